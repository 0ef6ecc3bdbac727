"""Copies of models for inference on a GPU: weights in the precision of the matmuls, norms folded, recurring shapes captured.

Under autocast every call casts the weights again. Here that is done once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vitrail.models.bit import BiT
from vitrail.models.fused.dispatch import Kernels
from vitrail.models.fused.folded_block import fold_norms
from vitrail.models.inference.capture import CapturedForward, NewGraph
from vitrail.models.inference.model import InferenceModel, cast_all_but_heads, deep_copied
from vitrail.models.inference.replaceable import replaceable_blocks
from vitrail.models.vit import ViT


class GpuModel(InferenceModel):
    """A ViT on a GPU, whose recurring shapes are captured as CUDA graphs: see `capture.py`."""

    def __init__(self, model: ViT, new_graph: NewGraph | None = None) -> None:
        super().__init__(model)
        self._captured = CapturedForward(self.model, new_graph)

    @property
    def kernels(self) -> Kernels:
        """As `ViT.kernels`. Norms stay folded with all of them."""
        return super().kernels

    @kernels.setter
    def kernels(self, kernels: Kernels) -> None:
        self.model.kernels = kernels

    def forward(self, images: Tensor) -> Tensor:
        """Compute logits [batch, outputs] in float32."""
        result = self._captured.replay(images)
        return super().forward(images) if result is None else result

    def _logits(self, images: Tensor) -> Tensor:
        return self._captured(images, self.device, self.dtype)

    def _changed(self) -> None:
        self._captured.drop()


@torch.inference_mode(False)  # or its weights would have no version, by which changes are seen
@torch.no_grad()
def gpu_copy(model: ViT | BiT, device: torch.device, dtype: torch.dtype, new_graph: NewGraph | None = None) -> InferenceModel:
    """Copy a model to a GPU, with weights of the given precision. A BiT is computed in float32 and not captured."""
    made = deep_copied(model).to(device, torch.float32).requires_grad_(False)
    if not isinstance(made, ViT):
        return InferenceModel(made)
    for block in replaceable_blocks(made):  # before anything is rounded
        fold_norms(block)
    cast_all_but_heads(made, dtype)
    return GpuModel(made, new_graph)
