"""The files that the error tour needs: photos, broken images, a checkpoint, tables."""

from __future__ import annotations

import json
import pickle
import tempfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image

import vitrail
from vitrail.data.preprocess import preset


def make_files(folder: Path) -> None:
    """Fill a folder with good and broken files."""
    (folder / "empty").mkdir()
    for root, classes, count in (("photos", ("cat", "dog"), 4), ("other", ("cat", "fox"), 4), ("single", ("cat",), 4)):
        for kind, name in enumerate(classes):
            for number in range(count):
                _photo(folder / root / "train" / name / f"{number}.jpg", 8 * kind + number)
                _photo(folder / root / "val" / name / f"v{number}.jpg", 100 + 8 * kind + number)
    for number in range(3):
        _photo(folder / "flat" / f"{number}.jpg", number)
    good = _photo(folder / "cat.jpg", 1).read_bytes()
    (folder / "text.jpg").write_text("this is not an image")
    (folder / "zero.jpg").write_bytes(b"")
    (folder / "truncated.jpg").write_bytes(good[: len(good) // 2])
    (folder / "photos-bad" / "cat").mkdir(parents=True)
    for name in ("cat", "dog"):
        for number in range(3):
            _photo(folder / "photos-bad" / name / f"{number}.jpg", number)
    (folder / "photos-bad" / "cat" / "bad.jpg").write_bytes(good[:200])
    (folder / "table.csv").write_text("path,label\nphotos/train/cat/0.jpg,cat\nphotos/train/dog/0.jpg\n")
    (folder / "missing.csv").write_text("path,label\nphotos/train/cat/0.jpg,cat\nnowhere.jpg,dog\n")
    (folder / "notes.txt").write_text("hello")
    (folder / "broken.npz").write_bytes(b"PK\x03\x04 not a real archive")
    with (folder / "code.pth").open("wb") as file:
        pickle.dump({"model": _Harmful()}, file)
    np.savez(folder / "numbers.npz", a=np.zeros(3, np.float32))
    (folder / "config-only").mkdir()
    (folder / "config-only" / "config.json").write_text(json.dumps({"format": "vitrail"}))
    _checkpoint(folder / "model")
    _checkpoint(folder / "zero-head", zero=True)
    _checkpoint(folder / "flipped")
    weights = folder / "flipped" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-40] ^= 0x10
    weights.write_bytes(bytes(data))


def scratch() -> Path:
    """Return a new, empty folder for a case that writes."""
    return Path(tempfile.mkdtemp(dir="."))


class _Harmful:
    """What a pickle can hold: a call of any function."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return print, ("code has run",)


def _photo(file: Path, seed: int) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(seed).integers(0, 256, (6, 8, 3), np.uint8)
    Image.fromarray(noise).resize((80, 60), Image.Resampling.BICUBIC).save(file)
    return file


def _checkpoint(folder: Path, *, zero: bool = False) -> None:
    small = {"width": 32, "depth": 2, "heads": 2, "mlp": 64, "patch": 8, "image_size": 32}
    model = vitrail.create_model("ViT-Ti/16", outputs=2, seed=0, **small)
    if not zero:
        torch.nn.init.normal_(model.head.weight, std=0.5)
    vitrail.save(folder, model, preprocess=preset("imagenet", size=32), classes=["cat", "dog"])
