"""Settings of the service."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from vitrail.errors import VitrailError
from vitrail.models.settings import Precision


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
    """Seconds from the upload until an image whose computation has not begun is given up, with 503."""
    max_bytes: int = 32 << 20
    """Largest request in bytes; larger ones are answered with 413."""
    max_pixels: int = 64_000_000
    """Largest image in pixels; larger ones are answered with 422 and never decoded. All images that are being decoded at a time
    have at most so many, too; others wait."""
    max_upload: int = 512 << 20
    """Most bytes of requests in memory at a time; requests beyond that are answered with 429."""
    max_connections: int = 1024
    """Most connections at a time; those beyond that are answered with 503 and closed."""
    max_images: int = 64
    """Most images in one request."""
    upload_seconds: float = 20.0
    """Seconds a client has to send its headers, again to send its body, and to read the answer; slower ones are cut off."""
    decoders: int | None = None
    """Images that are decoded and resized at a time. None: one per CPU core that the service may use, at most 16."""
    decode_in: Literal["auto", "threads", "processes"] = "auto"
    """Threads of the service share one core for what is Python; helper processes do not, and take about 50 MB each. auto:
    processes if there are more than 4 decoders, and always threads on Windows."""

    def __post_init__(self) -> None:
        numbers = ("max_batch", "queue", "max_bytes", "max_pixels", "max_upload", "max_connections", "max_images")
        for name in (*numbers, "deadline", "upload_seconds"):
            if not 0 < getattr(self, name) < float("inf"):
                raise VitrailError(f"--{name.replace('_', '-')} is {getattr(self, name)}; it must be above 0 and finite.")
        if self.max_upload < self.max_bytes:
            raise VitrailError(f"--max-upload is {self.max_upload}; it must be at least --max-bytes, which is {self.max_bytes}.")
        if self.decode_in not in ("auto", "threads", "processes"):
            raise VitrailError(f"--decode-in is {self.decode_in!r}; it must be auto, threads or processes.")
        if self.decode_in == "processes" and not hasattr(os, "readv"):
            raise VitrailError("--decode-in is 'processes', which this system (Windows) cannot do; it must be auto or threads.")
        if self.decoders is not None and self.decoders < 1:
            raise VitrailError(f"--decoders is {self.decoders}; it must be at least 1.")


def token_of_environment(environment: Mapping[str, str]) -> str | None:
    """Return VITRAIL_TOKEN without spaces around it: a file that it was read from may end in a new line."""
    token = environment.get("VITRAIL_TOKEN")
    if token is not None and not token.strip():  # a mistake in the configuration must not open the service
        raise VitrailError("VITRAIL_TOKEN is set but empty, so the service would be open to all. Give it a value, or unset it.")
    return None if token is None else token.strip()
