"""CUDA graphs of a copy's forward pass: shapes that recur are captured once and replayed.

A service that sends one image after another would wait for the launches. A replay computes what was captured, from the memory that
was captured, so:

- A capture belongs to a shape, to torch's settings for float32 matmuls and convolutions, determinism and attention kernels, and to
  the model as it is. After every replay, while the GPU still works, these are compared with what was captured: the settings, the
  model's modules, their classes with all methods, the functions of torch that these call, attributes and hooks, and every
  parameter and buffer by identity, address and version. If anything changed, all captures are dropped and the call is computed
  anew. Before a replay there is as little Python as can be: the GPU waits for it.
- Only models that run torch's and our code alone, without hooks, are captured (`runs_known_code`). Under torch.compile, functorch,
  global module hooks, a dispatch mode (such as a FLOP counter) or a capture of the caller's own, the model is called as usual.
- One thread at a time copies its images in, replays and copies the logits out; an event puts the calls of several streams in order.
- A capture that fails is reported once and not tried again; the shape is computed as usual.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from vitrail.models.cuda_graph import CudaGraph, Graph, random_state, recover
from vitrail.models.fused.ops import device_guard
from vitrail.models.fused.ordinary_call import is_eager_call, is_patched
from vitrail.models.fused.whitelist import has_hooks
from vitrail.models.inference.replaceable import are_patched, runs_known_code

log = logging.getLogger("vitrail")

WARMUP_CALLS = 3  # of a shape as usual, in which kernels are compiled and chosen
MAX_CAPTURES = 8  # each has memory of its own; powers of two up to 128
_MODULE_INTERNALS = frozenset(vars(nn.Module())) - {"training"}  # compared in other ways
_MISSING = object()

Call = Callable[[Tensor], Tensor]
NewGraph = Callable[[], Graph]


class CapturedCall:
    """The kernels of one call, from a fixed input to a fixed output."""

    def __init__(self, call: Call, images: Tensor, new_graph: NewGraph | None) -> None:
        self._images = images.clone()
        self._stream: int | None = None
        with device_guard(images):
            self._graph = CudaGraph(torch.cuda.Stream()) if new_graph is None else new_graph()
            self._done = torch.cuda.Event() if images.is_cuda else None
            self._result = self._capture(functools.partial(call, self._images))

    def _capture(self, run: Callable[[], Tensor]) -> Tensor:
        device = self._images.device
        random = random_state(device)
        try:
            return self._graph.capture(run)  # type: ignore[no-any-return]
        except Exception:
            recover(device, random)
            raise

    def replay(self, images: Tensor) -> Tensor:
        """Return the result for other images of the same shape, in a tensor of its own."""
        if self._done is None:
            return self._run(images)
        with device_guard(self._images):
            stream = torch._C._cuda_getCurrentRawStream(self._images.device.index)
            if stream != self._stream:  # the last call was on another, and may not have copied its result yet
                torch.cuda.current_stream().wait_event(self._done)
            result = self._run(images)
            self._done.record()
            self._stream = stream
        return result

    def _run(self, images: Tensor) -> Tensor:
        self._images.copy_(images)
        self._graph.replay()
        return self._result.clone()

    def wait(self) -> None:
        """Wait for replays that are still running, before the graph's memory is freed."""
        if self._done is not None:
            self._done.synchronize()


class Capture(NamedTuple):
    """A captured call, and what it was captured from."""

    call: CapturedCall
    state: ModelState
    settings: tuple[Any, ...]

    def is_current(self) -> bool:
        return self.settings == _kernel_settings() and self.state.is_current()


