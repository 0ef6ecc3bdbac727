"""Precisions and devices of a block's parts: the fused path takes those that its kernels compute, and steps aside for others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.models.other_libraries import randomise
from tests.models.test_fused import DEVICE, blocks_fused, fusing, near
from tests.models.test_whitelist import _no_hooks_left, images, tiny
from vitrail.errors import VitrailError
from vitrail.models import ViT, create_model
from vitrail.models.fused import dispatch, encoder, whitelist

pytest.importorskip("triton")

__all__ = ["_no_hooks_left", "blocks_fused", "fusing", "images"]


def test_logits_are_float32_and_fine() -> None:
    """400 sigmoid logits around −10 differ; in bfloat16 they would share 16 values."""
    model = tiny(outputs=400, head_bias=-10.0).eval()
    nn.init.normal_(model.head.weight, std=0.002)
    nn.init.constant_(model.head.bias, -10.0)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        found = model(torch.randn(1, 3, 32, 32, device=DEVICE))
    assert found.dtype == torch.float32 and len(found.unique()) > 390


@pytest.mark.parametrize("weights, given", [(torch.float32, torch.float64), (torch.float64, torch.bfloat16)])
@pytest.mark.parametrize("name", ["ViT-Ti/16", "BiT-R50x1"])
def test_autocast_takes_float64_images_and_weights(name: str, weights: torch.dtype, given: torch.dtype) -> None:
    """Autocast casts neither."""
    size: dict[str, Any] = {"depth": 1} if "ViT" in name else {"layers": (1, 1, 1, 1)}
    model = randomise(create_model(name, outputs=3, image_size=64, seed=0, **size)).to(DEVICE).eval()
    images = torch.randn(2, 3, 64, 64, device=DEVICE)
    exact = model(images)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        assert near(model.to(weights)(images.to(given)), exact, 0.1)


def test_float64_weights_under_autocast_get_float64_patches(images: Tensor, fusing: None) -> None:
    model = tiny(depth=1).eval()
    exact = model(images)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        assert near(model.double()(images), exact, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["ViT-Ti/16", "R26+ViT-S/32", "BiT-R50x1"])
def test_low_precision_weights_take_float32_images(name: str, dtype: torch.dtype) -> None:
    size: dict[str, Any] = {"depth": 1} if "ViT" in name else {"layers": (1, 1, 1, 1)}
    model = randomise(create_model(name, outputs=3, image_size=64, seed=0, **size)).to(DEVICE).eval()
    images = torch.randn(2, 3, 64, 64, device=DEVICE)
    exact = model(images)
    found = model.to(dtype)(images)
    assert found.dtype == torch.float32 and near(found, exact, 0.1)


@pytest.mark.parametrize("part", ["attention.qkv.bias", "attention.out.weight", "mlp.up.weight", "mlp.down.bias", "norm1.weight"])
@pytest.mark.parametrize(
    "tokens, other", [(torch.bfloat16, torch.float16), (torch.float16, torch.bfloat16), (torch.bfloat16, None)]
)
def test_mixed_precisions_take_the_plain_path(
    tokens: torch.dtype, other: torch.dtype | None, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch refuses to multiply tokens and weights of two types. Kernels would not: they cast weights."""
    monkeypatch.setattr(dispatch, "_block_runs", lambda shape, x, dtype: True)
    block, x = tiny().blocks[0].to(tokens), torch.zeros(1, 5, 32, device=DEVICE, dtype=tokens)

    def fuses(x: Tensor) -> bool:
        return dispatch.fuses_block(block, x, tokens, uses_autocast=encoder.uses_autocast(x))

    assert fuses(x)
    module, _, name = part.rpartition(".")
    parameters = block.get_submodule(module)._parameters
    parameters[name] = nn.Parameter(parameters[name].to(other or torch.float32))  # type: ignore[union-attr]
    assert not fuses(x)
    with torch.autocast(DEVICE, dtype=tokens):  # casts weights as kernels do
        assert fuses(x) and fuses(x.float())


