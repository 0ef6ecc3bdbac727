"""The images that a run validates on are those that every command evaluates it on, whatever its seed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import vitrail
from tests.train.small import Recorder, small, train
from tests.train.test_resume import interrupted
from vitrail.cli import main
from vitrail.commands.export import _images as export_images
from vitrail.data import open_source
from vitrail.data.augment.spec import Augment
from vitrail.data.split import stratified
from vitrail.evaluate.evaluator import evaluate, open_data
from vitrail.evaluate.fewshot import open_train_and_test
from vitrail.inspect.images import from_source
from vitrail.train.config import DataSpec, ModelSpec, TaskSpec
from vitrail.train.prepare import prepare


@pytest.fixture(scope="module")
def noise(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pure noise in 4 classes: nothing can be learned from one image for another."""
    root, rng = tmp_path_factory.mktemp("noise"), np.random.default_rng(0)
    for label in "abcd":
        (root / label).mkdir()
        for k in range(20):
            Image.fromarray(rng.integers(0, 256, (8, 8), np.uint8)).save(root / label / f"{k}.png")
    return root


def settings(noise: Path, **changes: Any) -> Any:
    return small(**{"seed": 1, "data": DataSpec(source=f"folder:{noise}", workers=0), "batch": 16, "steps": 4, **changes})


