"""CUDA graphs: what a function launches on a GPU, captured once and then replayed.

A GPU finishes the kernels of a small model sooner than Python can launch them one by one. A replay launches all of them at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor


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


RandomState = tuple[Tensor, Tensor | None]


def random_state(device: torch.device) -> RandomState:
    """Return the state of the random generators of the CPU and, if it is a GPU, of the device."""
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def recover(device: torch.device, random: RandomState) -> None:
    """Bring the device and the random generators back to where they were before a capture that failed."""
    torch.set_rng_state(random[0])
    if random[1] is None:
        return
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    # The generator still believes that it is being captured, and would refuse to draw.
    generator = torch.cuda.default_generators[device.index or 0]
    generator.graphsafe_set_state(torch.Generator(device).manual_seed(generator.initial_seed()).graphsafe_get_state())
    generator.set_state(random[1])
