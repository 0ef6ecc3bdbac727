"""The loop from end to end: numbers and several labels as targets, teachers, and checkpoints to start from."""

from __future__ import annotations

import csv
import dataclasses

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail
from tests.train.small import Recorder, small, train
from tests.train.test_loop import PLAIN
from vitrail.data.augment.spec import Augment
from vitrail.data.preprocess import Preprocess
from vitrail.errors import VitrailError
from vitrail.evaluate.multilabel import per_label
from vitrail.models import create_model
from vitrail.train.config import DataSpec, ModelSpec, OptimSpec, Recipe, ScheduleSpec, TaskSpec
from vitrail.train.export import rounded_threshold


def pictures(folder, count=24, seed=0):
    """Grey squares whose brightness is the target."""
    folder.mkdir(parents=True, exist_ok=True)
    levels = np.random.default_rng(seed).uniform(20, 235, count)
    for number, level in enumerate(levels):
        Image.fromarray(np.full((8, 8), level, np.uint8)).save(folder / f"{number:03d}.png")
    return levels


def small_on(source, **changes):
    return small(
        data=DataSpec(source=source, workers=0, validate="train"),
        augment=Augment(crop="none", flip=0.0),
        batch=8,
        steps=60,
        checkpoint_every=0,
        ema=0.0,
        **{"optim__lr": 3e-3, **PLAIN, **changes},
    )


def table(path, header, rows):
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([header, *rows])
    return f"csv:{path}"


@pytest.mark.slow
def test_regression_learns_and_predicts_in_the_targets_own_units(tmp_path):
    levels = pictures(tmp_path / "images")
    rows = [(f"images/{number:03d}.png", 1000 + 5 * level) for number, level in enumerate(levels)]
    result = train(small_on(table(tmp_path / "t.csv", ("path", "mass"), rows) + "?targets=mass"), tmp_path / "run")
    assert result.headline == "mae" and result.metrics["r2"] > 0.9
    bundle = vitrail.load(tmp_path / "run")
    dark, bright = int(levels.argmin()), int(levels.argmax())
    answers = bundle.predict([tmp_path / f"images/{dark:03d}.png", tmp_path / f"images/{bright:03d}.png"])
    assert answers[0][0].score == pytest.approx(1000 + 5 * levels[dark], abs=150)
    assert answers[1][0].score == pytest.approx(1000 + 5 * levels[bright], abs=150)


@pytest.mark.slow
def test_several_labels_per_image(tmp_path):
    levels = pictures(tmp_path / "images")
    labels = [
        "|".join(name for name, on in (("bright", level > 128), ("extreme", abs(level - 128) > 60)) if on) for level in levels
    ]
    rows = [(f"images/{number:03d}.png", label) for number, label in enumerate(labels)]
    result = train(small_on(table(tmp_path / "t.csv", ("path", "labels"), rows)), tmp_path / "run")
    assert result.metrics["map"] > 0.9
    task = vitrail.load(tmp_path / "run").provenance["task"]
    assert task["kind"] == "multilabel" and len(task["thresholds"]) == 2


@pytest.mark.slow
def test_saved_thresholds_are_reached_by_the_images_that_they_come_from(tmp_path):
    """A threshold is the score of an image. Rounded up, it would not be reached by that image, and the best F1 be missed."""
    levels = pictures(tmp_path / "images")
    rows = [
        (f"images/{number:03d}.png", "|".join(str(bit) for bit in range(8) if int(level) >> bit & 1))
        for number, level in enumerate(levels)
    ]
    source = table(tmp_path / "t.csv", ("path", "labels"), rows)
    train(small_on(source), tmp_path / "run")
    labels = vitrail.load(tmp_path / "run").evaluate(source)
    for threshold, best in zip(labels.thresholds, per_label(labels.outputs, labels.truth).best_threshold, strict=True):
        assert best - 2e-6 < threshold <= best


@pytest.mark.parametrize("score", [0.531982, 0.5319820000001, 0.5319829999999, 1e-7, 0.999999, 1.0])
def test_a_threshold_is_reached_by_its_image_computed_elsewhere(score):
    """An evaluation computes the same score with other kernels, up to a few roundings in float32."""
    assert score - 2e-6 < rounded_threshold(score) <= score * (1 - 3e-7)
    assert rounded_threshold(0.5) == 0.5