PARAMETERS = [name for name, _ in tiny(depth=1, qk_norm=True).blocks[0].named_parameters()]


@pytest.mark.parametrize("part", PARAMETERS)
def test_a_float64_parameter_of_a_block_takes_the_plain_path_under_autocast(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Autocast casts the other precisions and leaves float64, as torch's modules do. Kernels would cast it."""
    monkeypatch.setattr(dispatch, "_block_runs", lambda shape, x, dtype: True)
    block, x = tiny(depth=1, qk_norm=True).blocks[0], torch.zeros(1, 5, 32, device=DEVICE)
    module, _, name = part.rpartition(".")
    parameters = block.get_submodule(module)._parameters
    for dtype, fuses in ((torch.float32, True), (torch.bfloat16, True), (torch.float16, True), (torch.float64, False)):
        parameters[name] = nn.Parameter(parameters[name].to(dtype))  # type: ignore[union-attr]
        assert dispatch.fuses_block(block, x, torch.bfloat16, uses_autocast=True) == fuses
    assert whitelist.is_plain_block(block)  # a copy for inference makes float32 of it


@pytest.mark.parametrize("part", ["blocks.1", "blocks.1.mlp.down", "blocks.1.attention.out", "norm"])
def test_float64_parts_under_autocast_raise_as_torch_does(part: str, images: Tensor, fusing: None) -> None:
    model = tiny(depth=2).eval()
    model.get_submodule(part).double()
    for kernels in ("plain", "auto"):
        model.kernels = kernels  # type: ignore[assignment]
        with torch.autocast(DEVICE, dtype=torch.bfloat16), pytest.raises(RuntimeError, match=r"dtype|type"):
            model(images)


@pytest.mark.parametrize("position", ["learned", "sincos2d"])
def test_float64_positions_are_added_in_float64(position: str, fusing: None) -> None:
    """The addition of a float32 and a float64 is a float64: a kernel that adds in float32 would lose digits."""
    model = tiny(depth=1, position=position)
    model.positions.double()
    patches, found = torch.randn(2, 4, 32, device=DEVICE), []
    for kernels in ("plain", "auto"):
        model.kernels = kernels  # type: ignore[assignment]
        found.append(model.add_prefix_and_positions(patches))
    assert found[0].dtype == torch.float64 and torch.equal(*found)


def move(block: nn.Module, part: str, device: str) -> None:
    module, _, name = part.rpartition(".")
    parameters = block.get_submodule(module)._parameters
    parameters[name] = nn.Parameter(torch.empty(parameters[name].shape, device=device))  # type: ignore[union-attr]


@pytest.mark.parametrize("device", ["cuda:1", "cpu", "meta"])
@pytest.mark.parametrize("part", PARAMETERS)
def test_parameters_on_several_devices_take_the_plain_path(part: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch says that devices differ, a kernel would read memory that it cannot."""
    monkeypatch.setattr(dispatch, "_block_runs", lambda shape, x, dtype: True)
    block = tiny(depth=1, qk_norm=True).blocks[0]

    def fuses() -> bool:
        return dispatch.fuses_block(block, torch.empty(1, 5, 32, device="cuda:0"), torch.bfloat16, uses_autocast=True)

    with FakeTensorMode():
        for name in PARAMETERS:
            move(block, name, "cuda:0")
        assert fuses()
        move(block, part, device)
        assert not fuses() and not whitelist.is_plain_block(block)
        for name in PARAMETERS:
            move(block, name, device)
        assert not fuses() and whitelist.is_plain_block(block)


def test_images_on_another_device_than_the_model_take_the_plain_path() -> None:
    """There torch says that devices differ; a kernel would read memory that it cannot."""
    model = tiny(depth=1).bfloat16()
    with FakeTensorMode():
        move(model, "patches.weight", "cuda:0")
        model.patches.weight.data = model.patches.weight.data.bfloat16()
        for device, fuses in (("cuda:0", True), ("cuda:1", False), ("cpu", False)):
            assert dispatch._fuses_patchify(model, torch.empty(1, 3, 32, 32, device=device)) == fuses


@pytest.mark.parametrize("name", ["ViT-Ti/16", "R26+ViT-S/32", "BiT-R50x1"])
@pytest.mark.parametrize("weights, autocast", [(torch.float16, torch.bfloat16), (torch.bfloat16, torch.float16)])
def test_autocast_to_another_precision_than_the_weights(weights: torch.dtype, autocast: torch.dtype, name: str) -> None:
    size: dict[str, Any] = {"depth": 1} if "ViT" in name else {"layers": (1, 1, 1, 1)}
    model = create_model(name, outputs=3, image_size=64, seed=0, **size).eval()
    images = torch.randn(1, 3, 64, 64)
    with torch.autocast("cpu", dtype=autocast):
        assert model(images).isfinite().all()
        with pytest.raises(VitrailError, match=f"weights are {weights}, but autocast computes in {autocast}"):
            model.to(weights)(images)
        assert model.to(autocast)(images).isfinite().all()


@pytest.mark.parametrize("name", ["class_token", "registers"])
def test_a_prefix_token_of_another_precision_does_not_change_that_of_the_tokens(
    name: str, images: Tensor, fusing: None, blocks_fused: list[nn.Module]
) -> None:
    """Registers that were added to a model in bfloat16 as float32, say: the blocks could not multiply float32 tokens."""
    model = tiny(depth=1, registers=2).eval()
    setattr(model, name, nn.Parameter(getattr(model, name).detach().double()))
    found = []
    for kernels in ("plain", "auto"):
        model.kernels = kernels  # type: ignore[assignment]
        tokens = model.features(images).tokens
        (gradient,) = torch.autograd.grad(tokens.square().sum() + tokens.sum(), getattr(model, name))
        found.append((tokens, gradient))
    (plain, plain_gradient), (fused, gradient) = found
    assert fused.dtype == plain.dtype and near(fused, plain) and len(blocks_fused) == 1
    assert gradient.dtype == plain_gradient.dtype and near(gradient, plain_gradient, 1e-4)


@pytest.mark.parametrize("kernels", ["plain", "auto"])
@pytest.mark.parametrize("position", ["learned", "learned-2d", "sincos2d", "relative", "none"])
def test_the_precision_of_the_residual_under_autocast(position: str, kernels: str, blocks_fused: list[nn.Module]) -> None:
    """As docs/fused-encoder.md says; with fake tensors, which stand for a GPU's."""
    config = tiny(depth=2, position=position).config
    with FakeTensorMode(), torch.autocast("cpu", dtype=torch.bfloat16):
        model = ViT(config)
        model.kernels = kernels  # type: ignore[assignment]
        found = model.features(torch.empty(1, 3, 32, 32), layers=[0, 1]).layers
    low = kernels == "plain" and position in ("relative", "none")
    assert {one.dtype for one in found.values()} == {torch.bfloat16 if low else torch.float32}
    assert len(blocks_fused) == (0 if kernels == "plain" or position == "relative" else 2)


def test_the_final_norm_has_the_precision_of_torchs() -> None:
    """On a GPU autocast computes norms in float32 and leaves them so, also those of low-precision tokens."""
    low = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # the interpreter of older Triton cannot read bfloat16
    x, norm = torch.randn(2, 5, 32, device=DEVICE, dtype=low), nn.LayerNorm(32).to(DEVICE, low)
    pending, exact = encoder.PendingResidual(x, x), F.layer_norm(2 * x.float(), (32,))
    with torch.autocast(DEVICE, dtype=low):
        found = encoder.settle_and_norm(pending, norm)
        assert found.dtype == torch.float32 and near(found, exact, 1e-5)
        assert DEVICE == "cpu" or norm(2 * x).dtype == torch.float32
    assert encoder.settle_and_norm(pending, norm).dtype == low
