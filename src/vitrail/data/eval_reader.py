"""Read images for evaluation: fully decoded, and preprocessed exactly as the checkpoint says."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

import numpy as np
import torch

from vitrail.data.batch import HostBatch
from vitrail.data.buffers import BatchBuffers
from vitrail.data.preprocess import Preprocess
from vitrail.data.sampler import BatchSlice
from vitrail.data.types import Array, BadImage, Split


class EvalReader:
    """Build a worker's batches for evaluation. With `skip_bad`, a bad image is skipped and not replaced."""

    def __init__(self, split: Split, preprocess: Preprocess, *, skip_bad: bool, num_buffers: int) -> None:
        self.split, self.preprocess, self.skip_bad = split, preprocess, skip_bad
        self.buffers = BatchBuffers(num_buffers)

    def __getitem__(self, batch_slice: BatchSlice) -> HostBatch:
        arrays, read, bad, rotated = [], [], list[BadImage](), None
        self.split.read_ahead(batch_slice.indices)
        for index in batch_slice.indices.tolist():
            try:
                name = self.split.image_name(index)
                payload = self.split.payload(index)
                arrays.append(self.preprocess.pixels(payload, name=name))
                read.append(index)
                if rotated is None and self.preprocess.leaves_rotated(payload):
                    rotated = name
            except BadImage as error:
                error.index = index
                if not self.skip_bad:
                    raise error.skippable() from None
                bad.append(error)
        # uint8 is a quarter of the bytes to copy; 16-bit and unrounded pixels need float32.
        dtype = torch.uint8 if all(array.dtype == np.uint8 for array in arrays) else torch.float32
        groups: tuple[tuple[int, int, int], ...] = ()
        if self.preprocess.resize == "keep-aspect":
            order = sorted(range(len(arrays)), key=lambda k: arrays[k].shape)
            read, arrays = [read[k] for k in order], [arrays[k] for k in order]
            images, groups = _one_row(arrays, dtype), tuple(_count_sizes(arrays))
        else:
            images = self.buffers.empty((len(arrays), *self.preprocess.size, self.preprocess.channels), dtype)
            for row, array in enumerate(arrays):
                images.numpy()[row] = array
            images = images.permute(0, 3, 1, 2)
        indices = np.array(read, dtype=np.int64)
        targets = torch.from_numpy(self.split.targets[indices])
        return HostBatch(images, targets, torch.from_numpy(indices), batch_slice, bad=tuple(bad), rotated=rotated, groups=groups)


def _one_row(arrays: list[Array], dtype: torch.dtype) -> torch.Tensor:
    """Copy pixels of images of any size one after the other: a single tensor to pass on from a worker and to copy to a GPU."""
    row, start = torch.empty(sum(array.size for array in arrays), dtype=dtype), 0
    for array in arrays:
        row.numpy()[start : start + array.size] = array.reshape(-1)
        start += array.size
    return row


def _count_sizes(arrays: list[Array]) -> Iterator[tuple[int, int, int]]:
    for (height, width), same in groupby(arrays, key=lambda array: array.shape[:2]):
        yield len(list(same)), height, width


def eval_slices(length: int, batch: int, rank: int, ranks: int) -> list[BatchSlice]:
    """Return the batches of a rank: every `ranks`-th image, so sizes differ by at most one and nothing is padded or dropped."""
    own = np.arange(rank, length, ranks)
    return [
        eval_slice(step, indices) for step, indices in enumerate(np.split(own, range(batch, len(own), batch)) if len(own) else [])
    ]


def eval_slice(step: int, indices: Array) -> BatchSlice:
    """Return one batch for evaluation: the images at these positions."""
    return BatchSlice(0, step, 0, 1, indices, (), 0, len(indices), len(indices))
