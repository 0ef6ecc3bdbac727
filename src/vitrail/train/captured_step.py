"""Forward and backward of a training step as a CUDA graph: captured once, then replayed.

A replay reads its inputs from fixed tensors and writes its gradients to fixed tensors.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from vitrail.errors import VitrailError
from vitrail.models.cuda_graph import CudaGraph, Graph, random_state, recover
from vitrail.train.shards import local

WARMUP = 3  # ordinary calls before a capture: they compile and choose kernels, and allocate memory
DDP_WARMUP = 11  # DDP rebuilds its buckets after the first step, and times steps 1 to 10 with events that no graph can hold
_OTHER_SHAPE = 16  # calls in a row after which another shape takes the place of the captured one

Step = Callable[..., Any]


def capture(step: Step, parameters: Iterable[nn.Parameter], *, warmup: int = WARMUP) -> CapturedStep:
    """Make a training step that replays its forward and backward pass as one CUDA graph.

    `step(*tensors)` runs forward, loss and backward, under your own autocast, and returns a tensor or a tuple (or dict) of
    tensors. `parameters` are all those that it computes gradients for. The result is called in the same way:

        step = vitrail.train.capture(forward_and_backward, model.parameters())
        for images, labels in loader:
            loss = step(images, labels)       # adds to .grad, as backward does
            optimizer.step()
            optimizer.zero_grad()

    The first `warmup` calls run normally, the next one is captured. Calls with other shapes run normally; a shape that is
    called 16 times in a row is captured in place of the old one. Without a GPU, every call runs normally. If the capture fails,
    there is one warning, and calls run normally. Returned tensors are detached.

    A replay does not run the Python code of `step`. Another shape, dtype or autocast state, and parameters that were frozen,
    unfrozen or moved, are detected and lead to a new capture. `.grad` may be set to None, zeroed or replaced between calls, without
    a new capture. After any other change call `reset()`: train or eval mode, hooks, dropout rates, and every Python number that
    `step` uses (scale the learning rate in the optimiser, not the loss). After layers were added or replaced, capture a new step
    with the new parameters. `step` must not wait for the GPU (`.item()`, `print`), and inputs must be on the GPU. Gradient tensors
    are reused by the next call: clone what you keep.
    """
    return CapturedStep(step, parameters, warmup=warmup)


@dataclass(frozen=True)
class _Captured:
    """One captured call: its graph and the fixed tensors it reads and writes."""

    shape: Hashable
    state: Hashable
    graph: Graph
    inputs: tuple[Tensor, ...]
    results: Any
    gradients: tuple[tuple[nn.Parameter, Tensor], ...]
    """Parameters that get a gradient, and the tensor into which a replay writes it, over that of the replay before."""


class CapturedStep:
    """See `capture`. The keywords are for the training loop and for tests.

    `stream` is where ordinary calls run and the capture happens: DDP's hooks belong to the stream on which DDP was built.
    `any_rank(failed)` tells whether the capture failed on any rank, so that all ranks give up together. `on_failure` gets the
    reason in place of a warning. `captures_shards`: capture steps over FSDP2's shards, too; `step` must then end with
    `Runner.join_streams`.
    """

    def __init__(
        self,
        step: Step,
        parameters: Iterable[nn.Parameter],
        *,
        warmup: int = WARMUP,
        stream: torch.cuda.Stream | None = None,
        any_rank: Callable[[bool], bool] = bool,
        on_failure: Callable[[str], None] | None = None,
        captures_shards: bool = False,
        new_graph: Callable[[], Graph] | None = None,
    ) -> None:
        self._step, self._warmup = step, warmup
        self._parameters = [] if isinstance(parameters, nn.Module) else list(dict.fromkeys(parameters))
        if not self._parameters:
            raise VitrailError("There are no parameters to compute gradients for; pass model.parameters().")
        self._any_rank, self._on_failure, self._new_graph = any_rank, on_failure or _warn, new_graph
        self._given_stream, self._captures_shards = stream, captures_shards
        self.reset()

    def reset(self) -> None:
        """Drop what was captured; the next calls run normally, then the step is captured again."""
        self._captured: _Captured | None = None
        self._calls: int = 0
        self._shape: Hashable = None
        self._state: Hashable = None
        self._sums: dict[nn.Parameter, Tensor] = {}
        """Where gradients of several calls add up, allocated once."""
        self._not_given = ""
        self.failure = ""
        """Why the step could not be captured, once that has failed."""
        self._device = self._parameters[0].device
        on_gpu = self._device.type == "cuda"
        # One stream for ordinary calls and the capture: autograd remembers on which stream a parameter was first used.
        self._stream = torch.cuda.Stream(self._device) if on_gpu and self._given_stream is None else self._given_stream
        sharded = any(hasattr(one, "full_tensor") for one in self._parameters)
        self._captures = (self._captures_shards or not sharded) and (on_gpu or self._new_graph is not None)

    @property
    def captured(self) -> bool:
        """Whether calls are replayed now."""
        return self._captured is not None

    def __call__(self, *inputs: Tensor) -> Any:
        if self._parameters[0].device != self._device:
            self.reset()
        if not self._captures or self.failure:
            return self._run(inputs)
        shape, state = _shapes(inputs), self._state_of_parameters()
        if self._captured is not None and self._captured.state != state:
            self.reset()
        self._count(shape, state)
        if self._captured is not None and self._captured.shape == shape:
            return self._replay(self._captured, inputs)
        if self._calls > (self._warmup if self._captured is None else _OTHER_SHAPE) and self._capture(inputs, shape, state):
            assert self._captured is not None
            return self._replay(self._captured, inputs)
        return self._run(inputs)

    def _count(self, shape: Hashable, state: Hashable) -> None:
        """Count calls of the same kind in a row."""
        same = shape == self._shape and state == self._state
        self._calls, self._shape, self._state = self._calls + 1 if same else 1, shape, state

    def _run(self, inputs: tuple[Tensor, ...]) -> Any:
        with on_stream(self._stream):
            results = self._step(*inputs)
        if self._captures and not self._captures_shards and self._captured is None and not self.failure:
            self._check_parameters(results)
        return _detached(results)

    def _replay(self, captured: _Captured, inputs: tuple[Tensor, ...]) -> Any:
        gradients = captured.gradients
        self._move_sums(gradients)
        if inputs:
            torch._foreach_copy_(captured.inputs, inputs)
        with _device(self._device):
            captured.graph.replay()
        added = [(local(one.grad), local(gradient)) for one, gradient in gradients if one.grad is not None]
        if added:
            torch._foreach_add_([total for total, _ in added], [gradient for _, gradient in added])
        for parameter, gradient in gradients:
            if parameter.grad is None:
                parameter.grad = gradient
        return tree_map(torch.clone, captured.results)  # the next replay writes over them

    def _move_sums(self, gradients: Iterable[tuple[nn.Parameter, Tensor]]) -> None:
        """Move gradients that are there already, and lie where a replay writes, to tensors of their own."""
        overwritten = [one for one, new in gradients if one.grad is not None and _address(one.grad) == _address(new)]
        if not overwritten:
            return
        old = [one.grad for one in overwritten if one.grad is not None]
        for parameter, gradient in zip(overwritten, old, strict=True):
            if parameter not in self._sums:
                self._sums[parameter] = torch.empty_like(gradient)
            parameter.grad = self._sums[parameter]
        torch._foreach_copy_([local(self._sums[one]) for one in overwritten], [local(one) for one in old])

    def _capture(self, inputs: tuple[Tensor, ...], shape: Hashable, state: Hashable) -> bool:
        """Try to capture the step; where that fails on any rank, every rank runs normally from now on."""
        self._captured = None  # its memory is needed
        before = [parameter.grad for parameter in self._parameters]
        random = random_state(self._device)
        failure, made = _unfit(inputs, self._device) or self._not_given, None
        if not failure:
            try:
                made = self._try(inputs, shape, state)
            except Exception as error:  # whatever cannot be captured still runs
                failure = _first_cause(error)
        for parameter, gradient in zip(self._parameters, before, strict=True):
            parameter.grad = gradient
        if made is None:
            recover(self._device, random)
        if self._any_rank(bool(failure)):
            made, self.failure = None, failure or "it failed on another rank"
            self._on_failure(self.failure)
        self._captured = made
        return made is not None

    def _try(self, inputs: tuple[Tensor, ...], shape: Hashable, state: Hashable) -> _Captured:
        for parameter in self._parameters:
            parameter.grad = None
        with _device(self._device):
            fixed = tuple(one.detach().clone() for one in inputs)
            graph = self._new_graph() if self._new_graph else CudaGraph(self._stream)
            torch.clear_autocast_cache()  # weights cast before: a graph would read them as they were then
            try:
                results = _detached(graph.capture(lambda: self._step(*fixed)))
            finally:
                torch.clear_autocast_cache()  # and what is cast in a graph has no values before a replay
        gradients = tuple((one, one.grad) for one in self._parameters if one.grad is not None)
        return _Captured(shape, state, graph, fixed, results, gradients)

    def _check_parameters(self, results: Any) -> None:
        """Look for parameters whose gradients an ordinary call computed, but a replay would not hand over."""
        given = set(map(id, self._parameters))
        for leaf in _leaves(results):
            if isinstance(leaf, nn.Parameter) and id(leaf) not in given:
                self._not_given = (
                    f"the step computes the gradient of a parameter {list(leaf.shape)} that was not passed to `capture`; "
                    "pass all of them, and capture a new step after layers were added or replaced"
                )

    def _state_of_parameters(self) -> Hashable:
        """Return what decides which gradients are computed, and where the parameters lie; cheap enough for every call."""
        kind = self._device.type
        autocast = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind), torch.is_grad_enabled()
        return autocast, tuple((one.requires_grad, _address(one)) for one in self._parameters)


@contextmanager
def on_stream(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Run the block on a stream, after what the current one has to do, and let the current one wait for it."""
    if stream is None or torch.cuda.current_stream(stream.device) == stream:
        yield
        return
    current = torch.cuda.current_stream(stream.device)
    stream.wait_stream(current)
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        current.wait_stream(stream)


