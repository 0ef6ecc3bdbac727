"""Copies of models for inference on a GPU: weights in the precision of the matmuls, norms folded, recurring shapes captured.

Under autocast every call casts the weights again. Here that is done once.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from vitrail.models.bit import BiT
from vitrail.models.inference.capture import Call, CapturedForward, CudaGraph, Graph
from vitrail.models.inference.model import InferenceModel, keep_head_float32
from vitrail.models.inference.replaceable import replaceable_blocks
from vitrail.models.layers import FoldedNorm
from vitrail.models.vit import ViT


class GpuModel(InferenceModel):
    """A ViT on a GPU, whose recurring shapes are captured as CUDA graphs: see `capture.py`."""

    def __init__(self, model: ViT, graph: Callable[[Call, Tensor], Graph] = CudaGraph) -> None:
        super().__init__(model)
        self._captured = CapturedForward(self.model, graph)

    def _logits(self, images: Tensor) -> Tensor:
        return self._captured(images, self.device, self.dtype)

    def _changed(self) -> None:
        self._captured.drop()


def gpu_copy(
    model: ViT | BiT, device: torch.device, dtype: torch.dtype, graph: Callable[[Call, Tensor], Graph] = CudaGraph
) -> InferenceModel:
    """Copy a model to a GPU, with weights of the given precision. A BiT is computed in float32 and not captured."""
    made = copy.deepcopy(model).to(device, torch.float32).requires_grad_(False)
    if not isinstance(made, ViT):
        return InferenceModel(made)
    if dtype != torch.float32:
        for block in replaceable_blocks(made):  # before anything is rounded
            _fold(block, "norm1", block.attention.qkv)
            _fold(block, "norm2", block.mlp.up)
        made.to(dtype)
        keep_head_float32(made)
    return GpuModel(made, graph)


def _fold(block: nn.Module, name: str, linear: nn.Linear) -> None:
    """Take the block's norm, but for the division by the deviation, into the linear layer that follows."""
    norm = getattr(block, name)
    shift = linear.weight @ norm.bias
    linear.bias = nn.Parameter(shift if linear.bias is None else linear.bias + shift, requires_grad=False)
    linear.weight *= norm.weight
    linear.weight -= linear.weight.mean(dim=1, keepdim=True)
    setattr(block, name, FoldedNorm(norm))
