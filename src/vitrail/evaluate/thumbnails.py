"""Make thumbnails of images, for reports and contact sheets."""

from __future__ import annotations

import base64
import io

import numpy as np
from PIL import Image

from vitrail.data.decode import decode
from vitrail.data.types import BadImage, Payload, Split


def thumbnail(payload: Payload, side: int, name: str = "image") -> Image.Image | None:
    """Fit the whole image into a square of `side` pixels; None if it cannot be read."""
    channels = payload.shape[2] if isinstance(payload, np.ndarray) and payload.ndim == 3 else 3
    try:
        pixels = decode(payload, channels=channels, min_size=(side, side), name=name)
    except BadImage:
        return None
    image = Image.fromarray(pixels[:, :, :3] if pixels.shape[2] >= 3 else pixels[:, :, 0]).convert("RGB")
    scale = side / max(image.size)
    size = (max(1, round(image.size[0] * scale)), max(1, round(image.size[1] * scale)))
    tiny = max(image.size) * 2 < side  # show the pixels of tiny images unblurred
    return image.resize(size, Image.Resampling.NEAREST if tiny else Image.Resampling.BICUBIC)


def split_thumbnail(split: Split, index: int, side: int) -> Image.Image | None:
    try:
        return thumbnail(split.payload(index), side, split.image_name(index))
    except BadImage:
        return None


def data_uri(image: Image.Image | bytes) -> str:
    """Encode an image for an HTML page: a thumbnail as JPEG; bytes are an encoded PNG."""
    if isinstance(image, bytes):
        return f"data:image/png;base64,{base64.b64encode(image).decode()}"
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=85)
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"
