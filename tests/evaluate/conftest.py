"""A small dataset and a checkpoint that classifies it, made in a second: random features and a fitted head."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail
from vitrail.checkpoints import save
from vitrail.data import open_source, preset
from vitrail.data.loader import EvalLoader
from vitrail.evaluate.ridge import fit_ridge
from vitrail.models import Model

CLASSES = ("blue", "green", "red", "yellow")
COLOURS = {"blue": (40, 60, 200), "green": (40, 170, 60), "red": (200, 50, 40), "yellow": (210, 200, 50)}


def write_images(root: Path, counts: dict[str, int], seed: int = 0) -> None:
    """Write noisy images around one colour per class, of various sizes; some are close to another class."""
    random = np.random.default_rng(seed)
    for split, count in counts.items():
        for name, colour in COLOURS.items():
            folder = root / split / name
            folder.mkdir(parents=True, exist_ok=True)
            for number in range(count):
                height, width = random.integers(30, 60, 2)
                shifted = random.normal(colour, 55)
                pixels = random.normal(shifted, 40, (height, width, 3)).clip(0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(folder / f"{name}{number:03d}.jpg", quality=90)


def tiny_model(outputs: int = 4) -> Model:
    return vitrail.create_model("ViT-Ti/8", outputs=outputs, image_size=32, width=48, depth=2, heads=3, mlp=96, seed=1)


@torch.no_grad()
def with_fitted_head(model: Model, source: str) -> Model:
    """Give the model a head that classifies, from a ridge regression on its own features."""
    train = open_source(source).split("train")
    batches = list(EvalLoader(train, preprocess=preset("google-vit", size=32), batch=64, workers=0))
    features = torch.cat([model.features(batch.images).pre_logits for batch in batches])
    fitted = fit_ridge(features, torch.cat([batch.targets for batch in batches]), len(train.classes), l2=1.0)
    weight = fitted.weights[:-1] / fitted.std[:, None]
    model.head.weight.copy_(4 * weight.T)  # type: ignore[union-attr, operator]
    model.head.bias.copy_(4 * (fitted.bias * fitted.weights[-1] - fitted.mean @ weight))  # type: ignore[union-attr, operator]
    return model


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("photos")
    write_images(root, {"train": 12, "val": 9})
    return root


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, photos: Path) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints") / "colours"
    model = with_fitted_head(tiny_model().eval(), f"folder:{photos}")
    save(folder, model, preprocess=preset("google-vit", size=32), classes=CLASSES, task="classify")
    return folder


@pytest.fixture(scope="session")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints") / "backbone"
    save(folder, tiny_model(outputs=0), preprocess=preset("google-vit", size=32))
    return folder


@pytest.fixture
def bundle(checkpoint: Path) -> vitrail.Bundle:
    return vitrail.load(checkpoint)
