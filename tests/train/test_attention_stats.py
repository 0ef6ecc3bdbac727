"""Statistics of attention at each validation: right for every kind of model, harmless, and a warning when attention collapses."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.train.small import Recorder, same, small, train, weights
from tests.train.test_resume import interrupted
from vitrail.models import ViT
from vitrail.models.fused.whitelist import has_hooks
from vitrail.train.attention_stats import AttentionProbe, AttentionStats, num_images, summary
from vitrail.train.callbacks import scalars
from vitrail.train.config import ModelSpec, Recipe, TaskSpec
from vitrail.train.parallel import Runner, World
from vitrail.train.prepare import Prepared, prepare
from vitrail.train.run import RunFolder

EVERY_STEP = {"eval_every": 1 / 44, "schedule__warmup": 1}


def probe_of(recipe: Recipe) -> tuple[AttentionProbe, Prepared]:
    """A probe as the loop has it, without the rest of the loop. Weights are made large enough for attention to differ."""
    prepared = prepare(recipe)
    with torch.no_grad():
        for parameter in prepared.trained.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)), alpha=0.1)
    runner = Runner(prepared.trained, World(torch.device("cpu")))
    loop = SimpleNamespace(
        prepared=prepared, step=SimpleNamespace(runner=runner), world=runner.world, precision="fp32", recipe=recipe
    )
    return AttentionProbe(loop), prepared  # type: ignore[arg-type]


def by_hand(weights: torch.Tensor) -> tuple[float, float]:
    """Deviation of the scores and entropy of attention weights, in numpy: scores are their logarithms, up to a constant."""
    rows = weights.double().numpy()
    scores = np.log(rows, where=rows > 0, out=np.full_like(rows, np.nan))
    return float(np.nanstd(scores, axis=-1).mean()), float(-np.nansum(rows * scores, axis=-1).mean())


def test_the_summary_of_scores() -> None:
    scores = torch.randn(2, 3, 4, 7, generator=torch.Generator().manual_seed(0))
    found = summary(scores).tolist()
    assert found[:2] == pytest.approx(by_hand(scores.softmax(-1)), abs=1e-5) and found[2] == pytest.approx(math.log(7))
    scores[..., 3:] = -math.inf
    found = summary(scores).tolist()
    assert found[:2] == pytest.approx(by_hand(scores.softmax(-1)), abs=1e-5) and found[2] == pytest.approx(math.log(3))
    sharp = summary(torch.tensor([[[[200.0, 0.0, 0.0, 0.0]]]])).tolist()  # softmax has no more digits for that
    assert sharp == pytest.approx([200 * math.sqrt(3) / 4, 0.0, math.log(4)])


MODELS = {
    "class": {},
    "qk_norm": {"model__qk_norm": True},
    "distilled": {"model__distill_token": True, "model__registers": 1},
    "mean": {"model__pooling": "mean", "model__registers": 2},
    "map": {"model__pooling": "map"},
    "relative": {"model__position": "relative"},
    "hybrid": {"model": ModelSpec(name="R+ViT-Ti/16", image_size=32, channels=1, width=32, depth=2, heads=1, mlp=48)},
}


@pytest.mark.parametrize("kind", MODELS)
def test_each_block_is_measured_where_its_output_is_used(kind: str) -> None:
    probe, prepared = probe_of(small(model__heads=2, **MODELS[kind]) if "model" not in MODELS[kind] else small(**MODELS[kind]))
    found = probe.measure()
    assert found is not None and probe._batch is not None and len(probe._batch.images) == 30  # all there are
    model = prepared.model
    assert isinstance(model, ViT)
    maps = [weights for _, weights in model.attention(probe._batch.images, pooling=True)]
    read = {"class": slice(1), "distilled": slice(2), "mean": slice(2, None), "map": slice(None)}.get(kind, slice(1))
    maps[-2] = maps[-2][:, :, read]
    for number, attention in enumerate(maps[:-1]):
        measured = found.score_std[number], found.entropy[number]
        assert measured == pytest.approx(by_hand(attention), abs=1e-4), number
    assert found.uniform == pytest.approx([math.log(model.config.tokens)] * 2)
    assert (found.pooling is not None) == (kind == "map")
    if found.pooling is not None:
        assert found.pooling[:2] == pytest.approx(by_hand(maps[-1]), abs=1e-4)
        assert {"pooling_entropy", "pooling_score_std"} <= found.record()["attention"].keys()
    assert probe.measure() == found  # always the same images
    assert not any(has_hooks(module) for module in model.modules()) and model.training


def test_axial_attention_is_compared_with_what_it_may_look_at() -> None:
    from vitrail.models import create_model

    recipe = small()
    probe, prepared = probe_of(recipe)
    sizes = {"image_size": 8, "channels": 1, "width": 32, "depth": 2, "heads": 1, "mlp": 48}
    axial = create_model("ViT-Ti/4", outputs=10, attention="axial", pooling="mean", seed=0, **sizes)  # type: ignore[arg-type]
    prepared.model = axial
    probe.loop.step.runner = Runner(axial, World(torch.device("cpu")))
    found = AttentionProbe(probe.loop).measure()
    assert found is not None and found.uniform == pytest.approx([math.log(2)] * len(axial.blocks))  # rows of two patches
    assert all(entropy <= math.log(2) + 1e-6 for entropy in found.entropy)


@pytest.mark.parametrize(("kind", "keys"), [("masked-autoencoder", 1 + 4), ("masked-patch", 1 + 16)])
def test_masked_training_is_measured_on_what_the_encoder_sees(kind: Any, keys: int) -> None:
    recipe = small(
        task=TaskSpec(kind=kind, mask_rate=0.75), model__patch=2, augment__mixup=0.0, augment__smoothing=0.0, model__registers=None
    )
    found = probe_of(recipe)[0].measure()
    assert found is not None and len(found.entropy) == 2  # the encoder's blocks, not the decoder's
    assert found.uniform == pytest.approx([math.log(keys)] * 2)


def test_a_resnet_has_no_attention(tmp_path: Path) -> None:
    recipe = small(model=ModelSpec(name="BiT-R26x1", image_size=32, channels=1), ema=0.0)
    assert probe_of(recipe)[0].measure() is None


@pytest.mark.slow
def test_a_compiled_model_is_measured_too() -> None:
    probe, prepared = probe_of(small())
    before = probe.measure()
    prepared.model.compile(backend="eager")
    assert probe._batch is not None
    prepared.model(probe._batch.images)
    assert probe.measure() == before


def test_few_images_are_enough() -> None:
    probe, _ = probe_of(small(data__holdout=0.2))
    probe.measure()
    assert probe._batch is not None and len(probe._batch.images) == 32
    assert len(set(probe._batch.targets.tolist())) == 10  # not only those of the first classes
    from vitrail.models import model_config

    sizes = {name: num_images(model_config(name, image_size=size)) for name, size in (("ViT-S/16", 224), ("ViT-L/16", 512))}  # type: ignore[arg-type]
    assert sizes == {"ViT-S/16": 32, "ViT-L/16": 1}


def test_images_that_cannot_be_read_are_done_without() -> None:
    from vitrail.data.types import BadImage

    probe, prepared = probe_of(small(data__bad_images="skip"))
    assert prepared.validation is not None

    class Broken(type(prepared.validation)):  # type: ignore[misc]
        def payload(self, index: int) -> Any:
            raise BadImage(self.image_name(index), "cannot be read")

        def subset(self, indices: Any) -> Any:
            return self

    prepared.validation.__class__ = Broken
    assert probe.measure() is None and probe.measure() is None


def stats(*fractions: float) -> AttentionStats:
    uniform = math.log(64)
    return AttentionStats((1.0,) * len(fractions), tuple(uniform * one for one in fractions), (uniform,) * len(fractions))


def test_only_collapsed_attention_is_warned_of() -> None:
    # What was measured in a run that collapsed: .03 to .19 nats of 4.16 in all blocks but the first.
    text = stats(0.5, *np.linspace(0.03, 0.19, 11) / 4.16).warning(qk_norm=False)
    for words in (
        "collapsed in 11 of 12 blocks",
        "entropy 0.03 to 0.19 nats",
        "4.16",
        "--optim.lr",
        "--schedule.warmup",
        "--model.qk-norm",
    ):
        assert words in text, words
    assert "qk-norm" not in stats(0.01, 0.01).warning(qk_norm=True)
    for healthy in ((0.95,) * 12, (0.2, 0.3, 0.4, 0.6), (0.01, 0.05, 0.4, 0.5), (0.12,) * 4):
        assert stats(*healthy).warning(qk_norm=False) == ""


def test_scores_that_saturate_softmax_are_warned_of_though_equal_keys_share_the_weight() -> None:
    # What was measured on the digits after 22 steps at a learning rate of .05: empty patches have equal keys.
    entropy, deviation = (0.033, 0.474, 0.629, 0.687), (258.7, 182.4, 120.8, 29.5)
    text = AttentionStats(deviation, entropy, (math.log(17),) * 4).warning(qk_norm=False)
    assert "collapsed in 3 of 4 blocks" in text and "score std 120.8 to 258.7" in text
    # The largest of the included model, which is healthy, and of a run in the second of its epochs.
    assert AttentionStats((3.8, 7.2), (2.9, 2.3), (4.16, 4.16)).warning(qk_norm=False) == ""


@pytest.mark.slow
def test_it_is_logged_and_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = small(**EVERY_STEP, model__pooling="map")
    train(recipe, tmp_path / "run")
    for record in RunFolder(tmp_path / "run").records():
        if record["kind"] == "val":
            attention = record["attention"]
            assert len(attention["entropy"]) == len(attention["score_std"]) == 2
            assert record["attention_entropy"] == pytest.approx(np.mean(attention["entropy"]), abs=1e-4)
            assert {"attention_entropy", "attention_score_std", "attention_uniform_entropy"} <= scalars(record).keys()
    end = RunFolder(tmp_path / "run").end()
    assert end is not None and not any("attention" in name for name in end)
    monkeypatch.setattr(AttentionProbe, "measure", lambda self: None)
    train(recipe, tmp_path / "without")
    assert same(weights(tmp_path / "run"), weights(tmp_path / "without"))


@pytest.mark.slow
def test_a_collapsing_run_warns_once_also_when_it_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, recorder = small(**EVERY_STEP), Recorder()
    monkeypatch.setattr(AttentionProbe, "measure", lambda self: stats(0.01, 0.02))
    interrupted(recipe, tmp_path / "run", monkeypatch, 4)
    train(recipe, tmp_path / "run", callbacks=[recorder])
    assert not any("collapsed" in note for note in recorder.notes)
    train(recipe, tmp_path / "whole", callbacks=[recorder])
    assert len([note for note in recorder.notes if "attention has collapsed in 2 of 2 blocks" in note]) == 1


def test_sharp_attention_is_found_in_a_real_model() -> None:
    probe, prepared = probe_of(small())
    assert isinstance(prepared.model, ViT)
    healthy = probe.measure()
    assert healthy is not None and not healthy.collapsed()
    with torch.no_grad():
        for block in prepared.model.blocks:
            block.attention.qkv.weight[:64] *= 20  # type: ignore[union-attr, operator, index]
    sharp = probe.measure()
    assert sharp is not None and sharp.collapsed() == [0, 1] and sharp.warning(qk_norm=False)


@pytest.mark.slow
def test_a_healthy_run_is_not_warned_of(tmp_path: Path) -> None:
    from vitrail.recipes import recipe_named

    recorder = Recorder()
    result = train(recipe_named("digits").replace(epochs=12), tmp_path / "run", callbacks=[recorder])
    assert result.metrics["accuracy"] > 0.95 and not any("collapsed" in note for note in recorder.notes)
    last = [one for one in RunFolder(tmp_path / "run").records() if one["kind"] == "val"][-1]["attention"]
    assert all(entropy > 0.2 * most for entropy, most in zip(last["entropy"], last["uniform_entropy"], strict=True))
