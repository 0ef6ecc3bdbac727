"""Forward and backward of a micro-batch as a CUDA graph: recorded once, then replayed without the processor's help.

A GPU finishes a small model's operations sooner than a processor can start them one by one. What is recorded reads its images and
targets from fixed places and writes its gradients to fixed places; between them it is the same sequence of kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

_BEFORE = 3  # steps in the ordinary way first: kernels are compiled and chosen then, and memory is found


class Recording:
    """`backward(images, targets)` → loss, adding to the gradients that are there: after a few calls recorded, then replayed.

    A call of another shape goes the ordinary way.
    """

    def __init__(self, backward: Callable[[Tensor, Tensor], Tensor], parameters: Sequence[nn.Parameter]) -> None:
        self._backward, self._parameters = backward, parameters
        self._calls, self._shapes = 0, (_kind(torch.empty(0)),) * 2
        self._graph: torch.cuda.CUDAGraph | None = None
        self._learning: list[tuple[nn.Parameter, Tensor]] = []
        """Parameters that get a gradient, and where the recorded one is written: over that of the replay before."""
        self._sums: list[Tensor] = []
        """Where gradients are added up if a step has several micro-batches."""
        self.failure = ""
        """Why nothing can be recorded, once that was tried in vain."""

    def __call__(self, images: Tensor, targets: Tensor) -> Tensor:
        shapes = (_kind(images), _kind(targets))
        if self._graph is None and not self.failure:
            self._calls = self._calls + 1 if shapes == self._shapes else 1
            self._shapes = shapes
            if self._calls > _BEFORE:
                self._record(images, targets)
        if self._graph is None or shapes != self._shapes:
            return self._backward(images, targets)
        there = self._set_aside()
        self._images.copy_(images)
        self._targets.copy_(targets)
        self._graph.replay()
        if there:
            torch._foreach_add_(there, tuple(gradient for _, gradient in self._learning))
        else:
            for parameter, gradient in self._learning:
                parameter.grad = gradient
        return self._loss.clone()  # the next replay writes over it

    def _set_aside(self) -> list[Tensor]:
        """The gradients that are there already, moved if they lie where a replay writes."""
        if any(parameter.grad is gradient for parameter, gradient in self._learning):
            fresh = [gradient for _, gradient in self._learning]
            self._sums = self._sums or [torch.empty_like(gradient) for gradient in fresh]
            torch._foreach_copy_(self._sums, fresh)
            for (parameter, _), total in zip(self._learning, self._sums, strict=True):
                parameter.grad = total
        return [parameter.grad for parameter, _ in self._learning if parameter.grad is not None]

    def _record(self, images: Tensor, targets: Tensor) -> None:
        before = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        self._images, self._targets = images.clone(), targets.clone()
        torch.cuda.empty_cache()  # what is recorded has memory of its own
        graph = torch.cuda.CUDAGraph()
        try:
            # Only this thread is watched: the loader's pins memory meanwhile, which a recording would otherwise not bear.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._loss = self._backward(self._images, self._targets)
            self._learning = [(one, one.grad) for one in self._parameters if one.grad is not None]
            self._graph = graph
        except Exception as error:  # whatever cannot be recorded still runs
            self.failure = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            _forget_recording(images.device)
        finally:
            for parameter, gradient in zip(self._parameters, before, strict=True):
                parameter.grad = gradient


def _forget_recording(device: torch.device) -> None:
    """Bring the device back into an ordinary state after a recording that failed."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    # The generator still believes it is being recorded, and would refuse to draw.
    generator = torch.cuda.default_generators[device.index or 0]
    generator.graphsafe_set_state(torch.Generator(device).manual_seed(generator.initial_seed()).graphsafe_get_state())


def _kind(tensor: Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.dtype, tensor.stride()
