"""Datasets of torchvision, written here in their own file formats, and of the Hub, as local parquet."""

from __future__ import annotations

import pickle
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import pytest

from tests.data.image_files import encoded, folder_of, picture
from vitrail.data import open_source
from vitrail.data.decode import decode
from vitrail.data.sources.torchvision import _images
from vitrail.errors import VitrailError


@pytest.fixture(autouse=True)
def quiet_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "hf-cache"))


def write_mnist(root: Path, name: str, counts: dict[str, int]) -> dict[str, np.ndarray]:
    raw = root / name / "raw"
    raw.mkdir(parents=True)
    images = {}
    for word, count in counts.items():
        images[word] = np.random.default_rng(count).integers(0, 256, (count, 28, 28), dtype=np.uint8)
        header = struct.pack(">IIII", 0x0803, count, 28, 28)
        (raw / f"{word}-images-idx3-ubyte").write_bytes(header + images[word].tobytes())
        labels = (np.arange(count) % 10).astype(np.uint8)
        (raw / f"{word}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 0x0801, count) + labels.tobytes())
    return images


@pytest.mark.parametrize("name", ["MNIST", "FashionMNIST", "KMNIST"])
def test_arrays_of_torchvision(tmp_path: Path, name: str) -> None:
    images = write_mnist(tmp_path, name, {"train": 20, "t10k": 10})
    source = open_source(f"torchvision:{name.lower()}?root={tmp_path}")
    assert {key: len(split) for key, split in source.splits.items()} == {"train": 20, "test": 10}
    test = source.splits["test"]
    assert test.arrays is not None
    assert np.array_equal(test.arrays[:, :, :, 0], images["t10k"])
    assert test.targets.tolist() == list(range(10))
    assert len(source.classes) == 10


def test_a_dataset_without_splits_is_split(tmp_path: Path) -> None:
    folder_of(tmp_path / "eurosat/2750", {"Forest": 10, "River": 10})
    source = open_source(f"torchvision:EuroSAT?root={tmp_path}&val=0.2")
    assert source.classes == ("Forest", "River")
    assert {key: np.bincount(split.targets).tolist() for key, split in source.splits.items()} == {"train": [8, 8], "val": [2, 2]}
    split = source.splits["val"]
    assert split.image_name(0).startswith("eurosat/2750/Forest/")
    assert split.payload(0) == (tmp_path / split.image_name(0)).read_bytes()


def test_files_of_torchvision_are_read_as_files(tmp_path: Path) -> None:
    base = tmp_path / "oxford-iiit-pet"
    (base / "images").mkdir(parents=True)
    (base / "annotations").mkdir()
    breeds = ["Abyssinian", "beagle"]
    for part, first in (("trainval", 0), ("test", 4)):
        rows = []
        for k in range(first, first + 4):
            name = f"{breeds[k % 2]}_{k}"
            (base / f"images/{name}.jpg").write_bytes(encoded(picture(k), "JPEG"))
            rows.append(f"{name} {k % 2 + 1} 1 1")
        (base / f"annotations/{part}.txt").write_text("\n".join(rows) + "\n")
    source = open_source(f"torchvision:OxfordIIITPet?root={tmp_path}")
    assert source.classes == ("Abyssinian", "Beagle")
    train = source.splits["train"]
    assert train.targets.tolist() == [0, 1, 0, 1]
    assert train.payload(3) == encoded(picture(3), "JPEG")
    assert pickle.loads(pickle.dumps(train)).image_name(3).endswith("beagle_3.jpg")


def test_arrays_are_channels_last() -> None:
    first = np.arange(2 * 3 * 8 * 8, dtype=np.uint8).reshape(2, 3, 8, 8)  # SVHN and STL10
    assert np.array_equal(_images(SimpleNamespace(data=first))[1, 2, 5], first[1, :, 2, 5])
    last = np.arange(2 * 8 * 8 * 3, dtype=np.uint8).reshape(2, 8, 8, 3)  # CIFAR
    assert np.array_equal(_images(SimpleNamespace(data=last)), last)


def test_nothing_is_downloaded_by_default(tmp_path: Path) -> None:
    with pytest.raises(VitrailError, match=r"(?s)CIFAR10 cannot be opened in .*torchvision:CIFAR10\?download=1.*root=DIR"):
        open_source(f"torchvision:CIFAR10?root={tmp_path}")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(VitrailError, match="Did you mean CIFAR10"):
        open_source("torchvision:CIFAR-10")
    with pytest.raises(VitrailError, match="write download=1, or remove it"):
        open_source(f"torchvision:CIFAR10?root={tmp_path}&download=please")


def rows(count: int, first: int = 0) -> dict[str, list[Any]]:
    return {
        "image": [{"bytes": encoded(picture(first + k)), "path": None} for k in range(count)],
        "label": [k % 3 for k in range(count)],
        "name": [("cat", "dog", "eel")[k % 3] for k in range(count)],
        "tags": [[k % 2, 2] for k in range(count)],
        "score": [k / 2 for k in range(count)],
    }


FEATURES = datasets.Features(
    {
        "image": datasets.Image(),
        "label": datasets.ClassLabel(names=["ant", "bee", "cow"]),
        "name": datasets.Value("string"),
        "tags": datasets.Sequence(datasets.ClassLabel(names=["x", "y", "z"])),
        "score": datasets.Value("float32"),
    }
)


@pytest.fixture
def parquet(tmp_path: Path) -> Path:
    folder = tmp_path / "set/data"
    folder.mkdir(parents=True)
    datasets.Dataset.from_dict(rows(6), FEATURES).to_parquet(folder / "train-00000-of-00001.parquet")
    datasets.Dataset.from_dict(rows(3, 50), FEATURES).to_parquet(folder / "validation-00000-of-00001.parquet")
    return tmp_path / "set"


def test_local_parquet(parquet: Path) -> None:
    source = open_source(f"hf:{parquet}")
    assert {name: len(split) for name, split in source.splits.items()} == {"train": 6, "val": 3}
    assert source.classes == ("ant", "bee", "cow")
    val = pickle.loads(pickle.dumps(source.splits["val"]))
    assert val.payload(2) == encoded(picture(52))
    assert val.targets.tolist() == [0, 1, 2]
    assert np.array_equal(decode(val.payload(1), channels=3), picture(51))
    single = open_source(str(parquet / "data/train-00000-of-00001.parquet"))
    assert (single.kind, len(single.splits["train"])) == ("hf", 6)


def test_other_columns_give_other_tasks(parquet: Path) -> None:
    names = open_source(f"hf:{parquet}?label=name")
    assert names.classes == ("cat", "dog", "eel")
    tags = open_source(f"hf:{parquet}?label=tags")
    assert (tags.task, tags.splits["val"].targets.tolist()) == ("multilabel", [[1, 0, 1], [0, 1, 1], [1, 0, 1]])
    score = open_source(f"hf:{parquet}?label=score")
    assert (score.task, score.splits["val"].targets.ravel().tolist()) == ("regress", [0, 0.5, 1])
    none = open_source(f"hf:{parquet}?task=unlabelled")
    assert none.splits["train"].targets.shape == (6, 0)
    with pytest.raises(VitrailError, match="has no column 'colour'; it has image, label, name, tags, score"):
        open_source(f"hf:{parquet}?label=colour")


def test_a_saved_dataset_with_a_held_out_fraction(tmp_path: Path) -> None:
    whole = datasets.DatasetDict({"train": datasets.Dataset.from_dict(rows(30), FEATURES)})
    whole.save_to_disk(tmp_path / "saved")
    source = open_source(f"hf:{tmp_path}/saved?val=0.2")
    assert {name: np.bincount(split.targets).tolist() for name, split in source.splits.items()} == {
        "train": [8, 8, 8],
        "val": [2, 2, 2],
    }
    assert source.splits["val"].payload(0).startswith(b"\x89PNG")  # type: ignore[union-attr]


def test_hidden_labels_and_wrong_folders(tmp_path: Path) -> None:
    hidden = rows(4)
    hidden["label"] = [-1] * 4
    parts = {"train": datasets.Dataset.from_dict(rows(4), FEATURES), "test": datasets.Dataset.from_dict(hidden, FEATURES)}
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "saved")
    assert open_source(f"hf:{tmp_path}/saved").splits["test"].task == "unlabelled"
    folder_of(tmp_path / "images", {"a": 1})
    with pytest.raises(VitrailError, match=r"no .parquet file in .*use folder:"):
        open_source(f"hf:{tmp_path}/images")
    datasets.Dataset.from_dict({"text": ["a"]}).to_parquet(tmp_path / "text.parquet")
    with pytest.raises(VitrailError, match="has no image column; it has text"):
        open_source(f"hf:{tmp_path}/text.parquet")
