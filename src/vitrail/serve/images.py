"""From uploaded bytes to the model's input, with the preprocessing that `eval` uses."""

from __future__ import annotations

import base64
import binascii
import io
import os
import re
import warnings
from concurrent.futures import ThreadPoolExecutor

from PIL import Image
from torch import Tensor

from vitrail.data.preprocess import Preprocess
from vitrail.data.types import BadImage
from vitrail.errors import VitrailError
from vitrail.serve.errors import ServiceError
from vitrail.serve.limits import PixelLimit
from vitrail.serve.settings import ServeSettings

_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
_DATA_URI = re.compile(r"data:(?P<type>[\w.+/-]*)(?P<parameters>(;[\w=.+-]+)*?)(?P<base64>;base64)?,")


ROTATED = (
    "This photo is stored rotated (EXIF orientation), and the preprocessing of this model ignores that: the model sees it rotated. "
    "A server started with --preprocess stored+exif turns photos upright."
)


def decoding_pool(settings: ServeSettings) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(settings.decoders or min(16, _cores()), thread_name_prefix="decode", initializer=_ignore_warnings)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _ignore_warnings() -> None:
    """Pillow warns of large images and of corrupted metadata. Both are answered, not logged."""
    warnings.filterwarnings("ignore", module=r"PIL\.")
    warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)


def decode(data: bytes, preprocess: Preprocess, settings: ServeSettings, limit: PixelLimit) -> Tensor:
    """Return the model's input. Its size is read before any pixel is decoded."""
    width, height = _size(data, settings)
    if width * height > settings.max_pixels:
        raise ServiceError(422, f"The image has {width} × {height} pixels; at most {settings.max_pixels:,} are decoded.")
    with limit.hold(width * height):
        try:
            return preprocess(data, name="the image")
        except (VitrailError, BadImage) as error:
            raise ServiceError(422, str(error)) from error
        except Exception as error:  # a corrupted file can make decoders fail in many ways
            raise ServiceError(422, "The image cannot be decoded.") from error


def _size(data: bytes, settings: ServeSettings) -> tuple[int, int]:
    if not data:
        raise ServiceError(422, "The image is empty.")
    try:
        with Image.open(io.BytesIO(data)) as image:  # as decoding opens it: a file can be of two formats at once
            if image.format in (*_FORMATS, "MPO"):  # photos of phones that contain several JPEG pictures
                return image.size
            raise ValueError(image.format)
    except Image.DecompressionBombError as error:
        raise ServiceError(422, f"The image has too many pixels; at most {settings.max_pixels:,} are decoded.") from error
    except Exception as error:  # headers of corrupted files fail in many ways, too
        raise ServiceError(415, f"This is not an image of a known format ({', '.join(_FORMATS)}).") from error


def bytes_of_text(text: str) -> bytes:
    """Return the bytes of a `data:` URI or of plain base64. An address is refused: the service fetches nothing."""
    if re.match(r"(?i)[a-z][a-z0-9+.-]*://", text):
        raise ServiceError(400, "Addresses are not fetched; send the image itself as a data: URI or base64.")
    found = _DATA_URI.match(text)
    if text.startswith("data:") and (found is None or not found["base64"]):
        raise ServiceError(400, "This is not a data: URI with base64, such as data:image/jpeg;base64,…")
    try:
        return base64.b64decode(text[found.end() :] if found else text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ServiceError(400, "The image is not valid base64.") from error


def stays_rotated(data: bytes, preprocess: Preprocess, limit: PixelLimit) -> bool:
    """Whether the model sees a photo rotated. Pillow can decode a whole PNG to find that out, so its pixels count."""
    with Image.open(io.BytesIO(data)) as image:
        pixels = image.size[0] * image.size[1]
    with limit.hold(pixels):
        return preprocess.leaves_rotated(data)
