"""`vitrail embed` and `vitrail neighbours`, as a user types them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.commands.test_eval import run
from tests.evaluate.conftest import backbone, photos  # noqa: F401 - fixtures


def test_from_images_to_neighbours(capsys: pytest.CaptureFixture[str], backbone: Path, photos: Path, tmp_path: Path) -> None:  # noqa: F811
    file = tmp_path / "e.npz"
    status, out, _ = run(capsys, "embed", backbone, photos / "val", "--out", file, "--feature", "mean", "--layer", "0", "--no-norm")
    assert status == 0 and "36 × 48 features, mean of layer 0, without the final norm" in out
    with np.load(file) as content:
        assert content["features"].shape == (36, 48) and content["names"][0].endswith(".jpg")
    sheet = tmp_path / "near.png"
    status, out, _ = run(capsys, "neighbours", file, "red003.jpg", "--count", "3", "--sheet", sheet, "--json")
    found = json.loads(out)
    assert status == 0 and len(found["queries"][0]["neighbours"]) == 3 and Image.open(sheet).size[0] > 500
    status, out, _ = run(capsys, "neighbours", file, "--examples", "2", "--sheet", sheet)
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
    status, out, _ = run(capsys, "neighbours", file, other, original, "--count", "40", "--sheet", "None", "--json")
    queries = json.loads(out)["queries"]
    assert status == 0 and [one["image"] for one in queries] == [str(other), str(original)]
    nearest = queries[0]["neighbours"]
    assert nearest[0]["image"] == str(original) and nearest[0]["cosine"] == pytest.approx(1, abs=1e-5)
    assert not any(one["image"] == str(other) for query in queries for one in query["neighbours"])  # only images of the file
    (tmp_path / "bad.jpg").write_text("no image")
    status, _, err = run(capsys, "neighbours", file, tmp_path / "bad.jpg")
    assert status == 2 and "bad.jpg: a text file" in err
