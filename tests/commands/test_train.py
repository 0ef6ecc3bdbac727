"""`vitrail train`, `finetune` and `plan`, as a user types them."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console

import vitrail
from vitrail.api.image_check import ImageCheck
from vitrail.cli import main
from vitrail.commands.training_display import LiveDisplay
from vitrail.data import Split, open_source
from vitrail.data.types import BadImage
from vitrail.errors import VitrailError
from vitrail.models import create_model
from vitrail.train.callbacks import RunInfo
from vitrail.train.config import Recipe
from vitrail.train.parallel import World
from vitrail.train.run import RunFolder

SHORT = [
    "--steps",
    "3",
    "--schedule.warmup",
    "1",
    "--model.width",
    "32",
    "--model.heads",
    "1",
    "--model.depth",
    "1",
    "--model.mlp",
    "32",
    "--no-report",  # it takes longer than such a run; tests/api/test_run_report.py has it
]


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as exit_:
        main(words)
    out, err = capsys.readouterr()
    assert not logging.getLogger("vitrail").handlers, "a handler is left, and would show warnings of later commands"
    return int(exit_.value.code or 0), out, err


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three classes of thirty images each: colours in noise, of several sizes."""
    folder = tmp_path_factory.mktemp("photos")
    chance = np.random.default_rng(0)
    for place, colour in enumerate(("red", "green", "blue")):
        (folder / colour).mkdir()
        for number in range(30):
            height, width = chance.integers(40, 80, 2)
            pixels = chance.integers(0, 120, (height, width, 3))
            pixels[..., place] += 120
            Image.fromarray(pixels.astype(np.uint8)).save(folder / colour / f"{number}.jpg")
    return folder


