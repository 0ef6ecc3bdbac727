"""`vitrail embed` and `vitrail neighbours`, as a user types them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.commands.test_eval import run
from tests.evaluate.conftest import backbone, photos  # noqa: F401 - fixtures
from vitrail.checkpoints import hub, load, url
from vitrail.errors import VitrailError
from vitrail.evaluate.embeddings import embed


def test_from_images_to_neighbours(capsys: pytest.CaptureFixture[str], backbone: Path, photos: Path, tmp_path: Path) -> None:  # noqa: F811
    file = tmp_path / "e.npz"
    status, out, _ = run(capsys, "embed", backbone, photos / "val", "--out", file, "--feature", "mean", "--layer", "0", "--no-norm")
    assert status == 0 and "36 × 48 features, mean of layer 0, without the final norm" in out
    with np.load(file) as content:
        assert content["features"].shape == (36, 48) and content["names"][0].endswith(".jpg")
    sheet = tmp_path / "near.png"
    status, out, _ = run(capsys, "neighbours", file, "red003.jpg", "--count", "3", "--sheet", sheet, "--overwrite", "--json")
    found = json.loads(out)
    assert status == 0 and len(found["queries"][0]["neighbours"]) == 3 and Image.open(sheet).size[0] > 500
    status, out, _ = run(capsys, "neighbours", file, "--examples", "2", "--sheet", sheet, "--overwrite")
    assert status == 0 and "contact sheet" in out
    status, _, err = run(capsys, "neighbours", file, "violet.jpg")
    assert status == 2 and "There is no image 'violet.jpg'" in err


def test_bad_images_and_extensions(capsys: pytest.CaptureFixture[str], backbone: Path, photos: Path, tmp_path: Path) -> None:  # noqa: F811
    (tmp_path / "bad.png").write_bytes(b"")
    status, out, err = run(
        capsys, "embed", backbone, photos / "val" / "red", tmp_path / "bad.png", "--out", tmp_path / "e.parquet", "--json"
    )
    assert status == 1 and "bad.png: an empty file" in err and json.loads(out)["images"] == 9
    status, _, err = run(capsys, "embed", backbone, photos, "--out", tmp_path / "e.txt")
    assert status == 2 and ".npz or .parquet" in err


def test_a_file_that_was_not_embedded_is_a_query_too(
    capsys: pytest.CaptureFixture[str],
    backbone: Path,  # noqa: F811
    photos: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    file, other = tmp_path / "photos.npz", tmp_path / "holiday.jpg"
    assert run(capsys, "embed", backbone, photos / "val", "--out", file)[0] == 0
    original = photos / "val" / "red" / "red003.jpg"
    other.write_bytes(original.read_bytes())
    status, out, _ = run(capsys, "neighbours", file, other, original, "--count", "40", "--json")
    queries = json.loads(out)["queries"]
    assert status == 0 and [one["image"] for one in queries] == [str(other), str(original)]
    nearest = queries[0]["neighbours"]
    assert nearest[0]["image"] == str(original) and nearest[0]["cosine"] == pytest.approx(1, abs=1e-5)
    assert not any(one["image"] == str(other) for query in queries for one in query["neighbours"])  # only images of the file
    (tmp_path / "bad.jpg").write_text("no image")
    status, _, err = run(capsys, "neighbours", file, tmp_path / "bad.jpg")
    assert status == 2 and "bad.jpg: a text file" in err


def test_queries_inside_and_outside_of_the_file(
    capsys: pytest.CaptureFixture[str],
    backbone: Path,  # noqa: F811
    photos: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, original in (("photos/a/1.jpg", "red/red003.jpg"), ("photos/b/2.jpg", "blue/blue001.jpg")):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_bytes((photos / "val" / original).read_bytes())
    assert run(capsys, "embed", backbone, "photos", "--out", "e.npz")[0] == 0
    Path("q").mkdir()
    for name in ("1.jpg", "q/z.jpg"):
        Path(name).write_bytes((photos / "val" / "green" / "green002.jpg").read_bytes())

    def ask(*names: str) -> list[tuple[str, list[str]]]:
        status, out, err = run(capsys, "neighbours", "e.npz", *names, "--sheet", "s.png", "--overwrite", "--json")
        assert status == 0 and "Infinity" not in out and "NaN" not in out, err
        return [(one["image"], [near["image"] for near in one["neighbours"]]) for one in json.loads(out)["queries"]]

    every = {"photos/a/1.jpg", "photos/b/2.jpg"}
    (image, others), (again, _) = ask("1.jpg", "1.jpg")  # the file here, not photos/a/1.jpg
    assert image == again == "1.jpg" and set(others) == every
    (inside, near), (outside, others) = ask("photos/a/1.jpg", "./q/z.jpg")
    assert inside == "photos/a/1.jpg" and near == ["photos/b/2.jpg"]  # not its own neighbour
    assert outside.endswith("q/z.jpg") and set(others) == every
    assert ask("./photos/a/1.jpg", str(tmp_path / "photos/b/2.jpg"))[1][0] == "photos/b/2.jpg"  # the same files
    assert ask("2.jpg")[0][0] == "photos/b/2.jpg"  # no such file here


def test_another_width_and_unknown_downloads_are_sentences(
    backbone: Path,  # noqa: F811
    photos: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = embed(load(backbone), [photos / "val" / "red"])
    file = str(photos / "val" / "blue" / "blue001.jpg")
    other = dataclasses.replace(found, features=found.features[:, :7])
    with pytest.raises(VitrailError, match=r"now has features of size 48, those of this file are of size 7"):
        other.with_images([file])
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(hub, "download", lambda *args, **named: pytest.fail("downloads"))
    monkeypatch.setattr(url, "download", lambda *args, **named: pytest.fail("downloads"))
    for reference in ("hf:somebody/weights", "https://somebody.example/w.pth?signature=secret"):
        about = {**found.about, "checkpoint": reference}
        with pytest.raises(VitrailError, match=r"is not in the local cache, and is not downloaded because only a file") as raised:
            dataclasses.replace(found, about=about).with_images([file])
        assert "secret" not in str(raised.value)
