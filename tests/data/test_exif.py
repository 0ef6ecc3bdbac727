"""EXIF orientation: presets do what their libraries do, and photos that stay rotated are mentioned once."""

from __future__ import annotations

import dataclasses
import io
import logging
from pathlib import Path

import numpy as np
import pytest
import timm.data
import torch
from PIL import Image
from torchvision import transforms
from torchvision.datasets.folder import default_loader
from transformers.image_utils import load_image

import vitrail
from tests.data.image_files import encoded, picture
from vitrail.checkpoints import load
from vitrail.checkpoints.preprocess_configs import from_hugging_face, from_timm
from vitrail.data.loader import EvalLoader
from vitrail.data.preprocess import PRESETS, Preprocess, preset
from vitrail.evaluate.predictor import find_images
from vitrail.recipes import recipe_named
from vitrail.train.prepare import make_model


def rotated(kind: str = "JPEG") -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    return encoded(picture(0, 48, 80), kind, exif=exif)


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    (tmp_path / "phone.jpg").write_bytes(rotated())
    return tmp_path / "phone.jpg"


def test_timm_and_torchvision_ignore_the_orientation_and_so_do_their_presets(photo: Path) -> None:
    theirs = timm.data.create_transform(
        input_size=(3, 32, 32), interpolation="bicubic", crop_pct=0.9, mean=(0.5,) * 3, std=(0.5,) * 3, is_training=False
    )
    assert torch.equal(preset("timm", size=32)(photo), theirs(Image.open(photo).convert("RGB")))
    theirs = transforms.Compose(
        [
            transforms.Resize(37),
            transforms.CenterCrop(32),
            transforms.ToTensor(),
            transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        ]
    )
    assert torch.equal(preset("imagenet", size=32)(photo), theirs(default_loader(str(photo))))
    stored = {"mean": [0.5] * 3, "std": [0.5] * 3, "crop_pct": 0.9}
    config = from_timm(stored, (32, 32), 3)
    assert config is not None and torch.equal(config(photo), preset("timm", size=32)(photo))


def test_transformers_applies_the_orientation_and_so_does_its_preprocessing(photo: Path) -> None:
    upright = load_image(str(photo))
    assert upright.size == (48, 80)
    spec = from_hugging_face({}, (32, 32), 3)
    assert torch.equal(spec(photo), spec(np.asarray(upright)))


@pytest.mark.parametrize("name", PRESETS)
def test_plus_exif_turns_photos_upright(name: str) -> None:
    spec = preset(f"{name}+exif", size=32)
    assert spec.exif and spec == dataclasses.replace(preset(name, size=32), exif=True) and spec.name == name
    pixels = np.asarray(Image.open(io.BytesIO(rotated())).transpose(Image.Transpose.ROTATE_270))
    assert torch.equal(spec(rotated()), spec(pixels))
    assert ("EXIF orientation ignored" in preset(name).describe()) == (name != "cifar")


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_rotated_photos_are_recognised(kind: str) -> None:
    assert preset("timm").leaves_rotated(rotated(kind))
    assert not preset("timm+exif").leaves_rotated(rotated(kind))
    assert not preset("timm").leaves_rotated(encoded(picture(0, 48, 80), kind))
    assert not preset("timm").leaves_rotated(b"Exif, but no image") and not preset("timm").leaves_rotated(picture(0, 8, 8))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_warns_once(workers: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(6):
        (tmp_path / f"{number}.jpg").write_bytes(rotated() if number > 1 else encoded(picture(0, 48, 80)))
    split = find_images([tmp_path])
    for spec, expected in ((preset("timm", size=16), 1), (preset("timm+exif", size=16), 0)):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "vitrail.data"):
            assert sum(len(batch) for batch in EvalLoader(split, preprocess=spec, batch=2, workers=workers)) == 6
        assert len(caplog.messages) == expected
    assert not expected
    with caplog.at_level(logging.WARNING, "vitrail.data"):
        list(EvalLoader(split, preprocess=preset("imagenet", size=16), batch=2, workers=workers))
    assert "2.jpg" in caplog.text and "--preprocess stored+exif" in caplog.text


def test_predict_warns_and_stored_exif_turns_upright(photo: Path, caplog: pytest.LogCaptureFixture) -> None:
    name = "vitrail-ti8-tiny-imagenet"
    bundle = vitrail.load(name, verify="none")
    assert bundle.preprocess is not None and bundle.preprocess.exif
    bundle.preprocess = dataclasses.replace(bundle.preprocess, exif=False)
    with caplog.at_level(logging.WARNING, "vitrail.data"):
        sideways = bundle.predict([photo, photo.read_bytes()], top=1)
    assert len(caplog.messages) == 1 and "phone.jpg" in caplog.text and sideways[0] == sideways[1]
    upright = load(name, verify="none", preprocess="stored+exif").preprocess
    assert isinstance(upright, Preprocess) and upright.exif and upright.resize_to == bundle.preprocess.resize_to
    assert load(name, verify="none", preprocess="timm+exif").preprocess == preset("timm+exif", size=64)


def test_training_turns_photos_upright_whatever_the_preset_does() -> None:
    recipe = recipe_named("digits")
    for exif in (True, False):
        data = dataclasses.replace(recipe.data, preprocess="imagenet", exif=exif)
        _, preprocess = make_model(recipe.replace(data=data), 10, tuple("0123456789"), [], on_meta=True)
        assert preprocess.exif is exif
