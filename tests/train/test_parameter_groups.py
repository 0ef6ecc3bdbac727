"""Freezing, learning rates and weight decays by patterns on the names of parameters."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.train.small import Recorder, same, small, train, weights
from tests.train.test_optimizers import model
from tests.train.test_resume import interrupted
from vitrail.errors import VitrailError
from vitrail.train.config import OptimSpec, Recipe, TaskSpec
from vitrail.train.loop import Loop
from vitrail.train.optimizers import Optimizer
from vitrail.train.parameter_groups import all_groups, freeze, frozen_names, group_lines, matching, parameter_groups

NAMES = ["class_token", "head.weight", "head.bias", *(f"blocks.{n}.norm1.{what}" for n in range(12) for what in ("weight", "bias"))]


@pytest.mark.parametrize(
    ("pattern", "count"),
    [
        ("head", 2),
        ("head.weight", 1),
        ("head.*", 2),
        ("*", 27),
        ("blocks.1", 2),  # not 10 and 11
        ("blocks.[0-5]", 12),
        ("blocks.*.norm1", 24),
        ("*.bias", 13),
        (r"re:blocks\.(8|9|1\d)", 8),
        ("re:.*bias", 13),
        ("re:head|class_token", 3),
    ],
)
def test_a_pattern_matches_a_name_or_a_module(pattern: str, count: int) -> None:
    assert len(matching(pattern, NAMES, "optim.freeze")) == count


def test_a_pattern_without_a_match_is_an_error_with_near_names() -> None:
    for pattern in ("block.*.norm1.weight", "heads", "re:bloks.0"):
        with pytest.raises(
            VitrailError, match=rf"optim\.freeze has '{pattern[:4]}.*matches none of the 27 parameters.* Did you mean"
        ):
            matching(pattern, NAMES, "optim.freeze")
    with pytest.raises(VitrailError, match="matches none"):
        frozen_names(NAMES, ["*", "!heda"])
    with pytest.raises(VitrailError, match=r"optim\.lr_scale has 'hed'"):
        parameter_groups(model(), OptimSpec(lr_scale=("hed=2",)))


def test_the_last_match_decides() -> None:
    assert frozen_names(NAMES, ["*", "!head", "*.bias"]) == set(NAMES) - {"head.weight"}
    spec = OptimSpec(lr_scale=("*=2", "blocks.1=3", "*.bias=5"), weight_decay=0.1, weight_decay_for=("positions=0.2", "head=0"))
    network = model()
    scale = {name: group.scale for group in parameter_groups(network, spec) for name in group.names}
    decay = {name: group.weight_decay for group in parameter_groups(network, spec) for name in group.names}
    assert (scale["head.weight"], scale["blocks.1.norm1.weight"], scale["blocks.1.norm1.bias"]) == (2, 3, 5)
    assert decay["blocks.0.mlp.up.weight"] == 0.1 and decay["blocks.0.mlp.up.bias"] == 0 == decay["head.weight"]
    assert {decay[name] for name in decay if name.startswith("positions.")} == {0.2}  # though it is not a kernel


def test_it_multiplies_layer_decay() -> None:
    spec = OptimSpec(layer_decay=0.5, lr_scale=("blocks.1=3", "head=10"))
    scale = {name: group.scale for group in parameter_groups(model(), spec) for name in group.names}
    assert [scale[f"blocks.{k}.mlp.up.weight"] for k in range(3)] == [0.125, 3 * 0.25, 0.5]
    assert scale["head.bias"] == 10 and scale["norm.weight"] == 1


@pytest.mark.parametrize("decay", ["scaled-by-lr", "independent-of-lr"])
def test_rates_and_decays_reach_the_update(decay: Any) -> None:
    """One step of SGD without gradients is decay alone: −s·lr·scale·wd·p, or −s·wd·p."""
    layers = nn.ModuleDict({"one": nn.Linear(2, 2, bias=False), "two": nn.Linear(2, 2, bias=False)})
    spec = OptimSpec(
        name="sgd", lr=0.1, decay=decay, weight_decay=0.5, momentum=0.0, lr_scale=("two=4",), weight_decay_for=("two=0.2",)
    )
    optimizer = Optimizer(layers, spec)
    before = {name: one.detach().clone() for name, one in layers.named_parameters()}
    for one in layers.parameters():
        one.grad = torch.ones_like(one)
    optimizer.set_rate(0.5)
    optimizer.step()
    for name, scale, wd in (("one.weight", 1, 0.5), ("two.weight", 4, 0.2)):
        shrunk = 0.5 * (wd * 0.1 * scale if decay == "scaled-by-lr" else wd)
        expected = before[name] * (1 - shrunk) - 0.5 * 0.1 * scale
        torch.testing.assert_close(dict(layers.named_parameters())[name].detach(), expected)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lr_scale": ("head",)}, "PATTERN=NUMBER"),
        ({"lr_scale": ("head=fast",)}, "PATTERN=NUMBER"),
        ({"lr_scale": ("=2",)}, "PATTERN=NUMBER"),
        ({"lr_scale": ("head=0",)}, "use optim.freeze"),
        ({"lr_scale": ("head=nan",)}, "above 0"),
        ({"weight_decay_for": ("head=-1",)}, "0 or more"),
        ({"freeze": ("re:(",)}, "not a valid regular expression"),
    ],
)
def test_impossible_patterns_are_sentences(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(VitrailError, match=words):
        Recipe(epochs=1, optim=OptimSpec(**changes))


def test_nothing_to_train_and_a_rate_of_the_frozen_are_errors() -> None:
    with pytest.raises(VitrailError, match=r"optim.freeze \* leaves nothing to train"):
        freeze(model(), OptimSpec(freeze=("*",)))
    with pytest.raises(VitrailError, match=r"model.freeze with optim.freeze head leaves nothing to train"):
        freeze(model(), OptimSpec(freeze=("head",)), head_only=True)
    network, spec = model(), OptimSpec(freeze=("blocks",), lr_scale=("blocks.0=2",))
    freeze(network, spec)
    with pytest.raises(VitrailError, match="every parameter that it matches is frozen"):
        parameter_groups(network, spec)


def test_frozen_groups_are_described() -> None:
    network, spec = model(), OptimSpec(freeze=("blocks", "patches"), weight_decay=0.1, lr_scale=("head=10",), lr=1e-3)
    freeze(network, spec)
    groups = all_groups(network, spec)
    assert sum(group.values for group in groups) == sum(one.numel() for one in network.parameters())
    lines = group_lines(groups, spec)
    assert lines[0] == "160 parameters in 1 tensor: lr 0.01, weight decay 0.1 (scaled-by-lr)"
    assert "lr 0.001 to 0.01 in 2 groups, no weight decay" in lines[1] and lines[2].endswith("38 tensors: frozen")


def test_a_frozen_batch_norm_keeps_its_statistics() -> None:
    network = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).train()
    freeze(network, OptimSpec(freeze=("0", "1", "3.bias")))
    before = {name: value.clone() for name, value in network.named_buffers()}
    network(torch.randn(8, 3) + 5)
    changed = {name for name, value in network.named_buffers() if not torch.equal(value, before[name])}
    assert changed == {"3.running_mean", "3.running_var", "3.num_batches_tracked"}


def test_frozen_parameters_stay_and_have_no_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = small(optim__freeze=("patches", "blocks.0", "*.norm?"), optim__lr_scale=("head=3",), optim__layer_decay=0.9)
    start = {}
    made = Loop._make_step

    def remember(self: Loop) -> Any:
        step = made(self)
        start.update({name: one.detach().clone() for name, one in self.prepared.model.named_parameters()})
        frozen = {name for name, one in self.prepared.model.named_parameters() if not one.requires_grad}
        assert frozen == {name for name in start if name.startswith(("patches", "blocks.0.")) or ".norm" in name}
        assert not any(name.startswith(f"{kind}.{one}.") for one in frozen for kind in ("optim", "ema") for name in step.tensors())
        return step

    monkeypatch.setattr(Loop, "_make_step", remember)
    recorder = Recorder()
    train(recipe, tmp_path / "run", callbacks=[recorder])
    after = weights(tmp_path / "run")
    for name, value in start.items():
        frozen = name.startswith(("patches", "blocks.0.")) or ".norm" in name
        assert torch.equal(after[name], value) == frozen, name
    assert any("tensors: frozen" in note for note in recorder.notes)


@pytest.mark.slow
def test_a_resumed_run_with_frozen_parts_is_the_same_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"optim__freeze": ("blocks.0", "*.norm1"), "optim__lr_scale": ("head=3",), "optim__weight_decay_for": ("head=1",)}
    recipe = small(**settings)
    train(recipe, tmp_path / "whole")
    interrupted(recipe, tmp_path / "run", monkeypatch, 4)
    with pytest.raises(VitrailError, match=r"optim\.freeze: \['blocks\.0', '\*\.norm1'\] → \[\]"):
        train(small(**{**settings, "optim__freeze": ()}), tmp_path / "run")
    train(recipe, tmp_path / "run")
    assert same(weights(tmp_path / "run"), weights(tmp_path / "whole"))


def test_parts_of_self_supervised_training_have_names_too(tmp_path: Path) -> None:
    """As MoCo v3 does: a patch embedding that stays as it was drawn."""
    recipe = small(
        task=TaskSpec(kind="masked-autoencoder", mask_rate=0.5, decoder_width=32, decoder_depth=1),
        optim__freeze=("encoder.patches",),
        augment__mixup=0.0,
        augment__smoothing=0.0,
        steps=3,
        model__pooling="mean",
    )
    wrong = recipe.replace(optim=dataclasses.replace(recipe.optim, freeze=("patches",)))
    with pytest.raises(VitrailError, match=r"optim\.freeze has 'patches'.*Did you mean encoder\.patches"):
        train(wrong, tmp_path / "wrong")
    recorder = Recorder()
    train(recipe, tmp_path / "run", callbacks=[recorder])
    assert any("2 tensors: frozen" in note for note in recorder.notes)
