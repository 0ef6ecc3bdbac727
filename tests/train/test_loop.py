"""The loop: batch arithmetic, trouble and its handling, tasks from end to end."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import vitrail
from tests.data.image_files import folder_of
from tests.train.small import Recorder, same, small, train, weights
from vitrail.data.augment.spec import Augment
from vitrail.data.loader import TrainLoader
from vitrail.data.pack import choose_settings, pack
from vitrail.data.sampler import batch_slices
from vitrail.data.sources import open_source
from vitrail.errors import VitrailError
from vitrail.models.fused.whitelist import is_plain_block
from vitrail.train.averaging import Average
from vitrail.train.config import ModelSpec
from vitrail.train.prepare import prepare, warnings_for
from vitrail.train.run import RunFolder

PLAIN = {"model__dropout": 0.0, "model__stochastic_depth": 0.0}


@pytest.mark.slow
@pytest.mark.parametrize("mixed", [False, True])
def test_the_division_into_micro_batches_does_not_change_the_step(mixed, tmp_path):
    """64 at once, 4 × 16, and 3 uneven parts give the same gradients; only the order of additions differs."""
    augment = Augment(crop_area=(0.7, 1.0), flip=0.0, mixup=0.3 if mixed else 0.0)
    outcomes = []
    for micro in (64, 16, 27):
        recipe = small(batch=64, micro_batch=micro, steps=4, augment=augment, optim__name="sgd", optim__lr=0.1, **PLAIN)
        train(recipe, tmp_path / str(micro))
        outcomes.append(weights(tmp_path / str(micro)))
    for other in outcomes[1:]:
        for name, value in outcomes[0].items():
            assert torch.allclose(value, other[name], atol=1e-6), name


@pytest.mark.slow
def test_recomputed_activations_change_nothing(tmp_path):
    train(small(), tmp_path / "plain")
    train(small(model__recompute=-1), tmp_path / "recomputed")
    assert same(weights(tmp_path / "plain"), weights(tmp_path / "recomputed"))


def planted(recipe, step):
    """A model whose second block's MLP goes wrong in the training call of that step."""
    prepared = prepare(recipe)
    calls = {"count": -1}

    def count(module, inputs):
        if module.training:
            calls["count"] += 1

    def poison(module, inputs, output):
        return output * float("nan") if calls["count"] >= step and torch.is_grad_enabled() and module.training else output

    prepared.model.register_forward_pre_hook(count)
    prepared.model.blocks[1].mlp.register_forward_hook(poison)
    return prepared


def test_a_planted_nan_is_found_and_named(tmp_path):
    recipe = small(steps=6, checkpoint_every=2)
    with pytest.raises(VitrailError) as caught:
        train(recipe, tmp_path / "run", prepared=planted(recipe, step=3))
    said = str(caught.value)
    assert "step 3 (epoch 0)" in said
    assert "first in blocks.1.mlp (its input reaches" in said
    assert "the last good checkpoint is that of step 2" in said
    assert "--on-nonfinite skip" in said
    listed = (tmp_path / "run" / "nonfinite-step-3.txt").read_text().split()
    assert len(set(listed)) == 32
    assert not (tmp_path / "run" / "model").exists()
    assert RunFolder(tmp_path / "run").records()[-1]["step"] == 2


class BadOnce:
    """Makes the gradient of one step infinite, as a strange batch would."""

    def __init__(self, prepared, step):
        self.step, self.calls = step, -1
        prepared.model.register_forward_pre_hook(self._count)
        prepared.model.head.register_forward_hook(self._spoil)

    def _count(self, module, inputs):
        self.calls += module.training

    def _spoil(self, module, inputs, output):
        return output * float("inf") if self.calls == self.step and module.training else output


def test_skip_leaves_one_step_out_but_the_average_goes_on(tmp_path, monkeypatch):
    averages, update = [], Average.update

    def kept(average, step):
        update(average, step)
        averages.append((weights_of(prepared.model), {name: one.clone() for name, one in average.tensors().items()}))

    monkeypatch.setattr(Average, "update", kept)
    recipe = small(on_nonfinite="skip", steps=4, **PLAIN)
    prepared, recorder = prepare(recipe), Recorder()
    BadOnce(prepared, 2)
    train(recipe, tmp_path / "run", callbacks=[recorder], prepared=prepared)
    assert any("step 2 was not finite; the step was skipped" in note for note in recorder.notes)
    assert sum(record["skipped"] for record in recorder.records) == 1
    assert all(np.isfinite(record["loss"]) for record in recorder.records)
    (before, average_before), (after, average_after) = averages[1:3]  # of the steps 1 and 2
    assert same(before, after)
    for name, value in average_after.items():
        torch.testing.assert_close(value, 0.9 * average_before[name] + 0.1 * after[name])
    assert not same(average_before, average_after)


