"""Where batches are put together."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor
from torch.utils.data import get_worker_info


class BatchMemory:
    """Memory for a reader's batches.

    A worker builds batches in memory shared with the loader's process from the start, so that handing one over copies
    nothing, and uses a few pieces in turn: fresh memory costs more than filling it, because the system clears it page
    by page. `pieces` must exceed the batches a worker may be ahead by one at least; the loader is done with a batch
    when it asks for the next.
    """

    def __init__(self, pieces: int) -> None:
        self.pieces = pieces
        self.pins = False
        """Page-locked memory: worth it where the reader's own process feeds a GPU."""
        self._kept: dict[tuple[tuple[int, ...], torch.dtype], list[Tensor]] = {}

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_kept": {}}  # each worker has its own

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if get_worker_info() is None or prod(shape) == 0:
            return torch.empty(shape, dtype=dtype, pin_memory=self.pins)
        kept = self._kept.setdefault((shape, dtype), [])
        if len(kept) < self.pieces:
            storage = torch.UntypedStorage._new_shared(prod(shape) * dtype.itemsize)
            kept.append(torch.empty(0, dtype=dtype).set_(storage).view(shape))
        else:
            kept.append(kept.pop(0))
        return kept[-1]
