"""Decode image files of any format to pixel arrays, and say what is wrong with files that are not images."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image, UnidentifiedImageError

from vitrail.data.types import Array, BadImage, Payload
from vitrail.errors import counted
from vitrail.npy import read_npy

MAX_PIXELS = 178_956_970
"""Larger images are refused before they are decoded; above this size Pillow raises DecompressionBombError."""

SUFFIXES = (
    *(".jpg", ".jpeg", ".jfif", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff"),
    *(".avif", ".jp2", ".npy", ".pbm", ".pgm", ".ppm", ".qoi"),
)
"""Files with these suffixes count as images when a folder is read."""

# Pillow warns of large images, corrupted EXIF and palettes. What matters is an error here, or found by `vitrail data check`.
# Appended, so that the filters of a user come first.
warnings.filterwarnings("ignore", module=r"PIL\.", append=True)

# Pixels of a band. Larger images are converted in several, so that no second copy of the whole is made.
_BAND = 1 << 22
_16_BIT_MODES = ("I;16", "I;16L", "I;16B", "I;16N", "I")
_MAX_VALUE = {np.dtype(np.uint8): 255, np.dtype(np.uint16): 65535}


@dataclass(frozen=True)
class ImageHeader:
    """What is known of an image before it is decoded. Height and width are those of the upright image."""

    format: str
    height: int
    width: int
    mode: str
    bits: int
    orientation: int

    @property
    def channels(self) -> int:
        """Number of channels without alpha; a palette counts as colour."""
        if self.mode.endswith(" channels"):
            return int(self.mode.split()[0])
        return 1 if self.mode in ("1", "L", "LA", *_16_BIT_MODES, "F") else 3


def decode(
    payload: Payload | Image.Image,
    *,
    channels: int,
    bits: int = 8,
    exif: bool = True,
    min_size: tuple[int, int] | None = None,
    region: tuple[int, int, int, int] | None = None,
    name: str = "image",
) -> Array:
    """Return pixels [height, width, channels], uint8 or (bits=16) uint16. Raise `BadImage` if that is not possible.

    With `region` (top, left, height, width), return only this part of the upright image. With `min_size` (height, width),
    a JPEG may be decoded at the smallest of its scales (1, 1/2, 1/4, 1/8) at which the region, or else the whole image, is
    at least this large. This is for training, where a random crop is resized anyway.

    `exif` applies the EXIF orientation (Pillow always does for TIFF). Grey becomes colour by repetition, and colour
    becomes grey by ITU-R 601 luma. Alpha is dropped (as in Pillow, torchvision and TensorFlow) or added as opaque. 8 bits
    become 16 by a factor of 257, and 16 become 8 by their upper byte.
    """
    if not isinstance(payload, Image.Image):
        payload = unwrap_npy(payload, name=name)
    if isinstance(payload, np.ndarray):
        whole = _as_image_array(payload, name)
        return _crop(_convert_array(whole, channels, bits, name), region, 1.0)
    try:
        image = payload if isinstance(payload, Image.Image) else _open(payload, name)
        orientation = _orientation(image) if exif else 1
        downscale = 1.0 if min_size is None else _draft(image, min_size, region, orientation)
        if bits == 16 and isinstance(payload, bytes) and _is_16_bit_colour_png(payload):
            pixels = _convert_array(_read_16_bit_colour_png(payload, name), channels, bits, name)
        else:
            pixels = _pillow_pixels(image, channels, bits, name)
        del image  # its memory, before an orientation makes a copy
    except BadImage:
        raise
    except Exception as error:  # decoders raise nearly anything on a corrupted file: OSError, SyntaxError, struct.error, ...
        raise BadImage(name, _reason(error)) from error
    upright = _apply_orientation(pixels, orientation)
    return np.ascontiguousarray(_crop(upright, region, downscale))


def image_header(payload: Payload, *, name: str = "image") -> ImageHeader:
    """Read format, size, mode and orientation without decoding the image."""
    payload = unwrap_npy(payload, name=name)
    if isinstance(payload, np.ndarray):
        height, width, channels = _as_image_array(payload, name).shape
        mode = {1: "L", 3: "RGB", 4: "RGBA"}.get(channels, f"{channels} channels")
        return ImageHeader("array", height, width, mode, payload.dtype.itemsize * 8, 1)
    return open_image(payload, name=name)[1]


def open_image(payload: bytes, *, name: str = "image") -> tuple[Image.Image, ImageHeader]:
    """Return the image, opened but not yet decoded, and its header: for callers that need both and then call `decode`."""
    try:
        image = _open(payload, name)
        orientation = _orientation(image)
    except BadImage:
        raise
    except Exception as error:
        raise BadImage(name, _reason(error)) from error
    width, height = image.size if orientation < 5 else image.size[::-1]
    bits = 16 if image.mode in _16_BIT_MODES or _is_16_bit_colour_png(payload) else 32 if image.mode == "F" else 8
    return image, ImageHeader(image.format or "", height, width, image.mode, bits, orientation)


def _open(payload: bytes, name: str) -> Image.Image:
    if not payload:
        raise BadImage(name, "an empty file (0 bytes)")
    try:
        image = Image.open(io.BytesIO(payload))
    except UnidentifiedImageError:
        raise BadImage(name, _describe_non_image(payload)) from None
    width, height = image.size
    if width * height > MAX_PIXELS:
        raise BadImage(name, _too_large(width, height))
    return image


def _reason(error: Exception) -> str:
    text = str(error)
    if isinstance(error, Image.DecompressionBombError):
        return f"more than {MAX_PIXELS:,} pixels: a decompression bomb, or an image to resize first"
    if "truncated" in text.lower() or isinstance(error, EOFError):
        return "truncated: the file ends before the image is complete"
    return f"cannot be decoded ({text or type(error).__name__})"


def _too_large(width: int, height: int) -> str:
    return f"{height}×{width} pixels, more than the limit of {MAX_PIXELS:,}: a decompression bomb, or an image to resize first"


def is_heic(payload: bytes) -> bool:
    """Whether a file begins as a HEIC photo does, the usual format of an iPhone."""
    return payload[4:12] in (b"ftypheic", b"ftypheix", b"ftyphevc", b"ftypmif1", b"ftypmsf1")


def _describe_non_image(payload: bytes) -> str:
    head = payload[:64]
    if payload.startswith(b"version https://git-lfs"):
        return "a Git LFS pointer, not the image; run `git lfs pull` to download it"
    if is_heic(head):
        return "a HEIC image, which Pillow cannot read; convert it to JPEG or PNG"
    try:
        text = payload[:256].decode("utf-8", "strict")
    except UnicodeDecodeError as error:
        text = payload[: error.start].decode() if error.start > 200 else ""
    if text and all(character.isprintable() or character.isspace() for character in text):
        return f"a text file, not an image (it starts with {' '.join(text.split())[:40]!r})"
    return f"not an image in a format that Pillow can read (it starts with the bytes {head[:8].hex(' ')})"


def _orientation(image: Image.Image) -> int:
    """Return the EXIF orientation still to be applied: Pillow applies that of a TIFF itself, and of no other format."""
    if image.format == "TIFF":
        return 1
    value = image.getexif().get(0x0112, 1)
    return value if isinstance(value, int) and 1 <= value <= 8 else 1


def _draft(image: Image.Image, min_size: tuple[int, int], region: tuple[int, int, int, int] | None, orientation: int) -> float:
    """Set a JPEG to decode at its smallest sufficient scale; return the factor by which it will be smaller."""
    if image.format != "JPEG":
        return 1.0
    width, height = image.size if orientation < 5 else image.size[::-1]
    part = region[2:] if region is not None else (height, width)
    target = [-(-side * minimum // max(1, length)) for side, minimum, length in zip((height, width), min_size, part, strict=True)]
    full = image.size[0]
    drafted = image.draft(image.mode, (target[1], target[0]) if orientation < 5 else (target[0], target[1]))
    return 1.0 if drafted is None else full / drafted[1][2]


def _in_bands(height: int, width: int, convert: Callable[[int, int], Array]) -> Array:
    """Return the pixels that `convert(top, bottom)` gives for bands of rows: its copies are then those of a band."""
    rows = max(1, _BAND // max(1, width))
    if rows >= height:
        return convert(0, height)
    first = convert(0, rows)
    pixels = np.empty((height, *first.shape[1:]), first.dtype)
    pixels[:rows] = first
    for top in range(rows, height, rows):
        pixels[top : top + rows] = convert(top, min(top + rows, height))
    return pixels


def _convert_array(image: Array, channels: int, bits: int, name: str) -> Array:
    if image.shape[2] == channels and image.dtype.itemsize * 8 == bits:
        return image
    return _in_bands(image.shape[0], image.shape[1], lambda top, bottom: _with_channels(image[top:bottom], channels, bits, name))


def _pillow_pixels(image: Image.Image, channels: int, bits: int, name: str) -> Array:
    if image.mode == "I":
        least, most = image.getextrema()
        if least < 0 or most > 65535:  # type: ignore[operator]
            raise BadImage(name, f"pixel values from {least} to {most}, which do not fit in 16 bits")
    if image.mode == "F":
        raise BadImage(name, "floating-point pixels, whose range is unknown; save it with 8 or 16 bits")
    if image.mode not in _16_BIT_MODES and channels not in (1, 3, 4):
        raise BadImage(name, f"its mode is {image.mode}, but {channels} channels are expected; use .npy files for more than 4")
    image.load()  # a TIFF's size may change here, by its orientation
    width, height = image.size

    def convert(top: int, bottom: int) -> Array:
        band = image if (top, bottom) == (0, height) else image.crop((0, top, width, bottom))
        return _with_channels(_band_pixels(band, channels), channels, bits, name)

    return _in_bands(height, width, convert)


def _band_pixels(image: Image.Image, channels: int) -> Array:
    if image.mode in _16_BIT_MODES:
        return np.asarray(image).astype(np.uint16)[:, :, None]
    mode = {1: "L", 3: "RGB"}.get(channels, "RGBA")
    if image.mode == "P" and mode != "RGBA":
        # A palette may have alpha; converting to RGBA first lets it be dropped like any other alpha.
        image = image.convert("RGBA" if "transparency" in image.info else "RGB")
    if image.mode in ("CMYK", "YCbCr", "LAB", "HSV") and mode != "RGB":
        image = image.convert("RGB")
    pixels = np.asarray(image if image.mode == mode else image.convert(mode))
    return pixels[:, :, None] if pixels.ndim == 2 else pixels


def _is_16_bit_colour_png(payload: Payload) -> bool:
    # IHDR is always first: bit depth at byte 24, colour type at 25 (2 colour, 4 grey + alpha, 6 colour + alpha).
    return isinstance(payload, bytes) and payload[:4] == b"\x89PNG" and payload[24:26] in (b"\x10\2", b"\x10\4", b"\x10\6")


def _read_16_bit_colour_png(payload: bytes, name: str) -> Array:
    """Decode all 16 bits of a colour PNG, of which Pillow keeps only the upper 8.

    With a little-endian raw mode Pillow keeps the lower 8 instead. So decode twice and combine the bytes.
    """
    if payload[25:26] == b"\4":  # grey and alpha: two values of two bytes, read as four channels of one
        return _raw_png(payload, "RGBA", name, lambda halves: halves[:, :, 0::2] << 8 | halves[:, :, 1::2])
    rawmode = {b"\2": "RGB;16", b"\6": "RGBA;16"}[payload[25:26]]
    pixels = _raw_png(payload, f"{rawmode}B", name, lambda upper: upper << 8)
    pixels |= _raw_png(payload, f"{rawmode}L", name, lambda lower: lower.astype(np.uint8))
    return pixels


def _raw_png(payload: bytes, rawmode: str, name: str, combine: Callable[[Array], Array]) -> Array:
    image: Any = _open(payload, name)
    image.tile = [tile._replace(args=rawmode) if hasattr(tile, "_replace") else (*tile[:3], rawmode) for tile in image.tile]
    image.load()
    width, height = image.size
    return _in_bands(height, width, lambda top, bottom: combine(np.asarray(image.crop((0, top, width, bottom))).astype(np.uint16)))


def unwrap_npy(payload: Payload, *, name: str = "image") -> Payload:
    """Return the array of a .npy file; any other payload unchanged."""
    if isinstance(payload, np.ndarray) or payload[:6] != b"\x93NUMPY":
        return payload
    try:
        return _as_image_array(read_npy(payload), name)
    except (ValueError, EOFError, OSError) as error:
        if isinstance(error, BadImage):
            raise
        raise BadImage(name, f"not a readable .npy image ({error})") from error


def _as_image_array(image: Array, name: str) -> Array:
    image = image[:, :, None] if image.ndim == 2 else image
    if image.ndim != 3 or image.dtype not in _MAX_VALUE or 0 in image.shape:
        raise BadImage(
            name,
            f"an array {image.shape} of {image.dtype}, but uint8 or uint16 [height, width, channels] is expected",
        )
    return image


def _with_channels(image: Array, channels: int, bits: int, name: str) -> Array:
    if bits == 8 and image.dtype == np.uint16:
        image = (image >> 8).astype(np.uint8)
    elif bits == 16 and image.dtype == np.uint8:
        image = image.astype(np.uint16) * np.uint16(257)
    have = image.shape[2]
    if have == channels:
        return image
    if (have, channels) == (2, 1):
        return image[:, :, :1]
    if have in (1, 2) and channels in (3, 4):
        grey, alpha = image[:, :, :1].repeat(3, axis=2), image[:, :, 1:]
        return grey if channels == 3 else np.concatenate([grey, alpha], axis=2) if have == 2 else _add_alpha(grey)
    if have in (3, 4) and channels == 1:
        red, green, blue = (image[:, :, c : c + 1].astype(np.int64) for c in range(3))
        return ((19595 * red + 38470 * green + 7471 * blue + 0x8000) >> 16).astype(
            image.dtype
        )  # the same integer weights as Pillow
    if (have, channels) == (4, 3):
        return image[:, :, :3]
    if (have, channels) == (3, 4):
        return _add_alpha(image)
    raise BadImage(name, f"{counted(have, 'channel')}, but the model expects {channels}")


def _add_alpha(colour: Array) -> Array:
    alpha = np.full_like(colour[:, :, :1], _MAX_VALUE[colour.dtype])
    return np.concatenate([colour, alpha], axis=2)


def _apply_orientation(image: Array, orientation: int) -> Array:
    """Rotate and flip to upright, for the eight orientations of EXIF."""
    if orientation >= 5:
        image = image.swapaxes(0, 1)
    if orientation in (3, 4, 7, 8):
        image = image[::-1]
    if orientation in (2, 3, 6, 7):
        image = image[:, ::-1]
    return image


def _crop(image: Array, region: tuple[int, int, int, int] | None, downscale: float) -> Array:
    if region is None:
        return image
    top, left, height, width = region
    rows = slice(int(top / downscale), max(int(top / downscale) + 1, round((top + height) / downscale)))
    columns = slice(int(left / downscale), max(int(left / downscale) + 1, round((left + width) / downscale)))
    return image[rows, columns]