class CapturedForward:
    """Call a model, from captured graphs where shapes recur. Safe to call from several threads.

    `new_graph` makes the graphs that capture, also without a GPU: tests give a stand-in. None: CUDA graphs.
    """

    def __init__(self, model: nn.Module, new_graph: NewGraph | None = None) -> None:
        self._model, self._new_graph = model, new_graph
        self._lock = threading.Lock()
        self._warned = False
        self._forget()

    def _forget(self) -> None:
        self._calls: dict[torch.Size, int] = {}
        self._captures: dict[torch.Size, Capture] = {}
        self._failed: set[torch.Size] = set()

    def replay(self, images: Tensor) -> Tensor | None:
        """Return logits from a captured graph; None where there is none for these images, or it is outdated."""
        if images.shape not in self._captures or not images.is_floating_point() or not self._can_capture(images):
            return None
        with self._lock:
            capture = self._captures.get(images.shape)
            if capture is None:
                return None
            with torch.no_grad() if torch.is_grad_enabled() else contextlib.nullcontext():  # the former takes microseconds
                result = capture.call.replay(images)
            if capture.is_current():  # looked at while the GPU works
                return result
            self._drop()
        return None

    def __call__(self, images: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Compute logits of images of any device and floating-point type, by a model of the given ones."""
        capturable = device.type == "cuda" or self._new_graph is not None
        if capturable and self._can_capture(images) and not is_patched():
            with self._lock:
                self._capture(images, device, dtype)
            result = self.replay(images)
            if result is not None:
                return result
        return self._call(images.to(device, dtype))

    def drop(self) -> None:
        """Free all captures; shapes that recur are captured again."""
        with self._lock:
            self._drop()

    def _drop(self) -> None:
        for capture in self._captures.values():
            capture.call.wait()
        self._forget()

    def _call(self, images: Tensor) -> Tensor:
        return self._model(images).float()  # type: ignore[no-any-return]

    def _can_capture(self, images: Tensor) -> bool:
        """Tell whether this is an eager call, outside a capture of the caller's own."""
        if type(images) is not Tensor or torch._C._len_torch_dispatch_stack() or not is_eager_call():
            return False
        return not (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())

    def _capture(self, images: Tensor, device: torch.device, dtype: torch.dtype) -> None:
        """Capture a shape that has come often enough, if it can be."""
        shape = images.shape
        if shape in self._captures or shape in self._failed or len(self._captures) >= MAX_CAPTURES:
            return
        self._calls[shape] = self._calls.get(shape, 0) + 1
        if self._calls[shape] <= WARMUP_CALLS or not runs_known_code(self._model):
            return
        state = ModelState(self._model)
        try:
            with torch.inference_mode(False), torch.no_grad():  # or a call outside inference mode could not write to the input
                call = CapturedCall(self._call, images.to(device, dtype), self._new_graph)
        except Exception as error:  # whatever cannot be captured can still be computed
            self._failed.add(shape)
            self._warn(shape, error)
            return
        self._captures[shape] = Capture(call, state, _kernel_settings())

    def _warn(self, shape: torch.Size, error: Exception) -> None:
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        if not self._warned:
            log.warning(
                "Images of shape %s cannot be captured as a CUDA graph (%s). They are computed without one.", list(shape), reason
            )
        self._warned = True

    def __getstate__(self) -> dict[str, Any]:
        """Copy and pickle without captures: graphs and locks belong to this object and this process."""
        return {"_model": self._model, "_new_graph": self._new_graph}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["_model"], state["_new_graph"])  # type: ignore[misc]


class ModelState:
    """Everything of a model that a capture depends on, as it was when this was made.

    Holds the memory of all parameters and buffers: a replay that turns out to be outdated then still reads what exists.
    """

    def __init__(self, model: nn.Module) -> None:
        modules = list(model.modules())
        self._kinds = [(module, type(module)) for module in modules]
        self._classes = set(map(type, modules))
        dicts = [one for module in modules for one in (vars(module), module._parameters, module._buffers, module._modules)]
        self._dicts, self._count = dicts, sum(map(len, dicts))  # one more is a patched method, or another block
        self._slots = [
            (slots, name, value)
            for module in modules
            for slots in (vars(module), module._parameters, module._buffers, module._modules)
            for name, value in slots.items()
            if slots is not vars(module) or name not in _MODULE_INTERNALS
        ]
        tensors = [tensor for module in modules for slots in (module._parameters, module._buffers) for tensor in slots.values()]
        self._tensors = [(tensor, tensor.data_ptr()) for tensor in tensors if tensor is not None]
        self._versions = [(tensor, tensor._version) for tensor, _ in self._tensors if not tensor.is_inference()]  # those have none
        self._memory = [tensor.untyped_storage() for tensor, _ in self._tensors]  # held, so that no other tensor gets its address
        self._hooks_registered = RemovableHandle.next_id

    def is_current(self) -> bool:
        """Tell whether the model is still the one that was captured; by identity only, since this must be quicker than a replay."""
        for slots, name, value in self._slots:
            if slots.get(name, _MISSING) is not value:
                return False
        if sum(map(len, self._dicts)) != self._count:
            return False
        for tensor, address in self._tensors:
            if tensor.data_ptr() != address:
                return False
        for tensor, version in self._versions:
            if tensor._version != version:
                return False
        for module, kind in self._kinds:
            if type(module) is not kind:
                return False
        return not (are_patched(self._classes) or is_patched() or self._has_new_hooks())

    def _has_new_hooks(self) -> bool:
        registered = RemovableHandle.next_id  # counts the hooks of all modules: looking at each is needed only when it moves
        if registered == self._hooks_registered:
            return False
        self._hooks_registered = registered
        return any(has_hooks(module) for module, _ in self._kinds)


def _kernel_settings() -> tuple[Any, ...]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.cudnn.deterministic,
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
        torch.backends.cuda.matmul.fp32_precision,
        torch.backends.cudnn.conv.fp32_precision,  # type: ignore[attr-defined]
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(),
    )
