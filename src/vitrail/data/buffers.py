"""Buffers in which batches are built."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor
from torch.utils.data import get_worker_info


class BatchBuffers:
    """Allocate the memory of a reader's batches.

    In a worker, batches are built directly in shared memory, so passing one to the main process copies nothing. A few
    buffers are reused in rotation, because the kernel clears fresh memory page by page, which takes longer than filling
    it. `count` must exceed the number of batches a worker may prefetch by at least one; the loader is done with a batch
    when it requests the next.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.pin_memory = False
        """Use page-locked memory: pays if the reader's own process feeds a GPU."""
        self._buffers: dict[tuple[tuple[int, ...], torch.dtype], list[Tensor]] = {}

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_buffers": {}}  # each worker allocates its own

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if get_worker_info() is None or prod(shape) == 0:
            return torch.empty(shape, dtype=dtype, pin_memory=self.pin_memory)
        buffers = self._buffers.setdefault((shape, dtype), [])
        if len(buffers) < self.count:
            storage = torch.UntypedStorage._new_shared(prod(shape) * dtype.itemsize)
            buffers.append(torch.empty(0, dtype=dtype).set_(storage).view(shape))
        else:
            buffers.append(buffers.pop(0))
        return buffers[-1]
