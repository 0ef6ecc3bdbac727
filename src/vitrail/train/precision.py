"""The precision of a run: what `auto` means, and autocast."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

_DTYPES = {"bf16": torch.bfloat16, "fp8": torch.bfloat16, "fp16": torch.float16}
# FLOPs of a forward pass per image above which bf16 pays on a CPU: below, casts cost more than faster matmuls save.
MIN_CPU_FLOPS = 0.5e9


def chosen_precision(wanted: str, device: torch.device, flops: float = 0.0) -> str:
    """Resolve `auto`: bf16 on a GPU that has it, and on a CPU that has it if the model needs `flops` enough per image."""
    if wanted != "auto":
        return wanted
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"
    return "bf16" if device.type == "cpu" and flops >= MIN_CPU_FLOPS and cpu_multiplies_bf16() else "fp32"


def cpu_multiplies_bf16() -> bool:
    """Tell whether the CPU has bf16 matmul instructions. Without them torch converts, and bf16 is slower than float32."""
    features = torch.cpu.get_capabilities()
    return bool(features.get("avx512_bf16") or features.get("amx_bf16"))


def autocast_dtype(precision: str) -> torch.dtype | None:
    return _DTYPES.get(precision)


def shard_dtype(precision: str, device: torch.device) -> torch.dtype | None:
    """The dtype in which FSDP2 gathers weights; None: as they are. A CPU has no bandwidth to save, and no mixed layer norm."""
    return autocast_dtype(precision) if device.type == "cuda" else None


def autocast(precision: str, device: torch.device) -> AbstractContextManager[Any]:
    """Matmuls in low precision; norms, softmax and losses stay in float32."""
    dtype = autocast_dtype(precision)
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)
