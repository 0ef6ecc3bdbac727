"""Class names of other libraries' weights: known from where they come, or assumed and listed."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import vitrail
from tests.checkpoints.small_models import KINDS, bundle_of, needed_fields
from vitrail.checkpoints import convert
from vitrail.checkpoints.conversion import write
from vitrail.data import imagenet
from vitrail.models import ModelConfig

CONFIG = dataclasses.replace(KINDS["plain"], outputs=1000)
FIELDS = needed_fields(CONFIG)


def written(path: Path, to: str, config: ModelConfig = CONFIG) -> Path:
    write(bundle_of(config), path, to)
    return path


@pytest.mark.parametrize(
    ("name", "to"),
    [
        ("B_16-i21k-300ep-lr_0.001-aug_medium1-wd_0.1-do_0.0-sd_0.0--imagenet2012-steps_20k-lr_0.01-res_224.npz", "google"),
        ("imagenet21k+imagenet2012/ViT-B_16.npz", "google"),
        ("vit_b_16-c867db91.pth", "torchvision"),
        ("deit_base_patch16_224-b5f2ef4d.pth", "timm"),
    ],
)
def test_published_file_names_are_known(tmp_path: Path, name: str, to: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    loaded = vitrail.load(written(tmp_path / name, to), **FIELDS)
    assert loaded.classes == imagenet.labels("1k") and not loaded.classes_assumed
    assert any("class names of ImageNet-1k, by the file's name" in note for note in loaded.report.notes)


@pytest.mark.parametrize(("name", "to"), [("x.npz", "google"), ("x.pth", "torchvision"), ("x.safetensors", "timm"), ("x", "hf")])
def test_a_bare_file_of_1000_outputs_is_assumed(tmp_path: Path, name: str, to: str) -> None:
    loaded = vitrail.load(written(tmp_path / name, to), **(FIELDS if to != "hf" else {}))
    assert loaded.classes == imagenet.labels("1k") and loaded.classes_assumed
    assert sum("assumed ImageNet-1k in its usual order" in text for text in loaded.report.assumptions) == 1
    for given in ({"classes": [str(number) for number in range(1000)]}, {"outputs": 3}):
        known: Any = vitrail.load(tmp_path / name, **(FIELDS if to != "hf" else {}), **given)
        assert not any("ImageNet-1k" in text for text in known.report.assumptions)


def test_21k(tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG, outputs=21843)
    known = vitrail.load(written(tmp_path / "B_16-i21k-300ep-lr_0.001-aug_medium1-wd_0.1-do_0.0-sd_0.0.npz", "google", config))
    assert known.classes == imagenet.labels("21k") and not known.classes_assumed
    assert vitrail.load(written(tmp_path / "x.npz", "google", config)).classes_assumed


def test_tags_of_timm(tmp_path: Path) -> None:
    folder = written(tmp_path / "x", "timm")
    config = json.loads((folder / "config.json").read_text())
    for tag, assumed in (("augreg_in21k_ft_in1k", False), ("sw_in12k_ft_in1k", False), ("mine", True), ("in12k", True)):
        config["pretrained_cfg"]["tag"] = tag
        (folder / "config.json").write_text(json.dumps(config))
        assert vitrail.load(folder).classes_assumed is assumed


def test_stored_names_are_kept_and_made_unique(tmp_path: Path) -> None:
    folder = written(tmp_path / "x", "hf")
    config = json.loads((folder / "config.json").read_text())
    words = [one.words for one in imagenet.classes("1k")]
    words[134] = words[517] = "crane"  # as in google/vit-base-patch16-224
    config["id2label"] = {str(k): word for k, word in enumerate(words)}
    (folder / "config.json").write_text(json.dumps(config))
    classes = vitrail.load(folder).classes
    assert classes is not None and classes[0] == "tench, Tinca tinca" and len(set(classes)) == 1000
    assert (classes[134], classes[517]) == ("crane (bird)", "crane (machine)")
    own = bundle_of(CONFIG)
    own.classes = tuple(f"mine {k}" for k in range(1000))
    write(own, tmp_path / "own", "hf")
    assert vitrail.load(tmp_path / "own").classes == own.classes


def test_other_numbers_of_outputs_and_zero_heads_get_no_names(tmp_path: Path) -> None:
    assert vitrail.load(written(tmp_path / "five.npz", "google", KINDS["plain"])).classes is None
    zero = bundle_of(CONFIG)
    zero.model.head.weight.data.zero_()
    write(zero, tmp_path / "zero.npz", "google")
    loaded = vitrail.load(tmp_path / "zero.npz")
    assert loaded.classes is None and not any("usual order" in text for text in loaded.report.assumptions)


def test_an_assumption_is_not_stored_as_a_fact(tmp_path: Path) -> None:
    convert(written(tmp_path / "x.npz", "google"), tmp_path / "own")
    assert vitrail.load(tmp_path / "own").classes is None
    known = written(tmp_path / "B_16--imagenet2012.npz", "google")
    convert(known, tmp_path / "known")
    assert vitrail.load(tmp_path / "known").classes == imagenet.labels("1k")
    given = tuple(f"mine {k}" for k in range(1000))
    assert vitrail.load(tmp_path / "x.npz", classes=given).classes == given


def test_evaluation_with_other_classes_than_assumed_is_by_order(tmp_path: Path) -> None:
    from vitrail.evaluate import evaluate

    bare, known = written(tmp_path / "x.npz", "google"), written(tmp_path / "B_16--imagenet2012.npz", "google")
    for k in range(1000):
        folder = tmp_path / "mine" / "val" / f"{k:04d}"
        folder.mkdir(parents=True)
        if k % 250 == 0:
            Image.fromarray(np.full((8, 8, 3), k // 4, np.uint8)).save(folder / "x.png")
    result = evaluate(vitrail.load(bare), f"folder:{tmp_path / 'mine'}")
    assert result.classes[1] == "0001" and "classes were matched by order, not by name" in result.notes
    with pytest.raises(vitrail.VitrailError, match="'0000', which the model does not have"):
        evaluate(vitrail.load(known), f"folder:{tmp_path / 'mine'}")


def test_evaluation_on_folders_of_wordnet_ids(tmp_path: Path) -> None:
    from vitrail.evaluate import evaluate

    bundle = vitrail.load(written(tmp_path / "B_16--imagenet2012.npz", "google"))
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8))
    predicted = bundle.predict(image, top=1)[0][0].index
    folder = tmp_path / "data" / "val" / imagenet.wordnet_ids("1k")[predicted]
    folder.mkdir(parents=True)
    image.save(folder / "x.png")
    assert evaluate(bundle, f"folder:{tmp_path / 'data'}").metrics["accuracy"] == 1.0
