"""Predictions and embeddings of files, folders and lists."""

from __future__ import annotations

import builtins
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.spatial.distance import cdist

from vitrail.checkpoints import Bundle, load
from vitrail.errors import VitrailError
from vitrail.evaluate import EvalContext, FeatureSpec, embed, load_embeddings, predict
from vitrail.evaluate.embeddings import Embeddings, contact_sheet
from vitrail.evaluate.predictor import find_images


@pytest.fixture
def mixed(photos: Path, tmp_path: Path) -> Path:
    """Good and bad images in a known order."""
    for number, file in enumerate(sorted((photos / "val").rglob("*.jpg"))[:10]):
        shutil.copy(file, tmp_path / f"{number:02d}.jpg")
    (tmp_path / "00.jpg").write_bytes(b"")
    (tmp_path / "05.jpg").write_text("I am a text")
    content = (tmp_path / "06.jpg").read_bytes()
    (tmp_path / "06.jpg").write_bytes(content[: len(content) // 2])
    (tmp_path / "09.jpg").write_bytes(b"\xff\xd8")
    return tmp_path


@pytest.mark.parametrize(("batch", "workers"), [(1, 0), (3, 0), (4, 2), (64, 0)])
def test_every_image_gets_predictions_or_an_error_in_order(bundle: Bundle, mixed: Path, batch: int, workers: int) -> None:
    found = list(predict(bundle, [mixed], top=2, context=EvalContext(batch=batch, workers=workers, bad_images="skip")))
    assert [Path(one.name).name for one in found] == [f"{n:02d}.jpg" for n in range(10)]
    assert [n for n, one in enumerate(found) if one.error] == [0, 5, 6, 9]
    assert "empty" in str(found[0].error) and "text file" in str(found[5].error) and "truncated" in str(found[6].error)
    for one in (found[3], found[8]):
        with torch.no_grad():
            [alone] = bundle.decode(bundle.model.eval()(bundle.stored_preprocess()(one.name)[None]), top=2)
        assert [prediction.label for prediction in one.predictions] == [prediction.label for prediction in alone]
        assert [prediction.score for prediction in one.predictions] == pytest.approx(
            [prediction.score for prediction in alone], abs=1e-5
        )


def test_results_stream(bundle: Bundle, mixed: Path) -> None:
    stream = predict(
        bundle, [mixed / "01.jpg"] * 5 + [mixed / "05.jpg"], context=EvalContext(batch=2, workers=0, bad_images="error")
    )
    assert [Path(next(stream).name).name for _ in range(4)] == ["01.jpg"] * 4
    with pytest.raises(VitrailError, match=r"05\.jpg"):
        list(stream)


def test_files_folders_and_lists(mixed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (mixed / "deep" / "er").mkdir(parents=True)
    shutil.copy(mixed / "01.jpg", mixed / "deep" / "er" / "x.png")
    (mixed / "list.txt").write_text(f"# a comment\n\n01.jpg\n{mixed / '02.jpg'}\nnowhere.jpg\n")
    split = find_images([mixed / "08.jpg", mixed / "deep", mixed / "list.txt"])
    names = [split.image_name(k) for k in range(len(split))]
    assert names == [*(str(mixed / one) for one in ("08.jpg", "deep/er/x.png", "01.jpg", "02.jpg")), "nowhere.jpg"]
    monkeypatch.chdir(mixed)
    assert find_images(["01.jpg"]).image_name(0) == "01.jpg"
    with pytest.raises(VitrailError, match="no file or folder"):
        find_images([mixed / "none.jpg"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(VitrailError, match="no image in the folder"):
        find_images([tmp_path / "empty"])
    (mixed / "binary.txt").write_bytes(b"\xff\xfe\x00\x81")
    with pytest.raises(VitrailError, match="not a text file"):
        find_images([mixed / "binary.txt"])
    (mixed / "notes.txt").write_text("\nbuy milk\nand bread, " + 5000 * "a")
    with pytest.raises(VitrailError, match=r"No line of .*notes\.txt is the path of a file; the first is 'buy milk'"):
        find_images([mixed / "notes.txt"])


def test_a_missing_file_of_a_list_is_reported_by_its_name(bundle: Bundle, mixed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(mixed)
    Path("list.txt").write_text(f"01.jpg\ngone.jpg\n{5000 * 'a'}\n")
    _, gone, long = predict(bundle, ["list.txt"])
    assert gone.name == "gone.jpg" and gone.error == "no such file" and "name too long" in str(long.error).lower()


def test_a_backbone_can_embed_but_not_predict(backbone: Path, photos: Path) -> None:
    with pytest.raises(VitrailError, match="only a backbone"):
        predict(load(backbone), [photos])
    assert embed(load(backbone), [photos / "val"]).features.shape == (36, 48)


@pytest.mark.parametrize("extension", [".npz", ".parquet"])
@pytest.mark.parametrize("feature", ["class", "patches"])
def test_embeddings_round_trip(bundle: Bundle, mixed: Path, tmp_path: Path, extension: str, feature: Any) -> None:
    found = embed(bundle, [mixed], FeatureSpec(feature=feature, layer=0))
    found.save(tmp_path / f"e{extension}")
    again = load_embeddings(tmp_path / f"e{extension}")
    assert (again.features == found.features).all() and again.names == found.names and again.about == found.about
    assert again.about["features"] == {"feature": feature, "layer": 0, "norm": True} and len(found.bad) == 4
    assert found.features.shape == ((6, 48) if feature == "class" else (6, 4, 4, 48))


def test_files_that_are_not_embeddings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(VitrailError, match="Cannot read the embeddings"):
        load_embeddings(tmp_path / "none.npz")
    np.savez(tmp_path / "other.npz", x=np.zeros(3))
    with pytest.raises(VitrailError, match="is not an embeddings file"):
        load_embeddings(tmp_path / "other.npz")
    np.savez(tmp_path / "list.npz", features=np.zeros((1, 2), np.float32), names=np.array(["a"]), about=np.array("[1]"))
    with pytest.raises(VitrailError, match=r"not an embeddings file \(its settings are not a JSON object"):
        load_embeddings(tmp_path / "list.npz")
    with pytest.raises(VitrailError, match=r"\.npz or \.parquet"):
        load_embeddings(tmp_path / "x.csv")
    real = builtins.__import__

    def without_arrow(name: str, *rest: Any, **named: Any) -> Any:
        if name.startswith("pyarrow"):
            raise ImportError(name)
        return real(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", without_arrow)
    with pytest.raises(VitrailError, match=r"vitrail\[hub\]"):
        load_embeddings(tmp_path / "x.parquet")


def test_a_parquet_file_whose_parts_do_not_agree_is_refused(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = arrow.FixedSizeListArray.from_arrays(arrow.array([1.0, 2.0, 3.0, 4.0], arrow.float32()), 2)
    cases: list[tuple[Any, Any, Any]] = [
        (["a", "b"], rows, {"shape": [4]}),  # was read as one row for two names
        (["a", None], rows, {"shape": [2]}),
        (["a", "b"], rows, {"shape": 2}),
        (["a", "b"], [1, 2], {"shape": [1]}),
        (["a", "b"], rows, [2]),
    ]
    for names, features, about in cases:
        table = arrow.table({"name": names, "features": features}).replace_schema_metadata({"vitrail": json.dumps(about)})
        parquet.write_table(table, tmp_path / "x.parquet")
        with pytest.raises(VitrailError, match="is not an embeddings file"):
            load_embeddings(tmp_path / "x.parquet")


@pytest.mark.parametrize("metric", ["cosine", "euclidean"])
def test_neighbours_equal_scipy(metric: Any) -> None:
    rows = np.random.default_rng(0).normal(size=(60, 7)).astype(np.float32)
    order, values = Embeddings(rows, tuple(map(str, range(60)))).nearest([3, 59], 5, metric)
    distance = cdist(rows.astype(np.float64), rows, metric)
    for line, query in enumerate((3, 59)):
        expected = [k for k in np.argsort(distance[query], kind="stable") if k != query][:5]
        assert order[line].tolist() == expected
        shown = distance[query][expected]
        assert np.allclose(values[line], 1 - shown if metric == "cosine" else shown, atol=1e-5)


def test_an_image_is_never_its_own_neighbour() -> None:
    """Row 3 is a query from outside: it has three neighbours, a row of the file only two."""
    rows = np.random.default_rng(0).normal(size=(4, 7)).astype(np.float32)
    order, values = Embeddings(rows, tuple("abcd")).nearest([0, 3], 9, among=3)
    assert [set(found.tolist()) for found in order] == [{1, 2}, {0, 1, 2}]
    assert all(np.isfinite(line).all() for line in values)


def test_the_contact_sheet_shows_images_and_red_frames(bundle: Bundle, mixed: Path, tmp_path: Path) -> None:
    found = embed(bundle, [mixed])
    Path(found.names[1]).unlink()
    order, values = found.nearest([0, 1], 3)
    missing = contact_sheet(tmp_path / "sheet.png", found, [0, 1], order, values)
    sheet = Image.open(tmp_path / "sheet.png")
    assert sheet.size == (8 + 4 * 136 + 8, 8 + 2 * 166) and found.names[1] in missing
    assert sheet.crop((8, 8, 136, 136)).getcolors(1) is None  # an image, not a single colour
    assert found.find(Path(found.names[2]).name) == 2
    with pytest.raises(VitrailError, match="There is no image 'cat'"):
        found.find("cat")
    with pytest.raises(VitrailError, match="one vector per image"):
        embed(bundle, [mixed], FeatureSpec(feature="patches")).nearest([0], 2)
