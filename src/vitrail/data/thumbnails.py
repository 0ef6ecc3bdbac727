"""Thumbnails of images, for contact sheets, reports and notebooks."""

from __future__ import annotations

import base64
import io

import numpy as np
from PIL import Image

from vitrail.data.decode import decode, unwrap_npy
from vitrail.data.types import Array, BadImage, Payload, Split


def thumbnail(payload: Payload | Image.Image, side: int, *, name: str = "image") -> Image.Image:
    """Fit the whole image into a square of `side` pixels. Raise `BadImage` if it cannot be read."""
    if not isinstance(payload, Image.Image):
        payload = unwrap_npy(payload, name=name)
    channels = payload.shape[2] if isinstance(payload, np.ndarray) and payload.ndim == 3 else 3
    return fit_square(decode(payload, channels=channels, min_size=(side, side), name=name), side)


def fit_square(pixels: Array, side: int) -> Image.Image:
    """Resize uint8 [height, width, channels] to fit into a square, as RGB: of more than three channels, the first three."""
    height, width, channels = pixels.shape
    image = Image.fromarray(pixels[:, :, :3] if channels >= 3 else pixels[:, :, 0]).convert("RGB")
    scale = side / max(height, width)
    tiny = 2 * max(height, width) < side  # show the pixels of tiny images unblurred
    size = (max(1, round(width * scale)), max(1, round(height * scale)))
    return image.resize(size, Image.Resampling.NEAREST if tiny else Image.Resampling.BICUBIC)


def split_thumbnail(split: Split, index: int, side: int) -> Image.Image | None:
    """Return the thumbnail of an image of a split; None if it cannot be read."""
    try:
        return thumbnail(split.payload(index), side, name=split.image_name(index))
    except BadImage:
        return None


def jpeg_uri(image: Image.Image) -> str:
    """Encode a thumbnail for an HTML page."""
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=85)
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"
