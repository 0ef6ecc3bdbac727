"""Learning without labels through the one loop: it learns, resumes, accumulates, stops in time, and leaves a plain checkpoint."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail
from tests.train.small import Recorder, losses, same, train, weights
from vitrail.cli import main
from vitrail.data.augment.spec import Augment
from vitrail.errors import VitrailError
from vitrail.models import flops
from vitrail.tasks.masked import Masked
from vitrail.train.config import DataSpec, ModelSpec, OptimSpec, Recipe, ScheduleSpec, TaskSpec
from vitrail.train.loop import Loop
from vitrail.train.memory import SimulatedModel, simulate
from vitrail.train.plan import config_of, make_plan
from vitrail.train.run import RunFolder

pytestmark = pytest.mark.slow  # each test trains, or uses a run that was trained for it

TASKS: dict[str, TaskSpec] = {
    "mean-colour": TaskSpec(kind="masked-patch"),
    "downsized": TaskSpec(kind="masked-patch", patch_target="downsized"),
    "pixels": TaskSpec(kind="masked-patch", patch_target="pixels"),
    "mae": TaskSpec(kind="masked-autoencoder", decoder_width=32, decoder_depth=2),
}


def recipe_of(task: TaskSpec, **changes: Any) -> Recipe:
    """The digits, 16 patches each, on one thread."""
    scale = 2 if task.patch_target == "downsized" else 1
    settings: dict[str, Any] = {
        "name": "masked",
        "model": ModelSpec(name="ViT-Ti/4", patch=2 * scale, image_size=8 * scale, channels=1, width=64, depth=2, heads=2, mlp=128),
        "data": DataSpec(source="digits", workers=0, holdout=0.1),
        "augment": Augment(crop_area=(0.7, 1.0), flip=0.0),
        "task": task,
        "optim": OptimSpec(lr=2e-3, weight_decay=0.05),
        "schedule": ScheduleSpec(warmup=10),
        "steps": 80 if task.patch_target == "downsized" else 60,  # sixteen predictions a patch take longer
        "batch": 64,
        "ema": 0.9,
        "eval_every": 0,
        "log_every": 20,
        "threads": 1,
    }
    for name, value in changes.items():
        outer, _, inner = name.partition("__")
        settings[outer] = dataclasses.replace(settings[outer], **{inner: value}) if inner else value
    return Recipe(**settings)


class Runs(dict[str, Path]):
    """Finished runs by task, each made when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def __missing__(self, name: str) -> Path:
        recorder = Recorder()
        train(recipe_of(TASKS[name], model__pooling="mean"), self.folder / name, callbacks=[recorder], curves=True)
        assert any("the best constant prediction costs" in note for note in recorder.notes)
        self[name] = self.folder / name
        return self[name]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("runs"))


@pytest.mark.parametrize("name", TASKS)
def test_it_learns_more_than_a_constant_can_say(name: str, runs: Runs) -> None:
    records = RunFolder(runs[name]).records()
    end = records[-1]
    assert end["headline"] == "relative_loss" and end["relative_loss"] < 0.92
    assert end["relative_loss"] == pytest.approx(end["loss"] / end["constant_loss"])
    trained = [one for one in records if one["kind"] == "train"]
    assert trained[-1]["relative_loss"] < trained[0]["relative_loss"]
    assert trained[0]["target_entropy"] == trained[-1]["target_entropy"] == pytest.approx(2.5, abs=0.2)
    assert trained[-1]["constant_loss"] == pytest.approx(end["constant_loss"], rel=0.2)
    assert (runs[name] / "figures" / "curves.png").exists()


