"""The batches that loaders return."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from torch import Tensor

from vitrail.data.sampler import BatchSlice
from vitrail.data.types import BadImage, Split


@dataclass
class HostBatch:
    """A batch as a worker builds it: integer pixel values, not yet normalised or mixed."""

    images: Tensor
    """uint8 (float32 for 16-bit images) [n, C, H, W]; with `uncropped` as they are stored: uint8 [n, H, W, C]."""
    targets: Tensor
    indices: Tensor
    slice: BatchSlice
    uncropped: bool = False
    bad: tuple[BadImage, ...] = ()
    rotated: str | None = None
    """For evaluation: the first image whose EXIF orientation the preprocessing ignores."""
    groups: tuple[tuple[int, int, int], ...] = ()
    """Where images differ in size: how many of which height and width follow each other. `images` are then their pixels [H, W, C]
    in one row."""

    def pin_memory(self) -> HostBatch:
        """Return a copy in page-locked memory, which a GPU can copy from asynchronously."""
        return dataclasses.replace(self, images=self.images.pin_memory(), targets=self.targets.pin_memory())


@dataclass
class Batch:
    """A batch ready for the model."""

    images: Tensor
    """float32 [n, C, H, W], normalised, on the loader's device."""
    targets: Tensor
    """Class indices [n]; class probabilities [n, K] after mixing or smoothing; or the task's own values [n, K]."""
    indices: Tensor
    """Positions of the images in the split (on the CPU)."""
    epoch: int
    step: int
    """Optimiser step within the epoch."""
    micro_step: int
    micro_steps: int
    """This is micro-batch `micro_step` of the `micro_steps` that this rank accumulates per optimiser step."""
    total: int
    """Images in the whole optimiser step, over all micro-batches and ranks: divide a sum of losses by it."""
    bad: tuple[BadImage, ...] = ()
    """Images that could not be read; others are in their place."""

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def completes_step(self) -> bool:
        """Whether this is the last micro-batch of the optimiser step."""
        return self.micro_step == self.micro_steps - 1

    def names(self, split: Split) -> list[str]:
        """Return the images' names in the split they were loaded from."""
        return [split.image_name(int(index)) for index in self.indices]