def weights_of(model):
    return {name: value.detach().clone() for name, value in model.named_parameters()}


@pytest.mark.slow
def test_micro_batches_change_the_gradient_only_by_what_is_drawn_for_each(tmp_path):
    def grad_norm(micro_batch, **rates):
        recorder, out = Recorder(), tmp_path / f"{micro_batch}{rates}{len(list(tmp_path.iterdir()))}"
        recipe = small(steps=1, schedule__warmup=0, log_every=1, micro_batch=micro_batch, **rates)
        train(recipe, out, callbacks=[recorder])
        return recorder.records[0]["grad_norm"]

    dropout = {**PLAIN, "model__dropout": 0.5}
    assert grad_norm(16, **PLAIN) == pytest.approx(grad_norm(32, **PLAIN), rel=1e-5)
    one, other = grad_norm(16, **dropout), grad_norm(32, **dropout)
    assert one != pytest.approx(other, rel=1e-3)
    assert one == grad_norm(16, **dropout)


def test_rollback_goes_back_and_passes_the_batch_over(tmp_path):
    recipe = small(on_nonfinite="rollback", steps=6, **PLAIN)
    prepared, recorder = prepare(recipe), Recorder()
    BadOnce(prepared, 3)
    train(recipe, tmp_path / "run", callbacks=[recorder], prepared=prepared)
    assert any("Back to step 2; step 3 will be skipped" in note for note in recorder.notes)
    assert [record["step"] for record in RunFolder(tmp_path / "run").records() if record["kind"] == "train"] == [2, 4, 6]


@pytest.mark.slow
def test_out_of_memory_halves_the_micro_batch_and_keeps_the_result(tmp_path):
    recipe = small(batch=48, steps=3, **PLAIN)
    train(small(batch=48, steps=3, micro_batch=12, **PLAIN), tmp_path / "expected")
    prepared, recorder = prepare(recipe), Recorder()

    def narrow(module, inputs):
        if module.training and len(inputs[0]) > 20:
            raise torch.OutOfMemoryError("pretended")

    prepared.model.register_forward_pre_hook(narrow)
    train(recipe, tmp_path / "run", callbacks=[recorder], prepared=prepared)
    assert any("Out of memory at micro-batch 48" in note for note in recorder.notes)
    assert any("Now 12 × 4; the batch stays 48" in note for note in recorder.notes)
    assert same(weights(tmp_path / "run"), weights(tmp_path / "expected"))


def test_a_fixed_micro_batch_that_does_not_fit_is_a_sentence(tmp_path):
    recipe = small(micro_batch=16)
    prepared = prepare(recipe)

    def full(module, inputs):
        raise torch.OutOfMemoryError("pretended")

    prepared.model.register_forward_pre_hook(full)
    with pytest.raises(VitrailError, match="Try --micro-batch 8 or auto; the batch of 32 stays"):
        train(recipe, tmp_path / "run", prepared=prepared)


@pytest.mark.slow
def test_a_compiler_that_fails_is_done_without(tmp_path, monkeypatch):
    from torch._dynamo.exc import BackendCompilerFailed

    recipe, recorder = small(compile=True, steps=3), Recorder()
    prepared = prepare(recipe)

    def fails(self):
        def call(*inputs):
            raise BackendCompilerFailed(lambda: None, RuntimeError("no compiler"), None)

        self._compiled_call_impl = call

    monkeypatch.setattr(type(prepared.model), "compile", fails)
    train(recipe, tmp_path / "run", callbacks=[recorder], prepared=prepared)
    assert any("torch.compile failed" in note for note in recorder.notes)
    assert all(is_plain_block(block) for block in prepared.model.blocks)  # fused again, where there are kernels
    train(small(steps=3), tmp_path / "eager")
    assert same(weights(tmp_path / "run"), weights(tmp_path / "eager"))