@pytest.fixture(scope="module")
def run(noise: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "noise"
    train(settings(noise), out, curves=False)
    return out


def names(split: Any) -> list[str]:
    return [split.image_name(k) for k in range(len(split))]


def command(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[str, str]:
    with pytest.raises(SystemExit) as exit_:
        main([str(word) for word in words])
    assert not exit_.value.code
    return capsys.readouterr()


def test_the_seed_of_a_run_does_not_select_its_validation_images(noise: Path) -> None:
    one, two = (prepare(settings(noise, seed=seed)).validation for seed in (0, 1))
    assert names(one) == names(two) == names(open_source(f"folder:{noise}").splits["val"])


def test_evaluation_agrees_with_the_runs_own_validation(noise: Path, run: Path) -> None:
    result = evaluate(vitrail.load(run), f"folder:{noise}")
    end = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert result.images == 8 and result.metrics["accuracy"] == end["accuracy"]
    assert result.metrics["nll"] == pytest.approx(end["loss"], rel=1e-4)
    assert result.trained_on is not None and result.trained_on.images == 0 and not result.trained_on.notes


def test_the_run_and_its_model_say_what_they_were_trained_on(noise: Path, run: Path) -> None:
    resolved = json.loads((run / "config.json").read_text())["resolved"]
    provenance = json.loads((run / "model" / "config.json").read_text())["provenance"]
    (known,) = provenance["trained_on"]
    assert resolved["trained_on"] == [known] and (known["source"], known["images"], known["rule"]) == (
        f"folder:{noise}",
        72,
        "names",
    )


def test_every_command_divides_the_source_as_the_run_did(noise: Path, run: Path, tmp_path: Path) -> None:
    """Also for a run of an older version, in which the seed selected the validation images."""
    older = tmp_path / "older"
    older.mkdir()
    config = json.loads((run / "config.json").read_text())
    del config["recipe"]["data"]["split_rule"], config["resolved"]["trained_on"]
    (older / "config.json").write_text(json.dumps(config))
    bundle = vitrail.load(run)
    vitrail.save(older / "model", bundle.model, preprocess=bundle.preprocess, classes=bundle.classes)
    whole = open_source(f"folder:{noise}?val=0").splits["train"]
    drawn = names(whole.subset(stratified(whole, 0.1, seed=1)))
    for path, expected in ((run, names(open_source(f"folder:{noise}").splits["val"])), (older, drawn)):
        bundle = vitrail.load(path)
        assert names(open_data(bundle, f"folder:{noise}")[0]) == expected
        assert names(open_train_and_test(bundle, f"folder:{noise}", "train", None, vitrail.evaluate.EvalContext())[1]) == expected
        assert set(from_source(bundle, f"folder:{noise}", None, 99, 0).names) == set(expected)
    assert drawn != names(open_source(f"folder:{noise}").splits["val"])


def test_without_data_the_run_is_evaluated_on_its_own(
    noise: Path, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for place in (run, run / "model"):
        out, err = command(capsys, "eval", place, "--workers", 0, "--json")
        assert f"data: folder:{noise}, which the run was trained on" in err.replace("\n", " ")
        assert json.loads(out)["data"] == f"folder:{noise}" and json.loads(out)["split"] == "val"
    for name in ("fewshot", "probe"):
        more = ("--shots", 2, "--seeds", 1) if name == "fewshot" else ("--l2", 0.1)
        out, err = command(capsys, name, run, *more, "--workers", 0, "--json")
        assert "which the run was trained on" in err.replace("\n", " ") and json.loads(out)["test"] == "val"
    with pytest.raises(SystemExit):
        main(["eval", "vitrail-ti8-tiny-imagenet"])
    assert "is not a run that knows its data: add --data" in capsys.readouterr().err
    stopped = tmp_path / "stopped"
    (stopped / "checkpoints").mkdir(parents=True)
    (stopped / "config.json").write_bytes((run / "config.json").read_bytes())
    with pytest.raises(SystemExit):
        main(["eval", str(stopped)])
    assert "is a run that has no model/ yet. Finish it first" in capsys.readouterr().err


def test_images_that_were_trained_on_are_said_loudly(
    noise: Path, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("eval", run, "--data", f"folder:{noise}", "--split", "train", "--workers", 0)
    out, _ = command(capsys, *words, "--out", tmp_path / "report")
    assert "warning: trained on: all of these 72 images" in out.replace("\n", " ")
    assert '<p class="warning">trained on: all of these 72 images' in (tmp_path / "report" / "report.html").read_text()
    (result,) = json.loads(command(capsys, *words, "--json")[0])["results"]
    assert result["trained_on"] == {"images": 72, "exact": True} and result["warnings"][0].startswith("trained on")
    (tmp_path / "all.csv").write_text(
        "path,label,split\n" + "".join(f"{noise}/{c}/{k}.png,{c},test\n" for c in "abcd" for k in range(20))
    )
    (result,) = json.loads(command(capsys, "eval", run, "--data", tmp_path / "all.csv", "--workers", 0, "--json")[0])["results"]
    assert result["trained_on"]["images"] == 72 and result["total_images"] == 80
    for name, out_file in (("fewshot", "f.json"), ("probe", "p.json")):
        more = ("--shots", 1) if name == "fewshot" else ("--l2", 1.0)
        own = ("--train-split", "val", "--split", "train", "--out", tmp_path / out_file, "--workers", 0, "--json", *more)
        found = json.loads(command(capsys, name, run, "--data", f"folder:{noise}", *own)[0])
        assert found["trained_on"]["images"] == 72 and found["warnings"]


def test_an_export_is_compared_on_images_that_were_not_trained_on(
    noise: Path, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = vitrail.load(run)
    shutil.copytree(noise / "a", tmp_path / "other" / "a")
    for file in (tmp_path / "other" / "a").iterdir():
        Image.open(file).rotate(90).save(file)
    export_images(bundle, f"folder:{tmp_path / 'other'}", None, 99)
    assert "none of these images is identical to one of a sample of training images" in capsys.readouterr().err.replace("\n", " ")
    for name, said in ((None, "none of these images was among the training images"), ("train", "all of these 72 images")):
        _, labels, data = export_images(bundle, f"folder:{noise}", name, 99)
        assert labels is not None and data == f"folder:{noise}, split {name or 'val'}"
        assert said in capsys.readouterr().err.replace("\n", " ")
    export_images(bundle, f"folder:{noise}", "train", 99, measured=False)  # to calibrate
    assert not capsys.readouterr().err


@pytest.mark.slow
def test_fine_tuning_keeps_the_record_and_writes_nothing_into_the_folder(
    noise: Path, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(noise.rglob("*"))
    words = ("--steps", 1, "--batch", 8, "--schedule.warmup", 0, "--data.workers", 0, "--out", tmp_path / "tuned", "--json")
    command(capsys, "finetune", "--from", run, "--data", noise, *words)
    assert sorted(noise.rglob("*")) == before
    assert [one.source for one in vitrail.load(tmp_path / "tuned").trained_on] == [str(noise), f"folder:{noise}"]


def test_a_resumed_run_notices_other_images_and_an_older_one_keeps_its_own(
    noise: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    photos = tmp_path / "photos"
    shutil.copytree(noise, photos)
    interrupted(settings(photos), tmp_path / "run", monkeypatch, 2)
    config = tmp_path / "run" / "config.json"
    saved = json.loads(config.read_text())
    (photos / "a" / "0.png").rename(photos / "a" / "new.png")
    recorder = Recorder()
    train(settings(photos), tmp_path / "run", callbacks=[recorder], curves=False)
    assert any("has changed since this run began" in note for note in recorder.notes)
    shutil.rmtree(tmp_path / "run" / "model")
    del saved["recipe"]["data"]["split_rule"], saved["resolved"]["trained_on"]
    config.write_text(json.dumps(saved))
    train(settings(photos), tmp_path / "run", curves=False)
    assert json.loads(config.read_text())["recipe"]["data"]["split_rule"] == "seed-1"


@pytest.mark.slow
def test_held_out_images_that_a_start_or_a_teacher_was_trained_on_are_said(tmp_path: Path) -> None:
    train(small(steps=3), tmp_path / "first")

    def notes(name: str, **changes: Any) -> list[str]:
        recorder = Recorder()
        train(small(steps=1, eval_every=0, schedule__warmup=0, **changes), tmp_path / name, callbacks=[recorder])
        return [note for note in recorder.notes if "held-out" in note]

    start = {"model": ModelSpec(start=str(tmp_path / "first"))}
    assert notes("same", **start) == []
    (more,) = notes("more", **start, data__holdout=0.5)
    assert "starting checkpoint" in more and "was trained on 6" in more and "of the 719 held-out images" in more
    (taught,) = notes("taught", task=TaskSpec(distill="soft", teacher=str(tmp_path / "first")), data__holdout=0.5)
    assert "the teacher" in taught
    unlabelled = small(steps=3, task=TaskSpec(kind="masked-autoencoder"), augment=Augment(), model__image_size=16)
    train(unlabelled, tmp_path / "masked")
    assert notes("after", model=ModelSpec(start=str(tmp_path / "masked")), data__holdout=0.5) == []