@pytest.mark.parametrize("name", TASKS)
def test_the_model_is_a_plain_headless_checkpoint_and_the_rest_is_stored_next_to_it(name: str, runs: Runs) -> None:
    from safetensors.torch import load_file

    bundle = vitrail.load(runs[name], verify="full")
    assert (bundle.head, bundle.task, bundle.classes) == ("none", "unlabelled", None)
    assert bundle.task_info["kind"] == TASKS[name].kind
    parts = load_file(runs[name] / "reconstruction" / "parts.safetensors")
    assert {"mask_token", "head.weight", "head.bias"} <= parts.keys() and not any("encoder" in key for key in parts)
    with pytest.raises(VitrailError, match=r"no head.*finetune"):
        bundle.predict(torch.zeros(1, 1, *bundle.model.config.image_size))


def test_fine_tuning_says_what_it_leaves_behind(runs: Runs, tmp_path: Path) -> None:
    for name, dropped in (("mean-colour", "mask_token, head.weight, head.bias"), ("mae", "decoder_blocks (24 tensors)")):
        recorder = Recorder()
        model = ModelSpec(start=str(runs[name]))
        train(recipe_of(TaskSpec(), model=model, steps=12, ema=0.0), tmp_path / name, callbacks=[recorder])
        note = next(note for note in recorder.notes if note.startswith("dropped: "))
        assert dropped in note and TASKS[name].kind in note
        assert any("head: new, zero-initialised, 10 outputs (the checkpoint had none)" in note for note in recorder.notes)
        assert vitrail.load(tmp_path / name).head == "set"


def test_starting_from_a_labelled_checkpoint(runs: Runs, tmp_path: Path) -> None:
    train(recipe_of(TaskSpec(), steps=12, ema=0.0), tmp_path / "labelled")
    recorder = Recorder()
    start = ModelSpec(start=str(tmp_path / "labelled"))
    train(recipe_of(TASKS["pixels"], model=start, steps=12), tmp_path / "run", callbacks=[recorder])
    assert any(note.startswith("head: left out (the checkpoint had 10)") for note in recorder.notes)


class Enough(Exception):
    """Stands in for a crash."""


@pytest.mark.parametrize("name", ["mean-colour", "mae"])
def test_a_resumed_run_is_the_same_bit_for_bit(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_of(TASKS[name], steps=12, checkpoint_every=4, log_every=2, model__dropout=0.1, micro_batch=24)
    train(recipe, tmp_path / "whole")
    original = Loop._next_step

    def crash(self: Loop) -> None:
        if self.done == 6:
            self.snapshots.finish()
            raise Enough
        original(self)

    with monkeypatch.context() as patch:
        patch.setattr(Loop, "_next_step", crash)
        with pytest.raises(Enough):
            train(recipe, tmp_path / "run")
    train(recipe, tmp_path / "run")
    assert same(weights(tmp_path / "run"), weights(tmp_path / "whole"))
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    files = [tmp_path / one / "reconstruction" / "parts.safetensors" for one in ("run", "whole")]
    assert files[0].read_bytes() == files[1].read_bytes()


def of_the_image(task: Masked, images: torch.Tensor) -> torch.Tensor:
    """Noise that an image has wherever it is computed."""
    mixed = images.flatten(1).double() @ torch.linspace(1, 2, images[0].numel(), dtype=torch.float64)
    spread = torch.arange(1, 1 + task._fixed[0].numel(), dtype=torch.float64)
    return ((mixed[:, None] * spread).sin() * 1e4 % 1).float().reshape(len(images), *task._fixed.shape[1:])


def test_the_division_into_micro_batches_does_not_change_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Masked, "draw", of_the_image)
    for size in (64, 16, 24):
        recipe = recipe_of(TASKS["mae"], steps=5, micro_batch=size, ema=0.0, schedule__warmup=1, optim__name="sgd", optim__lr=0.1)
        train(recipe, tmp_path / str(size))
    one = weights(tmp_path / "64")
    for size in (16, 24):
        other = weights(tmp_path / str(size))
        assert max(float((one[name] - other[name]).abs().max()) for name in one) < 1e-5


def test_a_planted_nan_is_found_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vitrail.models.masked import MaskedPatches

    def wrong_reset(self: MaskedPatches, generator: torch.Generator | None = None) -> None:
        torch.nn.init.constant_(self.mask_token, float("nan"))

    monkeypatch.setattr(MaskedPatches, "reset", wrong_reset)
    with pytest.raises(VitrailError, match="the weight mask_token itself is not finite"):
        train(recipe_of(TASKS["mean-colour"], steps=3, schedule__warmup=1), tmp_path / "run")


