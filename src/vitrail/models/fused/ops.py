"""Register kernels as `torch.ops.vitrail.…`: functional operators with a fake rule and a device guard.

An operator returns new tensors, and neither changes nor aliases its inputs; an output that is not computed is an empty tensor. Its
fake rule allocates the outputs and launches nothing; torch.compile and memory plans call it.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from vitrail.models.fused.launch import PLAIN_TENSORS

P = ParamSpec("P")
R = TypeVar("R")

_LIBRARY = torch.library.Library("vitrail", "FRAGMENT")

Shape = Sequence[int]


def op(schema: str, fake: Callable[P, R], flops: Callable[..., int] | None = None) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Register the decorated function as an operator; its first argument is a tensor, on whose device kernels are launched.

    `schema` is `name(Tensor x, Tensor? bias, float eps) -> (Tensor, Tensor)`, with the defaults of the function; `fake` takes the
    same arguments and returns empty tensors of the right shape, precision and strides. `flops` takes them too, shapes instead of
    tensors and `out_shape` besides, and returns the floating-point operations of the matmuls inside, for torch's FlopCounterMode.

    Calls with plain tensors go straight to the function, which saves the dispatcher's 3 µs. Fake tensors, dispatch modes and
    torch.compile see the operator.
    """
    name = schema[: schema.index("(")]

    def register(launch: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(launch)
        def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
            with device_guard(args[0]):  # type: ignore[arg-type]
                return launch(*args, **kwargs)

        _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        _LIBRARY.impl(name, guarded, "CompositeExplicitAutograd")
        torch.library.register_fake(f"vitrail::{name}", fake, lib=_LIBRARY)
        operator = getattr(torch.ops.vitrail, name).default
        if flops is not None:
            register_flop_formula(getattr(torch.ops.vitrail, name))(flops)

        @functools.wraps(launch)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            x: Any = args[0]
            if torch.compiler.is_compiling() or type(x) not in PLAIN_TENSORS or x.is_meta or torch._C._len_torch_dispatch_stack():
                return operator(*args, **kwargs)  # type: ignore[no-any-return]
            return guarded(*args, **kwargs)

        return call

    return register


def matmul_flops(x: Shape, weight: Shape, *rest: Any, **named: Any) -> int:
    """Count x [..., in] times a weight [out, in]."""
    return 2 * math.prod(x) * weight[0]


def attention_flops(q: Shape, kv: Shape | None, *rest: Any, matmuls: int = 2, **named: Any) -> int:
    """Count the matmuls of attention, each as large as queries times keys; tensors as in `attention_forward`."""
    images, queries, width = q if kv is not None else (q[0], q[1], q[2] // 3)
    return 2 * matmuls * images * queries * (q if kv is None else kv)[1] * width


_NO_GUARD = contextlib.nullcontext()


def device_guard(tensor: Tensor) -> contextlib.AbstractContextManager[object]:
    """Make the tensor's GPU the current one, where it is not: Triton launches on the current device."""
    if not tensor.is_cuda or tensor.device.index == torch.cuda.current_device():
        return _NO_GUARD
    return torch.cuda.device(tensor.device)


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Make an autograd function's backward raise if its result is differentiated in turn.

    torch's decorator of this name returns gradients without a history: `torch.autograd.grad` then does not reach it, and leaves out
    a term silently. Here they depend on everything that backward read, so that every path through them raises. Several gradients at
    once (`is_grads_batched`) raise, too: a kernel cannot read them.
    """
    is_batched = torch._C._functorch.is_legacy_batchedtensor

    @functools.wraps(backward)
    def wrapper(ctx: Any, *grads: Any) -> Any:
        if not torch.compiler.is_compiling() and any(one is not None and is_batched(one) for one in grads):
            raise RuntimeError(
                "Vitrail's fused kernels compute one gradient at a time. "
                'For is_grads_batched=True, set model.kernels = "plain" before the forward pass.'
            )
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():  # no create_graph; a compiled graph refuses by itself
            with torch.no_grad():
                return backward(ctx, *grads)
        ctx = _ReadOnce(ctx)
        with torch.no_grad():
            results = backward(ctx, *grads)
        sources = [one for one in (*grads, *ctx.saved_tensors) if one is not None and one.requires_grad]
        tensors = [one for one in results if isinstance(one, Tensor)]
        if not sources or not tensors:
            return results
        refusing = iter(_Refuse.apply(len(tensors), *tensors, *sources))
        return tuple(next(refusing) if isinstance(one, Tensor) else one for one in results)

    return wrapper


class _ReadOnce:
    """The context of an autograd function, whose saved tensors activation checkpointing lets one read only once."""

    def __init__(self, ctx: Any) -> None:
        self._ctx, self.saved_tensors = ctx, ctx.saved_tensors

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)


class _Refuse(torch.autograd.Function):
    """Return the first `count` tensors as depending on the others, in a way that has no derivative."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(one.view_as(one) for one in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(
            "Vitrail's fused kernels can be differentiated only once. "
            'For a gradient of a gradient, set model.kernels = "plain" before the forward pass, which must run within '
            "torch.nn.attention.sdpa_kernel(SDPBackend.MATH): torch's fast attention has no second derivative either."
        )
