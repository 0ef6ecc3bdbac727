"""From uploaded bytes to the model's input, with the preprocessing that `eval` uses."""

from __future__ import annotations

import base64
import binascii
import io
import os
import re
import warnings
from concurrent.futures import ThreadPoolExecutor

from PIL import Image, UnidentifiedImageError
from torch import Tensor

from vitrail.data.preprocess import Preprocess
from vitrail.data.types import BadImage
from vitrail.errors import VitrailError
from vitrail.serve.errors import ServiceError
from vitrail.serve.settings import ServeSettings

_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
_DATA_URI = re.compile(r"data:(?P<type>[\w.+/-]*)(?P<parameters>(;[\w=.+-]+)*?)(?P<base64>;base64)?,")


def decoding_pool(settings: ServeSettings) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(settings.decoders or min(16, os.cpu_count() or 1), thread_name_prefix="decode")


def decode(data: bytes, preprocess: Preprocess, settings: ServeSettings) -> Tensor:
    """Return the model's input. Its size is read before any pixel is decoded."""
    if not data:
        raise ServiceError(422, "The image is empty.")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with Image.open(io.BytesIO(data), formats=_FORMATS) as image:
                width, height = image.size
        except (UnidentifiedImageError, Image.DecompressionBombError, OSError, ValueError, SyntaxError, OverflowError) as error:
            if isinstance(error, Image.DecompressionBombError):
                raise ServiceError(422, f"The image has too many pixels; at most {settings.max_pixels:,} are decoded.") from error
            raise ServiceError(415, f"This is not an image of a known format ({', '.join(_FORMATS)}).") from error
        if width * height > settings.max_pixels:
            raise ServiceError(422, f"The image has {width} × {height} pixels; at most {settings.max_pixels:,} are decoded.")
        try:
            return preprocess(data, name="the image")
        except (VitrailError, BadImage) as error:
            raise ServiceError(422, str(error)) from error
        except Exception as error:  # a corrupted file can make decoders fail in many ways
            raise ServiceError(422, "The image cannot be decoded.") from error


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
