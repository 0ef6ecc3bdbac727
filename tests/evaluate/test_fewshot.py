"""The few-shot protocol from images to scores."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.evaluate.conftest import write_images
from tests.evaluate.test_ridge import by_least_squares
from vitrail.checkpoints import Bundle, load
from vitrail.data import open_source
from vitrail.errors import VitrailError
from vitrail.evaluate import FewShotEvaluator, FewShotSpec, few_shot
from vitrail.evaluate.context import EvalContext
from vitrail.evaluate.features import extract_features
from vitrail.evaluate.settings import FeatureSpec


def test_scores_equal_an_independent_solution(bundle: Bundle, photos: Path) -> None:
    protocol = FewShotSpec(shots=(1, 5, 12), seeds=2)  # 48 features and the constant: 48 images still use the kernel form
    found = few_shot(bundle, f"folder:{photos}", protocol=protocol)
    source = open_source(f"folder:{photos}")
    assert bundle.preprocess is not None
    train, test = (
        extract_features(bundle.model, source.split(name), bundle.preprocess, FeatureSpec(), EvalContext())
        for name in ("train", "val")
    )
    names = [source.split("train").image_name(i) for i in range(48)]
    for trial in found.trials:
        rows = [names.index(file) for file in trial.files]
        y = source.split("train").targets[rows]
        assert np.bincount(y).tolist() == [trial.shots] * 4
        scores = by_least_squares(train.features[rows], y, test.features, 4)
        assert trial.accuracy == pytest.approx((scores.argmax(1) == source.split("val").targets).mean())
        assert trial.test_images == 36
    assert found.mean(5) == pytest.approx(np.mean([one.accuracy for one in found.trials if one.shots == 5]))
    assert found.std(5) == pytest.approx(np.std([one.accuracy for one in found.trials if one.shots == 5], ddof=1))
    assert json.loads(json.dumps(found.to_dict()))["scores"]["5"]["mean"] == found.mean(5)
    assert found.mean(12) > 0.5


def test_a_backbone_and_any_feature_work(backbone: Path, photos: Path) -> None:
    found = few_shot(
        load(backbone),
        f"folder:{photos}",
        protocol=FewShotSpec(shots=(5,), seeds=1),
        features=FeatureSpec(feature="mean", layer=0, norm=False),
    )
    assert 0 <= found.mean(5) <= 1 and np.isnan(found.std(5)) and found.to_dict()["features"]["layer"] == 0
    assert found.to_dict()["scores"]["5"]["std"] is None


def test_dropped_classes_are_neither_fitted_nor_tested(bundle: Bundle, tmp_path: Path) -> None:
    write_images(tmp_path, {"train": 6, "val": 5})
    for file in sorted((tmp_path / "train" / "green").iterdir())[2:]:
        file.unlink()
    with pytest.raises(VitrailError, match=r"Class 'green' has 2 images, fewer than 6 shots"):
        few_shot(bundle, f"folder:{tmp_path}", protocol=FewShotSpec(shots=(1, 6), seeds=1))
    found = few_shot(bundle, f"folder:{tmp_path}", protocol=FewShotSpec(shots=(1, 6), seeds=1, small_classes="drop"))
    one, six = found.trials
    assert one.test_images == 20 and one.dropped == () and six.test_images == 15 and six.dropped == ("green",)
    assert len(six.files) == 18 and not any("green" in file for file in six.files)


def test_a_bad_support_image_is_an_error_and_a_bad_test_image_may_be_skipped(bundle: Bundle, tmp_path: Path) -> None:
    write_images(tmp_path, {"train": 3, "val": 3})
    next((tmp_path / "val" / "red").iterdir()).write_bytes(b"")
    found = few_shot(
        bundle, f"folder:{tmp_path}", protocol=FewShotSpec(shots=(3,), seeds=1), context=EvalContext(bad_images="skip")
    )
    assert found.trials[0].test_images == 11 and len(found.bad) == 1
    next((tmp_path / "train" / "red").iterdir()).write_bytes(b"")
    with pytest.raises(VitrailError, match="empty file"):
        few_shot(bundle, f"folder:{tmp_path}", protocol=FewShotSpec(shots=(3,), seeds=1), context=EvalContext(bad_images="skip"))


def test_impossible_protocols_give_clear_messages(bundle: Bundle, photos: Path, tmp_path: Path) -> None:
    write_images(tmp_path, {"train": 3})
    with pytest.raises(VitrailError, match="only the split train"):
        few_shot(bundle, f"folder:{tmp_path}")
    with pytest.raises(VitrailError, match="not used for training"):
        few_shot(bundle, f"folder:{photos}", split="train")
    with pytest.raises(VitrailError, match="one class per image"):
        few_shot(bundle, f"folder:{photos}?labels=none")
    with pytest.raises(VitrailError, match="seeds is 0; use 1 or more"):
        FewShotSpec(seeds=0)
    source = open_source(f"folder:{photos}")
    assert bundle.preprocess is not None
    with pytest.raises(VitrailError, match="use mean instead of patches"):
        FewShotEvaluator(source.split("train"), source.split("val"), bundle.preprocess, features=FeatureSpec(feature="patches"))


def test_the_evaluator_leaves_the_model_unchanged(bundle: Bundle, photos: Path) -> None:
    source = open_source(f"folder:{photos}")
    assert bundle.preprocess is not None
    evaluator = FewShotEvaluator(
        source.split("train"), source.split("val"), bundle.preprocess, protocol=FewShotSpec(shots=(1, 5), seeds=1)
    )
    bundle.model.train()
    first = evaluator(bundle.model)
    assert set(first) == {"1shot", "5shot"} and bundle.model.training and evaluator(bundle.model) == first
