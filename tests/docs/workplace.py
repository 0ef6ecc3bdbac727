"""A folder with what the pages assume: photos, packed datasets, a run, weights in Google's format. All are small and real files."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from vitrail.checkpoints import Bundle, Report, write
from vitrail.data.pack import PackSettings, pack
from vitrail.data.preprocess import preset
from vitrail.data.sources import open_source
from vitrail.export.verify import sample_photos
from vitrail.models import create_model
from vitrail.train import train
from vitrail.train.config import DataSpec, ModelSpec, OptimSpec, Recipe

CLASSES = ("cat", "dog", "fox")
SMALL: dict[str, Any] = {"width": 32, "depth": 2, "heads": 2, "mlp": 64}


def make_workplace(folder: Path) -> Path:
    """Fill a folder."""
    photos = sample_photos(90)
    for number, photo in enumerate(photos):
        name = CLASSES[number % len(CLASSES)]
        photo = _tinted(photo.resize((96, 80)), number)
        for root in ("photos", "pets", "moths", "flowers"):
            _save(photo, folder / root / name / f"{number:02}.jpg")
        if number < 8:
            _save(photo, folder / "holiday" / ("cat.jpg" if not number else f"{number}.jpg"))
    single = (
        "cat.jpg",
        "dog.jpg",
        "images/candle.png",
        "images/obelisk.png",
        "images/tabby.png",
        "new/church.png",
        "new/springer.png",
    )
    for number, name in enumerate(single):
        _save(photos[number], folder / name)
    (folder / "list.txt").write_text("cat.jpg\ndog.jpg\n")
    for name, size in (("TINY", 64), ("CIFAR", 32)):
        pack(open_source(f"folder:{folder / 'photos'}"), folder / name, PackSettings(store="arrays", size=(size, size)))
    for name in ("ViT-B_16.npz", "B_16.npz"):
        _google_file(folder / name)
    _run(folder / "runs" / "pets", folder / "pets")
    for name in ("scratch", "finetuned", "flowers"):
        shutil.copytree(folder / "runs" / "pets", folder / "runs" / name)
    return folder


def _tinted(photo: Image.Image, number: int) -> Image.Image:
    """Make each photo another image, so that none is a near duplicate of one in another split."""
    noise = np.random.default_rng(number).integers(0, 256, (5, 6, 3), np.uint8)
    return Image.blend(photo, Image.fromarray(noise).resize(photo.size, Image.Resampling.BICUBIC), 0.7)


def _save(photo: Image.Image, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    photo.save(file)


def _google_file(file: Path) -> None:
    """Write a ViT/16 of 2 layers in the layout of Google's published files."""
    torch.manual_seed(0)
    model = create_model("ViT-B/16", outputs=1000, image_size=32, seed=0, **{**SMALL, "width": 64, "heads": 1})
    torch.nn.init.normal_(model.head.weight, std=0.1)
    bundle = Bundle(model, preset("google-vit", size=32), None, "classify", Report(str(file), "google"))
    write(bundle, file, "google")


def _run(out: Path, data: Path) -> None:
    recipe = Recipe(
        name="pets",
        model=ModelSpec(name="ViT-Ti/8", image_size=64, **SMALL),
        data=DataSpec(source=f"folder:{data}", workers=0),
        optim=OptimSpec(lr=1e-3),
        steps=2,
        batch=8,
        eval_every=0,
    )
    train(recipe, out)
