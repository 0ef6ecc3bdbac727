"""Copies of models that are not exactly the paper's: parts that are not plain are copied as they are, never miscomputed."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

from tests.models.test_inference import LIMITS, build, error, some_images
from vitrail.models import ViT
from vitrail.models.attention import Attention
from vitrail.models.inference import InferenceModel, for_inference
from vitrail.models.inference.cpu import ChunkedStem, PackedPatchEmbedding
from vitrail.models.inference.gpu import gpu_copy
from vitrail.models.inference.packed_block import PackedBlock
from vitrail.models.layers import LayerScale, Mlp, PatchEmbedding
from vitrail.models.resnet import StandardisedConv
from vitrail.models.vit import Block

COPIES = [*LIMITS, "gpu fp32", "gpu bf16"]


def make_copy(model: ViT, name: str) -> InferenceModel:
    """The copy for a CPU, or the one for a GPU, but here on the CPU: what is folded and cast is the same."""
    if not name.startswith("gpu"):
        return for_inference(model, name)  # type: ignore[arg-type]
    return gpu_copy(model, torch.device("cpu"), torch.float32 if name.endswith("fp32") else torch.bfloat16)


class LoRALinear(nn.Linear):
    """A linear layer with a low-rank adapter, as a subclass."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features)
        self.weight, self.bias = linear.weight, linear.bias
        self.a, self.b = nn.Parameter(torch.randn(2, self.in_features) / 5), nn.Parameter(torch.randn(self.out_features, 2) / 5)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x @ self.a.T @ self.b.T


class OtherNorm(nn.Module):
    """Another norm with a weight, a bias and an eps."""

    def __init__(self, norm: nn.LayerNorm) -> None:
        super().__init__()
        self.weight, self.bias, self.eps, self.normalized_shape = norm.weight, norm.bias, norm.eps, norm.normalized_shape

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight, self.eps) + self.bias


class NormSubclass(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return 1.5 * super().forward(x)


class ReluMlp(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x)))  # type: ignore[no-any-return]


class HalfBlock(Block):
    def forward(self, x: Tensor, *rest: Any, **named: Any) -> Tensor:
        return super().forward(x, *rest, **named) / 2


