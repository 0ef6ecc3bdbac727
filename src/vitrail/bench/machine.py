"""Describe the hardware and the package versions that a result was measured with."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from vitrail.errors import counted

PACKAGES = ("vitrail", "torch", "timm", "transformers", "torchvision")


def hardware(device: torch.device) -> str:
    """Return the device's name; for a CPU also its cores and torch's threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type == "mps":
        return f"Apple GPU, {platform.processor()}"
    threads = torch.get_num_threads()
    return f"{_cpu_name()}, {counted(threads, 'thread')}"


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines() if cpuinfo.is_file() else []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine()) + f" ({os.cpu_count()} cores)"


def versions() -> dict[str, str]:
    """Return the installed version of each compared package; empty if it is not installed."""
    return {name: _version(name) for name in PACKAGES}


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
