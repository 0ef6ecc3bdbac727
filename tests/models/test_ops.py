"""Every kernel is an operator of torch that keeps torch's contract, and the autograd functions around them keep autograd's."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

from tests.models.test_fused import DEVICE, LOW, near

pytest.importorskip("triton")

import vitrail.models.fused.cross_entropy_kernels
import vitrail.models.fused.hopper_attention
import vitrail.models.fused.hopper_gelu_backward
import vitrail.models.fused.hopper_matmul
import vitrail.models.fused.patchify  # noqa: F401
from vitrail.models.fused import branches, ops, prefix_positions, qk_norm
from vitrail.models.fused.residual_norm import residual_norm

HOPPER = DEVICE == "cuda" and torch.cuda.get_device_capability()[0] == 9


def rand(*size: int, dtype: torch.dtype = LOW) -> Tensor:
    return torch.randn(size, device=DEVICE).to(dtype)


def seed() -> Tensor:
    return torch.tensor(7, device=DEVICE)


F32, F16 = torch.float32, torch.float16
Case = Callable[[], tuple[Any, ...]]
CASES: dict[str, list[Case]] = {
    "column_sum": [lambda: (rand(40, 3, 5, dtype=F32), F16), lambda: (rand(5, 40, dtype=F32).t(), F32)],
    "patchify": [lambda: (rand(2, 3, 8, 12), [4, 4], F16), lambda: (rand(2, 3, 12, 8).mT, [4, 4], F16)],
    "add_prefix_and_positions": [lambda: (rand(3, 4, 24), rand(6, 24, dtype=F32))],
    "add_prefix_and_positions_backward": [
        lambda: (rand(3, 6, 24, dtype=F32), 2, LOW, F32),
        lambda: (rand(6, 3, 24).transpose(0, 1), 0, F16, F32),
    ],
    "fold_norm": [
        lambda: (rand(6, 24), rand(6), rand(24), rand(24), F16),
        lambda: (rand(24, 6).t(), None, rand(24), rand(24), LOW),
    ],
    "unfold_norm": [
        lambda: (rand(6, 24), rand(6), rand(6, 24), rand(24), rand(24)),
        lambda: (rand(24, 6).t(), rand(6), rand(24, 6).t(), rand(24), rand(24)),
    ],
    "gelu": [lambda: (rand(2, 5, 24), rand(24), True), lambda: (rand(24, 5).t(), None, False, seed(), 0.3)],
    "gelu_fp8": [lambda: (rand(2, 5, 24), rand(24), True), lambda: (rand(24, 5).t(), None, False, seed(), 0.3)],
    "gelu_backward": [
        lambda: (rand(2, 5, 24), rand(24), rand(2, 5, 24), True),
        lambda: (rand(24, 5).t(), None, rand(24, 5).t(), False, seed(), 0.3),
    ],
    "residual_norm": [
        lambda: (rand(2, 5, 24, dtype=F32), None, None, None, None, 0.0, 1e-6, F16),
        lambda: (rand(2, 5, 24), rand(2, 5, 24), rand(24), torch.ones(2, device=DEVICE), seed(), 0.3, 1e-6, LOW),
        lambda: (rand(5, 2, 24).transpose(0, 1), rand(5, 2, 24).transpose(0, 1), None, None, None, 0.0, 1e-6, LOW),
    ],
    "residual_centred": [
        lambda: (rand(2, 5, 24), None, None, None, None, 0.0, 1e-6, None),
        lambda: (rand(5, 2, 24).transpose(0, 1), rand(2, 5, 24), rand(24), None, None, 0.0, 1e-6, rand(5, 2, dtype=F32).t()),
    ],
    "residual_norm_backward": [
        lambda: (rand(2, 5, 24), rand(10, dtype=F32), rand(2, 5, 24), None, None, None, 0.0, F32, None, None),
        lambda: (
            rand(2, 5, 24),
            rand(10, dtype=F32),
            rand(5, 2, 24).transpose(0, 1),
            rand(2, 5, 24),
            None,
            None,
            0.0,
            F32,
            F16,
            None,
        ),
        lambda: (*(rand(2, 5, 24), rand(10, dtype=F32), rand(2, 5, 24), rand(2, 5, 24), keep(), seed()), 0.3, LOW, LOW, F32),
    ],
    "quantise_fp8": [lambda: (rand(2, 5, 24),), lambda: (rand(24, 5).t(),)],
    "fp8_matmul": [lambda: (*in_fp8(2, 5, 32), *in_fp8(16, 32), None, torch.bfloat16)],
    "cross_entropy": [
        lambda: (rand(5, 12), torch.arange(5, device=DEVICE)),
        lambda: (rand(12, 5).t(), torch.arange(10, device=DEVICE)[::2]),
    ],
    "cross_entropy_backward": [lambda: (rand(5, 12), torch.arange(5, device=DEVICE), rand(5, dtype=F32), rand(5, dtype=F32))],
    "qk_norm": [
        lambda: (rand(2, 5, 72), 2, head_norms(12), 1e-6),
        lambda: (rand(5, 2, 96).transpose(0, 1), 2, head_norms(16), 1e-6),
    ],
    "qk_norm_backward": [lambda: (rand(2, 5, 72), rand(5, 2, 72).transpose(0, 1), 2, head_norms(12), 1e-6)],
    "attention_forward": [
        lambda: (rand(2, 5, 96), None, 2, head_norms(16), 1e-6),
        lambda: (rand(2, 5, 96), None, 2),
        lambda: (rand(2, 1, 32), rand(2, 5, 64), 2, None, 0.0, True),
        lambda: (rand(5, 2, 96).transpose(0, 1), None, 2, None, 0.0, False),
    ],
    "attention_backward": [
        lambda: (rand(2, 5, 96), None, rand(2, 5, 32), rand(2, 5, 32), rand(2, 2, 5, dtype=F32), 2, head_norms(16), 1e-6),
        lambda: (rand(2, 5, 96), None, rand(2, 5, 32), rand(2, 5, 32), rand(2, 2, 5, dtype=F32), 2),
        lambda: (rand(2, 1, 32), rand(2, 5, 64), rand(2, 1, 32), rand(1, 2, 32).transpose(0, 1), rand(2, 2, 1, dtype=F32), 2),
    ],
    "weight_grad": [lambda: (rand(2, 5, 24), rand(2, 5, 16), F32), lambda: (rand(2, 5, 24), rand(2, 9, 16)[:, :5], LOW)],
}
GLUON = {"matmul_bias", "matmul_bias_gelu", "matmul_bias_gelu_with_grad", "matmul_gelu_backward", "hopper_attention"}


def keep() -> Tensor:
    return torch.ones(2, device=DEVICE)


def head_norms(channels: int) -> list[Tensor]:
    return [rand(channels, dtype=F32) for _ in range(4)]


def in_fp8(*size: int) -> tuple[Tensor, Tensor]:
    return torch.ops.vitrail.quantise_fp8(rand(*size))  # type: ignore[no-any-return]


def test_every_operator_is_tested() -> None:
    """Those written in Gluon have no interpreter; test_hopper_matmul.py and test_hopper_attention.py hold them."""
    registered = {
        name.removeprefix("vitrail::").split(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("vitrail::")
    }
    assert registered == set(CASES) | GLUON


@pytest.mark.parametrize("name, number", [(name, number) for name, cases in CASES.items() for number in range(len(cases))])
def test_operators_keep_their_contract(name: str, number: int) -> None:
    """Nothing given is changed or aliased, and the fake rule agrees with the kernel in shape, precision and strides."""
    args, operator = CASES[name][number](), getattr(torch.ops.vitrail, name).default
    given = [one for one in tree_leaves(args) if isinstance(one, Tensor)]
    before = [one.clone() for one in given]
    results = as_tuple(operator(*args))
    for one, two in zip(given, before, strict=True):
        assert torch.equal(one.float(), two.float())
    filled = [one for one in (*given, *results) if one.numel()]
    assert len({one.untyped_storage().data_ptr() for one in filled}) == len(filled)
    with FakeTensorMode() as mode:
        fake = as_tuple(operator(*tree_map_only(Tensor, mode.from_tensor, args)))
    for one, two in zip(results, fake, strict=True):
        assert (one.shape, one.dtype, one.stride(), one.device) == (two.shape, two.dtype, two.stride(), two.device)
    schema = operator._schema
    assert not schema.is_mutable and all(one.alias_info is None for one in (*schema.arguments, *schema.returns))


def as_tuple(results: Any) -> tuple[Tensor, ...]:
    return (results,) if isinstance(results, Tensor) else tuple(results)


def test_plain_tensors_skip_the_dispatcher_and_others_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    from vitrail.models.fused.column_sum import column_sum

    seen: list[str] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    parts = rand(4, 8, dtype=F32)
    expected = column_sum(parts, F32)
    with Watch():
        assert torch.equal(column_sum(parts, F32), expected)
    assert "vitrail.column_sum.default" in seen
    with FakeTensorMode():
        assert column_sum(torch.empty(4, 8), F16).shape == (8,)


class ElsewhereTensor:
    """Stands for a tensor on the second GPU."""

    is_cuda, device = True, torch.device("cuda", 1)


@pytest.mark.parametrize("current, expected", [(0, [1]), (1, [])])
def test_kernels_are_launched_on_the_tensors_device(current: int, expected: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[Any] = []

    @contextlib.contextmanager
    def device(where: torch.device) -> Any:
        entered.append(where.index)
        yield

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.setattr(torch.cuda, "device", device)
    with ops.device_guard(ElsewhereTensor()):  # type: ignore[arg-type]
        pass
    assert entered == expected
    with ops.device_guard(torch.zeros(1)):
        assert entered == expected


WIDTH, MLP, HEADS = 32, 48, 2


def attention_parts(grad: bool = True) -> list[Tensor]:
    sizes = ((2, 5, WIDTH), (WIDTH,), (WIDTH,), (3 * WIDTH, WIDTH), (3 * WIDTH,), (WIDTH, WIDTH))
    return [(rand(*size, dtype=F32) / (5 if len(size) == 2 else 1)).requires_grad_(grad) for size in sizes]


def mlp_parts(grad: bool = True) -> list[Tensor]:
    sizes = ((2, 5, WIDTH), (WIDTH,), (WIDTH,), (MLP, WIDTH), (MLP,), (WIDTH, MLP))
    return [(rand(*size, dtype=F32) / (5 if len(size) == 2 else 1)).requires_grad_(grad) for size in sizes]


def run_attention(parts: list[Any], num_queries: int | None = None, **changes: bool) -> Tensor:
    options = {"fp8": False, "recompute_cheap": False, "needs_grad": True, "refold": False, **changes}
    return branches.attention_branch(parts[0].to(LOW), *parts[1:], HEADS, num_queries, **options)


def norm_parts(grad: bool = True) -> list[Tensor]:
    return [*attention_parts(grad), *((1 + rand(WIDTH // HEADS, dtype=F32) / 5).requires_grad_(grad) for _ in range(4))]


def run_norm(parts: list[Any], num_queries: int | None = None, **changes: bool) -> Tensor:
    options = {"fp8": False, "recompute_cheap": False, "needs_grad": True, "refold": False, **changes}
    return branches.attention_branch(parts[0].to(LOW), *parts[1:6], HEADS, num_queries, parts[6:], 1e-6, **options)


def run_norm_pass(parts: list[Any], num_queries: int | None = None, **changes: bool) -> Tensor:
    return qk_norm.qk_norm(run_linear(parts), HEADS, parts[6:], 1e-6)


def run_mlp(parts: list[Any], num_queries: int | None = None, **changes: bool) -> Tensor:
    options = {"fp8": False, "recompute_cheap": False, "needs_grad": True, "refold": False, **changes}
    return branches.mlp_branch(parts[0].to(LOW), *parts[1:], False, None, 0.0, **options)


def run_linear(parts: list[Any], num_queries: int | None = None, **changes: bool) -> Tensor:
    return branches.linear(parts[0].to(LOW), *parts[1:5], fp8=False, refold=changes.get("refold", False))


def run_residual(parts: list[Any], num_queries: int | None = None, **changes: bool) -> Tensor:
    x, y = residual_norm(parts[0], parts[0].to(LOW), parts[1], None, None, 0.0, 1e-6, LOW)
    return x + y


def run_prefix(parts: list[Any], num_queries: int | None = None, **changes: bool) -> Tensor:
    return prefix_positions.add_prefix_and_positions(parts[0].to(LOW), torch.cat([parts[1][None], parts[0][0]]))


def run_loss(parts: list[Any], num_queries: int | None = None, **changes: bool) -> Tensor:
    from vitrail.models.fused.cross_entropy import CrossEntropy

    return CrossEntropy.apply(parts[0][0], torch.arange(5, device=DEVICE))  # type: ignore[no-any-return]


FUNCTIONS = {
    "attention": (attention_parts, run_attention), "mlp": (mlp_parts, run_mlp), "linear": (attention_parts, run_linear),
    "qk norm": (norm_parts, run_norm), "qk norm pass": (norm_parts, run_norm_pass),
    "residual": (attention_parts, run_residual), "prefix": (attention_parts, run_prefix), "loss": (attention_parts, run_loss),
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_gradient_of_a_gradient_raises(name: str) -> None:
    """A kernel's backward pass has no derivative; without the refusal it would be taken as constant, and be wrong silently."""
    make, run = FUNCTIONS[name]
    parts = make()
    (gradient,) = torch.autograd.grad(run(parts).square().sum(), parts[0], create_graph=True)
    penalty = gradient.square().sum() + parts[0].sum()  # the second term alone would be a gradient without the first
    with pytest.raises(RuntimeError, match="differentiated only once"):
        torch.autograd.grad(penalty, parts[0], retain_graph=True)
    with pytest.raises(RuntimeError, match="differentiated only once"):
        penalty.backward()


