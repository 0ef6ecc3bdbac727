"""Results as objects: tables, figures, what notebooks show, and runs."""

from __future__ import annotations

import builtins
import dataclasses
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import vitrail
from tests.evaluate.conftest import CLASSES, checkpoint, photos, tiny_model  # noqa: F401 - fixtures
from tests.train.small import small
from vitrail.api.finetuning import starting_recipe, with_changes
from vitrail.data import preset
from vitrail.data.trained_on import Overlap
from vitrail.errors import VitrailError
from vitrail.train import train
from vitrail.train.config import OptimSpec


@pytest.fixture
def bundle(checkpoint: Path) -> vitrail.Bundle:  # noqa: F811
    return vitrail.load(checkpoint)


def test_a_bundle_in_one_line_and_as_html(bundle: vitrail.Bundle, checkpoint: Path) -> None:  # noqa: F811
    assert repr(bundle) == f"Bundle(ViT-Ti/8, 32×32 pixels with 3 channels, 4 classes, from {checkpoint})"
    assert "blue, green, red, yellow" in bundle._repr_html_() and len(repr(bundle)) < 300
    assert "no head" in repr(vitrail.load(checkpoint, outputs=0))
    bundle.classes = ("<script>", *CLASSES[1:])
    assert "<script>" not in bundle._repr_html_() and "&lt;script&gt;" in bundle._repr_html_()


def test_predictions_are_a_list_a_table_and_html(bundle: vitrail.Bundle, photos: Path) -> None:  # noqa: F811
    found = bundle.predict(photos / "val", top=2)
    assert isinstance(found, list) and isinstance(found[0], list) and isinstance(found[0][0], vitrail.Prediction)
    table = found.to_pandas()
    assert list(table.columns) == ["image", "rank", "label", "index", "probability"] and len(table) == 72
    assert table[table["rank"] == 1]["label"].tolist() == found.labels
    assert repr(found).startswith("PredictionList of 36 images\n") and "and 16 more images" in repr(found)
    page = found._repr_html_()
    assert page.count("data:image/jpeg") == 20 and "and 16 more images" in page
    assert "data:image" not in bundle.predict(bundle.stored_preprocess()(next(photos.rglob("*.jpg"))))._repr_html_()


def test_multilabel_predictions_have_a_column_for_thresholds(tmp_path: Path) -> None:
    model = tiny_model()
    model.head.weight.data.normal_()
    vitrail.save(tmp_path / "x", model, preprocess=preset("google-vit", size=32), task="multilabel")
    table = vitrail.load(tmp_path / "x").predict(np.zeros((9, 9, 3), np.uint8)).to_pandas()
    assert "above_threshold" in table.columns and len(table) == 4


