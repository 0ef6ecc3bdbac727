"""From the bytes of a file to an array of pixels, whatever the format; a sentence for every file that is not one."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image, UnidentifiedImageError

from vitrail.data.types import Array, BadImage, Payload

MAX_PIXELS = 178_956_970
"""Larger images are refused before they fill the memory; the limit at which Pillow itself speaks of a bomb."""

SUFFIXES = (
    *(".jpg", ".jpeg", ".jfif", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff"),
    *(".avif", ".jp2", ".npy", ".pbm", ".pgm", ".ppm", ".qoi"),
)
"""File names ending so are taken for images when a folder is read."""

_DEEP = ("I;16", "I;16L", "I;16B", "I;16N", "I")
_OPAQUE = {np.dtype(np.uint8): 255, np.dtype(np.uint16): 65535}


@dataclass(frozen=True)
class ImageHeader:
    """What a file says of its image before it is decoded. Height and width are those of the upright image."""

    format: str
    height: int
    width: int
    mode: str
    bits: int
    orientation: int

    @property
    def channels(self) -> int:
        """Of the image's content, without alpha; a palette stands for colours."""
        if self.mode.endswith(" channels"):
            return int(self.mode.split()[0])
        return 1 if self.mode in ("1", "L", "LA", *_DEEP, "F") else 3


def decode(
    payload: Payload | Image.Image,
    *,
    channels: int,
    bits: int = 8,
    exif: bool = True,
    cover: tuple[int, int] | None = None,
    region: tuple[int, int, int, int] | None = None,
    name: str = "image",
) -> Array:
    """Pixels [height, width, channels], uint8 or (bits=16) uint16; what cannot be decoded raises `BadImage`.

    `region` (top, left, height, width) in the upright image is all that is returned. With `cover` (height, width) a
    JPEG may be decoded at the smallest of its scales (1, 1/2, 1/4, 1/8) at which that region, or else the whole image,
    is still at least so large: for training, where a random crop is shrunk anyway.

    `exif` turns an image upright as its camera recorded (a TIFF always is, by Pillow). Grey becomes colour by
    repetition, colour grey by the luma of ITU-R 601, alpha is dropped (as Pillow, torchvision and TensorFlow do) or
    added as opaque, 8 bits become 16 by a factor of 257, 16 become 8 by their upper byte.
    """
    if not isinstance(payload, Image.Image):
        payload = unwrapped(payload, name=name)
    if isinstance(payload, np.ndarray):
        return _cut(_with_channels(_checked(payload, name), channels, bits, name), region, 1.0)
    try:
        image = payload if isinstance(payload, Image.Image) else _open(payload, name)
        orientation = _orientation(image) if exif else 1
        shrunk = 1.0 if cover is None else _draft(image, cover, region, orientation)
        if bits == 16 and isinstance(payload, bytes) and _is_deep_colour_png(payload):
            pixels = _deep_colour_png(payload, name)
        else:
            pixels = _pillow_pixels(image, channels, bits, name)
    except BadImage:
        raise
    except Exception as error:  # decoders raise nearly anything on a spoiled file: OSError, SyntaxError, struct.error, ...
        raise BadImage(name, _fault(error)) from error
    upright = _turn(_with_channels(pixels, channels, bits, name), orientation)
    return np.ascontiguousarray(_cut(upright, region, shrunk))


def image_header(payload: Payload, *, name: str = "image") -> ImageHeader:
    """Format, size, mode and orientation, read without decoding the image."""
    payload = unwrapped(payload, name=name)
    if isinstance(payload, np.ndarray):
        height, width, channels = _checked(payload, name).shape
        mode = {1: "L", 3: "RGB", 4: "RGBA"}.get(channels, f"{channels} channels")
        return ImageHeader("array", height, width, mode, payload.dtype.itemsize * 8, 1)
    return open_image(payload, name=name)[1]


