"""`ModelInput`: from the images of a batch to what the model takes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vitrail.data.preprocess import Preprocess
from vitrail.data.types import Array


class ModelInput:
    """Stacks images, copies them to the model's device and normalises them there: the bits are those of the preprocessing.

    Pixels are mostly uint8: a quarter of the bytes that they have when they are normalised. For a GPU they are stacked in pinned
    memory, from which it copies them itself.
    """

    def __init__(self, preprocess: Preprocess | None, device: torch.device, most: int) -> None:
        self._preprocess, self._device, self._most = preprocess, device, most
        self._pins, self._pinned = device.type == "cuda", torch.empty(0)

    def __call__(self, images: Sequence[Array | Tensor], size: int) -> Tensor:
        """Return a batch of `size` images: those given, of one type, then whatever. It is valid until the next call."""
        tensors = [image if isinstance(image, Tensor) else torch.from_numpy(image) for image in images]
        batch = self._stacked(tensors, size)
        if isinstance(images[0], Tensor):  # a client has normalised it
            return batch
        assert self._preprocess is not None
        return self._preprocess.normalise(batch)

    def _stacked(self, images: list[Tensor], size: int) -> Tensor:
        if not self._pins:
            return torch.stack(images)
        shape = (self._most, *images[0].shape)
        if self._pinned.shape != shape or self._pinned.dtype != images[0].dtype:
            self._pinned = torch.zeros(shape, dtype=images[0].dtype, pin_memory=True)
        torch.stack(images, out=self._pinned[: len(images)])
        return self._pinned[:size].to(self._device, non_blocking=True)
