"""LoRA: what is trained, that the merged model computes the same, and what it saves."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import vitrail
from tests.models.test_fused import CLOSE, DEVICE, blocks_fused, fusing, near, results  # noqa: F401 - fixtures
from tests.models.test_fused import small as small_vit
from tests.train.small import Recorder, losses, same, small, weights
from vitrail.checkpoints import load
from vitrail.errors import VitrailError
from vitrail.models import build_model, create_model, model_config
from vitrail.models.inference import for_inference
from vitrail.models.lora import LoraLinear, add_lora, merged_state
from vitrail.models.settings import LORA_MATRICES, LoraMatrix
from vitrail.train import Recipe, train
from vitrail.train.config import ModelSpec, OptimSpec
from vitrail.train.memory import SimulatedModel, simulate
from vitrail.train.parameter_groups import freeze, parameter_groups
from vitrail.train.plan import make_plan


def lora(start: Path, **changes: object) -> Recipe:
    spec = {"lora": 4, "dropout": 0.1, **changes}
    return small(model=ModelSpec(start=str(start), **spec), optim__lr=0.02, steps=8, ema=0.0)  # type: ignore[arg-type]


def test_weight_decay_is_on_the_adapters() -> None:
    model = create_model("ViT-Ti/16", outputs=10, image_size=32, depth=2)
    add_lora(model, 4, seed=0)
    spec = OptimSpec(weight_decay=0.1)
    freeze(model, spec)
    decaying = {name for group in parameter_groups(model, spec) if group.decays for name in group.names}
    adapters = {name for name, _ in model.named_parameters() if "lora_" in name}
    assert decaying == {*adapters, "head.weight"}


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("lora") / "start"
    train(small(ema=0.0), out)
    return out


def drawn(rank: int = 3, **options: object) -> tuple[nn.Module, torch.Tensor]:
    """A model with adapters that are not zero."""
    model = create_model("ViT-Ti/16", image_size=32, outputs=5, depth=3, seed=0)
    add_lora(model, rank, seed=1, **options)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(2)
    for layer in model.modules():
        if isinstance(layer, LoraLinear):
            nn.init.normal_(layer.lora_b, std=0.05, generator=generator)
    nn.init.normal_(model.head.weight, std=0.05, generator=generator)
    return model.eval(), torch.randn(4, 3, 32, 32, generator=generator)


def test_saving_a_model_with_adapters_merges_them(tmp_path: Path) -> None:
    model, images = drawn(alpha=12.0)
    vitrail.save(tmp_path / "model", model, read_back=True)
    loaded = vitrail.load(tmp_path / "model")
    assert not any("lora" in name for name in loaded.model.state_dict()) and isinstance(model.blocks[0].mlp.up, LoraLinear)
    with torch.no_grad():
        torch.testing.assert_close(loaded.model.eval()(images), model(images), atol=1e-5, rtol=0)
    loaded.model = model
    loaded.save(tmp_path / "again")
    assert same(load_file(tmp_path / "model" / "model.safetensors"), load_file(tmp_path / "again" / "model.safetensors"))


@pytest.mark.parametrize("options", [{}, {"alpha": 12.0}, {"matrices": ("qkv",)}, {"matrices": ("up", "out")}])
def test_a_merged_model_computes_the_same(options: dict[str, object]) -> None:
    model, images = drawn(**options)  # type: ignore[arg-type]
    plain = build_model(model.config, seed=3).eval()  # type: ignore[arg-type]
    before = create_model("ViT-Ti/16", image_size=32, outputs=5, depth=3, seed=0).eval()
    plain.load_state_dict(merged_state(model, model.state_dict()))
    with torch.no_grad():
        expected = model(images)
        before.head.load_state_dict(model.head.state_dict())
        assert (plain(images) - expected).abs().max() < 1e-5
        assert (before(images) - expected).abs().max() > 1e-2  # the adapters do something
        assert (for_inference(model, "fp32", torch.device("cpu"))(images) - expected).abs().max() < 1e-5  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("matrices", [("qkv",), ("out",), ("up",), ("down",), LORA_MATRICES], ids=str)
def test_fused_kernels_step_aside_for_adapters(
    matrices: tuple[LoraMatrix, ...],
    fusing: None,  # noqa: F811
    blocks_fused: list[nn.Module],  # noqa: F811
) -> None:
    """One block of three keeps its plain layers, and only that one runs fused; logits and gradients are the plain ones."""
    model = small_vit(image_size=32)
    plain_layers = copy.deepcopy(model.blocks[1])
    add_lora(model, 2, matrices=matrices, seed=1)
    model.blocks[1] = plain_layers
    for name, parameter in model.named_parameters():
        if name.endswith("lora_b"):
            nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(4))
    images = torch.randn(1, 3, 32, 32, device=DEVICE)
    plain, plain_gradients = results(model, images, "plain")
    fused, fused_gradients = results(model, images, "auto")
    assert blocks_fused == [model.blocks[1]]
    assert near(fused, plain) and fused_gradients.keys() == plain_gradients.keys()
    assert all(near(fused_gradients[name], gradient, 2 * CLOSE) for name, gradient in plain_gradients.items())


def test_an_adapter_is_the_product_of_its_matrices_times_alpha_over_rank() -> None:
    layer = LoraLinear(nn.Linear(6, 5), 2, alpha=8.0)
    layer.reset(torch.Generator().manual_seed(0))
    nn.init.normal_(layer.lora_b)
    x = torch.randn(3, 6)
    whole = layer.weight + 4.0 * layer.lora_b @ layer.lora_a
    assert torch.allclose(layer(x), x @ whole.T + layer.bias, atol=1e-6)


def test_a_new_adapter_changes_nothing() -> None:
    model = create_model("ViT-Ti/16", image_size=32, outputs=5, depth=2, seed=0).eval()
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        before = model.features(images).tokens
        added = add_lora(model, 8, seed=0)
        assert torch.equal(model.features(images).tokens, before)
    width, mlp = 192, 768
    assert added == 2 * 8 * ((width + 3 * width) + 2 * width + 2 * (width + mlp))


@pytest.mark.slow
def test_only_adapters_and_head_are_trained_and_the_saved_model_is_plain(start: Path, tmp_path: Path) -> None:
    recorder = Recorder()
    train(lora(start), tmp_path / "run", callbacks=[recorder])
    before, after = weights(start), weights(tmp_path / "run")
    assert before.keys() == after.keys()
    adapted = tuple(f".{name}.weight" for name in LORA_MATRICES)
    changed = {name for name in after if not torch.equal(before[name], after[name])}
    assert changed == {name for name in after if name.endswith(adapted) or name.startswith("head.")}
    assert any("LoRA: rank 4 on qkv, out, up, down" in note for note in recorder.notes)
    assert any("frozen" in note for note in recorder.notes)
    difference = after["blocks.0.attention.qkv.weight"].double() - before["blocks.0.attention.qkv.weight"].double()
    assert int((torch.linalg.svdvals(difference) > 1e-6).sum()) == 4  # the rank
    assert load(tmp_path / "run").provenance["lora"] == {"rank": 4, "alpha": 4, "on": list(LORA_MATRICES), "merged": True}


@pytest.mark.slow
def test_a_stopped_run_is_resumed_bit_for_bit(start: Path, tmp_path: Path) -> None:
    recipe = lora(start)
    train(recipe, tmp_path / "whole")

    class Break(Recorder):
        def trained(self, record: dict[str, object]) -> None:
            if record["step"] == 6:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(recipe, tmp_path / "parts", callbacks=[Break()])
    train(recipe, tmp_path / "parts")
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "parts"))
    assert losses(tmp_path / "whole") == losses(tmp_path / "parts")
    stored = load_file(tmp_path / "whole" / "model" / "model.safetensors")
    assert not any("lora" in name for name in stored)


def test_what_cannot_be_adapted_is_refused(start: Path, tmp_path: Path) -> None:
    with pytest.raises(VitrailError, match=r"starts from random values: add --from"):
        train(small(model__lora=4), tmp_path / "run")
    with pytest.raises(VitrailError, match="choose one of them"):
        train(lora(start, freeze=True), tmp_path / "run")
    with pytest.raises(VitrailError, match="The rank of LoRA is -1"):
        train(lora(start, lora=-1), tmp_path / "run")
    with pytest.raises(VitrailError, match="a ResNet has none"):
        add_lora(create_model("BiT-R50x1", image_size=32, device="meta"), 4)  # type: ignore[arg-type]
    model = create_model("ViT-Ti/16", image_size=32, depth=1)
    add_lora(model, 4)  # type: ignore[arg-type]
    with pytest.raises(VitrailError, match="qkv is a LoraLinear, not a plain linear layer"):
        add_lora(model, 4)  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_plan_counts_what_lora_saves() -> None:
    """ViT-B/16 fine-tuned as in the paper, SGD with momentum: weights, gradients and optimiser state."""
    config = model_config("ViT-B/16", outputs=100)
    kept = []
    for rank in (0, 8):
        found = simulate(SimulatedModel(config, spec=ModelSpec(lora=rank)), 2, precision="bf16")
        kept.append(found.weights + 2 * found.gradients)  # momentum is as large as the gradients
    assert kept[1] < 0.4 * kept[0]
    trained = sum(8 * (a + b) for a, b in ((768, 2304), (768, 768), (768, 3072), (3072, 768)) for _ in range(12))
    assert found.gradients == pytest.approx(4 * (trained + 100 * 768 + 100), rel=0.02)
    small_plan = Recipe(model=ModelSpec(name="ViT-Ti/16", image_size=32, depth=2, lora=4), steps=1, batch=8)
    (need,) = make_plan(small_plan, gpus=1, memory=8, outputs=10).needs
    assert need.optimizer == 2 * need.gradients < need.weights  # AdamW keeps two moments
