"""LoRA (arXiv 2106.09685): a linear layer's weight W is frozen, and a product of two thin matrices is trained next to it.

The layer computes x (W + s B A)ᵀ + b with A [rank, inputs], B [outputs, rank] and s = alpha / rank. B starts at zero, so a model
begins as it was. Merged, the adapter is part of W, and the model is a plain one again. Blocks with adapters take the plain path,
because the fused kernels compute nn.Linear only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.errors import VitrailError
from vitrail.models.settings import LORA_MATRICES, LoraMatrix
from vitrail.models.vit import ViT

_PARTS = {"qkv": "attention", "out": "attention", "up": "mlp", "down": "mlp"}


class LoraLinear(nn.Linear):
    """A linear layer with an adapter. It shares weight and bias with the layer that it replaces."""

    def __init__(self, linear: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        self.lora_a = nn.Parameter(linear.weight.new_empty(rank, linear.in_features))
        self.lora_b = nn.Parameter(linear.weight.new_empty(linear.out_features, rank))
        self.scale = alpha / rank

    def reset(self, generator: torch.Generator | None) -> None:
        """Draw A as torch draws a linear layer's weight, and set B to zero."""
        nn.init.kaiming_uniform_(self.lora_a, a=math.sqrt(5), generator=generator)
        nn.init.zeros_(self.lora_b)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias) + self.scale * F.linear(F.linear(x, self.lora_a), self.lora_b)


def add_lora(
    model: ViT, rank: int, *, alpha: float | None = None, matrices: Sequence[LoraMatrix] = LORA_MATRICES, seed: int | None = None
) -> int:
    """Put adapters on these matrices of every block; return their number of values. `alpha` None: equal to the rank, so s is 1.

    Nothing is frozen here; train only parameters named `lora_a`, `lora_b` and the head.
    """
    if not isinstance(model, ViT):
        raise VitrailError("LoRA adapts the linear layers of a Vision Transformer's blocks; a ResNet has none.")
    if rank < 1 or not matrices:
        raise VitrailError(
            f"The rank of LoRA is {rank} on {', '.join(matrices) or 'no matrix'}; use 1 or more, on at least one matrix."
        )
    device = next(model.parameters()).device
    generator = None if seed is None or device.type == "meta" else torch.Generator(device).manual_seed(seed)
    added = 0
    for block in model.blocks:
        for name in matrices:
            part = block.get_submodule(_PARTS[name])
            layer = part.get_submodule(name)
            if type(layer) is not nn.Linear:
                raise VitrailError(f"{name} is a {type(layer).__name__}, not a plain linear layer: LoRA cannot be added to it.")
            adapted = LoraLinear(layer, rank, rank if alpha is None else alpha)
            adapted.reset(generator)
            setattr(part, name, adapted)
            added += adapted.lora_a.numel() + adapted.lora_b.numel()
    return added


def merged_state(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a state dict of the plain model: adapters are added to their weights, in float64, and left out."""
    merged = dict(state)
    for name, layer in model.named_modules():
        if isinstance(layer, LoraLinear):
            a, b = (merged.pop(f"{name}.{part}").double() for part in ("lora_a", "lora_b"))
            weight = merged[f"{name}.weight"]
            merged[f"{name}.weight"] = (weight.double() + layer.scale * (b @ a)).to(weight.dtype)
    return merged
