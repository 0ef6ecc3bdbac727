"""How fast a run is: images per second, and the fraction of the device's peak FLOPs that it uses (MFU)."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from vitrail.models import ModelConfig, needed_flops

# Dense peak of the tensor cores in bf16 or fp16, in teraflops, from the vendors' data sheets, by words of the GPU's name: an
# RTX A4000 is not an A40. The first match counts.
_PEAKS = {
    "H200": 989.0, "H100 PCIe": 756.0, "H100 NVL": 835.0, "H100": 989.0, "GH200": 989.0, "B200": 2250.0, "GB200": 2500.0,
    "B100": 1750.0, "A100": 312.0, "A10G": 70.0, "A10": 125.0, "A30": 165.0, "A40": 149.7, "L40S": 362.0, "L40": 181.0, "L4": 121.0,
    "V100": 125.0, "T4": 65.0, "RTX 6000 Ada": 364.0, "RTX 4090": 165.2, "RTX 3090": 71.0,
}  # fmt: skip


def peak_flops(device: torch.device) -> float | None:
    """Return the device's peak in FLOPs per second; None if it is not known.

    All precisions count against the same peak. With fp32 the metric should show that the tensor cores are idle; with fp8 a third
    of the matmuls are bf16.
    """
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak * 1e12 for key, peak in _PEAKS.items() if re.search(rf"\b{key}\b", name)), None)


def training_flops(config: ModelConfig) -> int:
    """Return the FLOPs of training on one image: forward, and twice that backward. What is recomputed does not count."""
    return 3 * needed_flops(config)


class Clock:
    """Time spent training, without validations and checkpoints."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self._began, self._paused = time.perf_counter(), 0.0

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._began - self._paused

    @contextmanager
    def paused(self) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self._paused += time.perf_counter() - start


def memory(device: torch.device) -> int | None:
    """Return the device's peak memory since the start, in bytes; for a CPU, that of the whole process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
