"""Every command's result equals that of its Python call."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import vitrail
from tests.commands.test_eval import run
from tests.evaluate.conftest import checkpoint, photos  # noqa: F401 - fixtures
from tests.train.small import weights
from vitrail.commands.inspect import _load_images
from vitrail.errors import VitrailError
from vitrail.evaluate import load_embeddings


@pytest.mark.parametrize(
    "options", [{"precision": "auto"}, {"top": 1, "tta": True, "precision": "fp32"}, {"precision": "bf16"}], ids=str
)
def test_predict(capsys: pytest.CaptureFixture[str], checkpoint: Path, photos: Path, options: dict[str, object]) -> None:  # noqa: F811
    words = [word for name, value in options.items() for word in ([f"--{name}"] if value is True else [f"--{name}", value])]
    status, out, _ = run(capsys, "predict", checkpoint, photos / "val", "--json", "--device", "cpu", *words)
    found = vitrail.load(checkpoint).predict(photos / "val", **options)
    assert status == 0 and [json.loads(line) for line in out.splitlines()] == json.loads(json.dumps(found.to_dicts()))


def test_embed(capsys: pytest.CaptureFixture[str], checkpoint: Path, photos: Path, tmp_path: Path) -> None:  # noqa: F811
    words = ("--feature", "mean", "--layer", 0, "--no-norm", "--device", "cpu", "--json")
    status, out, _ = run(capsys, "embed", checkpoint, photos / "val", "--out", tmp_path / "cli.npz", *words)
    found = vitrail.load(checkpoint).embed(photos / "val", feature="mean", layer=0, norm=False)
    written, said = load_embeddings(tmp_path / "cli.npz"), json.loads(out)
    assert status == 0 and written.names == found.names and written.about == found.about
    np.testing.assert_array_equal(written.features, found.features)
    assert said["shape"] == list(found.features.shape) and said["images"] == len(found)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"image_size": 48, "tta": True, "split": "train"}], ids=["plain", "options"])
def test_evaluate(
    capsys: pytest.CaptureFixture[str],
    checkpoint: Path,  # noqa: F811
    photos: Path,  # noqa: F811
    tmp_path: Path,
    options: dict[str, object],
) -> None:
    words = ("--image-sizes", 48, "--tta", "--split", "train") if options else ()
    command = ("eval", checkpoint, "--data", f"folder:{photos}", "--device", "cpu", "--json", "--out", tmp_path / "cli", *words)
    status, out, err = run(capsys, *command)
    assert status == 0, err
    bundle = vitrail.load(checkpoint)
    found = bundle.evaluate(f"folder:{photos}", out=tmp_path / "python", **options)
    assert json.loads(out)["results"] == [json.loads(json.dumps(found.summary()))]
    for file in sorted(path.name for path in (tmp_path / "cli").iterdir()):
        assert (tmp_path / "cli" / file).read_bytes() == (tmp_path / "python" / file).read_bytes(), file
    with pytest.raises(vitrail.VitrailError, match="already contains a report"):
        bundle.evaluate(f"folder:{photos}", out=tmp_path / "python")
    bundle.evaluate(photos, out=tmp_path / "path")
    assert json.loads((tmp_path / "path" / "metrics.json").read_text())["data"] == str(photos), "a path is named, not its split"


@pytest.mark.slow
def test_inspect(capsys: pytest.CaptureFixture[str], checkpoint: Path, photos: Path, tmp_path: Path) -> None:  # noqa: F811
    words = ("--count", 5, "--show", 2, "--layers", -1, "--patch", 0, 1, "--device", "cpu", "--json")
    status, out, err = run(capsys, "inspect", checkpoint, photos / "val", "--out", tmp_path / "cli", *words)
    assert status == 0, err
    bundle = vitrail.load(checkpoint)
    found = bundle.inspect(photos / "val", count=5, show=2, layers=[-1], patch=(0, 1))
    assert json.loads(out)["sections"] == found.summary()
    for name, arrays in found.arrays.items():
        written = np.load(tmp_path / "cli" / f"{name}.npz")
        for key, values in arrays.items():
            np.testing.assert_array_equal(written[key], values)
    chosen = _load_images(bundle, (), f"folder:{photos}", None, 5, 0)
    assert chosen is not None and chosen.names == bundle._images_to_inspect(f"folder:{photos}", None, 5, 0)[0].names


@pytest.mark.slow
def test_finetune(capsys: pytest.CaptureFixture[str], checkpoint: Path, photos: Path, tmp_path: Path) -> None:  # noqa: F811
    words = ("--steps", 6, "--batch", 8, "--optim.lr", 0.02, "--schedule.warmup", 2, "--model.lora", 2, "--data.workers", 0)
    command = ("finetune", "--from", checkpoint, "--data", photos, *words, "--json", "--out")
    status, out, err = run(capsys, *command, tmp_path / "cli")
    assert status == 0, err
    settings: dict[str, Any] = {"steps": 6, "lora": 2, "schedule": {"warmup": 2}, "data.workers": 0}
    found = vitrail.finetune(checkpoint, photos, out=tmp_path / "python", batch=8, lr=0.02, **settings)
    with pytest.raises(VitrailError, match=r"choose another out\..* pass allow_change=\['batch', 'optim.lr'\]\.$"):
        vitrail.finetune(checkpoint, photos, out=tmp_path / "python", batch=4, lr=0.5, **settings)
    with pytest.raises(VitrailError, match=r"^allow_change names 'bach', which is not a setting"):
        vitrail.finetune(checkpoint, photos, out=tmp_path / "python", batch=4, allow_change=["bach"], **settings)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{}")
    with pytest.raises(VitrailError, match=r"hoose another out\."):
        vitrail.finetune(checkpoint, photos, out=tmp_path / "broken", **settings)
    (tmp_path / "more" / "red").mkdir(parents=True)
    (tmp_path / "more" / "red" / "bad.png").write_text("no picture")
    with pytest.raises(VitrailError, match=r"skip them with \*\*\{'data.bad_images': 'skip'\}\."):
        vitrail.finetune(checkpoint, tmp_path / "more", out=tmp_path / "bad", **settings)
    said = json.loads(out)
    assert found.recipe == vitrail.open_run(tmp_path / "cli").recipe
    same = {key: value for key, value in said.items() if key not in ("out", "seconds", "report")}
    assert same == {key: value for key, value in json.loads(json.dumps(found.summary())).items() if key in same}
    mine, theirs = weights(tmp_path / "python"), weights(tmp_path / "cli")
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)
    status, out, _ = run(capsys, *command, tmp_path / "python")
    again = vitrail.open_run(tmp_path / "python")
    assert json.loads(out) == json.loads(json.dumps(again.summary())), "finished: both only read it"
