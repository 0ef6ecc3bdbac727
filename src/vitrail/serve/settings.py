"""Settings of the service."""

from __future__ import annotations

from dataclasses import dataclass

from vitrail.errors import VitrailError
from vitrail.models.inference import Precision


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """Limits and computation of the service."""

    device: str = "auto"
    """Device: auto, cpu or cuda."""
    precision: Precision = "fp32"
    """fp32 answers as `bundle.predict` does. bf16, and on a CPU int8, are faster but less exact; auto: the fastest that suits."""
    max_batch: int = 32
    """Most images that are computed at once. A batch never waits for more images: it takes those that have arrived meanwhile."""
    queue: int = 256
    """Most images in the service at a time, from upload to answer, per model; a request beyond that is answered with 429."""
    deadline: float = 30.0
    """Seconds until an image that has not been computed is given up, with 503."""
    max_bytes: int = 32 << 20
    """Largest request in bytes; larger ones are answered with 413."""
    max_pixels: int = 64_000_000
    """Largest image in pixels; larger ones are answered with 422 and never decoded."""
    max_images: int = 64
    """Most images in one request."""
    upload_seconds: float = 20.0
    """Seconds a client has to send its headers, and again its body; slower ones are cut off."""
    decoders: int | None = None
    """Threads that decode and resize images. None: one per CPU core, at most 16."""

    def __post_init__(self) -> None:
        for name in ("max_batch", "queue", "max_bytes", "max_pixels", "max_images", "deadline", "upload_seconds"):
            if not getattr(self, name) > 0:
                raise VitrailError(f"--{name.replace('_', '-')} is {getattr(self, name)}; it must be above 0.")
        if self.decoders is not None and self.decoders < 1:
            raise VitrailError(f"--decoders is {self.decoders}; it must be at least 1.")
