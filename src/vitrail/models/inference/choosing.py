"""Which arithmetic a model is run in, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from vitrail.errors import VitrailError
from vitrail.models.config import BiTConfig, ModelConfig
from vitrail.models.cost import flops
from vitrail.models.inference import operations
from vitrail.models.inference.blocks import Style
from vitrail.models.inference.operations import Kind

Precision = Literal["auto", "fp32", "bf16", "int8"]
# Operations an image below which a faster product no longer shows: its rounding, and the calls around it, cost more.
WORTH_INT8, WORTH_BF16 = 4e9, 0.5e9


@dataclass(frozen=True)
class Chosen:
    """The arithmetic, and a clause that says why it was taken."""

    precision: Kind
    why: str
    attention_bf16: bool = False

    @property
    def style(self) -> Style:
        return Style(self.precision, self.attention_bf16)


@dataclass(frozen=True)
class Processor:
    """What of this processor and this torch matters here."""

    int8: bool
    """Multiplies bytes four at a time (VNNI) through an operation that works."""
    bf16: bool
    """Has bfloat16 instructions, and the operation works."""


def processor() -> Processor:
    known = torch.cpu.get_capabilities()
    int8 = known.get("avx512_vnni") or known.get("avx_vnni")
    return Processor(bool(int8) and operations.works("int8"), bool(known.get("avx512_bf16")) and operations.works("bf16"))


def choose(config: ModelConfig, precision: Precision, device: torch.device) -> Chosen:
    """What `for_inference` does with a model."""
    if precision not in ("auto", "fp32", "bf16", "int8"):
        raise VitrailError(f"The precision is {precision!r}; it can be auto, fp32, bf16 or int8.")
    if device.type not in ("cpu", "cuda"):
        return Chosen("fp32", f"faster layers are there for processors and CUDA GPUs, not yet for {device.type}")
    if isinstance(config, BiTConfig):
        return Chosen("fp32", f"{config.name} is a ResNet: its convolutions have no faster form here")
    if device.type == "cuda":
        return _on_gpu(precision)
    able = processor()
    if precision == "auto":
        return _automatic(config, able)
    if precision == "fp32":
        return Chosen("fp32", "as asked for")
    if not operations.works(precision):
        return Chosen("fp32", f"this torch, {torch.__version__}, has no {precision} product that works")
    return Chosen(precision, "as asked for", able.bf16)


def _on_gpu(precision: Precision) -> Chosen:
    if precision == "fp32":
        return Chosen("fp32", "as asked for")
    if not torch.cuda.is_bf16_supported():
        return Chosen("fp32", "this GPU has no bfloat16")
    if precision == "int8":
        return Chosen("bf16", "on a GPU there is no int8 path; bf16 is its fast one")
    return Chosen("bf16", "as asked for" if precision == "bf16" else "the GPU's tensor cores compute in it")


def _automatic(config: ModelConfig, able: Processor) -> Chosen:
    work = flops(config)
    if able.int8 and work >= WORTH_INT8:
        return Chosen("int8", "the processor multiplies bytes fastest (VNNI)", able.bf16)
    if able.bf16 and work >= WORTH_BF16:
        return Chosen("bf16", "the processor has bfloat16 instructions", True)
    if able.int8 or able.bf16:
        return Chosen("fp32", f"{config.name} at this size is too small to gain from less")
    return Chosen("fp32", "the processor has neither VNNI nor bfloat16 instructions")
