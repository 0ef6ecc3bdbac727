"""From uploaded bytes to the model's input, with the preprocessing that `eval` uses."""

from __future__ import annotations

import io
import math
import re
from dataclasses import dataclass
from typing import Literal

import numpy as np
from PIL import Image

from vitrail.data.decode import image_header, is_heic
from vitrail.data.preprocess import Preprocess
from vitrail.data.types import Array, BadImage
from vitrail.errors import VitrailError
from vitrail.serve.costly_files import MAX_BLOCKS, PPM_HEADER, check_blocks, check_opened, limit_directories, too_many_blocks
from vitrail.serve.errors import ServiceError, unavailable
from vitrail.serve.limits import PixelLimit
from vitrail.serve.settings import ServeSettings

NPY = b"\x93NUMPY"  # for images of more channels than any format has
_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
# Pillow decodes icons (ICO) as soon as it opens them, and reads the headers of EPS, XPM and IM line by line, to their end.
_BEGINNINGS = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"RIFF", b"BM", b"GIF87a", b"GIF89a", b"II", b"MM", b"P")
_JPEG, _SCAN = b"\xff\xd8", b"\xff\xda"
_MARKER = re.compile(rb"\xff[\xc0-\xcf\xd8-\xfe]")  # a length follows, or the file ends; no byte 255 of pixels, no restart
_MAX_SCANS = 100  # as in libtiff
_WORK = 20  # scans of an image that has max_pixels
_TIFF = (b"II*\0", b"MM\0*", b"II+\0")  # other beginnings are read differently by Pillow and libtiff
_TILE_WIDTH, _TILE_LENGTH = 322, 323

ROTATED = (
    "This photo is stored rotated (EXIF orientation), and the preprocessing of this model ignores that: the model sees it rotated. "
    "A server started with --preprocess stored+exif turns photos upright."
)


@dataclass(frozen=True, slots=True)
class Decoded:
    """An image in the size of the model's input, whose pixels are not normalised yet."""

    pixels: Array
    """[channel, height, width] from 0 to the preprocessing's `max_value`: uint8 where they are, otherwise float32."""
    rotated: bool
    """Whether the photo is stored rotated and the preprocessing ignores that, so that the model sees it rotated."""


