"""The best checkpoint, early stopping, and raw weights measured beside averaged ones."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import vitrail
from tests.train.small import Recorder, losses, same, small, train, weights
from tests.train.test_resume import interrupted
from vitrail.errors import VitrailError
from vitrail.tasks import Classify, MultiLabel, Regress, Task
from vitrail.tasks.base import lower_is_better
from vitrail.train.best_checkpoint import Selection
from vitrail.train.config import Recipe, TaskSpec
from vitrail.train.prepare import Prepared
from vitrail.train.result import Result
from vitrail.train.run import RunFolder
from vitrail.train.snapshots import damage
from vitrail.train.validate import Validator

PER_EPOCH = 44  # steps of the small run
EVERY_STEP = {"eval_every": 1 / PER_EPOCH, "steps": 8, "schedule__warmup": 1}


def followed(values: list[float], metric: str = "accuracy", **changes: Any) -> tuple[Selection, list[bool]]:
    selection = Selection(Recipe(steps=1, keep_best=metric, **changes), Classify(10))
    return selection, [selection.update({metric: value}, step) for step, value in enumerate(values, 1)]


def test_the_best_is_the_first_of_equal_ones_and_never_nan() -> None:
    nan, infinite = math.nan, math.inf
    selection, improved = followed([nan, 0.3, 0.3, 0.5, nan, 0.5, 0.4, infinite])
    assert improved == [False, True, False, True, False, False, False, False]
    assert selection.best is not None and (selection.best.step, selection.best.value) == (4, 0.5)
    selection, improved = followed([nan, infinite, 0.3, 0.4, 0.2, 0.2], "loss")
    assert improved == [False, False, True, False, True, False]
    assert followed([nan, nan])[0].best is None


@pytest.mark.parametrize(
    ("metric", "lower"),
    [
        ("loss", True),
        ("raw_loss", True),
        ("mae", True),
        ("raw_mae", True),
        ("relative_loss", True),
        ("my_error", True),
        ("nll", True),
        ("ece", True),
        ("test_rmse", True),
        ("ECE", True),
        ("calibration/NLL", True),
        ("Loss", True),
        ("accuracy", False),
        ("raw_accuracy", False),
        ("map", False),
        ("f1", False),
        ("r2", False),
        ("5shot", False),
        ("macro_f1", False),
        ("mAP", False),
        ("share_valid", False),
    ],
)
def test_directions(metric: str, lower: bool) -> None:
    assert lower_is_better(metric) == lower


def test_patience_counts_validations_since_a_real_improvement() -> None:
    """Many small improvements add up to a real one: each is compared with the last that counted."""
    selection, improved = followed([0.50, 0.52, 0.54, 0.56, 0.57], patience=2, min_improvement=0.05)
    assert improved == [True] * 5 and selection.stale == 1 and not selection.stops
    selection, _ = followed([0.50, 0.52, 0.54], patience=2, min_improvement=0.05)
    assert selection.stops
    assert selection.reason() == "accuracy has not improved by more than 0.05 in 2 validations; the best was 54.00% at step 3"
    assert not followed([0.5] * 9)[0].stops
    again = Selection(Recipe(steps=1, keep_best="accuracy", patience=2, min_improvement=0.05), Classify(10))
    again.load_state(json.loads(json.dumps(selection.state())))
    assert again.state() == selection.state() and again.stops
    other = Selection(Recipe(steps=1, keep_best="loss", patience=2), Classify(10))
    other.load_state(selection.state())
    assert other.best is None and other.stale == 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"patience": -1}, "patience is -1; it must be at least 0"),
        ({"min_improvement": 0.1}, "add --patience"),
        ({"final_model": "best"}, "add --keep-best"),
        ({"keep_best": "accuracy", "eval_every": 0.0}, "eval_every is 0"),
        ({"patience": 3, "eval_every": 0.0}, "eval_every is 0"),
    ],
)
def test_impossible_settings_are_sentences(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(VitrailError, match=words):
        Recipe(epochs=1, **changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"keep_best": "acuracy"}, "it can be accuracy, .*raw_loss. Did you mean accuracy"),
        ({"keep_best": "images"}, "it can be accuracy"),
        ({"keep_best": "raw_accuracy", "ema": 0.0}, "only with averaging"),
        ({"patience": 1, "data__holdout": 0.0, "data__validate": "none"}, "add --data.holdout"),
    ],
)
def test_a_metric_that_will_not_be_there_is_refused_before_the_first_step(
    changes: dict[str, Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if changes.pop("data__validate", None):
        monkeypatch.setattr("vitrail.train.prepare.chosen_splits", lambda recipe, source: (source.split("train"), None))
    with pytest.raises(VitrailError, match=words):
        train(small(**EVERY_STEP, **changes), tmp_path / "run")
    assert not (tmp_path / "run" / "config.json").exists()


NUMBERS = np.array([[1.0], [2.0], [4.0]])


@pytest.mark.parametrize(
    ("task", "targets"),
    [
        (Classify(3), torch.tensor([0, 1, 2])),
        (Classify(6), torch.tensor([0, 1, 2])),
        (MultiLabel(2), torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])),
        (Regress(NUMBERS, ("height",)), torch.tensor(NUMBERS)),
    ],
)
def test_every_task_names_its_metrics(task: Task, targets: torch.Tensor) -> None:
    meter = task.meter()
    meter.update(torch.randn(3, task.outputs), targets)
    assert task.metric_names()[0] == task.headline
    assert set(task.metric_names()) == meter.metrics().keys() - {"images", "predicted_classes"}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["masked-patch", "masked-autoencoder"])
def test_masked_runs_keep_the_best_too(kind: Any, tmp_path: Path) -> None:
    decoder = {"decoder_width": 32, "decoder_depth": 1} if kind == "masked-autoencoder" else {}  # or it is larger than all else
    recipe = small(
        **EVERY_STEP,
        task=TaskSpec(kind=kind, **decoder),
        model__pooling="mean",
        augment__mixup=0.0,
        augment__smoothing=0.0,
        keep_best="raw_relative_loss",
    )
    result = train(recipe, tmp_path / "run")
    record = next(one for one in RunFolder(tmp_path / "run").records() if one["kind"] == "val")
    names = ("relative_loss", "loss", *(("patch_accuracy",) if kind == "masked-patch" else ()))
    assert all(name in record and f"raw_{name}" in record for name in names) and "raw_target_entropy" not in record
    assert result.model is not None and result.model.metric == "raw_relative_loss" and result.model.checkpoint == "best"
    assert result.model.describe().startswith("raw weights with the best relative loss, ")


def scripted(monkeypatch: pytest.MonkeyPatch, values: dict[int, float]) -> None:
    """Give validations these accuracies; weights and losses stay as they are."""
    evaluate = Validator.evaluate

    def pretend(self: Validator, step: int) -> Any:
        validation = evaluate(self, step)
        assert validation is not None
        validation.metrics["accuracy"] = values[step]
        return validation

    monkeypatch.setattr(Validator, "evaluate", pretend)


RISE_AND_FALL = {1: 0.1, 2: 0.3, 3: 0.6, 4: 0.6, 5: 0.5, 6: math.nan, 7: 0.2, 8: 0.55}


def stopped_at(step: int, out: Path) -> dict[str, torch.Tensor]:
    """The weights of an unbroken run of the same schedule, after `step` steps."""
    from vitrail.train.loop import Loop

    kept: dict[str, torch.Tensor] = {}
    next_step = Loop._next_step

    def watch(self: Loop) -> None:
        next_step(self)
        if self.done == step:
            average = self.step.average
            assert average is not None
            with average.applied():
                kept.update({name: value.detach().clone() for name, value in self.prepared.model.state_dict().items()})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Loop, "_next_step", watch)
        train(small(**EVERY_STEP), out)
    return kept


@pytest.mark.slow
def test_the_best_is_in_model_and_the_last_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = stopped_at(3, tmp_path / "plain")
    scripted(monkeypatch, RISE_AND_FALL)
    recorder = Recorder()
    result = train(small(**EVERY_STEP, keep_best="accuracy"), tmp_path / "run", callbacks=[recorder])
    assert result.model is not None and result.steps == 8 and not result.stopped_early
    assert result.model.describe() == "averaged weights with the best accuracy, 60.00%, of step 3 of 8"
    assert same(weights(tmp_path / "run"), expected)
    last = vitrail.load(tmp_path / "run" / "model-last")
    assert same(dict(last.model.state_dict()), weights(tmp_path / "plain"))
    assert last.provenance["checkpoint"] == {"checkpoint": "last", "step": 8, "steps_taken": 8, "weights": "averaged"}
    best = vitrail.load(tmp_path / "run").provenance
    assert best["checkpoint"]["metric"] == "accuracy" and best["steps"] == 3 and "best accuracy, 60.00%" in best["weights"]
    records = RunFolder(tmp_path / "run").records()
    assert [one["step"] for one in records if one.get("best")] == [1, 2, 3]
    assert records[-1]["model"] == best["checkpoint"] and records[-1]["stopped_early"] is False
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == [
        "step-00000003", "step-00000006", "step-00000008",
    ]  # fmt: skip
    again = train(small(**EVERY_STEP, keep_best="accuracy"), tmp_path / "run")
    assert again.before and again.model == result.model and again.metrics == pytest.approx(result.metrics, nan_ok=True)


@pytest.mark.slow
def test_model_holds_the_last_by_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, RISE_AND_FALL)
    result = train(small(**EVERY_STEP, keep_best="accuracy", final_model="last"), tmp_path / "run")
    assert result.model is not None and result.model.describe() == "averaged weights of the last step, 8"
    assert vitrail.load(tmp_path / "run" / "model-best").provenance["steps"] == 3
    assert not (tmp_path / "run" / "model-last").exists()
    # The other way round from the same checkpoints: nothing is trained again, and nothing old stays.
    recorder = Recorder()
    changed = small(**EVERY_STEP, keep_best="accuracy", final_model="best")
    result = train(changed, tmp_path / "run", callbacks=[recorder], allow_change=["final_model"])
    assert not recorder.records and result.model is not None and result.model.step == 3
    assert (tmp_path / "run" / "model-last").exists() and not (tmp_path / "run" / "model-best").exists()


@pytest.mark.slow
def test_the_best_may_be_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, {step: step / 10 for step in range(1, 9)})
    result = train(small(**EVERY_STEP, keep_best="accuracy"), tmp_path / "run")
    assert result.model is not None and (result.model.checkpoint, result.model.step) == ("best", 8)
    assert not list((tmp_path / "run").glob("model-*"))


@pytest.mark.slow
def test_the_best_is_saved_also_between_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, RISE_AND_FALL)
    result = train(small(**EVERY_STEP, keep_best="accuracy", checkpoint_every=5), tmp_path / "run")
    assert result.model is not None and result.model.step == 3


@pytest.mark.slow
def test_without_a_finite_value_the_last_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, dict.fromkeys(range(1, 9), math.nan))
    recorder = Recorder()
    result = train(small(**EVERY_STEP, keep_best="accuracy"), tmp_path / "run", callbacks=[recorder])
    assert result.model is not None and result.model.checkpoint == "last"
    assert any("not finite in any validation" in note for note in recorder.notes)


@pytest.mark.slow
def test_a_corrupted_best_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, RISE_AND_FALL)
    recipe = small(**EVERY_STEP, keep_best="accuracy")
    interrupted(recipe, tmp_path / "run", monkeypatch, 7)
    best = tmp_path / "run" / "checkpoints" / "step-00000003"
    next(best.glob("*.distcp")).write_bytes(b"")
    assert damage(best)
    recorder = Recorder()
    result = train(recipe, tmp_path / "run", callbacks=[recorder])
    assert result.model is not None and result.model.checkpoint == "last"
    assert any("best checkpoint, of step 3, is corrupted" in note for note in recorder.notes)
    assert not list((tmp_path / "run").glob("model-*"))


@pytest.mark.slow
@pytest.mark.parametrize("at", [3, 5, 7])
def test_a_resumed_run_keeps_the_best(at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, RISE_AND_FALL)
    recipe = small(**EVERY_STEP, keep_best="accuracy", keep=1, checkpoint_every=2)
    whole = train(recipe, tmp_path / "whole")
    interrupted(recipe, tmp_path / "run", monkeypatch, at)
    resumed = train(recipe, tmp_path / "run")
    assert resumed.model == whole.model and same(weights(tmp_path / "run"), weights(tmp_path / "whole"))
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    assert validations(tmp_path / "run") == validations(tmp_path / "whole")


def validations(out: Path) -> list[str]:
    return [json.dumps(one) for one in RunFolder(out).records() if one["kind"] == "val"]


@pytest.mark.slow
def test_a_run_stops_early_and_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, RISE_AND_FALL)
    recorder = Recorder()
    recipe = small(**EVERY_STEP, patience=3)
    result = train(recipe, tmp_path / "run", callbacks=[recorder])
    assert (result.steps, result.stopped_early) == (6, True) and result.model is not None and result.model.checkpoint == "last"
    said = "stopped early at step 6 of 8: accuracy has not improved in 3 validations; the best was 60.00% at step 3"
    assert said in recorder.notes
    assert RunFolder(tmp_path / "run").records()[-1]["stopped_early"] and train(recipe, tmp_path / "run").before
    more = train(small(**EVERY_STEP, patience=9), tmp_path / "run", allow_change=["patience"])
    assert (more.steps, more.stopped_early) == (8, False)


@pytest.mark.slow
@pytest.mark.parametrize("at", [3, 5])
def test_a_resumed_run_keeps_the_count(at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, RISE_AND_FALL)
    recipe = small(**EVERY_STEP, patience=3, keep_best="accuracy", log_every=4)
    whole = train(recipe, tmp_path / "whole")
    interrupted(recipe, tmp_path / "run", monkeypatch, at)
    resumed = train(recipe, tmp_path / "run")
    assert (resumed.steps, resumed.model) == (6, whole.model) and losses(tmp_path / "run") == losses(tmp_path / "whole")
    assert losses(tmp_path / "run")[-1][0] == 6  # the steps since the last record are logged too
    assert same(weights(tmp_path / "run"), weights(tmp_path / "whole"))


@pytest.mark.slow
def test_a_run_killed_between_stopping_and_ending_stops_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vitrail.train.loop import Loop

    scripted(monkeypatch, RISE_AND_FALL)
    recipe = small(**EVERY_STEP, patience=3)

    def die(self: Loop, stop: object) -> Result:
        self.snapshots.finish()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Loop, "_finish", die)
        train(recipe, tmp_path / "run")
    before = validations(tmp_path / "run")
    result = train(recipe, tmp_path / "run")
    assert (result.steps, result.stopped_early) == (6, True) and validations(tmp_path / "run") == before


@pytest.mark.slow
def test_raw_and_averaged_weights_are_both_measured(tmp_path: Path) -> None:
    recipe = small(**EVERY_STEP, ema=0.9)
    seen: dict[str, Any] = {}

    def make(prepared: Prepared, world: Any) -> Any:
        def norm(model: Any) -> dict[str, float]:
            seen["during"] = model.head.weight.detach().norm().item()
            return {"head_norm": seen["during"]}

        return norm

    train(recipe, tmp_path / "run", evaluators=[make])
    records = [one for one in RunFolder(tmp_path / "run").records() if one["kind"] == "val"]
    assert all({"loss", "accuracy", "raw_loss", "raw_accuracy", "raw_balanced_accuracy"} <= one.keys() for one in records)
    assert "raw_images" not in records[0] and records[-1]["raw_loss"] != records[-1]["loss"]
    averaged = vitrail.load(tmp_path / "run").model.head.weight
    assert records[-1]["head_norm"] == pytest.approx(averaged.norm().item())  # evaluators see the averaged weights
    end = RunFolder(tmp_path / "run").end()
    assert end is not None and end["loss"] == records[-1]["loss"] and "raw_loss" not in end
    plain = small(**EVERY_STEP, ema=0.0)
    train(plain, tmp_path / "plain")
    without = [one for one in RunFolder(tmp_path / "plain").records() if one["kind"] == "val"]
    assert not any(name.startswith("raw_") for one in without for name in one)
    # The same steps are taken, so the raw weights are those of the run without averaging.
    assert np.allclose([one["raw_loss"] for one in records], [one["loss"] for one in without])


@pytest.mark.slow
def test_the_best_raw_weights_can_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The third step counts as the best: which loss really is the lowest depends on the CPU, and may be the last."""
    update = Selection.update
    monkeypatch.setattr(
        Selection, "update", lambda self, metrics, step: update(self, {**metrics, self.metric: abs(step - 3)}, step)
    )
    result = train(small(**EVERY_STEP, keep_best="raw_loss"), tmp_path / "run")
    third = next(one for one in RunFolder(tmp_path / "run").records() if one["kind"] == "val" and one["step"] == 3)
    assert result.model is not None and (result.model.weights, result.model.step) == ("raw", 3)
    assert result.metrics["loss"] == pytest.approx(third["raw_loss"]) and "raw_loss" not in result.metrics
    assert vitrail.load(tmp_path / "run" / "model-last").provenance["checkpoint"]["weights"] == "averaged"
    train(small(**EVERY_STEP, ema=0.0, keep_best="loss"), tmp_path / "plain")
    assert same(weights(tmp_path / "run"), weights(tmp_path / "plain"))