def test_too_few_images_for_a_step_is_a_sentence(tmp_path):
    with pytest.raises(VitrailError, match="0 optimiser steps per epoch"):
        train(small(batch=5000), tmp_path / "run")


def test_settings_that_usually_fail_give_a_warning(tmp_path):
    recipe = small(optim__lr=0.02, model__width=32, model__heads=4)
    notes = " ".join(prepare(recipe).notes)
    assert "learning rate 0.02 with adamw" in notes
    assert "heads of 8 channels" in notes
    model = prepare(small()).model
    warned = {n: any("few for a Vision" in one for one in warnings_for(small(data__source="photos"), model, n)) for n in SIZES}
    assert warned == {28: True, 1_999: True, 50_000: True, 100_000: False}
    assert not any("few for a Vision" in one for one in warnings_for(small(), model, 28))  # the embedded digits are for trying out


def test_a_single_class_is_a_warning(tmp_path: Path) -> None:
    folder_of(tmp_path / "photos", {"train/cat": 4})
    recipe = small(data__source=f"folder:{tmp_path / 'photos'}", data__holdout=0.0, batch=4)
    assert "warning: there is only one class, 'cat'" in "\n".join(prepare(recipe).notes)


def test_validating_on_the_test_split_is_mentioned(tmp_path: Path) -> None:
    folder_of(tmp_path / "photos", {"train/cat": 4, "train/dog": 4, "test/cat": 1, "test/dog": 1})
    data = {"data__source": f"folder:{tmp_path / 'photos'}", "data__holdout": 0.0, "batch": 4}
    notes = "\n".join(prepare(small(**data)).notes)
    assert "validation: the split test, since there is no val" in notes
    choosing = "\n".join(prepare(small(**data, keep_best="accuracy", eval_every=1)).notes)
    assert "warning: there is no val, so the checkpoint is chosen on the split test" in choosing
    assert "split test" not in "\n".join(prepare(small(**data, data__validate="test")).notes)  # asked for


SIZES = (28, 1_999, 50_000, 100_000)


def test_a_recipe_without_data_or_length_says_so(tmp_path):
    with pytest.raises(VitrailError, match=r"has no images: add --data, such as"):
        train(small(data__source=""), tmp_path / "one")
    with pytest.raises(VitrailError, match="add --epochs or --steps"):
        train(small(steps=None), tmp_path / "two")


def test_the_run_folder_holds_what_it_promises(tmp_path):
    train(small(), tmp_path / "run", curves=True)
    assert {path.name for path in (tmp_path / "run").iterdir()} >= {
        "config.json",
        "metrics.jsonl",
        "checkpoints",
        "model",
        "figures",
    }
    assert (tmp_path / "run" / "figures" / "curves.png").read_bytes()[:4] == b"\x89PNG"
    bundle = vitrail.load(tmp_path / "run")
    assert bundle.classes == tuple("0123456789")
    assert "decay 0.9" in bundle.provenance["weights"]
    end = RunFolder(tmp_path / "run").end()
    assert end["headline"] == "accuracy" and end["step"] == 6


def test_an_extra_that_is_missing_is_named(monkeypatch):
    import sys

    from vitrail.train.callbacks import TensorBoard, WeightsAndBiases

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(VitrailError, match=r"pip install 'vitrail\[tensorboard\]'"):
        TensorBoard()
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(VitrailError, match=r"pip install 'vitrail\[wandb\]'"):
        WeightsAndBiases("project")


def test_waiting_for_data_gives_one_message(tmp_path, monkeypatch):
    from vitrail.data.data_wait import DataWaitTimer

    monkeypatch.setattr(DataWaitTimer, "fraction", lambda self: 0.6)
    recorder = Recorder()
    train(small(steps=8, log_every=1), tmp_path / "run", callbacks=[recorder])
    assert len([note for note in recorder.notes if "waits for data 60% of the time" in note]) == 1


@pytest.mark.slow
def test_evaluators_run_at_every_validation_and_do_not_change_the_run(tmp_path):
    seen = []

    def make(prepared, world):
        seen.append((prepared.train.name, world.ranks))
        return lambda model: {"weight_norm": model.head.weight.detach().norm().item()}

    recipe = small(steps=4, eval_every=0.0)
    with_them = train(recipe, tmp_path / "with", evaluators=[make])
    train(recipe, tmp_path / "without")
    assert seen == [("train", 1)] and with_them.metrics["weight_norm"] > 0
    assert same(weights(tmp_path / "with"), weights(tmp_path / "without"))