def decode(data: bytes, preprocess: Preprocess, settings: ServeSettings, limit: PixelLimit) -> Decoded:
    """Decode, resize and crop an image. Its size is read before any pixel is decoded."""
    limit_directories()
    width, height = _size(data, settings)
    planes = max(1, preprocess.channels // 3)  # the limits are for pixels of three channels
    if planes * width * height > settings.max_pixels:
        found = f"The image, or a tile of it, has {width} × {height} pixels{f' of {preprocess.channels} channels' * (planes > 1)}"
        raise ServiceError(422, f"{found}; send one of at most {settings.max_pixels:,}.")
    scans = count_scans(data)
    if scans > min(_MAX_SCANS, _WORK * settings.max_pixels // (width * height)):
        raise ServiceError(
            422, f"The JPEG has {width} × {height} pixels in too many scans: {scans} or more. Save it as a baseline JPEG."
        )
    # A line of 30,000 pixels, resized by its short side, is an image of 100 million on the way.
    resized = planes * max(preprocess.peak_pixels(height, width), preprocess.peak_pixels(width, height))  # upright or not
    if resized > max(settings.max_pixels, 4 * planes * math.prod(preprocess.size)):
        found = f"The image has {width} × {height} pixels, and {resized:,} while it is resized"
        raise ServiceError(422, f"{found}; crop it to a shape that is less narrow.")
    with limit.hold(max(planes * width * height, resized)):
        try:
            pixels = preprocess.pixels(data, name="the image").transpose(2, 0, 1)
            kind = np.uint8 if pixels.dtype == np.uint8 else np.float32
            return Decoded(np.array(pixels, kind, order="C"), preprocess.leaves_rotated(data))
        except (VitrailError, BadImage) as error:
            if isinstance(error.__cause__, ServiceError):  # of `limit_directories`, with a message of its own
                raise error.__cause__ from None
            if isinstance(error.__cause__, MemoryError):
                raise _no_memory() from error
            raise ServiceError(422, str(error)) from error
        except MemoryError as error:
            raise _no_memory() from error
        except Exception as error:  # a corrupted file can make decoders fail in many ways
            raise ServiceError(
                422, "The image cannot be decoded: the file is corrupted. Send an intact JPEG or PNG file."
            ) from error


def _no_memory() -> ServiceError:
    return unavailable("There is not enough memory to decode the image.")


def _size(data: bytes, settings: ServeSettings) -> tuple[int, int]:
    if not data:
        raise ServiceError(422, "The image is empty (0 bytes); send the content of an image file.")
    if data.startswith(NPY):
        try:
            header = image_header(data, name="the image")
        except BadImage as error:
            raise ServiceError(422, str(error)) from error
        return header.width, header.height
    check_blocks(data)
    try:
        if not data.startswith(_BEGINNINGS):
            raise ValueError(data[:8])
        # As decoding opens it: a file can be of two formats at once. Only the header of a PPM decides what it is.
        with Image.open(io.BytesIO(data[:PPM_HEADER] if data.startswith(b"P") else data)) as image:
            check_opened(image)
            if image.format == "TIFF" and data[:4] in _TIFF:
                return max(image.size, tile_of_tiff(data), key=math.prod)
            if image.format != "TIFF" and image.format in (*_FORMATS, "MPO"):  # photos of phones: several JPEG pictures
                return image.size
            raise ValueError(image.format)
    except ServiceError:
        raise
    except Image.DecompressionBombError as error:
        raise ServiceError(422, f"The image has too many pixels; send one of at most {settings.max_pixels:,}.") from error
    except Exception as error:  # headers of corrupted files fail in many ways, too
        raise ServiceError(415, _what_it_is(data)) from error


def _what_it_is(data: bytes) -> str:
    if is_heic(data):
        return "This is a HEIC photo, which is not read; convert it to JPEG or PNG."
    if data[:1] in b"{[" and data[-1:] in b"}]\n":
        return "This is JSON, not an image; send the content of the image file as the body, or a form with files."
    return f"This is not an image of a known format ({', '.join(_FORMATS)})."


def tile_of_tiff(data: bytes) -> tuple[int, int]:
    """Return the width and height of a TIFF's tiles, which are decoded whole: they may be far larger than the image.

    Read from the file itself: where a field is there twice, libtiff takes the first and Pillow the last; this is the largest.
    """
    order: Literal["little", "big"] = "little" if data.startswith(b"II") else "big"
    big = data.startswith(b"II+")  # BigTIFF

    def number(at: int, size: int) -> int:
        return int.from_bytes(data[at : at + size], order)

    start = number(8, 8) if big else number(4, 4)
    first, step = (start + 8, 20) if big else (start + 2, 12)
    sides = {_TILE_WIDTH: 0, _TILE_LENGTH: 0}
    for at in range(first, min(first + step * number(start, first - start), len(data)), step):
        if (tag := number(at, 2)) in sides:
            size = {1: 1, 3: 2, 16: 8}.get(number(at + 2, 2), 4)
            sides[tag] = max(sides[tag], number(at + (12 if big else 8), size))
    return sides[_TILE_WIDTH], sides[_TILE_LENGTH]


def count_scans(data: bytes) -> int:
    """Return how often a JPEG goes over all its pixels, counted up to a little above the limit; 0 for other formats.

    A progressive JPEG refines its pixels in about ten scans. An empty scan takes some bytes of the file and the time of a full one.
    """
    if not data.startswith(_JPEG) or data.count(_SCAN) <= 1:
        return int(data.startswith(_JPEG))
    scans, position, markers = 0, 2, 0
    while scans <= _MAX_SCANS and (found := _MARKER.search(data, position)):
        markers += 1
        if markers > MAX_BLOCKS:  # `check_blocks` counts only those before the first scan
            raise too_many_blocks()
        kind = found[0][-1:]
        if kind == b"\xd9":  # the end; phones append videos
            break
        scans += kind == b"\xda"
        position = found.end() + int.from_bytes(data[found.end() : found.end() + 2], "big")
    return scans
