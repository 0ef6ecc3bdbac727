"""Small images and folders of images, for tests of sources, checking and packing."""

from __future__ import annotations

import hashlib
import io
import zlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from PIL import Image

from vitrail.data.types import Array, Split


def picture(seed: int | str, height: int = 40, width: int = 48, channels: int = 3) -> Array:
    """Return smooth colours that differ for every seed and survive JPEG compression."""
    number = seed if isinstance(seed, int) else zlib.crc32(seed.encode())
    coarse = np.random.default_rng(number).integers(0, 256, (7, 7, channels), dtype=np.uint8)
    planes = [Image.fromarray(coarse[:, :, c]).resize((width, height), Image.Resampling.BICUBIC) for c in range(channels)]
    return np.stack([np.asarray(plane) for plane in planes], axis=2)


def encoded(image: Array | Image.Image, kind: str = "PNG", **options: object) -> bytes:
    if isinstance(image, np.ndarray):
        image = Image.fromarray(image[:, :, 0] if image.ndim == 3 and image.shape[2] == 1 else image)
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def folder_of(root: Path, counts: Mapping[str, int]) -> Path:
    """Write images to folders, for example {"train/cat": 3}; no two images are the same."""
    for folder, count in counts.items():
        path = root / folder
        path.mkdir(parents=True, exist_ok=True)
        for k in range(count):
            (path / f"{k}.png").write_bytes(encoded(picture(f"{folder}/{k}")))
    return root


def digest_of(splits: list[Split]) -> list[str]:
    """Hash names, payloads and targets of splits, to compare them across processes."""
    digests = []
    for split in splits:
        digest = hashlib.sha256(np.ascontiguousarray(split.targets).tobytes())
        for k in range(len(split)):
            payload = split.payload(k)
            digest.update(split.image_name(k).encode() + (payload if isinstance(payload, bytes) else payload.tobytes()))
        digests.append(digest.hexdigest())
    return digests