def folder_of(place: Path, pixels: np.ndarray) -> str:
    place.mkdir()
    for number, one in enumerate(pixels):
        Image.fromarray(one.astype(np.uint8)).save(place / f"{number}.png")
    return f"folder:{place}?labels=none"


def test_no_labels_are_needed(tmp_path: Path) -> None:
    from sklearn.datasets import load_digits

    source = folder_of(tmp_path / "images", np.asarray(load_digits().images[:80] * 15.9))
    recorder = Recorder()
    recipe = recipe_of(TASKS["mean-colour"], data__source=source, data__holdout=0.2, steps=3, batch=32, schedule__warmup=1)
    result = train(recipe, tmp_path / "run", callbacks=[recorder])
    assert result.metrics["images"] == 16 and any("no labels" in note for note in recorder.notes)
    with pytest.raises(VitrailError, match=r"train without labels: --task\.kind masked-patch"):
        train(recipe.replace(task=TaskSpec()), tmp_path / "other")


def test_degenerate_targets_stop_the_run_before_it_begins(tmp_path: Path) -> None:
    source = folder_of(tmp_path / "dark", np.random.default_rng(0).integers(0, 3, (40, 8, 8)))
    for name in TASKS:
        with pytest.raises(VitrailError, match=r"All targets fall in 1 of 8 bins.*images look un-normalised"):
            train(recipe_of(TASKS[name], data__source=source, batch=32), tmp_path / name)
        assert not (tmp_path / name / "metrics.jsonl").exists()


def test_what_does_not_go_together_is_refused_with_a_reason(tmp_path: Path) -> None:
    masked = TASKS["mean-colour"]
    with pytest.raises(VitrailError, match=r"augment.mixup, augment.smoothing cannot.*--augment.mixup 0 --augment.smoothing 0"):
        recipe_of(masked, augment__mixup=0.2, augment__smoothing=0.1)
    with pytest.raises(VitrailError, match=r"without labels, so optim\.layer_decay cannot be used with it"):
        recipe_of(masked, optim__layer_decay=0.5)
    with pytest.raises(VitrailError, match=r"task.patch_target goes with --task.kind masked-patch, not with classify"):
        TaskSpec(kind="classify", patch_target="pixels") and recipe_of(TaskSpec(kind="classify", patch_target="pixels"))
    with pytest.raises(VitrailError, match=r"BiT-R26x1 is a ResNet: it has no patch embeddings"):
        train(recipe_of(masked, model=ModelSpec(name="BiT-R26x1", image_size=32, channels=1)), tmp_path / "bit")
    with pytest.raises(VitrailError, match="pools by attention"):
        train(recipe_of(masked, model__pooling="map"), tmp_path / "map")


def test_a_hybrid_learns_and_is_warned_about(tmp_path: Path) -> None:
    model = ModelSpec(name="R26+ViT-S/32", image_size=64, channels=1, width=32, depth=1, heads=1, mlp=32)
    recorder = Recorder()
    data = DataSpec(source="digits", workers=0, holdout=0.02)
    recipe = recipe_of(TASKS["mean-colour"], model=model, data=data, steps=1, batch=4, schedule__warmup=0, ema=0.0)
    result = train(recipe, tmp_path / "run", callbacks=[recorder])
    assert np.isfinite(result.metrics["loss"])
    assert any("looks beyond the borders of a patch" in note for note in recorder.notes)