@pytest.mark.parametrize("refold", [False, True])
@pytest.mark.parametrize(
    "name, number",
    [
        *((name, number) for name in ("attention", "mlp", "linear") for number in (1, 2, 3, 5) if (name, number) != ("linear", 5)),
        *(("qk norm", number) for number in (6, 7, 8)),
        *(("qk norm pass", number) for number in (6, 8)),
    ],
)
def test_a_weight_changed_in_place_before_backward_raises(name: str, number: int, refold: bool) -> None:
    make, run = FUNCTIONS[name]
    parts = make()
    out = run(parts, refold=refold)
    with torch.no_grad():
        parts[number].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["attention", "mlp", "linear"])
@pytest.mark.parametrize("num_queries", [None, 1])
def test_folded_weights_are_made_again_instead_of_kept(name: str, num_queries: int | None) -> None:
    """Backward gives the same, and between the passes no tensor as large as a weight is alive but the weights themselves."""
    make, run = FUNCTIONS[name]
    parts = make()
    saved: dict[bool, list[Tensor]] = {}
    gradients = {}
    for refold in (False, True):
        kept = saved[refold] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda one, kept=kept: (kept.append(one), one)[1], lambda one: one):
            out = run(parts, num_queries, refold=refold)
        assert not any(isinstance(value, Tensor) for value in vars(out.grad_fn).values())  # nothing past save_for_backward
        gradients[refold] = torch.autograd.grad(out, parts[: 5 if name == "linear" else 6], torch.ones_like(out))
    assert all(torch.equal(one, two) for one, two in zip(gradients[False], gradients[True], strict=True))
    own = {one.data_ptr() for one in parts}
    made = {refold: [one for one in kept if one.dim() == 2 and one.data_ptr() not in own] for refold, kept in saved.items()}
    assert made[False] and not made[True]