class AddsOne(nn.Module):
    """A user's module around a plain block."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor, *rest: Any, **named: Any) -> Tensor:
        return 1 + self.block(x, *rest, **named) + self.block.norm1.weight.mean()  # type: ignore[no-any-return, union-attr, operator]


class LooksIntoBlocks(ViT):
    """A subclass whose forward calls the parts of its blocks itself."""

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images) + self.blocks[0].mlp(self.features(images).pooled)[:, :20]  # type: ignore[no-any-return, operator]


class BrighterPatches(PatchEmbedding):
    def forward(self, images: Tensor) -> Tensor:
        return 2 * super().forward(images)


class Doubled(nn.Module):
    """A parametrisation of a weight."""

    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def lora(model: ViT) -> None:
    for block in model.blocks[:2]:
        block.attention.qkv, block.mlp.up = LoRALinear(block.attention.qkv), LoRALinear(block.mlp.up)


def norm_without_bias(model: ViT) -> None:
    for name in ("norm1", "norm2"):
        made = nn.LayerNorm(192, eps=model.config.norm_eps, bias=False)
        made.weight = getattr(model.blocks[1], name).weight
        setattr(model.blocks[1], name, made)


def norm_without_weights(model: ViT) -> None:
    model.blocks[0].norm1 = nn.LayerNorm(192, elementwise_affine=False)


def another_norm(model: ViT) -> None:
    model.blocks[0].norm2 = OtherNorm(model.blocks[0].norm2)


def norm_subclass(model: ViT) -> None:
    model.blocks[0].norm1.__class__ = NormSubclass


def mlp_subclass(model: ViT) -> None:
    model.blocks[1].mlp.__class__ = ReluMlp


def block_subclass(model: ViT) -> None:
    model.blocks[1].__class__ = HalfBlock


def patched_mlp(model: ViT) -> None:
    mlp = model.blocks[1].mlp
    mlp.forward = lambda x: torch.tanh(x)


def patched_attention_method(model: ViT) -> None:
    def split(self: Attention, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = Attention._split(self, x)
        return q, k, 2 * v

    attention = model.blocks[1].attention
    attention._split = MethodType(split, attention)


def hook_on_norm(model: ViT) -> None:
    model.blocks[0].norm1.register_forward_hook(lambda module, given, found: 2 * found)


def hook_before_linear(model: ViT) -> None:
    model.blocks[2].mlp.down.register_forward_pre_hook(lambda module, given: (given[0] * 2,))


def hook_on_block(model: ViT) -> None:
    model.blocks[1].register_forward_hook(lambda module, given, found: 2 * found)


def hook_on_final_norm(model: ViT) -> None:
    model.norm.register_forward_hook(lambda module, given, found: found + 1)


def hook_on_patches(model: ViT) -> None:
    model.patches.register_forward_hook(lambda module, given, found: 2 * found)


def no_final_norm(model: ViT) -> None:
    model.norm = nn.Identity()


def no_norm_in_a_block(model: ViT) -> None:
    model.blocks[1].norm2 = nn.Identity()


def a_block_twice(model: ViT) -> None:
    model.blocks[2] = model.blocks[0]


def wrapped_block(model: ViT) -> None:
    model.blocks[1] = AddsOne(model.blocks[1])


def vit_subclass(model: ViT) -> None:
    model.__class__ = LooksIntoBlocks


def patches_subclass(model: ViT) -> None:
    model.patches.__class__ = BrighterPatches


def parametrised_weight(model: ViT) -> None:
    parametrize.register_parametrization(model.blocks[0].mlp.down, "weight", Doubled())


def shared_weight(model: ViT) -> None:
    """A weight of a plain block that another module has, too."""
    model.blocks[1].norm1.register_forward_hook(lambda module, given, found: found)
    model.blocks[1].mlp.up.weight = model.blocks[0].mlp.up.weight


def strided_weights(model: ViT) -> None:
    """Transposed in memory, as weights of a library that stores [in, out] are without a copy."""
    for layer in (model.blocks[1].attention.qkv, model.blocks[1].attention.out, model.blocks[1].mlp.up, model.blocks[1].mlp.down):
        layer.weight = nn.Parameter(layer.weight.detach().T.contiguous().T)


def one_factor_for_all_channels(model: ViT) -> None:
    for name, factor in (("scale1", torch.tensor(0.5)), ("scale2", torch.tensor([[0.7]]))):
        scale = LayerScale(192)
        scale.weight = nn.Parameter(factor)
        setattr(model.blocks[1], name, scale)


def biases_of_one_row(model: ViT) -> None:
    for layer in (model.blocks[1].mlp.up, model.blocks[1].mlp.down, model.blocks[2].attention.out):
        layer.bias = nn.Parameter(layer.bias.detach()[None])


def one_bias_for_all_heads(model: ViT) -> None:
    tokens = model.positions.table.shape[1]
    bias = torch.linspace(-2, 2, tokens).expand(tokens, -1)
    model.positions.bias = lambda layer: bias


def another_head(model: ViT) -> None:
    model.head = nn.Sequential(nn.Linear(192, 30), nn.Tanh(), nn.Linear(30, 20))


CHANGES: list[Callable[[ViT], None]] = [
    lora, norm_without_bias, norm_without_weights, another_norm, norm_subclass, mlp_subclass, block_subclass, patched_mlp,
    patched_attention_method, hook_on_norm, hook_before_linear, hook_on_block, hook_on_final_norm, hook_on_patches,
    no_final_norm, no_norm_in_a_block, a_block_twice, wrapped_block, vit_subclass, patches_subclass, parametrised_weight,
    shared_weight, strided_weights, one_factor_for_all_channels, biases_of_one_row, one_bias_for_all_heads, another_head,
]  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize("copied", COPIES)
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_copies_compute_what_the_changed_model_does(change: Callable[[ViT], None], copied: str) -> None:
    model = build()
    change(model)
    images = some_images(model, 3)
    expected = model(images)
    found = make_copy(model, copied)(images)
    assert found.dtype == torch.float32 and error(found, expected) < LIMITS[copied.split()[-1]]
    assert torch.equal(model(images), expected), "the model itself was changed"


@pytest.mark.parametrize("copied", COPIES)
@pytest.mark.parametrize("change", [lambda up: prune.random_unstructured(up, "weight", 0.5), nn.utils.spectral_norm])
def test_weights_that_are_computed_from_others_are_copied(change: Callable[[nn.Module], None], copied: str) -> None:
    """They have a history, and torch does not copy tensors that have one."""
    model = build()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch has newer ways
        change(model.blocks[1].mlp.up)
    images = some_images(model, 3)
    model(images).sum().backward()
    found = make_copy(model, copied)(images)
    with torch.no_grad():
        assert error(found, model(images)) < LIMITS[copied.split()[-1]]


@torch.no_grad()
@pytest.mark.parametrize("copied", COPIES)
def test_only_blocks_that_are_not_plain_stay(copied: str) -> None:
    """One adapter does not make the whole model slow."""
    model = build()
    model.blocks[1].attention.qkv = LoRALinear(model.blocks[1].attention.qkv)
    blocks = make_copy(model, copied).model.blocks
    if copied.startswith("gpu"):
        assert [block.norm1.weight is None for block in blocks] == [True, False, True]
    else:
        assert [type(block) is PackedBlock for block in blocks] == [True, False, True] and type(blocks[1]) is Block


@torch.no_grad()
@pytest.mark.parametrize("copied", COPIES)
def test_hooks_are_called_once_with_the_whole_batch(copied: str) -> None:
    model, seen = build(), []
    model.blocks[1].register_forward_hook(lambda module, given, found: seen.append(len(given[0])))
    model.register_forward_hook(lambda module, given, found: seen.append(len(found)))
    made, before = make_copy(model, copied), torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        made(some_images(model, 5))
    finally:
        torch.set_num_threads(before)
    assert seen == [5, 5]


@torch.no_grad()
@pytest.mark.parametrize("precision", LIMITS)
def test_hooks_inside_the_blocks_of_a_copy(precision: Any) -> None:
    """They are called, and what they keep stays as it was: layers overwrite their input only where there are no hooks."""
    made = for_inference(build(), precision)
    images, kept = some_images(made), list[tuple[Tensor, Tensor]]()
    expected, block = made(images), made.model.get_submodule("blocks.0")

    def keep(module: nn.Module, given: tuple[Tensor], found: Tensor) -> None:
        kept.extend((one, one.clone()) for one in (*given, found))

    handles = [block.get_submodule(name).register_forward_hook(keep) for name in ("norm1", "out", "norm2", "up")]
    made(images)
    for handle in handles:
        handle.remove()
    assert kept and all(torch.equal(now, then) for now, then in kept)
    handle = block.get_submodule("norm1").register_forward_hook(lambda module, given, found: 2 * found)
    assert error(made(images), expected) > 0.01
    handle.remove()
    assert torch.equal(made(images), expected)


@torch.no_grad()
@pytest.mark.parametrize("copied", COPIES)
def test_a_patched_class_or_a_global_hook_is_seen(copied: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build()
    images = some_images(model)
    limit = LIMITS[copied.split()[-1]]
    usual = model(images)
    with monkeypatch.context() as patch:
        patch.setattr(Mlp, "forward", lambda self, x: self.down(F.relu(self.up(x))))
        assert error(make_copy(model, copied)(images), model(images)) < limit and error(model(images), usual) > 2 * limit
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, given, found: 2 * found if isinstance(module, nn.Linear) else None
    )
    try:
        assert error(make_copy(model, copied)(images), model(images)) < limit and error(model(images), usual) > 2 * limit
    finally:
        handle.remove()


@torch.no_grad()
def test_a_patched_stem_keeps_its_convolution() -> None:
    """Filters that another class standardises in its own way are not standardised beforehand."""

    class Louder(StandardisedConv):
        def standardised(self) -> Tensor:
            return 2 * super().standardised()

    model = build("R+ViT-Ti/16")
    for change in (False, True):
        if change:
            model.resnet.root.__class__ = Louder
        images = some_images(model)
        made = for_inference(model, "fp32")
        assert isinstance(made.model.resnet, ChunkedStem) and isinstance(made.model.patches, PackedPatchEmbedding)
        assert error(made(images), model(images)) < LIMITS["fp32"]


@torch.no_grad()
@pytest.mark.parametrize("copied", COPIES)
def test_weights_of_any_type_are_copied(copied: str) -> None:
    model = build()
    lora(model)
    images = some_images(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for dtype in (torch.bfloat16, torch.float16, torch.float64):
            cast = copy.deepcopy(model).to(dtype)
            found = make_copy(cast, copied)(images)
            assert found.dtype == torch.float32 and error(found, cast.float()(images)) < LIMITS[copied.split()[-1]]
