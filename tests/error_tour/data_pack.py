"""Errors of packed datasets: writing, resuming and reading them."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.memory_splits import MemorySplit
from tests.error_tour.case import Case, at
from vitrail.data import open_source
from vitrail.data import pack as pack_module
from vitrail.data.pack import PackSettings, choose_settings, locked, pack
from vitrail.data.types import Payload, Source

_TRAIN = "train.images.bin"


def _source(*payloads: Payload) -> Source:
    return Source(reference="folder:mixed", kind="folder", splits={"train": MemorySplit(list(payloads))})


@cache
def _photos() -> Source:
    return open_source("photos")


@cache
def _settings() -> PackSettings:
    return choose_settings(_photos())


@cache
def _original() -> Path:
    pack(_photos(), Path("packed-photos"), _settings())
    return Path("packed-photos")


def _packed(name: str) -> Path:
    """Return a new copy of a packed dataset, whose training split has 115,200 bytes."""
    return Path(shutil.copytree(_original(), name))


def _flipped(name: str) -> Path:
    file = _packed(name) / _TRAIN
    content = bytearray(file.read_bytes())
    content[50] ^= 1
    file.write_bytes(content)
    return Path(name)


def _described(name: str, text: str) -> Source:
    """Open a packed dataset with another description."""
    (_packed(name) / "packed.json").write_text(text)
    return open_source(f"packed:{name}")


def _changed_file(name: str, file: str, *, cut: bool) -> Source:
    path = _packed(name) / file
    content = path.read_bytes()
    path.write_bytes(content[:-1] if cut else bytes(len(content)))
    return open_source(f"packed:{name}")


def _truncated_later() -> object:
    """Read an image after the file has become shorter."""
    pack(_photos(), Path("encoded"), choose_settings(_photos(), store="encoded"))
    split = open_source("packed:encoded").splits["train"]
    Path("encoded", _TRAIN).write_bytes(b"")
    return split.payload(0)


def _lock(destination: str, times: int = 1) -> None:
    with locked(Path(destination)):
        if times > 1:
            _lock(destination, times - 1)


def _resumed() -> object:
    """Resume a dataset that was begun with other options."""
    Path("begun.partial").mkdir()
    Path("begun.partial/plan.json").write_text("{}")
    Path("begun.partial/train.journal").write_text("{}\n")
    return pack(_photos(), Path("begun"), _settings())


def _bad_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def checksum_errors(folder: Path, description: dict[str, Any]) -> list[str]:
        return [f"{folder / _TRAIN} is corrupted between bytes 0 and 115,200."]

    monkeypatch.setattr(pack_module, "checksum_errors", checksum_errors)


# fmt: off
CASES: tuple[Case, ...] = (
    at(
        "data/pack.py:PackSettings.image",
        lambda: PackSettings(store="arrays", size=(1, 1), exact=True).image(Path("cat.jpg").read_bytes(), "cat.jpg"),
        "cat.jpg is 60×80, but the others are 1×1.",
        "Pass --image-size to resize all images, or --store encoded to store them as they are.",
    ),
    at(
        "data/pack.py:choose_settings",
        lambda: choose_settings(_source(np.zeros((4, 4, 3), np.uint8), np.zeros((5, 5, 3), np.uint8)), store="arrays"),
        "The images of folder:mixed differ in size.", "Pass --image-size, or --store encoded.",
    ),
    at(
        "data/pack.py:locked#1", lambda: _lock("cat.jpg/inside/packed"),
        "Cannot write into cat.jpg/inside: Not a directory.", "Choose another folder.",
    ),
    at(
        "data/pack.py:locked#2", lambda: _lock("busy", 2),
        "Another process is packing into busy.", "Wait for it, or choose another name.",
    ),
    at(
        "data/pack.py:_pack", lambda: pack(_photos(), Path("bad-disk"), _settings()),
        "bad-disk.partial/train.images.bin is corrupted between bytes 0 and 115,200. The disk did not return what was written.",
        "Delete bad-disk.partial and use another disk.", patch=_bad_disk,
    ),
    at(
        "data/pack.py:_verify_existing#1", lambda: pack(_photos(), _packed("existing"), replace(_settings(), channels=1)),
        "existing already exists, with other images or options.", "Delete it, or choose another name.",
    ),
    at(
        "data/pack.py:_verify_existing#2", lambda: pack(_photos(), _flipped("flipped-pack"), _settings()),
        "flipped-pack/train.images.bin is corrupted between bytes 0 and 115,200.", "Delete flipped-pack and pack again.",
    ),
    at(
        "data/pack.py:_check_partial", _resumed,
        "begun.partial was started with other images, options or another version.",
        "Use the same ones to resume, or delete it.",
    ),
    at(
        "data/pack.py:_sample_headers", lambda: choose_settings(_source(b"", b"")),
        "No image of folder:mixed can be read.", "Run `vitrail data check` to list the problems.",
    ),
    at(
        "data/sources/packed.py:PackedSplit.payload", _truncated_later,
        "train/cat/0.jpg: encoded/train.images.bin ends before the image is complete.", "Pack the dataset again.",
    ),
    at(
        "data/sources/packed.py:open_packed", lambda: open_source(f"packed:{_flipped('flipped-verify')}?verify=1"),
        "flipped-verify/train.images.bin is corrupted between bytes 0 and 115,200.", "Pack the dataset again.",
    ),
    at(
        "data/sources/packed_files.py:read_description#2", lambda: _described("no-json", "{"),
        "no-json/packed.json is corrupted (", "Pack the dataset again.",
    ),
    at(
        "data/sources/packed_files.py:read_description#3",
        lambda: _described("newer", json.dumps({"format": "vitrail-packed", "version": 99})),
        "newer is vitrail-packed version 99,", "this Vitrail reads vitrail-packed version 2.",
        "Pack the dataset again, or use the version of Vitrail that wrote it.",
    ),
    at(
        "data/sources/packed_files.py:read_description#4",
        lambda: _described("no-task", json.dumps({"format": "vitrail-packed", "version": 2, "task": "sort"})),
        "no-task/packed.json is corrupted: its task is 'sort',",
        "not one of classify, multilabel, regress, unlabelled. Pack the dataset again.",
    ),
    at(
        "data/sources/packed_files.py:check_size", lambda: _changed_file("cut", _TRAIN, cut=True),
        "cut/train.images.bin has 115,199 bytes,", "but 115,200 are expected. Pack the dataset again.",
    ),
    at(
        "data/sources/packed_files.py:read_index", lambda: _changed_file("zeros", "train.index.npz", cut=False),
        "zeros/train.index.npz is corrupted: not a readable .npz file:", "Pack the dataset again.",
    ),
)
# fmt: on