def test_plans_know_the_parts() -> None:
    model = ModelSpec(name="ViT-Ti/16", image_size=64, depth=4)
    simulated = SimulatedModel(config_of(model, 0), TASKS["mae"])
    made = make_plan(Recipe(model=model, task=TASKS["mae"], batch=64, epochs=1), gpus=1, memory=8, micro_batch=64)
    whole = simulated.without_memory()
    assert (
        made.parameters == sum(one.numel() for one in whole.parameters()) > sum(one.numel() for one in whole.encoder.parameters())
    )
    assert made.flops == 3 * 64 * whole.flops() < 3 * 64 * 0.5 * flops(simulated.config)
    other = SimulatedModel(simulated.config, TASKS["mean-colour"])
    assert made.needs[0].activations < 0.8 * simulate(other, 64, precision="bf16").activations
    with pytest.raises(VitrailError, match="ResNet without patches"):
        make_plan(Recipe(model=ModelSpec(name="BiT-R50x1"), task=TASKS["mae"], epochs=1), gpus=1, memory=8)


def test_planned_activations_are_what_autograd_saves() -> None:
    config, batch, saved = config_of(ModelSpec(name="ViT-Ti/16", image_size=64, depth=3), 0), 16, dict[int, int]()
    simulated = SimulatedModel(config, TASKS["pixels"])
    model, around, task = simulated.build()
    vitrail.models.initialise(model, 0)
    around.reset()
    own = {one.untyped_storage().data_ptr() for one in around.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = task.objective(around, torch.randn(batch, 3, 64, 64), torch.zeros(batch))
    del loss
    by_image = (simulate(simulated, 2 * batch, precision="fp32").peak - simulate(simulated, batch, precision="fp32").peak) / batch
    assert by_image == pytest.approx(sum(saved.values()) / batch + 3 * 64 * 64 * 4, rel=0.15)


def command(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str]:
    with pytest.raises(SystemExit) as exit_:
        main([str(word) for word in words])
    out, err = capsys.readouterr()
    return int(exit_.value.code or 0), out + err


@pytest.mark.parametrize("name", TASKS)
def test_reconstructions_are_drawn(name: str, runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "painted"
    status, said = command(capsys, "inspect", runs[name], "--what", "reconstruction", "--out", out, "--show", 3, "--device", "cpu")
    assert status == 0 and "reconstruction" in said
    picture = np.asarray(Image.open(out / "reconstruction.png").convert("RGB"))
    assert picture.std() > 20
    stored = np.load(out / "reconstruction.npz")
    shown, hidden = ("reconstructed", "visible") if name == "mae" else ("predicted", "corrupted")
    assert stored["original"].shape == stored[shown].shape == stored[hidden].shape
    assert not np.array_equal(stored["original"], stored[hidden]) and not np.array_equal(stored[hidden], stored[shown])
    assert "of the loss of the best constant prediction" in (out / "index.html").read_text()
    assert len((out / "reconstruction.csv").read_text().splitlines()) == 4


def test_commands_know_a_model_without_labels(runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, said = command(capsys, "info", runs["mae"], "--json")
    assert status == 0 and json.loads(said)["provenance"]["task"]["kind"] == "masked-autoencoder"
    not_a_run = tmp_path / "notes"
    not_a_run.mkdir()
    (not_a_run / "notes.md").write_text("no run here")
    status, said = command(capsys, "inspect", not_a_run, "--what", "reconstruction", "--out", tmp_path / "no")
    assert status == 2 and "--data" in said
    status, said = command(
        capsys, "fewshot", runs["mae"], "--data", "digits", "--shots", 5, "--feature", "mean", "--out", "None", "--device", "cpu"
    )
    assert status == 0 and "5" in said
    words = ("train", "digits", "--task.kind", "masked-patch", "--augment.smoothing", "0", "--augment.mixup", "0", "--steps", "3")
    status, said = command(capsys, *words, "--schedule.warmup", "1", "--out", tmp_path / "run", "--threads", "1", "--plain")
    assert status == 0 and "of the best constant prediction" in said and "--what reconstruction" in said


def test_a_run_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "painted"
    status, said = command(capsys, "inspect", tmp_path / "nowhere", "--what", "reconstruction", "--out", out)
    assert status == 2 and "There is no image, folder or checkpoint" in said and "nowhere" in said and not out.exists()