def open_image(payload: bytes, *, name: str = "image") -> tuple[Image.Image, ImageHeader]:
    """The image, opened but not yet decoded, and its header: for a caller that wants both and `decode` afterwards."""
    try:
        image = _open(payload, name)
        orientation = _orientation(image)
    except BadImage:
        raise
    except Exception as error:
        raise BadImage(name, _fault(error)) from error
    width, height = image.size if orientation < 5 else image.size[::-1]
    bits = 16 if image.mode in _DEEP or _is_deep_colour_png(payload) else 32 if image.mode == "F" else 8
    return image, ImageHeader(image.format or "", height, width, image.mode, bits, orientation)


def _open(payload: bytes, name: str) -> Image.Image:
    if not payload:
        raise BadImage(name, "an empty file (0 bytes)")
    try:
        image = Image.open(io.BytesIO(payload))
    except UnidentifiedImageError:
        raise BadImage(name, _what_it_is_instead(payload)) from None
    width, height = image.size
    if width * height > MAX_PIXELS:
        raise BadImage(name, _too_large(width, height))
    return image


def _fault(error: Exception) -> str:
    text = str(error)
    if isinstance(error, Image.DecompressionBombError):
        return f"more than {MAX_PIXELS:,} pixels: a decompression bomb, or an image to shrink first"
    if "truncated" in text.lower() or isinstance(error, EOFError):
        return "truncated: the file ends before its image does"
    return f"cannot be decoded ({text or type(error).__name__})"


def _too_large(width: int, height: int) -> str:
    return f"{height}×{width} pixels, more than the {MAX_PIXELS:,} allowed: a decompression bomb, or one to shrink first"


def _what_it_is_instead(payload: bytes) -> str:
    head = payload[:64]
    if payload.startswith(b"version https://git-lfs"):
        return "a Git LFS pointer and not the image itself; `git lfs pull` fetches it"
    if head[4:12] in (b"ftypheic", b"ftypheix", b"ftypmif1"):
        return "a HEIC image, which Pillow cannot read; convert it to JPEG or PNG"
    try:
        text = payload[:256].decode("utf-8", "strict")
    except UnicodeDecodeError as error:
        text = payload[: error.start].decode() if error.start > 200 else ""
    if text and all(character.isprintable() or character.isspace() for character in text):
        return f"a text file and not an image (it begins {' '.join(text.split())[:40]!r})"
    return f"not an image in a format Pillow knows (it begins with the bytes {head[:8].hex(' ')})"


def _orientation(image: Image.Image) -> int:
    """By how the image must still be turned: Pillow turns a TIFF itself, and no other format."""
    if image.format == "TIFF":
        return 1
    value = image.getexif().get(0x0112, 1)
    return value if isinstance(value, int) and 1 <= value <= 8 else 1