def test_train_says_what_differs_what_happens_and_what_next(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    status, out, _ = run(capsys, "train", *SHORT, "--optim.lr", "3e-4", "--out", str(tmp_path / "run"))
    assert status == 0
    for words in ("Differs from the recipe digits", "optim.lr", "0.002", "0.0003", "data: digits", "batch: 64 = 64 at once × 1 × 1",
                  "weight decay 0.05 (scaled-by-lr)", "step 3/3", "validation: accuracy", "vitrail eval"):  # fmt: skip
        assert words in out, words
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["recipe"]["optim"]["lr"] == 3e-4 and config["resolved"]["steps"] == 3
    status, out, _ = run(capsys, "train", *SHORT, "--optim.lr", "3e-4", "--out", str(tmp_path / "run"))
    assert status == 0 and "was finished already" in out
    status, _, err = run(capsys, "train", *SHORT, "--optim.lr", "1e-3", "--out", str(tmp_path / "run"))
    assert status == 2 and "optim.lr: 0.0003 → 0.001" in err and "Traceback" not in err


def test_json_for_programs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    status, out, _ = run(capsys, "train", *SHORT, "--out", str(tmp_path / "run"), "--json", "--tensorboard")
    found = json.loads(out)
    assert status == 0 and found["finished"] and found["steps"] == 3 and 0 <= found["metrics"]["accuracy"] <= 1
    assert list((tmp_path / "run" / "tensorboard").glob("events*"))


def test_the_best_checkpoint_and_early_stopping_are_said(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["train", *SHORT, "--steps", "9", "--eval-every", "0.1", "--keep-best", "loss", "--patience", "1", "--ema", "0.5"]
    status, out, err = run(capsys, *words, "--min-improvement", "5", "--plain", "--out", str(tmp_path / "run"))
    assert status == 0, err
    assert "; best loss so far" in out and "; raw weights: accuracy" in out
    assert "stopped early at step 4 of 9: loss has not improved by more than 5 in 1 validation;" in out
    assert f"{tmp_path / 'run' / 'model'}: averaged weights with the best loss" in out and "4 steps, stopped early" in out
    status, out, _ = run(capsys, *words, "--min-improvement", "5", "--json", "--out", str(tmp_path / "run"))
    found = json.loads(out)
    assert found["stopped_early"] and found["model"]["metric"] == "loss" and "loss" in found["metrics"]
    status, out, _ = run(capsys, "info", str(tmp_path / "run"))
    assert "averaged weights with the best loss" in out
    status, _, err = run(capsys, "train", *SHORT, "--keep-best", "acuracy", "--out", str(tmp_path / "other"))
    assert status == 2 and "Did you mean accuracy" in err


def test_explain_shows_the_update_and_trains_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    status, out, _ = run(capsys, "train", "digits", "--explain", "--out", str(tmp_path / "run"))
    assert status == 0 and "p −= s·0.002·(u + 0.05·p)" in out and "Parameter groups" in out
    assert not (tmp_path / "run").exists()


def test_mistakes_are_answered(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "Did you mean digits" in run(capsys, "train", "digitz")[2]
    status, out, err = run(capsys, "train", "--optim.lrr", "1")
    assert status == 2 and "optim.lr" in out + err
    assert "add --data, such as" in run(capsys, "train", "tiny-imagenet", "--out", str(tmp_path / "x"))[2]
    assert "add --from" in run(capsys, "finetune", "--data", "x")[2]
    assert "add --data" in run(capsys, "finetune", "--from", "x")[2]
    assert "data.workers is -1" in run(capsys, "train", "digits", "--workers", "-1", "--out", str(tmp_path / "x"))[2]


@pytest.mark.slow
def test_a_warm_up_as_it_is_written_on_the_command_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Two ways of writing the same length are the same run."""
    words = ["train", *SHORT, "--steps", "8", "--plain", "--out", str(tmp_path / "run")]
    status, out, err = run(capsys, *words, "--schedule.warmup", "25%")
    assert status == 0 and "schedule: cosine over 8 steps, warm-up 25 % of the run = 2 steps" in out, err
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["recipe"]["schedule"]["warmup"] == "25%" and config["resolved"]["warmup_steps"] == 2
    status, out, _ = run(capsys, *words, "--schedule.warmup", "25.0 %")
    assert status == 0 and "was finished already" in out
    status, _, err = run(capsys, *words, "--schedule.warmup", "2")
    assert status == 2 and "schedule.warmup: '25%' → 2" in err
    for wrong in ("0.05", "many"):
        status, out, err = run(capsys, *words, "--schedule.warmup", wrong)
        assert status == 2 and "10ep" in out + err and "Traceback" not in out + err
    status, out, _ = run(capsys, "plan", "digits", "--model.depth", "1", "--schedule.warmup", "10ep")
    assert status == 0 and "schedule: cosine over 40 epochs, warm-up 10 epochs" in out


@pytest.mark.slow
def test_parts_of_a_model_are_shown_before_anything_is_trained(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["--model.freeze", "--optim.freeze", "!*.norm?", "--optim.lr-scale", "head=10", "--optim.weight-decay-for", "head=0.5"]
    status, out, err = run(capsys, "train", "digits", *words, "--explain", "--out", str(tmp_path / "run"))
    assert status == 0 and "frozen" in out and "0.02" in out and "blocks.*.norm1.weight" in out, err
    words += ["--model.depth", "1"]
    status, out, _ = run(capsys, "plan", "digits", *words, "--json")
    groups = json.loads(out)["groups"]
    assert status == 0 and [(group["scale"], group["weight_decay"], group["frozen"]) for group in groups] == [
        (1.0, 0.0, False),
        (10.0, 0.5, False),
        (0.0, 0.0, True),
    ]
    status, out, _ = run(capsys, "plan", "digits", *words)
    assert status == 0 and "Parameter groups" in out and "frozen" in out
    status, _, err = run(capsys, "plan", "digits", "--optim.freeze", "block.0")
    assert status == 2 and "matches none of the 56 parameters. Did you mean blocks.0" in err


def test_recipes_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "train", "--recipes", "--json")
    rows = json.loads(out)
    assert status == 0 and {"digits", "vit-b16-imagenet", "finetune-cifar10"} <= {row["name"] for row in rows}
    out = run(capsys, "train", "--recipes")[1]
    assert "vit-h14-jft" in out and {row["what"] for row in rows} <= set(out.splitlines())  # headings are not wrapped


def test_finetune_names_all_bad_images_and_empty_classes_before_the_first_step(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("cat", "dog"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(6):
            Image.fromarray(np.full((20, 20, 3), 9 * number, np.uint8)).save(tmp_path / "photos" / name / f"{number}.png")
    (tmp_path / "photos" / "cat" / "3.png").write_text("not a photograph at all")
    (tmp_path / "photos" / "dog" / "4.png").write_bytes(b"")
    words = ["finetune", "--from", str(tmp_path / "none.npz"), "--data", str(tmp_path / "photos"), "--out", str(tmp_path / "run")]
    status, _, err = run(capsys, *words)
    assert status == 2 and "2 of 12 images cannot be read" in err and "3.png: a text file" in err and "4.png: an empty file" in err
    assert "--bad-images skip" in err and not (tmp_path / "run").exists()
    with monkeypatch.context() as patch:
        opened = list[str]()
        patch.setattr("vitrail.train.prepare.open_source", lambda ref, **more: opened.append(ref) or open_source(ref, **more))
        run(capsys, *words)
        assert len(opened) == 1, "the images are listed once for the check and for training"
    for more in (["--check-images", "none"], ["--bad-images", "skip"]):  # the checkpoint, which does not exist, comes next
        assert "none.npz" in run(capsys, *words, *more)[2]
    assert "it can be auto, all or none" in run(capsys, *words, "--check-images", "some")[2]
    (tmp_path / "photos" / "eel").mkdir()
    status, _, err = run(capsys, *words)
    assert status == 2 and "The class 'eel'" in err and "has no training images. Add images to its folder" in err


@pytest.mark.slow
def test_finetune_a_folder_from_a_published_file_and_predict(
    capsys: pytest.CaptureFixture[str], photos: Path, tmp_path: Path
) -> None:
    from vitrail.checkpoints import load, save, write

    save(tmp_path / "body", create_model("ViT-Ti/16", outputs=21, image_size=64, seed=0))
    write(load(tmp_path / "body"), tmp_path / "Ti_16.npz", "google")
    words = ["finetune", "--from", str(tmp_path / "Ti_16.npz"), "--data", str(photos), "--out", str(tmp_path / "run")]
    status, out, err = run(capsys, *words, "--steps", "12", "--schedule.warmup", "2", "--data.workers", "0")
    assert status == 0, err
    assert "head: new, zero-initialised, 3 outputs (the checkpoint had 21)" in out
    bundle = vitrail.load(tmp_path / "run")
    assert bundle.classes == ("blue", "green", "red") and bundle.model.config.image_size == (64, 64)
    answers = bundle.predict([photos / "red" / "0.jpg", photos / "blue" / "3.jpg"], top=1)
    assert [row[0].label for row in answers] == ["red", "blue"]


@pytest.mark.slow
def test_a_sweep_finds_the_learning_rate_and_does_not_repeat_itself(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["train", *SHORT, "--sweep", "--lr-grid", "1e-5", "3e-3", "--out", str(tmp_path / "run"), "--steps", "12"]
    status, out, _ = run(capsys, *words)
    assert status == 0 and "best learning rate: 0.003" in out
    assert json.loads((tmp_path / "run" / "config.json").read_text())["recipe"]["optim"]["lr"] == 3e-3
    before = (tmp_path / "run" / "sweep" / "lr-1e-05" / "metrics.jsonl").stat().st_mtime_ns
    run(capsys, *words)
    assert (tmp_path / "run" / "sweep" / "lr-1e-05" / "metrics.jsonl").stat().st_mtime_ns == before


@pytest.mark.slow
def test_plan(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "digits", "--gpus", "2", "--memory", "1", "--model.depth", "1"]
    status, out, err = run(capsys, *words)
    assert status == 0 and "largest micro-batch" in out and "fsdp" in out
    assert "ddp, 8 images at once: " in err and "fsdp, 8 images at once: " in err  # each simulated step, as it comes
    found = json.loads(run(capsys, *words, "--json")[1])
    assert [need["engine"] for need in found["needs"]] == ["ddp", "fsdp"] and found["needs"][0]["total"] > 0
    assert "1 to 4096" in run(capsys, "plan", "digits", "--gpus", "0")[2]
    assert "Error parsing --gpus" in run(capsys, "plan", "digits", "--gpus", "some")[2]


def test_the_live_display_shows_everything(tmp_path: Path) -> None:
    console = Console(force_terminal=True, width=100, record=True)
    display = LiveDisplay(console)
    info = RunInfo(name="digits", out=tmp_path, steps=100, steps_per_epoch=20, first=0, headline="accuracy", config={"batch": 64})
    display.started(info)
    speed = {"images_per_second": 640.0, "mfu": 0.412, "data_wait": 0.03, "memory": 2**31, "seconds": 1.0}
    display.trained({"step": 50, "epoch": 2.5, "loss": 0.5, "lr": 1e-3, "grad_norm": 0.7, "skipped": 0, "speed": speed})
    display.validated({"step": 50, "epoch": 2.5, "accuracy": 0.97, "loss": 0.1})
    with console.capture() as shown:
        console.print(display._shown())
    display.closed()
    for words in ("50/100", "ETA 0:00:05", "0.5000", "0.001", "640", "41.2%", "3%", "2.00 GiB", "accuracy 97.00%"):
        assert words in shown.get(), words


@pytest.mark.slow
def test_few_shot_accuracy_is_measured_along_the_way(tmp_path, capsys):
    out = tmp_path / "run"
    words = ["--steps", "40", "--schedule.warmup", "5", "--few-shot", "1", "5", "--eval-every", "0.9", "--plain"]
    with pytest.raises(SystemExit) as ended:
        main(["train", "digits", *words, "--out", str(out)])
    assert not ended.value.code
    measured = [one for one in RunFolder(out).records() if one["kind"] == "val"]
    assert len(measured) == 2 and all(0.2 < one["1shot"] < one["5shot"] <= 1 for one in measured)
    assert "5-shot" in capsys.readouterr().out


@pytest.mark.parametrize("written", [["--data", "{photos}"], ["--data=folder:{photos}"]])
@pytest.mark.slow
def test_data_is_short_for_the_source(written: list[str], photos: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = [word.format(photos=photos) for word in written]
    status, out, err = run(
        capsys, "train", "digits", *words, *SHORT, "--batch", "8", "--workers", "0", "--out", str(tmp_path / "run")
    )
    assert status == 0 and "data: folder" in out, err
    saved = RunFolder(tmp_path / "run").saved_recipe()
    assert saved is not None and saved.data.source == words[-1].removeprefix("--data=")


def test_the_flags_that_messages_advise_are_accepted(tmp_path, capsys):
    for number in range(24):
        split, name = ("train", "ab"[number % 2]) if number < 16 else ("val", "abc"[number % 3])
        place = tmp_path / "photos" / split / name
        place.mkdir(parents=True, exist_ok=True)
        Image.new("L", (8, 8), number * 10).save(place / f"{number}.png")
    (tmp_path / "photos/train/a/broken.png").write_text("not an image")
    words = ["train", "digits", "--data.source", f"folder:{tmp_path / 'photos'}", *SHORT, "--batch", "8"]
    for flags, advised in (([], "--ignore-unknown-classes"), (["--ignore-unknown-classes"], "--bad-images skip")):
        with pytest.raises(SystemExit) as ended:
            main([*words, *flags, "--out", str(tmp_path / "refused")])
        assert ended.value.code == 2 and advised in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        main([*words, "--ignore-unknown-classes", "--bad-images=skip", "--workers", "0", "--out", str(tmp_path / "run")])
    assert not ended.value.code
    saved = RunFolder(tmp_path / "run").saved_recipe()
    assert saved is not None and saved.data.bad_images == "skip" and saved.data.workers == 0


def test_the_time_to_check_images_is_divided_between_the_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a large dataset the training images took all of it, and no validation image was looked at."""
    calls: list[tuple[str, float, tuple[int, int]]] = []

    def look(split: Split, *, seconds: float, share: tuple[int, int], **_: object) -> tuple[list[BadImage], int]:
        calls.append((split.name, seconds, share))
        return [BadImage(f"{split.name} {share}", "bad")] if share[0] else [], 1

    monkeypatch.setattr("vitrail.api.image_check.find_bad", look)
    source = open_source("digits")
    splits = [source.split("train"), source.split("val")]
    assert len(splits[0]) > len(splits[1])
    check = ImageCheck(60.0)
    check(source, splits, world=World(torch.device("cpu")))
    assert [name for name, _, _ in calls] == ["val", "train"]
    assert 29 < calls[0][1] <= 30 and 58 < calls[1][1] <= 60
    check(source, splits, world=World(torch.device("cpu")))
    assert len(calls) == 2, "the runs of a sweep are checked once"
    world = World(torch.device("cpu"), rank=1, ranks=2, local_ranks=2)
    monkeypatch.setattr(World, "gather", lambda self, value: [value])
    with pytest.raises(VitrailError, match=r"2 of 2 images looked at, of 1,797 cannot be read"):
        ImageCheck(60.0)(source, splits, world=world)
    assert calls[2][2] == (1, 2)


def test_a_recipe_goes_out_as_json_and_comes_back(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["--optim.lr", "0.003", "--steps", "5", "--augment.mixup", "0.2", "--model.depth", "1"]
    status, out, _ = run(capsys, "train", "digits", *words, "--explain", "--json")
    assert status == 0
    (tmp_path / "config.json").write_text(out)
    for place in (tmp_path / "config.json", tmp_path):  # a file, or the folder of a run
        status, again, _ = run(capsys, "train", "--config", str(place), "--explain", "--json")
        assert status == 0 and again == out
    status, changed, _ = run(capsys, "train", f"--config={tmp_path / 'config.json'}", "--epochs", "2", "--explain", "--json")
    recipe = Recipe.from_dict(json.loads(changed)["recipe"])
    assert status == 0 and (recipe.epochs, recipe.steps, recipe.optim.lr, recipe.augment.mixup) == (2, None, 0.003, 0.2)
    assert not (tmp_path / "runs").exists()
    for wrong, message in (
        (["digits", "--config", str(tmp_path / "config.json")], "leave one out"),
        (["--config", str(tmp_path / "none.json")], "There is no file"),
        (["--config"], "--config needs a value"),
    ):
        status, _, err = run(capsys, "train", *wrong)
        assert status == 2 and message in err
    (tmp_path / "config.json").write_text("[1]")
    status, _, err = run(capsys, "train", "--config", str(tmp_path / "config.json"))
    assert status == 2 and "holds no recipe" in err
    (tmp_path / "config.json").write_text('{"format": 3, "recipe": {"optim": {"lrr": 1}}}')
    status, _, err = run(capsys, "train", "--config", str(tmp_path / "config.json"))
    assert status == 2 and "There is no setting optim.lrr. Did you mean lr" in err


@pytest.mark.slow
def test_a_run_starts_from_the_config_of_another(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(capsys, "train", "digits", *SHORT, "--optim.lr", "0.003", "--out", str(tmp_path / "one"))[0] == 0
    config = str(tmp_path / "one" / "config.json")
    assert run(capsys, "train", "--config", config, "--seed", "1", "--out", str(tmp_path / "two"))[0] == 0
    first, second = (RunFolder(tmp_path / name).saved_recipe() for name in ("one", "two"))
    assert first is not None and second == first.replace(seed=1)


def test_finetuning_starts_from_the_config_of_another(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config, out = str(tmp_path / "config.json"), str(tmp_path / "out")
    shown = run(capsys, "finetune", "--from", "runs/a", "--data", "digits", "--optim.lr", "0.003", "--explain", "--json")[1]
    Path(config).write_text(shown, encoding="utf-8")
    words = ("finetune", "--config", config, "--out", out)
    again = run(capsys, *words, "--explain", "--json")[1]
    assert json.loads(again) == json.loads(shown)
    changed = json.loads(run(capsys, *words, "--from", "runs/b", "--explain", "--json")[1])["recipe"]
    assert changed["model"]["start"] == "runs/b" and changed["data"]["source"] == "digits" and changed["optim"]["lr"] == 0.003
    assert "leave one out" in run(capsys, *words, "--recipe", "finetune-cifar10")[2]
    shown = run(capsys, "train", "digits", "--explain", "--json")[1]
    Path(config).write_text(shown, encoding="utf-8")
    assert "add --from" in run(capsys, *words)[2]  # a recipe that starts from random values