def exact(parts: list[Any], kind: str) -> Tensor:
    y, norm_weight, norm_bias, one_weight, one_bias, two_weight = (None if part is None else part.double() for part in parts)
    y = y if norm_weight is None else y * norm_weight + norm_bias
    hidden = F.linear(y, one_weight, one_bias)
    if kind == "linear":
        return hidden
    if kind == "mlp":
        return F.linear(F.gelu(hidden), two_weight)
    q, k, v = hidden.unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4).unbind(0)
    return F.linear(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2), two_weight)


@pytest.mark.parametrize("missing", [(4,), (1, 2), (1, 2, 4)], ids=["no bias", "no norm weights", "neither"])
@pytest.mark.parametrize("kind", ["attention", "mlp", "linear"])
def test_biases_and_norm_weights_may_be_missing(kind: str, missing: tuple[int, ...]) -> None:
    make, run = FUNCTIONS[kind]
    parts: list[Any] = make()
    for number in missing:
        parts[number] = None
    leaves = [one for one in parts[: 5 if kind == "linear" else 6] if one is not None]
    found, expected = run(parts), exact(parts, kind)
    tolerance = 1e-5 if DEVICE == "cpu" else 3e-2
    assert near(found, expected, tolerance)
    grad_out = torch.randn_like(expected)
    theirs = torch.autograd.grad(expected, leaves, grad_out)
    ours = torch.autograd.grad(found, leaves, grad_out.to(found.dtype))
    assert all(near(one, two, tolerance) for one, two in zip(ours, theirs, strict=True))


@pytest.mark.slow
def test_compiled_branches_have_no_graph_break() -> None:
    """torch.compile sees the operators and their fake rules; nothing launches while it traces."""
    parts = mlp_parts()

    def run(*args: Tensor) -> Tensor:
        x, y = residual_norm(args[0], None, None, None, None, 0.0, 1e-6, LOW)
        return x + run_mlp([y, *args[1:]])

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    expected, found = run(*parts), compiled(*parts)
    assert torch.allclose(found, expected, atol=1e-6)
    ours = torch.autograd.grad(found, parts, torch.ones_like(found))
    theirs = torch.autograd.grad(expected, parts, torch.ones_like(expected))
    assert all(torch.allclose(one, two, atol=1e-5) for one, two in zip(ours, theirs, strict=True))