def _device(device: torch.device) -> AbstractContextManager[Any]:
    """Make a GPU the current one for a while."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _address(tensor: Tensor) -> int:
    return local(tensor).data_ptr()


def _shapes(tensors: tuple[Tensor, ...]) -> Hashable:
    return tuple((one.shape, one.dtype, one.stride(), one.device, one.requires_grad) for one in tensors)


def _unfit(inputs: tuple[Tensor, ...], device: torch.device) -> str:
    for number, one in enumerate(inputs):
        if one.device != device:
            return f"input {number} is on {one.device}, the parameters are on {device}: move the batch before the call"
        if one.requires_grad:
            return f"input {number} requires a gradient, and a replay computes gradients of parameters only"
    return ""


def _leaves(results: Any) -> Iterator[Tensor]:
    """Yield the tensors whose gradients the backward pass of these results accumulates; none of detached results."""
    nodes = [leaf.grad_fn for leaf in tree_leaves(results) if isinstance(leaf, Tensor) and leaf.grad_fn is not None]
    seen = set(nodes)
    while nodes:
        node: Any = nodes.pop()
        if hasattr(node, "variable"):
            yield node.variable
        new = {one for one, _ in node.next_functions if one is not None} - seen
        seen |= new
        nodes.extend(new)


def _detached(results: Any) -> Any:
    for leaf in tree_leaves(results):
        if not isinstance(leaf, Tensor):
            raise VitrailError(
                f"The step returned a value of type {type(leaf).__name__}; return tensors, which a replay can write again."
            )
    return tree_map(torch.Tensor.detach, results)


def _first_cause(error: BaseException) -> str:
    """Return what went wrong first: ending a broken capture raises an error of its own."""
    while error.__context__ is not None:
        error = error.__context__
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def _warn(reason: str) -> None:
    warnings.warn(f"The step could not be captured as a CUDA graph ({reason}). It runs normally, more slowly.", stacklevel=4)
