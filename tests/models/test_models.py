"""Features, initial values, changed heads and sizes, activation checkpointing, and what bad input is told."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.models.other_libraries import randomise
from vitrail import VitrailError, create_model
from vitrail.models import ViT

SMALL = {"width": 24, "heads": 3, "depth": 4, "mlp": 32, "outputs": 5, "patch": 4, "image_size": (12, 16)}
IMAGES = torch.randn(2, 3, 12, 16, generator=torch.Generator().manual_seed(0))


def build(**fields: object) -> torch.nn.Module:
    model = create_model("S/16", **{**SMALL, **fields}, seed=0)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "head" in name:
            torch.nn.init.normal_(parameter, generator=generator)
    return model.eval()


@pytest.mark.parametrize(
    ("fields", "prefix"),
    [
        ({}, 1), ({"registers": 3}, 4), ({"distill_token": True}, 2), ({"pooling": "mean"}, 0), ({"pooling": "map"}, 0),
        ({"pooling": "mean", "final_norm": "after-pool"}, 0), ({"pre_logits": 10}, 1),
    ],
    ids=str,
)  # fmt: skip
def test_features_by_name(fields: dict[str, object], prefix: int) -> None:
    model = build(**fields)
    features = model.features(IMAGES, layers=[0, -1])
    assert features.tokens.shape == (2, prefix + 12, 24)
    assert features.prefix.shape == (2, prefix, 24)
    assert features.patches.shape == (2, 3, 4, 24) and features.grid == (3, 4)
    assert torch.equal(features.tokens[:, prefix:], features.patches.flatten(1, 2))
    assert features.pooled.shape == (2, 24) and features.pre_logits.shape == (2, fields.get("pre_logits", 24))
    assert list(features.layers) == [0, 3]
    if not fields.get("distill_token"):
        assert torch.allclose(model.head(features.pre_logits), model(IMAGES), atol=1e-5)
    if fields.get("final_norm") == "after-pool":
        assert torch.equal(features.layers[3], features.tokens)
    else:
        torch.testing.assert_close(model.norm(features.layers[3]), features.tokens)


def test_bit_features() -> None:
    model = create_model("BiT-R26x1", outputs=4, image_size=64, seed=0).eval()
    torch.nn.init.normal_(model.head.weight)
    images = torch.randn(2, 3, 64, 96)
    features = model.features(images, layers=[0])
    assert features.patches.shape == (2, 2, 3, 2048) and features.prefix.shape == (2, 0, 2048)
    assert features.layers[0].shape == (2, 16, 24, 256)
    torch.testing.assert_close(model.head(features.pre_logits), model(images))


def test_without_a_head_the_representation_comes_out() -> None:
    model = build(outputs=0)
    assert torch.allclose(model(IMAGES), model.features(IMAGES).pre_logits, atol=1e-5)


def test_initial_values_are_the_references() -> None:
    model = create_model("ViT-S/16", outputs=30, pre_logits=384, pooling="map", class_token=True, head_bias=-10.0, seed=0)
    state = model.state_dict()
    assert state["class_token"].abs().sum() == 0 and state["head.weight"].abs().sum() == 0
    assert (state["head.bias"] == -10).all()
    assert state["positions.table"].std().item() == pytest.approx(0.02, rel=0.02)
    square = math.sqrt(6 / (384 + 384))  # each of q, k, v is drawn as a square matrix, not the fused one
    for part in state["blocks.0.attention.qkv.weight"].split(384):
        assert part.abs().max().item() == pytest.approx(square, rel=1e-3) and part.abs().max() <= square
        assert part.std().item() == pytest.approx(square / math.sqrt(3), rel=0.02)
    assert state["blocks.0.mlp.up.weight"].abs().max().item() == pytest.approx(math.sqrt(6 / (384 + 1536)), rel=1e-3)
    assert 0 < state["blocks.0.mlp.up.bias"].abs().max() < 1e-5
    assert state["blocks.0.attention.qkv.bias"].abs().sum() == 0
    for name, fan_in in (("patches.weight", 3 * 16 * 16), ("pre_logits.weight", 384)):
        assert state[name].std().item() == pytest.approx(fan_in**-0.5, rel=0.02)
        assert state[name].abs().max().item() <= 2 * fan_in**-0.5 / 0.8796
    assert state["pool.probe"].abs().max() <= math.sqrt(6 / 385)


@pytest.mark.slow
def test_big_visions_position_scale_and_the_hybrids_zero_norms() -> None:
    model = create_model("ViT-S/16", position_std=None, seed=0)
    assert model.positions.table.std().item() == pytest.approx(384**-0.5, rel=0.02)
    hybrid = create_model("R26+ViT-S/32", seed=0)
    assert hybrid.resnet.stages[0][0].norm3.weight.abs().sum() == 0
    assert (hybrid.resnet.stages[0][0].norm2.weight == 1).all()


def test_a_seed_gives_the_same_model_and_leaves_the_global_state_alone() -> None:
    before = torch.random.get_rng_state()
    one, two, other = build(), build(), create_model("S/16", **SMALL, seed=1)  # type: ignore[arg-type]
    torch.random.set_rng_state(before)
    same = create_model("S/16", **SMALL, seed=0).state_dict()  # type: ignore[arg-type]
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(one.state_dict()["patches.weight"], two.state_dict()["patches.weight"])
    assert torch.equal(one.state_dict()["patches.weight"], same["patches.weight"])
    assert not torch.equal(other.state_dict()["patches.weight"], same["patches.weight"])


def test_a_new_head_is_zero_and_the_rest_is_kept() -> None:
    model = build(distill_token=True)
    body = {key: value.clone() for key, value in model.state_dict().items() if "head" not in key}
    model.replace_head(9)
    assert model.config.outputs == 9 and model(IMAGES).shape == (2, 9) and model(IMAGES).abs().sum() == 0
    assert model.distill_head.weight.shape == (9, 24)
    assert all(torch.equal(model.state_dict()[key], value) for key, value in body.items())


def test_resizing_says_what_it_does(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "vitrail"):
        model = build().resize((24, 20))
    assert "positions 3×4 → 6×5 (learned, rule 'reference')" in caplog.text
    assert model.config.image_size == (24, 20) and model(torch.randn(1, 3, 24, 20)).shape == (1, 5)
    assert not model.positions.table.grad_fn and model.positions.table.requires_grad


@pytest.mark.parametrize("blocks", [None, 0, 2])
def test_activation_checkpointing_reports_and_recomputes(blocks: int | None, caplog: pytest.LogCaptureFixture) -> None:
    model, plain = build().train(), build().train()
    with caplog.at_level(logging.INFO, "vitrail"):
        covered = model.checkpoint_activations(blocks)
    assert covered == (4 if blocks is None else blocks)
    assert f"activation checkpointing: {covered}/4 blocks" in caplog.text
    calls = []
    for block in model.blocks:
        block.norm1.register_forward_pre_hook(lambda *_: calls.append(1))
    model(IMAGES).square().sum().backward()
    plain(IMAGES).square().sum().backward()
    assert len(calls) == 4 + covered
    for one, two in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad)


@pytest.mark.slow
def test_bit_checkpointing_gives_the_same_gradients() -> None:
    model = create_model("BiT-R26x1", outputs=3, image_size=32, seed=0)
    torch.nn.init.normal_(model.head.weight)
    images = torch.randn(2, 3, 32, 32)
    model(images).square().sum().backward()
    plain = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    for keep in ("nothing", "matmuls"):
        assert model.checkpoint_activations(None, keep) == 8
        model.zero_grad()
        model(images).square().sum().backward()
        for one, two in zip(model.parameters(), plain, strict=True):
            torch.testing.assert_close(one.grad, two)


def test_matmul_outputs_are_kept_and_the_rest_is_recomputed() -> None:
    model, plain = build(dropout=0.2).train(), build(dropout=0.2).train()
    model.checkpoint_activations(None, "matmuls")
    for one in (model, plain):
        torch.manual_seed(0)
        one(IMAGES).square().sum().backward()
    for one, two in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad)
    loss = model(IMAGES).square().sum()
    products: list[str] = []

    class Watched(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            products.append(str(func))
            return func(*args, **(kwargs or {}))

    with Watched():
        loss.backward()
    assert not any("addmm" in name for name in products)  # every product forward has a bias; none is taken again
    assert any("native_layer_norm.default" in name for name in products)


def test_what_recomputed_blocks_keep_is_named() -> None:
    with pytest.raises(VitrailError, match="nothing or matmuls"):
        build().checkpoint_activations(None, "everything")  # type: ignore[operator]


@pytest.mark.slow
@pytest.mark.parametrize("channels", [1, 3, 4, 13])
def test_any_number_of_channels(channels: int) -> None:
    for name in ("ViT-Ti/16", "R+ViT-Ti/16", "BiT-R26x1"):
        model = create_model(name, channels=channels, image_size=64, outputs=3)
        assert model(torch.randn(1, channels, 64, 64)).shape == (1, 3)


@pytest.mark.slow
def test_compiles_without_a_graph_break() -> None:
    model = build()
    explanation = torch._dynamo.explain(model)(IMAGES)
    assert explanation.graph_break_count == 0, explanation.break_reasons
    torch._dynamo.reset()


def test_bf16_autocast_stays_close() -> None:
    model = build()
    with torch.autocast("cpu", torch.bfloat16):
        low = model(IMAGES).float()
    full = model(IMAGES)
    assert (low - full).abs().max() < 0.05 * full.abs().max()


BAD_IMAGES = [
    (torch.zeros(3, 12, 16), r"takes a batch \[images, channels, height, width\]; this tensor is \[3, 12, 16\].*images\[None\]"),
    (torch.zeros(1, 1, 12, 16), "has 3 input channels, these images have 1.*channels=1"),
    (torch.zeros(1, 12, 16, 3), r"has 3 input channels, these images have 12.*images.permute\(0, 3, 1, 2\)"),
    (torch.zeros(1, 3, 16, 12), r"expects 12×16 images, these are 16×12.*model.resize\(\(16, 12\)\)"),
    (torch.zeros(1, 3, 12, 16, dtype=torch.uint8), "floating-point.*torch.uint8"),
]


@pytest.mark.parametrize(("images", "sentence"), BAD_IMAGES)
def test_bad_images_are_refused_with_what_is_expected(images: torch.Tensor, sentence: str) -> None:
    model = build()
    for use in (model, model.features, model.attention):
        with pytest.raises(VitrailError, match=sentence):
            use(images)


BAD_FIELDS = [
    ({"image_size": 222, "patch": 16}, r"Image 222×222 is not a multiple of patch 16\. Nearest: 208×208, 224×224"),
    ({"image_size": (224, 100), "patch": (16, 32)}, r"patch 16×32\. Nearest: 224×96, 224×128"),
    ({"image_size": 8, "patch": 16}, r"Nearest: 16×16\."),
    ({"image_size": "large"}, "image_size is 'large'; it takes a whole number, or a pair"),
    ({"heads": 5}, "Width 24 is not a multiple of 5 heads"),
    ({"depth": 0}, "depth is 0; it takes whole numbers of at least 1"),
    ({"dropout": 1.0}, "dropout is 1.0; choose a number from 0"),
    ({"class_token": False}, "pooling='class' needs class_token=True"),
    ({"pooling": "mean", "distill_token": True}, "needs pooling='class'"),
    ({"position": "relative", "position_at": "input"}, "position_at='every-layer' or 'shared'"),
    ({"position": "none", "position_prefix": True}, "needs a learned table"),
    ({"position": "sincos2d", "width": 18}, "multiple of 4"),
    ({"channels": 0}, "channels is 0"),
    ({"patch": 2.5}, "patch is 2.5"),
]


@pytest.mark.parametrize(("fields", "sentence"), BAD_FIELDS, ids=str)
def test_bad_fields_are_sentences(fields: dict[str, object], sentence: str) -> None:
    with pytest.raises(VitrailError, match=sentence):
        build(**fields)


def test_a_resnet_too_small_for_its_stride() -> None:
    with pytest.raises(VitrailError, match="smaller than the network's stride of 32"):
        create_model("BiT-R50x1", image_size=16)


def test_distilled_logits_need_the_token() -> None:
    with pytest.raises(VitrailError, match="distill_token=True"):
        build().distilled_logits(IMAGES)


@pytest.mark.parametrize(
    "change",
    [{}, {"attention": "axial"}, {"position": "relative"}, {"position_at": "every-layer"}, {"distill_token": True}],
    ids=lambda change: next(iter(change), "plain"),
)
def test_the_last_block_computes_only_what_is_read(change: dict[str, Any]) -> None:
    """Logits come from the class token, so nothing else of the last block is needed, and nothing else changes."""
    model = randomise(create_model("ViT-Ti/16", image_size=64, depth=2, outputs=5, seed=0, **change))
    assert isinstance(model, ViT)
    images = torch.randn(2, 3, 64, 64)
    x = model.add_prefix_and_positions(model.embed_patches(images))
    count = 1 + model.config.distill_token
    few, whole = model.encode(x, num_queries=count), model.encode(x)
    assert few.shape[1] == count and torch.allclose(few, whole[:, :count], atol=1e-5)
    assert torch.allclose(model(images), model.logits(whole), atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["ViT-Ti/16", "BiT-R50x1"])
def test_shapes_can_be_computed_on_the_meta_device(name: str, dtype: torch.dtype) -> None:
    model = create_model(name, image_size=32, device="meta", dtype=dtype)
    assert model(torch.empty(2, 3, 32, 32, device="meta")).shape == (2, 1000)


def test_a_model_with_other_blocks_can_be_resized() -> None:
    model = build()
    model.blocks[1] = torch.nn.Identity()  # type: ignore[union-attr, operator]
    assert model.resize(64).config.image_size == (64, 64)  # type: ignore[operator, union-attr]
