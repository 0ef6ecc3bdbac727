"""CUDA graphs: what a function launches on a GPU, captured once and then replayed.

A GPU finishes the kernels of a small model sooner than Python can launch them one by one. A replay launches all of them at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch


class Graph(Protocol):
    """A CUDA graph; tests without a GPU have stand-ins."""

    def capture(self, run: Callable[[], Any]) -> Any:
        """Capture what `run` launches; return its result, whose tensors every replay writes again."""

    def replay(self) -> None: ...


class CudaGraph:
    """A graph captured on a given stream; None: on the one that torch keeps for captures."""

    def __init__(self, stream: torch.cuda.Stream | None = None) -> None:
        self._stream, self._graph = stream, torch.cuda.CUDAGraph()

    def capture(self, run: Callable[[], Any]) -> Any:
        # thread_local: other threads may use CUDA meanwhile. A loader's pins memory, NCCL's queries events.
        with torch.cuda.graph(self._graph, stream=self._stream, capture_error_mode="thread_local"):
            return run()

    def replay(self) -> None:
        self._graph.replay()
