"""Small splits in memory, for tests of augmentation and loading."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image

from vitrail.data.types import Array, BadImage, Payload, Split, Task


def picture(seed: int, height: int, width: int, channels: int = 3) -> Array:
    """Return smooth colours with some noise, which JPEG compresses well."""
    rng = np.random.default_rng(seed)
    small = rng.integers(0, 256, (6, 8, channels), dtype=np.uint8)
    planes = [
        np.asarray(Image.fromarray(small[:, :, c]).resize((width, height), Image.Resampling.BICUBIC)) for c in range(channels)
    ]
    noise = rng.integers(-8, 9, (height, width, channels))
    return (np.stack(planes, -1).astype(int) + noise).clip(0, 255).astype(np.uint8)


def jpeg(image: Array, **options: object) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(image.squeeze()).save(buffer, "JPEG", quality=92, **options)
    return buffer.getvalue()


class MemorySplit(Split):
    """Payloads in a list; the payload `unreadable` raises BadImage."""

    def __init__(self, payloads: list[Payload], *, classes: int = 3, task: Task = "classify", targets: Array | None = None) -> None:
        self.name, self.task = "train", task
        self.classes = tuple(f"class {c}" for c in range(classes))
        self.targets = np.arange(len(payloads)) % classes if targets is None else targets
        self.payloads = payloads

    def image_name(self, index: int) -> str:
        return f"picture-{index}.jpg"

    def payload(self, index: int) -> Payload:
        payload = self.payloads[index]
        if isinstance(payload, bytes) and payload == b"unreadable":
            raise BadImage(self.image_name(index), "cannot be read")
        return payload


class StoredSplit(MemorySplit):
    """Images of one size in one array, as in a packed dataset."""

    def __init__(self, arrays: Array, *, classes: int = 3, task: Task = "classify", targets: Array | None = None) -> None:
        super().__init__(list(arrays), classes=classes, task=task, targets=targets)
        self._arrays = arrays

    @property
    def arrays(self) -> Array:
        return self._arrays


def photos(count: int, *, classes: int = 3) -> MemorySplit:
    """Return a split of JPEGs of various sizes."""
    sizes = np.random.default_rng(7).integers(40, 120, (count, 2))
    return MemorySplit([jpeg(picture(i, int(h), int(w))) for i, (h, w) in enumerate(sizes)], classes=classes)


def stored(count: int, side: int = 40, channels: int = 3, *, classes: int = 3) -> StoredSplit:
    return StoredSplit(np.stack([picture(i, side, side, channels) for i in range(count)]), classes=classes)