def test_sigmoid_and_class_weights_on_one_label(tmp_path):
    train(small(task=TaskSpec(loss="sigmoid", class_weights="auto"), model__head_bias=-2.0), tmp_path / "run")
    assert vitrail.load(tmp_path / "run").provenance["task"]["activation"] == "sigmoid"


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "token"), [("hard", True), ("soft", False)])
def test_distillation_from_a_run(mode, token, tmp_path):
    train(small(), tmp_path / "teacher")
    recipe = small(
        task=TaskSpec(distill=mode, teacher=str(tmp_path / "teacher")), model__distill_token=token or None, augment__smoothing=0.0
    )
    recorder = Recorder()
    train(recipe, tmp_path / "student", callbacks=[recorder])
    assert any(f"{mode} distillation into the {'distillation token' if token else 'only head'}" in note for note in recorder.notes)
    model = vitrail.load(tmp_path / "student").model
    assert (model.distill_head is not None) == token
    if token:
        assert not torch.equal(model.head.weight, model.distill_head.weight)


def test_a_teacher_with_other_classes_is_refused(tmp_path):
    model = create_model("ViT-Ti/4", outputs=2, image_size=8, channels=1, width=32, depth=1, heads=1, mlp=32, seed=0)
    vitrail.save(
        tmp_path / "teacher", model, preprocess=Preprocess(size=(8, 8), channels=1, mean=(0.5,), std=(0.5,)), classes=("a", "b")
    )
    with pytest.raises(VitrailError, match="different classes: 10 and 2"):
        train(small(task=TaskSpec(distill="hard", teacher=str(tmp_path / "teacher"))), tmp_path / "run")


def test_a_checkpoint_without_preprocessing_names_the_option_that_sets_it(tmp_path):
    bare = tmp_path / "bare"
    vitrail.save(bare, create_model("ViT-Ti/4", outputs=2, image_size=8, channels=1, width=32, depth=1, heads=1, mlp=32, seed=0))
    with pytest.raises(VitrailError, match=r"No preprocessing is stored in .*bare.* --data.preprocess google-vit"):
        train(small(model=ModelSpec(start=str(bare))), tmp_path / "run")
    with pytest.raises(VitrailError, match=r"vitrail convert .*bare FOLDER --preprocess google-vit"):
        train(small(task=TaskSpec(distill="hard", teacher=str(bare))), tmp_path / "run")


@pytest.mark.slow
def test_fine_tuning_keeps_the_body_and_the_preprocessing_and_renews_the_head(tmp_path):
    train(small(), tmp_path / "start")
    pictures(tmp_path / "set/a", 6, 1)
    pictures(tmp_path / "set/b", 6, 2)
    recipe = Recipe(
        name="tuned",
        model=ModelSpec(start=str(tmp_path / "start"), image_size=12, dropout=0.2, freeze=True),
        data=DataSpec(source=f"folder:{tmp_path / 'set'}", workers=0),
        optim=OptimSpec(name="sgd", lr=0.01),
        schedule=ScheduleSpec(warmup=1),
        steps=2,
        batch=4,
    )
    recorder = Recorder()
    train(recipe, tmp_path / "tuned", callbacks=[recorder])
    messages = " ".join(recorder.notes)
    assert "head: new, zero-initialised, 2 outputs (the checkpoint had 10)" in messages
    assert "image size 8×8 → 12×12" in messages
    before, after = vitrail.load(tmp_path / "start"), vitrail.load(tmp_path / "tuned")
    assert after.classes == ("a", "b") and after.model.config.dropout == 0.2
    assert after.preprocess == before.preprocess.with_size(12)
    assert torch.equal(before.model.blocks[1].mlp.up.weight, after.model.blocks[1].mlp.up.weight)
    with pytest.raises(VitrailError, match=r"model\.depth cannot be changed in a trained checkpoint"):
        train(dataclasses.replace(recipe, model=dataclasses.replace(recipe.model, depth=3)), tmp_path / "other")


@pytest.mark.slow
def test_the_same_classes_keep_the_head(tmp_path):
    train(small(), tmp_path / "start")
    recorder = Recorder()
    train(small(model=ModelSpec(start=str(tmp_path / "start")), steps=1), tmp_path / "more", callbacks=[recorder])
    assert any("head: kept" in note for note in recorder.notes)