def test_initial_values_may_be_named_with_a_checkpoint(tmp_path: Path) -> None:
    """They decide nothing in trained weights, so a recipe that names them can still start from some."""
    first = train(small(model__init="small"), tmp_path / "first")
    again = small(model=ModelSpec(start=str(first.out), init="paper"), steps=1, ema=0.0, optim__lr=1e-12)
    train(again, tmp_path / "again")
    assert all(
        torch.allclose(one, two, atol=1e-6)
        for one, two in zip(weights(tmp_path / "first").values(), weights(tmp_path / "again").values(), strict=True)
    )


def test_held_out_images_of_a_packed_dataset(tmp_path):
    """The same for every seed, a fraction of every class, never trained on, and read as fast as the whole."""
    source = open_source("digits")
    pack(source, tmp_path / "packed", choose_settings(source))
    whole = open_source(f"packed:{tmp_path / 'packed'}").split("train")
    held_out, trained = set(), set()
    for seed in (0, 1):
        recipe = small(data__source=f"packed:{tmp_path / 'packed'}", data__holdout=0.1, seed=seed, augment__device="gpu")
        one = prepare(recipe)
        held_out.add(tuple(one.validation.image_name(k) for k in range(len(one.validation))))
        trained |= {one.train.image_name(k) for k in range(len(one.train))}
        loader = TrainLoader(one.train, preprocess=one.preprocess, augment=recipe.augment, batch=32, seed=seed, workers=0)
        order = next(iter(batch_slices(loader.order, epoch=0, step=0)))
        host = loader.reader[order]
        assert host.uncropped
        names = [one.train.image_name(int(k)) for k in order.indices]
        every = {whole.image_name(k): k for k in range(len(whole))}
        assert all(np.array_equal(image, whole.payload(every[name])) for image, name in zip(host.images, names, strict=True))
    assert len(held_out) == 1 and not trained & set(*held_out) and len(trained) + len(*held_out) == len(whole)
    assert (abs(np.bincount(one.validation.targets) - 0.1 * np.bincount(whole.targets)) <= 0.5).all()
    other = prepare(small(data__holdout=0.1, data__holdout_rule="seed-1")).validation
    assert {other.image_name(k) for k in range(len(other))} != set(*held_out)


def test_a_fraction_of_the_training_images():
    """Smaller fractions are parts of larger ones, of every class and for every seed; what is validated on stays the same."""
    recipes = {part: small(data__fraction=part, data__holdout=0.0, seed=seed) for seed, part in enumerate((0.1, 0.5, 1.0))}
    splits = {part: prepare(recipe) for part, recipe in recipes.items()}
    names = {part: {one.train.image_name(k) for k in range(len(one.train))} for part, one in splits.items()}
    counts = {part: np.bincount(one.train.targets) for part, one in splits.items()}
    assert names[0.1] < names[0.5]
    assert (abs(counts[0.1] - 0.1 * counts[1.0]) <= 1).all() and (abs(counts[0.5] - 0.5 * counts[1.0]) <= 1).all()
    assert len(splits[0.1].validation) == len(splits[1.0].validation)
    for wrong in (0, 1.5):
        with pytest.raises(VitrailError, match=r"data.fraction is .* above 0 and at most 1"):
            small(data__fraction=wrong)


def test_a_part_of_the_training_split_is_mentioned() -> None:
    def notes(**part: float) -> list[str]:
        prepared = prepare(small(**part))
        counts = {"{train}": f"{len(prepared.train):,}", "{held out}": f"{len(prepared.validation or ()):,}"}
        found = [note for note in prepared.notes if note.startswith("training on")]
        for name, count in counts.items():
            found = [note.replace(f" {count} ", f" {name} ") for note in found]
        return found

    assert notes(data__holdout=0.1) == ["training on {train} of the 1,438 images of train, {held out} held out for validation"]
    assert notes(data__holdout=0.0, data__fraction=0.25) == ["training on {train} of the 1,438 images of train"]
    assert notes(data__holdout=0.0) == []
