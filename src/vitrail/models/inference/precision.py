"""The precision a model is run in, and why."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vitrail.errors import VitrailError
from vitrail.models.config import BiTConfig, ModelConfig
from vitrail.models.cost import flops
from vitrail.models.inference import onednn
from vitrail.models.inference.onednn import MatmulPrecision
from vitrail.models.inference.packed_block import BlockPrecision
from vitrail.models.settings import Precision

# FLOPs per image below which a faster matmul no longer shows: its rounding, and the calls around it, cost more.
MIN_FLOPS_INT8, MIN_FLOPS_BF16 = 4e9, 0.5e9


@dataclass(frozen=True)
class PrecisionChoice:
    """The precision, and a clause that says why."""

    precision: MatmulPrecision
    why: str
    attention_bf16: bool = False

    @property
    def block_precision(self) -> BlockPrecision:
        return BlockPrecision(self.precision, self.attention_bf16)


@dataclass(frozen=True)
class CpuFeatures:
    """What this CPU and this torch can do that matters here."""

    int8: bool
    """It has VNNI (int8 dot products), and torch's int8 matmul works."""
    bf16: bool
    """It has bfloat16 instructions, and torch's bf16 matmul works."""


def cpu_features() -> CpuFeatures:
    known = torch.cpu.get_capabilities()
    vnni = known.get("avx512_vnni") or known.get("avx_vnni")
    return CpuFeatures(bool(vnni) and onednn.works("int8"), bool(known.get("avx512_bf16")) and onednn.works("bf16"))


def choose(config: ModelConfig, precision: Precision, device: torch.device) -> PrecisionChoice:
    """Say which precision `for_inference` takes for a model on a device."""
    if precision not in ("auto", "fp32", "bf16", "int8"):
        raise VitrailError(f"The precision is {precision!r}; it can be auto, fp32, bf16 or int8.")
    if device.type not in ("cpu", "cuda"):
        return PrecisionChoice("fp32", f"there are faster layers for CPUs and CUDA GPUs, not yet for {device.type}")
    if isinstance(config, BiTConfig):
        return PrecisionChoice("fp32", f"{config.name} is a ResNet: its convolutions have no faster form here")
    if device.type == "cuda":
        return _choose_gpu(precision)
    features = cpu_features()
    if precision == "auto":
        return _choose_cpu(config, features)
    if precision == "fp32":
        return PrecisionChoice("fp32", "as requested")
    if not onednn.works(precision):
        return PrecisionChoice("fp32", f"this torch, {torch.__version__}, has no {precision} matmul that works")
    return PrecisionChoice(precision, "as requested", features.bf16)


def _choose_gpu(precision: Precision) -> PrecisionChoice:
    if precision == "fp32":
        return PrecisionChoice("fp32", "as requested")
    if not torch.cuda.is_bf16_supported(including_emulation=False):
        return PrecisionChoice("fp32", "this GPU has no bfloat16")
    if precision == "int8":
        return PrecisionChoice("bf16", "there is no int8 path for GPUs; bf16 is the fast one")
    return PrecisionChoice("bf16", "as requested" if precision == "bf16" else "the GPU's tensor cores compute in it")


def _choose_cpu(config: ModelConfig, features: CpuFeatures) -> PrecisionChoice:
    work = flops(config)
    if features.int8 and work >= MIN_FLOPS_INT8:
        return PrecisionChoice("int8", "the CPU has VNNI, so int8 matmuls are its fastest", features.bf16)
    if features.bf16 and work >= MIN_FLOPS_BF16:
        return PrecisionChoice("bf16", "the CPU has bfloat16 instructions", True)
    if features.int8 or features.bf16:
        return PrecisionChoice("fp32", f"{config.name} at this size is too small to gain from int8 or bf16")
    return PrecisionChoice("fp32", "the CPU has neither VNNI nor bfloat16 instructions")
