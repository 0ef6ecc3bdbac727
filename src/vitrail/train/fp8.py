"""Training with fp8 matmuls: an explicit option, so refused with a reason where it is not available."""

from __future__ import annotations

from torch import nn

from vitrail.errors import VitrailError
from vitrail.models import ViT
from vitrail.models.fused.dispatch import is_fusable
from vitrail.models.fused.self_test import fp8_fault
from vitrail.train.config import Recipe
from vitrail.train.parallel import World


def use_fp8(model: nn.Module, recipe: Recipe, world: World) -> None:
    """Train the encoder's blocks with fp8 matmuls. Evaluation stays in bf16."""
    encoder = next((one for one in model.modules() if isinstance(one, ViT)), None)
    reason = _why_not(encoder, recipe, world)
    if reason:
        raise VitrailError(f"--precision fp8 cannot be used: {reason} Use --precision auto.")
    assert encoder is not None
    encoder.kernels = "fp8"


def _why_not(encoder: ViT | None, recipe: Recipe, world: World) -> str:
    if encoder is None:
        return "it is for the linear layers of Vision Transformers; this is a ResNet."
    if world.sharded:
        return "it is not available under FSDP."
    if recipe.compile:
        return "fp8 is part of Vitrail's own kernels, which --compile replaces."
    if recipe.model.lora:
        return "fp8 is part of the fused kernels, which layers with LoRA adapters do not take."
    sizes = (encoder.config.width, encoder.config.mlp)
    if any(size % 16 for size in sizes):
        return f"widths must be multiples of 16; {encoder.config.name} has {sizes[0]} and {sizes[1]}."
    if not is_fusable(encoder):
        return f"{encoder.config.name} has layers that the fused kernels do not cover: see docs/performance.md."
    if world.device.type != "cuda":
        return f"it needs a GPU with fp8 matmuls (H100 and later), and the device is {world.device.type}."
    fault = fp8_fault(world.device)
    return fault and f"its self-test failed on this GPU ({fault})."
