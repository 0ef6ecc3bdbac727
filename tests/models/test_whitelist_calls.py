"""Modules that are not called as usual: patched classes and functions, modes, hooks, other kinds of differentiation."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from tests.models.test_fused import CLOSE, DEVICE, blocks_fused, fusing, near
from tests.models.test_whitelist import _no_hooks_left, images, logits, tiny
from vitrail.models.layers import Mlp

pytest.importorskip("triton")

__all__ = ["_no_hooks_left", "blocks_fused", "fusing", "images"]


@pytest.mark.parametrize("name", ["forward", "Linear.forward", "__call__"])
def test_a_patched_class_takes_the_plain_path(
    name: str, images: Tensor, fusing: None, monkeypatch: pytest.MonkeyPatch, blocks_fused: list[nn.Module]
) -> None:
    model, kind, name = tiny().eval(), nn.Linear if "Linear" in name else Mlp, name.rpartition(".")[2]
    logits(model, images, "auto")
    assert len(blocks_fused) == 3
    real = getattr(kind, name)
    monkeypatch.setattr(kind, name, lambda self, x: 1.5 * real(self, x))
    assert near(logits(model, images, "auto"), logits(model, images, "plain")) and len(blocks_fused) == 3


@pytest.mark.parametrize("name", ["linear", "layer_norm", "gelu", "scaled_dot_product_attention", "dropout"])
def test_a_patched_function_of_torch_takes_the_plain_path(
    name: str, images: Tensor, fusing: None, monkeypatch: pytest.MonkeyPatch, blocks_fused: list[nn.Module]
) -> None:
    """Profilers count calls so, and other attention kernels are put in so."""
    model, calls, real = tiny().eval(), list[str](), getattr(F, name)
    before = logits(model, images, "auto")
    assert len(blocks_fused) == 3
    monkeypatch.setattr(F, name, lambda *given, **named: (calls.append(name), 1.5 * real(*given, **named))[1])
    found = logits(model, images, "auto")
    assert calls and len(blocks_fused) == 3
    assert near(found, logits(model, images, "plain")) and not near(found, before, 1e-3)


@pytest.mark.parametrize("name", ["attention.sdpa", "layers.patchify"])
def test_a_patched_function_of_ours_takes_the_plain_path(
    name: str, images: Tensor, fusing: None, monkeypatch: pytest.MonkeyPatch, blocks_fused: list[nn.Module]
) -> None:
    model = tiny(depth=1).eval()
    before, target = logits(model, images, "auto"), importlib.import_module("vitrail.models." + name.partition(".")[0])
    real = getattr(target, name.partition(".")[2])
    monkeypatch.setattr(target, name.partition(".")[2], lambda *given: 1.5 * real(*given))
    blocks_fused.clear()
    found = logits(model, images, "auto")
    assert near(found, logits(model, images, "plain")) and not near(found, before, 1e-3) and not blocks_fused


@pytest.mark.parametrize("kind", [nn.Module, nn.Linear])
def test_a_patched_call_of_all_modules_takes_the_plain_path(
    kind: type[nn.Module], images: Tensor, fusing: None, monkeypatch: pytest.MonkeyPatch, blocks_fused: list[nn.Module]
) -> None:
    model, calls, real = tiny().eval(), list[nn.Module](), kind._call_impl
    monkeypatch.setattr(kind, "_call_impl", lambda self, *given: (calls.append(self), real(self, *given))[1])
    logits(model, images, "auto")
    assert model.blocks[0].mlp.up in calls and not blocks_fused


@pytest.mark.slow
def test_a_class_patched_before_the_first_call_is_noticed() -> None:
    code = (
        "from vitrail.models import vit\n"
        "vit.Block.forward = lambda self, x, *rest: x\n"
        "from vitrail.models.fused.ordinary_call import is_ordinary_call\n"
        "assert not is_ordinary_call()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.slow
def test_a_function_patched_before_vitrail_is_imported_is_noticed() -> None:
    code = (
        "import torch.nn.functional as F\n"
        "F.scaled_dot_product_attention = lambda q, k, v, **_: v\n"
        "from vitrail.models.fused.ordinary_call import is_ordinary_call\n"
        "assert not is_ordinary_call()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_torch_function_mode_takes_the_plain_path(images: Tensor, fusing: None, blocks_fused: list[nn.Module]) -> None:
    class NoGelu(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
            return args[0] if func is torch.nn.functional.gelu else func(*args, **(kwargs or {}))

    model = tiny().eval()
    with NoGelu():
        assert near(logits(model, images, "auto"), logits(model, images, "plain")) and not blocks_fused
    with torch.device(DEVICE):  # a default device is such a mode, too, and changes no arithmetic
        logits(model, images, "auto")
    assert len(blocks_fused) == 3


def test_a_dispatch_mode_takes_the_plain_path(images: Tensor, fusing: None, blocks_fused: list[nn.Module]) -> None:
    class NoGelu(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
            return args[0] if func is torch.ops.aten.gelu.default else func(*args, **(kwargs or {}))

    model = tiny(depth=1).eval()
    before = logits(model, images, "plain")
    with NoGelu(), torch.no_grad():
        plain = logits(model, images, "plain")
        assert near(logits(model, images, "auto"), plain) and not near(plain, before, 1e-3) and not blocks_fused


# Hooks


def test_a_hook_on_the_final_norm_is_called(images: Tensor, fusing: None) -> None:
    model, seen = tiny().eval(), []
    model.norm.register_forward_hook(lambda module, given, out: seen.append(out) or out * 2)  # type: ignore[func-returns-value]
    assert near(logits(model, images, "auto"), logits(model, images, "plain")) and len(seen) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "kind"),
    [
        ("mlp.up", "forward"),
        ("attention", "forward_pre"),
        ("mlp", "full_backward"),
        ("norm1", "full_backward_pre"),
        ("skip", "forward"),
    ],
)
def test_hooks_inside_a_block_are_called(
    where: str, kind: str, images: Tensor, fusing: None, blocks_fused: list[nn.Module]
) -> None:
    model, calls = tiny().train(), []
    module = model.blocks[1].get_submodule(where)
    handle = getattr(module, f"register_{kind}_hook")(lambda *given: calls.append(1))
    logits(model, images, "auto").sum().backward()
    assert calls and blocks_fused == [model.blocks[0], model.blocks[2]]
    handle.remove()
    blocks_fused.clear()
    logits(model, images, "auto")
    assert len(blocks_fused) == 3


def test_a_hook_on_a_block_gets_tokens_in_and_out(images: Tensor, fusing: None, blocks_fused: list[nn.Module]) -> None:
    model, seen = tiny().eval(), []
    model.blocks[1].register_forward_hook(lambda module, given, out: seen.append((given[0], out)))
    plain, fused = logits(model, images, "plain"), logits(model, images, "auto")
    assert near(fused, plain) and len(blocks_fused) == 2
    for one, two in zip(*seen, strict=True):
        assert near(two, one, 10 * CLOSE)


@pytest.mark.parametrize("kind", ["forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"])
def test_global_hooks_are_called_for_every_module(kind: str, images: Tensor, fusing: None) -> None:
    model, calls = tiny().train(), []
    register = getattr(nn.modules.module, f"register_module_{kind}")
    handle = register(lambda module, *given: calls.append(module) if type(module) is Mlp else None)
    try:
        logits(model, images, "auto").sum().backward()
    finally:
        handle.remove()
    assert {id(module) for module in calls} == {id(block.mlp) for block in model.blocks}


# Other kinds of differentiation


@pytest.mark.parametrize("recompute", [0, 3])
def test_a_gradient_of_a_gradient_is_refused(recompute: int, images: Tensor, fusing: None) -> None:
    model = tiny().train()
    model.checkpoint_activations(recompute)
    weight = model.blocks[0].mlp.up.weight
    (gradient,) = torch.autograd.grad(logits(model, images, "auto").square().sum(), weight, create_graph=True)
    (plain,) = torch.autograd.grad(logits(model, images, "plain").square().sum(), weight)
    assert near(gradient, plain, 3 * CLOSE)
    with pytest.raises(RuntimeError, match="only once"):
        torch.autograd.grad(gradient.square().sum(), weight)


def test_several_gradients_at_once_are_refused(images: Tensor, fusing: None) -> None:
    model = tiny(depth=1).train()
    found = logits(model, images, "auto")
    with pytest.raises(RuntimeError, match=r'is_grads_batched=True, set model\.kernels = "plain"'):
        torch.autograd.grad(
            found, [model.blocks[0].mlp.up.weight], torch.ones(3, *found.shape, device=DEVICE), is_grads_batched=True
        )


def test_forward_mode_differentiation_takes_the_plain_path(fusing: None) -> None:
    model = tiny().eval().requires_grad_(False)
    tokens, direction = torch.randn(2, 2, 5, 32, device=DEVICE)
    tangents = []
    for kernels in ("plain", "auto"):
        model.kernels = kernels  # type: ignore[assignment]
        with forward_ad.dual_level(), _math_attention():
            encoded = model.encode(forward_ad.make_dual(tokens, direction))
            tangents.append(forward_ad.unpack_dual(encoded).tangent)
    assert tangents[1] is not None and near(tangents[1], tangents[0])


def test_functorch_transforms_take_the_plain_path(images: Tensor, fusing: None) -> None:
    model = tiny().eval()
    parameters = {name: one.detach() for name, one in model.named_parameters()}

    def loss(parameters: dict[str, Tensor], images: Tensor) -> Tensor:
        return torch.func.functional_call(model, parameters, (images[None],)).square().sum()

    with _math_attention():
        found = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, images)
        model.kernels = "plain"
        for number, image in enumerate(images):
            expected = torch.autograd.grad(model(image[None]).square().sum(), list(model.parameters()), allow_unused=True)
            for (name, _), one in zip(model.named_parameters(), expected, strict=True):
                assert one is None or near(found[name][number], one, 1e-4), name


@pytest.mark.slow
def test_a_weight_changed_between_forward_and_backward_raises(images: Tensor, fusing: None) -> None:
    for name in ("attention.qkv", "attention.out", "mlp.up", "mlp.down"):
        model = tiny().train()
        loss = logits(model, images, "auto").sum()
        with torch.no_grad():
            model.blocks[1].get_submodule(name).weight.mul_(1.5)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@contextmanager
def _math_attention() -> Iterator[None]:
    """Attention in plain operations: torch's fused ones have no forward-mode derivative and no batching rule."""

    def plain(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
        return (q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5).softmax(-1) @ v

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(F, "scaled_dot_product_attention", plain)
        yield
