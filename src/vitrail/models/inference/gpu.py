"""A copy of a ViT for computing on a GPU: weights in the precision of the arithmetic, and shapes that recur replayed.

Under autocast every call casts the weights again, and takes those of the norms into them. Here that is done once; and where a shape
keeps coming, as one image after another does to a service, its kernels are recorded as a CUDA graph and no longer wait for
the processor to start them.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from vitrail.models.bit import BiT
from vitrail.models.fused.folded_norm import fold_norms
from vitrail.models.vit import ViT

_BEFORE = 3  # calls of a shape in the ordinary way, in which kernels are compiled and chosen
_SHAPES = 4  # recorded at most: each keeps memory of its own


class GpuViT(ViT):
    """A ViT for inference on a GPU. Made by `gpu_copy`; it takes float32 images and gives float32 logits."""

    _calls: dict[torch.Size, int]
    _recorded: dict[torch.Size, tuple[torch.cuda.CUDAGraph, Tensor, Tensor]]

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        shape = images.shape
        if shape not in self._recorded:
            self._calls[shape] = self._calls.get(shape, 0) + 1
            if self._calls[shape] <= _BEFORE or len(self._recorded) >= _SHAPES or torch.cuda.is_current_stream_capturing():
                return super().forward(images).float()
            self._record(images)
        graph, entering, leaving = self._recorded[shape]
        entering.copy_(images)
        graph.replay()
        return leaving.clone()

    def embed_patches(self, images: Tensor) -> Tensor:
        return super().embed_patches(images if self._cuts(images) else images.to(self.norm.weight.dtype))

    def _record(self, images: Tensor) -> None:
        graph, entering = torch.cuda.CUDAGraph(), images.clone()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # a loader's thread may pin memory meanwhile
            leaving = super().forward(entering).float()
        self._recorded[images.shape] = (graph, entering, leaving)


def gpu_copy(model: ViT | BiT, device: torch.device, dtype: torch.dtype) -> ViT | BiT:
    """The model on a GPU with weights of the given precision. A BiT keeps its own, and is not recorded."""
    made = copy.deepcopy(model).to(device).eval().requires_grad_(False)
    if isinstance(made, ViT):
        for block in made.blocks:
            fold_norms(block)  # type: ignore[arg-type]
        made.to(dtype)
        made.__class__ = GpuViT
        made.__dict__ |= {"_calls": {}, "_recorded": {}}
    return made
