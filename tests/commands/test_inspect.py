"""`vitrail inspect`, as a user types it."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail
from tests.checkpoints.small_models import KINDS, bundle_of
from vitrail import inspect
from vitrail.cli import main
from vitrail.commands.inspect import _load_images
from vitrail.data.preprocess import Preprocess, preset

FIGURES = ["filters", "filters-raw", "positions", "distance", "rollout", "heads", "comparison"]


def run(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as exit_:
        main([str(word) for word in words])
    out, err = capsys.readouterr()
    return int(exit_.value.code or 0), out, err


def checkpoint(
    folder: Path, *, trained: bool = True, size: tuple[int, int] = (16, 24), channels: int = 3, **changes: object
) -> Path:
    fields = {"patch": 8, "width": 24, "depth": 2, "heads": 2, "mlp": 24, "channels": channels, **changes}
    model = vitrail.create_model("Ti/8", image_size=size, outputs=3, seed=len(folder.name), **fields)
    if trained:
        generator = torch.Generator().manual_seed(0)
        for parameter in (model.blocks[0].norm1.bias, model.head.weight):
            torch.nn.init.normal_(parameter, generator=generator)
    vitrail.save(folder, model, preprocess=preset("google-vit", size=size, channels=channels), classes=["ant", "bee", "cat"])
    return folder


@pytest.fixture
def pictures(tmp_path: Path) -> list[Path]:
    random = np.random.default_rng(0)
    paths = [tmp_path / f"picture {number}.png" for number in range(2)]
    for path in paths:
        Image.fromarray(random.integers(0, 255, (40, 50, 3), dtype=np.uint8)).save(path)
    return paths


def links_of(index: Path) -> set[str]:
    return {link for link in re.findall(r'(?:href|src)="([^"]+)"', index.read_text(encoding="utf-8")) if not link.startswith("#")}


@pytest.mark.slow
def test_all_figures_of_a_vit(tmp_path: Path, pictures: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    out, ref = tmp_path / "inspection", checkpoint(tmp_path / "run")
    status, said, err = run(capsys, "inspect", ref, *pictures, "--out", out, "--device", "cpu", "--patch", 0, 2)
    assert (status, err) == (0, "") and "index.html" in said and "not meaningful" not in said
    links = links_of(out / "index.html")
    assert links == {f"{name}.{form}" for name in FIGURES for form in ("png", "svg", "npz")} | {"filters.csv", "distance.csv"}
    assert all((out / link).stat().st_size > 0 for link in links)
    text = (out / "index.html").read_text(encoding="utf-8")
    assert "Fig. 6" in text and "not in the paper" in text and "http" not in text

    bundle = vitrail.load(ref)
    assert bundle.preprocess is not None
    batch = torch.stack([bundle.preprocess(path) for path in pictures])
    np.testing.assert_allclose(np.load(out / "rollout.npz")["rollout"], inspect.rollout(bundle.model, batch), rtol=1e-5)
    distances = inspect.attention_distances(bundle.model, batch)
    rows = list(csv.DictReader((out / "distance.csv").open()))
    assert len(rows) == 4 and float(rows[3]["pixels_among_patches"]) == pytest.approx(distances["patches"][1, 1], rel=1e-5)
    assert float(rows[0]["pixels_prefix_as_zero"]) == pytest.approx(distances["all"][0, 0], rel=1e-5)
    assert np.load(out / "heads.npz")["patch"].tolist() == [0, 2]
    maps = np.load(out / "comparison.npz")
    np.testing.assert_allclose(maps["gradient_rollout"], inspect.gradient_rollout(bundle.model, batch), rtol=1e-4)


@pytest.mark.slow
def test_data_sources_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, ref = tmp_path / "inspection", checkpoint(tmp_path / "digits", size=(8, 8), channels=1, patch=4, pooling="map")
    words = (
        "inspect",
        ref,
        "--data",
        "digits",
        "--count",
        5,
        "--show",
        3,
        "--layers",
        -1,
        "--out",
        out,
        "--device",
        "cpu",
        "--json",
    )
    status, said, _ = run(capsys, *words)
    answer = json.loads(said)
    assert status == 0 and answer["sections"]["."]["figures"] == FIGURES
    assert np.load(out / "rollout.npz")["rollout"].shape == (3, 2, 2)
    assert np.load(out / "distance.npz")["among_patches"].shape == (1, 2)
    summary = json.loads((out / "inspection.json").read_text(encoding="utf-8"))
    assert len(set(summary["images"])) == 5
    first = summary["images"]
    assert run(capsys, *words, "--overwrite")[0] == 0
    assert json.loads((out / "inspection.json").read_text(encoding="utf-8"))["images"] == first


@pytest.mark.slow
def test_comparison_of_checkpoints(tmp_path: Path, pictures: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    before = checkpoint(tmp_path / "before" / "model", trained=False)
    after = checkpoint(tmp_path / "after" / "model", size=(24, 24))
    out = tmp_path / "inspection"
    status, said, _ = run(capsys, "inspect", before, *pictures, "--compare", after, "--out", out, "--device", "cpu")
    assert status == 0 and "untrained" in said and "head is missing or zero-initialised" in said
    links = links_of(out / "index.html")
    assert all((out / link).exists() for link in links)
    assert {"comparison/distance.png", "comparison/rollout.svg", "before/rollout.png", "after/rollout.png"} <= links
    rows = list(csv.DictReader((out / "comparison" / "distance.csv").open()))
    assert {row["checkpoint"] for row in rows} == {"before", "after"} and len(rows) == 8
    maps = np.load(out / "comparison" / "rollout.npz")
    assert maps["before"].shape == (2, 2, 3) and maps["after"].shape == (2, 3, 3)
    assert "untrained" in (out / "index.html").read_text(encoding="utf-8")


def test_weights_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "inspection"
    status, said, _ = run(capsys, "inspect", checkpoint(tmp_path / "run", position="relative"), "--out", out, "--device", "cpu")
    assert status == 0 and "No images were given" in said and "relative positions" in said
    assert sorted(path.stem for path in out.glob("*.png")) == ["filters", "filters-raw"]


@pytest.mark.slow
def test_without_a_checkpoint_the_included_model_is_inspected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, said, _ = run(capsys, "inspect", "--out", tmp_path / "inspection", "--device", "cpu")
    assert (
        status == 0
        and "model: vitrail-ti8-tiny-imagenet (ViT-Ti/8" in said
        and (tmp_path / "inspection" / "positions.png").exists()
    )


def test_folders_of_images_are_sampled(tmp_path: Path, pictures: list[Path]) -> None:
    names = {path.name for path in pictures}

    def chosen(*images: Path, count: int) -> list[str]:
        raw = _load_images(bundle_of(KINDS["plain"]), tuple(map(str, images)), None, None, count, 0)
        assert raw is not None
        return raw.names

    assert chosen(tmp_path, count=1)[0] in names and set(chosen(tmp_path, count=5)) == names
    assert chosen(*pictures, count=1) == [path.name for path in pictures], "named files are all used"


def test_a_resnet_shows_only_its_filters_and_a_note(
    tmp_path: Path, pictures: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    model = vitrail.create_model("BiT-R50x1", image_size=32, layers=(1,), outputs=3, seed=0)
    vitrail.save(tmp_path / "bit", model, preprocess=Preprocess(size=(32, 32)))
    status, said, _ = run(capsys, "inspect", tmp_path / "bit", *pictures, "--out", tmp_path / "inspection", "--device", "cpu")
    assert status == 0 and "is a ResNet" in said and "do not apply" in said
    assert (tmp_path / "inspection" / "filters.png").exists() and not (tmp_path / "inspection" / "rollout.png").exists()


@pytest.mark.slow
def test_another_input_size(tmp_path: Path, pictures: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    out, ref = tmp_path / "inspection", checkpoint(tmp_path / "run")
    words = ("inspect", ref, *pictures, "--out", out, "--device", "cpu", "--image-size")
    assert run(capsys, *words, "32x16")[0] == 0
    assert np.load(out / "rollout.npz")["rollout"].shape == (2, 4, 2)
    status, _, err = run(capsys, *words, 33, "--overwrite")
    assert status == 2 and "not a multiple of patch 8. Nearest: 32×32, 40×40" in err
    assert np.load(out / "rollout.npz")["rollout"].shape == (2, 4, 2), "a failed run keeps the old inspection"


@pytest.mark.slow
def test_mistakes_give_clear_messages(tmp_path: Path, pictures: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    ref, out = checkpoint(tmp_path / "run"), tmp_path / "inspection"
    for words, sentence in (
        ((ref, *pictures, "--data", "digits", "--out", out), "both given; choose one"),
        ((ref, tmp_path / "nowhere.png", "--out", out), "nowhere.png"),
        ((ref, *pictures, "--out", tmp_path), "contains other files"),
        ((ref, *pictures, "--out", pictures[0]), "is a file"),
        ((ref, *pictures, "--out", out, "--layers", 5), "no layer 5"),
        ((ref, *pictures, "--out", out, "--patch", 9, 9), "no patch in row 9, column 9"),
        ((ref, "--data", "digits", "--count", 0, "--out", out), "count is 0"),
        ((ref, *pictures, "--show", 0, "--out", out), "show is 0"),
        ((ref, *pictures, "--compare", ref, "--out", out), "same checkpoint was given twice"),
        ((ref, *pictures, "--image-size", "1,2", "--out", out), "height and width such as 384x512"),
    ):
        status, _, err = run(capsys, "inspect", *words, "--device", "cpu")
        assert status == 2 and sentence in err and "Traceback" not in err
    assert not out.exists()
    run(capsys, "inspect", ref, "--out", out, "--device", "cpu")
    status, _, err = run(capsys, "inspect", ref, "--out", out, "--device", "cpu")
    assert status == 2 and "--overwrite" in err


def test_help_defines_the_attention_distance(capsys: pytest.CaptureFixture[str]) -> None:
    status, said, _ = run(capsys, "inspect", "--help")
    assert status == 0 and "Euclidean distance" in said and "counts as distance 0" in " ".join(said.split())


def test_a_file_that_is_not_an_image_is_named_without_unsupported_advice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "note.jpg").write_text("hello")
    status, _, err = run(capsys, "inspect", checkpoint(tmp_path / "model"), tmp_path / "note.jpg", "--out", tmp_path / "inspection")
    assert status == 2 and "a text file, not an image" in err and "--bad-images" not in err
    assert not (tmp_path / "inspection").exists()
