"""`ModelInput`: from the images of a batch to what the model takes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vitrail.data.preprocess import Preprocess
from vitrail.data.types import Array


class ModelInput:
    """Stacks images, copies them to the model's device and normalises them there: the bits are those of the preprocessing.

    Pixels are mostly uint8: a quarter of the bytes that they have when they are normalised. They are stacked in memory that stays,
    for a GPU in pinned memory, from which it copies them itself. There are two such places: while one is copied and computed, the
    other can be filled.
    """

    def __init__(self, preprocess: Preprocess | None, device: torch.device, most: int) -> None:
        self._preprocess, self._device, self._most = preprocess, device, most
        self._next, self._after = torch.empty(0), torch.empty(0)

    def __call__(self, images: Sequence[Array | Tensor], size: int) -> Tensor:
        """Return a batch of `size` images: those given, of one type, then whatever. It is valid until the next call but one."""
        batch = self._stacked([image if isinstance(image, Tensor) else torch.from_numpy(image) for image in images], size)
        return batch if isinstance(images[0], Tensor) else self._normalised(batch)

    def alone(self, image: Array | Tensor) -> Tensor:
        """Return one image on the CPU, in memory that no batch is stacked in."""
        return image if isinstance(image, Tensor) else self._normalised(torch.from_numpy(image))

    def _normalised(self, pixels: Tensor) -> Tensor:
        assert self._preprocess is not None  # only a client that has normalised its images needs none
        return self._preprocess.normalise(pixels)

    def _stacked(self, images: list[Tensor], size: int) -> Tensor:
        shape, memory = (self._most, *images[0].shape), self._next
        if memory.shape != shape or memory.dtype != images[0].dtype:
            memory = torch.empty(shape, dtype=images[0].dtype, pin_memory=self._device.type == "cuda")
        torch.stack(images, out=memory[: len(images)])
        self._next, self._after = self._after, memory
        return memory[:size].to(self._device, non_blocking=True)