def _draft(image: Image.Image, cover: tuple[int, int], region: tuple[int, int, int, int] | None, orientation: int) -> float:
    """Ask a JPEG for its smallest sufficient scale; return by how much it will come out smaller."""
    if image.format != "JPEG":
        return 1.0
    width, height = image.size if orientation < 5 else image.size[::-1]
    part = region[2:] if region is not None else (height, width)
    wanted = [-(-side * least // max(1, length)) for side, least, length in zip((height, width), cover, part, strict=True)]
    full = image.size[0]
    drafted = image.draft(image.mode, (wanted[1], wanted[0]) if orientation < 5 else (wanted[0], wanted[1]))
    return 1.0 if drafted is None else full / drafted[1][2]


def _pillow_pixels(image: Image.Image, channels: int, bits: int, name: str) -> Array:
    if image.mode in _DEEP:
        values = np.asarray(image)
        if values.min() < 0 or values.max() > 65535:
            raise BadImage(name, f"pixel values from {values.min()} to {values.max()}, which do not fit 16 bits")
        return values.astype(np.uint16)[:, :, None]
    if image.mode == "F":
        raise BadImage(name, "floating-point pixels, whose scale is unknown; save it with 8 or 16 bits")
    mode = {1: "L", 3: "RGB"}.get(channels, "RGBA")
    if channels not in (1, 3, 4):
        raise BadImage(name, f"a {image.mode} image where {channels} channels are wanted; use .npy files for those")
    if image.mode == "P" and mode != "RGBA":
        # The palette may itself carry alpha; going by way of RGBA drops that like any other.
        image = image.convert("RGBA" if "transparency" in image.info else "RGB")
    if image.mode in ("CMYK", "YCbCr", "LAB", "HSV") and mode != "RGB":
        image = image.convert("RGB")
    pixels = np.asarray(image if image.mode == mode else image.convert(mode))
    return pixels[:, :, None] if pixels.ndim == 2 else pixels


def _is_deep_colour_png(payload: Payload) -> bool:
    # IHDR is always first: depth at byte 24, colour type at 25 (2 colour, 4 grey + alpha, 6 colour + alpha).
    return isinstance(payload, bytes) and payload[:4] == b"\x89PNG" and payload[24:26] in (b"\x10\2", b"\x10\4", b"\x10\6")


def _deep_colour_png(payload: bytes, name: str) -> Array:
    """All 16 bits of a colour PNG, of which Pillow keeps the upper 8.

    Told that the bytes are in little-endian order, it keeps the lower 8 instead; the two halves make the whole.
    """
    if payload[25:26] == b"\4":  # grey and alpha: two values of two bytes, read as four channels of one
        halves = _raw_png(payload, "RGBA", name)
        return halves[:, :, 0::2] << 8 | halves[:, :, 1::2]
    rawmode = {b"\2": "RGB;16", b"\6": "RGBA;16"}[payload[25:26]]
    return _raw_png(payload, f"{rawmode}B", name) << 8 | _raw_png(payload, f"{rawmode}L", name)


def _raw_png(payload: bytes, rawmode: str, name: str) -> Array:
    image: Any = _open(payload, name)
    image.tile = [tile._replace(args=rawmode) if hasattr(tile, "_replace") else (*tile[:3], rawmode) for tile in image.tile]
    return np.asarray(image).astype(np.uint16)


def unwrapped(payload: Payload, *, name: str = "image") -> Payload:
    """The array inside the content of a .npy file; any other payload as it is."""
    if isinstance(payload, np.ndarray) or payload[:6] != b"\x93NUMPY":
        return payload
    try:
        return _checked(np.load(io.BytesIO(payload), allow_pickle=False), name)
    except (ValueError, EOFError, OSError) as error:
        if isinstance(error, BadImage):
            raise
        raise BadImage(name, f"not a readable .npy image ({error})") from error


def _checked(image: Array, name: str) -> Array:
    image = image[:, :, None] if image.ndim == 2 else image
    if image.ndim != 3 or image.dtype not in _OPAQUE or 0 in image.shape:
        raise BadImage(
            name,
            f"an array {image.shape} of {image.dtype}, where uint8 or uint16 [height, width, channels] is expected",
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
        return grey if channels == 3 else np.concatenate([grey, alpha], axis=2) if have == 2 else _opaque(grey)
    if have in (3, 4) and channels == 1:
        red, green, blue = (image[:, :, c : c + 1].astype(np.int64) for c in range(3))
        return ((19595 * red + 38470 * green + 7471 * blue + 0x8000) >> 16).astype(image.dtype)  # Pillow's own weights
    if (have, channels) == (4, 3):
        return image[:, :, :3]
    if (have, channels) == (3, 4):
        return _opaque(image)
    raise BadImage(name, f"{have} channels where the model takes {channels}")


def _opaque(colour: Array) -> Array:
    alpha = np.full_like(colour[:, :, :1], _OPAQUE[colour.dtype])
    return np.concatenate([colour, alpha], axis=2)


def _turn(image: Array, orientation: int) -> Array:
    """Upright, by the eight orientations of the EXIF standard."""
    if orientation >= 5:
        image = image.swapaxes(0, 1)
    if orientation in (3, 4, 7, 8):
        image = image[::-1]
    if orientation in (2, 3, 6, 7):
        image = image[:, ::-1]
    return image


def _cut(image: Array, region: tuple[int, int, int, int] | None, shrunk: float) -> Array:
    if region is None:
        return image
    top, left, height, width = region
    rows = slice(int(top / shrunk), max(int(top / shrunk) + 1, round((top + height) / shrunk)))
    columns = slice(int(left / shrunk), max(int(left / shrunk) + 1, round((left + width) / shrunk)))
    return image[rows, columns]
