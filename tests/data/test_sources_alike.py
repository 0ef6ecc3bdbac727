"""The same images as a folder, a table, tars, parquet and packed give the same dataset."""

from __future__ import annotations

import io
import multiprocessing
import tarfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch

from tests.data.image_files import digest_of, folder_of
from vitrail.data import EvalLoader, open_source, preset
from vitrail.data.pack import choose_settings, pack
from vitrail.data.types import Source, Split


@pytest.fixture
def everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Source]:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "hf-cache"))
    root = folder_of(tmp_path / "set", {"train/2": 4, "train/10": 3, "val/10": 2})
    files = sorted(root.rglob("*.png"))
    rows = "".join(f"{file.relative_to(tmp_path)},{file.parent.name},{file.parent.parent.name}\n" for file in files)
    (tmp_path / "t.csv").write_text("path,label,split\n" + rows)
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("string")})
    for part in ("train", "val"):
        own = [file for file in files if file.parent.parent.name == part]
        with tarfile.open(tmp_path / f"{part}-0.tar", "w") as tar:
            for k, file in enumerate(own):
                tar.add(file, f"{k:03d}.png")
                label = tarfile.TarInfo(f"{k:03d}.cls")
                label.size = len(file.parent.name)
                tar.addfile(label, io.BytesIO(file.parent.name.encode()))
        table = {"image": [{"bytes": file.read_bytes()} for file in own], "label": [file.parent.name for file in own]}
        (tmp_path / "hub").mkdir(exist_ok=True)
        datasets.Dataset.from_dict(table, features).to_parquet(tmp_path / f"hub/{part}.parquet")
    folder = open_source(str(root))
    pack(folder, tmp_path / "arrays", choose_settings(folder))
    pack(folder, tmp_path / "encoded", choose_settings(folder, store="encoded"))
    references = {
        "csv": f"csv:{tmp_path}/t.csv",
        "wds": f"wds:{tmp_path}/{{train,val}}-0.tar?index={tmp_path}/cache",
        "hf": f"hf:{tmp_path}/hub",
        "arrays": f"packed:{tmp_path}/arrays",
        "encoded": f"packed:{tmp_path}/encoded",
    }
    return {"folder": folder, **{name: open_source(reference) for name, reference in references.items()}}


def seen(split: Split) -> dict[bytes, str]:
    """Map the preprocessed pixels of each image to its label."""
    spec = preset("timm", size=16)
    loader = EvalLoader(split, preprocess=spec, batch=4, workers=0)
    found = {}
    for batch in loader:
        for image, target in zip(batch.images, batch.targets, strict=True):
            found[image.numpy().tobytes()] = split.classes[int(target)]
    return found


def test_every_kind_of_source_gives_the_same_input(everywhere: dict[str, Source]) -> None:
    assert {source.kind for source in everywhere.values()} == {"folder", "csv", "wds", "hf", "packed"}
    for part in ("train", "val"):
        expected = seen(everywhere["folder"].splits[part])
        assert len(expected) == {"train": 7, "val": 2}[part]
        for name, source in everywhere.items():
            assert source.classes == ("2", "10"), name
            assert seen(source.splits[part]) == expected, name


@pytest.mark.slow
def test_every_kind_of_split_works_in_a_spawned_process(everywhere: dict[str, Source]) -> None:
    splits = [source.splits["train"] for source in [*everywhere.values(), open_source("digits")]]
    splits += [split.subset(np.array([2, 0])) for split in splits]
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        assert pool.submit(digest_of, splits).result() == digest_of(splits)


def test_batches_of_all_sources_have_the_same_dtype(everywhere: dict[str, Source]) -> None:
    for source in everywhere.values():
        batch = next(iter(EvalLoader(source.splits["val"], preprocess=preset("google-vit", size=8), batch=8, workers=0)))
        assert batch.images.dtype == torch.float32
        assert batch.targets.dtype == torch.int64
