"""Reading images for evaluation: decoded fully, preprocessed exactly as the checkpoint says."""

from __future__ import annotations

import numpy as np
import torch

from vitrail.data.batch import HostBatch
from vitrail.data.memory import BatchMemory
from vitrail.data.preprocess import Preprocess
from vitrail.data.sampler import Slice
from vitrail.data.types import BadImage, Split


class EvalReader:
    """Makes a worker's batches for evaluation. A bad image, where they are skipped, is left out and nothing else is."""

    def __init__(self, split: Split, preprocess: Preprocess, *, skip_bad: bool, pieces: int) -> None:
        self.split, self.preprocess, self.skip_bad = split, preprocess, skip_bad
        self.memory = BatchMemory(pieces)

    def __getitem__(self, where: Slice) -> HostBatch:
        pictures, kept, bad = [], [], list[BadImage]()
        for index in where.indices.tolist():
            try:
                name = self.split.image_name(index)
                pictures.append(self.preprocess.pixels(self.split.payload(index), name=name))
                kept.append(index)
            except BadImage as error:
                if not self.skip_bad:
                    raise
                bad.append(error)
        indices = np.array(kept, dtype=np.int64)
        # Fractions (where a preprocessing keeps them) and 16 bits travel as float32, whole pixels as bytes.
        whole = all(picture.dtype == np.uint8 for picture in pictures)
        images = self.memory.empty(
            (len(pictures), *self.preprocess.size, self.preprocess.channels), torch.uint8 if whole else torch.float32
        )
        for row, picture in enumerate(pictures):
            images.numpy()[row] = picture
        targets = torch.from_numpy(self.split.targets[indices])
        return HostBatch(images.permute(0, 3, 1, 2), targets, torch.from_numpy(indices), where, False, tuple(bad))


def eval_slices(length: int, batch: int, rank: int, ranks: int) -> list[Slice]:
    """This rank's batches: every `ranks`-th image, so shares differ by at most one and none is padded or dropped."""
    own = np.arange(rank, length, ranks)
    return [
        Slice(0, step, 0, 1, part, (), 0, len(part), len(part))
        for step, part in enumerate(np.split(own, range(batch, len(own), batch)) if len(own) else [])
    ]