def test_without_pandas_a_sentence(bundle: vitrail.Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    found = bundle.embed(np.zeros((9, 9, 3), np.uint8))
    assert found.to_pandas().shape == (1, 49) and "ViT-Ti/8" in found._repr_html_()
    original = builtins.__import__

    def missing(name: str, *rest: Any, **named: Any) -> Any:
        if name == "pandas":
            raise ImportError(name)
        return original(name, *rest, **named)

    monkeypatch.delitem(sys.modules, "pandas", raising=False)
    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(VitrailError, match="needs pandas, which is not installed: pip install pandas"):
        found.to_pandas()


@pytest.mark.slow
def test_an_evaluation_has_tables_and_figures(bundle: vitrail.Bundle, photos: Path) -> None:  # noqa: F811
    found = bundle.evaluate(f"folder:{photos}")
    metrics = found.to_pandas().set_index("metric")
    assert metrics["value"].to_dict() == found.metrics and metrics.loc["accuracy", "low"] == found.intervals["accuracy"][0]
    images, classes = found.to_pandas("images"), found.to_pandas("classes")
    assert images["correct"].mean() == pytest.approx(found.metrics["accuracy"]) and classes["class"].tolist() == list(CLASSES)
    assert found.confusion.sum() == 36 and np.diag(found.confusion).sum() == images["correct"].sum()
    assert set(found.figures) == {"confusion", "reliability"}
    assert found.figures["confusion"]._repr_png_().startswith(b"\x89PNG")
    assert repr(found).startswith("EvalResult(accuracy ") and "36 images of val" in repr(found)
    assert "data:image/png" in found._repr_html_() and "macro F1" in found._repr_html_()
    with pytest.raises(VitrailError, match="no table 'class'"):
        found.to_pandas("class")  # type: ignore[arg-type]
    flipped = bundle.evaluate(f"folder:{photos}", tta=True)
    assert flipped.metrics != found.metrics and "mirror image" in flipped.notes[0]
    assert bundle.evaluate(found.split).metrics == found.metrics  # type: ignore[arg-type]


@pytest.mark.slow
def test_an_inspection_is_shown_and_saved(bundle: vitrail.Bundle, photos: Path, tmp_path: Path, checkpoint: Path) -> None:  # noqa: F811
    files = sorted((photos / "val").rglob("*.jpg"))[:2]
    weights = bundle.inspect()
    assert list(weights.figures) == ["filters", "filters-raw", "positions"] and "No images were given" in weights.notes[-1]
    found = bundle.inspect([np.zeros((40, 40, 3), np.uint8), *files], count=1)
    assert found.about["images"] == ["image 0", files[0].name, files[1].name], "images that are given one by one are all used"
    assert found._repr_html_().count("data:image/png") == len(found.figures) == 7 and "rollout" in repr(found)
    inputs = bundle.stored_preprocess()(files[0])[None]
    tensor, file = bundle.inspect(inputs), bundle.inspect(files[0])
    np.testing.assert_allclose(tensor.arrays["rollout"]["rollout"], file.arrays["rollout"]["rollout"], rtol=1e-5)
    bundle.save(tmp_path / "other")
    both = bundle.inspect(files, compare=tmp_path / "other")
    assert "comparison/rollout" in both.figures and "other/heads" in both.figures
    bundle.inspect(out=tmp_path / "saved")
    with pytest.raises(VitrailError, match="already contains an inspection"):
        weights.save(tmp_path / "saved")
    with pytest.raises(VitrailError, match="given twice"):
        bundle.inspect(compare=bundle)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> vitrail.Run:
    out = tmp_path_factory.mktemp("runs") / "small"
    train(small(steps=6, ema=0.0), out)
    return vitrail.open_run(out)


@pytest.mark.slow
def test_a_run_has_records_curves_and_a_model(run: vitrail.Run) -> None:
    assert run.result is not None and run.result.before and run.recipe.name == "small"
    table = run.metrics.to_pandas()
    assert set(table["kind"]) == {"train", "val", "end"} and "speed.images_per_second" in table.columns
    assert len(run.metrics.of("train")) == 3 and "3 train" in repr(run.metrics) and "<table>" in run.metrics._repr_html_()
    assert run.curves()._repr_png_().startswith(b"\x89PNG")
    assert run.bundle is run.bundle and isinstance(run.bundle, vitrail.Bundle) and len(run.bundle.classes or ()) == 10
    assert repr(run).startswith(f"Run('{run.out}', 6 steps, accuracy ") and "data:image/png" in run._repr_html_()
    held_out = run.bundle.evaluate("digits")
    assert held_out.images == 30 == len(run.bundle.predict("digits", top=1, split="holdout")), "as the run divided it"
    assert len(run.bundle.predict("digits", top=1)) == 1797, "without a split all images, as the command does"


def test_what_is_no_run_or_not_finished(tmp_path: Path) -> None:
    with pytest.raises(VitrailError, match="There is no folder"):
        vitrail.open_run(tmp_path / "none")
    with pytest.raises(VitrailError, match="holds no run"):
        vitrail.open_run(tmp_path)
    unfinished = vitrail.Run(tmp_path)
    assert "not finished" in repr(unfinished) and unfinished.metrics == [] and "not finished" in unfinished._repr_html_()
    for ask in (lambda: unfinished.bundle, unfinished.curves, unfinished.summary, lambda: unfinished.recipe):
        with pytest.raises(VitrailError, match=r"not finished|no metrics yet|holds no run"):
            ask()


def test_settings_by_name_by_part_and_by_path() -> None:
    recipe = small()
    changed = with_changes(
        recipe, {"epochs": 2, "optim": {"lr": 0.5}, "data.holdout": 0.25, "model.lora_on": ("qkv",), "schedule": {"warmup": "10%"}}
    )
    assert (changed.epochs, changed.steps, changed.optim.lr, changed.data.holdout) == (2, None, 0.5, 0.25)
    assert changed.model.lora_on == ("qkv",) and changed.schedule.warmup == "10%" and changed.optim.weight_decay == 0.1
    assert with_changes(recipe, {"optim": OptimSpec(lr=0.25)}).optim == OptimSpec(lr=0.25)
    assert with_changes(recipe, {}) == recipe
    for mistake, text in (({"optim": {"lrr": 1}}, r"no setting optim\.lrr\. Did you mean optim\.lr"), ({"epoch": 1}, "epochs")):
        with pytest.raises(VitrailError, match=text):
            with_changes(recipe, mistake)


def test_fine_tuning_starts_from_what_can_be_loaded_again(bundle: vitrail.Bundle, tmp_path: Path) -> None:
    with pytest.raises(VitrailError, match="Pass its reference"):
        vitrail.finetune(bundle, "digits", out=tmp_path / "run")
    with pytest.raises(VitrailError, match="images to train on are missing"):
        vitrail.finetune("x", out=tmp_path / "run")
    with pytest.raises(VitrailError, match="check-images is 'some'"):
        vitrail.finetune("x", "digits", out=tmp_path / "run", check_images="some")  # type: ignore[arg-type]
    assert not (tmp_path / "run").exists()


def test_images_are_counted_without_the_warnings_of_the_run(photos: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:  # noqa: F811
    """The run opens the data again: each warning was printed twice."""
    stray = tmp_path / "data"
    shutil.copytree(photos / "train", stray)
    shutil.copy(next(photos.rglob("*.jpg")), stray / "stray.jpg")
    assert starting_recipe("x", str(stray), None).batch > 0
    assert not caplog.records
    vitrail.data.open_source(str(stray))
    assert "outside the class folders" in caplog.text


def test_images_that_were_trained_on_are_in_the_one_line(bundle: vitrail.Bundle, photos: Path) -> None:  # noqa: F811
    result = bundle.evaluate(str(photos))
    assert "trained on" not in repr(result)
    seen = dataclasses.replace(result, trained_on=Overlap(3, exact=True))
    assert repr(seen).endswith("36 images of val, 3 of them trained on)")
