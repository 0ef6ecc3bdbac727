"""What the loaders hand over."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from torch import Tensor

from vitrail.data.sampler import Slice
from vitrail.data.types import BadImage, Split


@dataclass
class HostBatch:
    """A batch as a worker makes it: whole pixel values, not yet normalised or mixed."""

    images: Tensor
    """uint8 (or, for 16 bits, float32) [n, C, H, W]; with `whole` as they are stored: uint8 [n, H, W, C], uncropped."""
    targets: Tensor
    indices: Tensor
    where: Slice
    whole: bool = False
    bad: tuple[BadImage, ...] = ()

    def pin_memory(self) -> HostBatch:
        """Page-locked, so that a GPU can fetch it while other work goes on."""
        return dataclasses.replace(self, images=self.images.pin_memory(), targets=self.targets.pin_memory())


@dataclass
class Batch:
    """A batch ready for the model."""

    images: Tensor
    """float32 [n, C, H, W], normalised, on the loader's device."""
    targets: Tensor
    """Class numbers [n]; shares of classes [n, K] after mixing or smoothing; or the task's own numbers [n, K]."""
    indices: Tensor
    """Which images of the split these are (on the CPU)."""
    epoch: int
    step: int
    """The optimiser step within the epoch."""
    part: int
    parts: int
    """This is micro-batch `part` of the `parts` in which this rank takes the step."""
    total: int
    """Images in the whole step, over all parts and ranks: what a sum of losses is divided by."""

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def last(self) -> bool:
        """Whether the step is complete with this batch."""
        return self.part == self.parts - 1

    def names(self, split: Split) -> list[str]:
        """The images' names in the split they were loaded from."""
        return [split.image_name(int(index)) for index in self.indices]
