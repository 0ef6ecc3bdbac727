"""Packed datasets, tars and `.npy` files whose content does not agree with itself."""

from __future__ import annotations

import io
import json
import logging
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.image_files import folder_of
from vitrail.data import open_source
from vitrail.data import pack as pack_module
from vitrail.data.check import check
from vitrail.data.decode import decode
from vitrail.data.pack import choose_settings, locked, pack
from vitrail.data.sources.packed_files import read_description
from vitrail.data.types import BadImage
from vitrail.errors import VitrailError


@pytest.fixture(params=["arrays", "encoded"])
def packed(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    source = open_source(str(folder_of(tmp_path / "photos", {"train/a": 3, "train/b": 2, "val/b": 2})))
    pack(source, tmp_path / "p", choose_settings(source, store=request.param))
    return tmp_path / "p"


def changed(packed: Path, path: str, value: Any) -> None:
    description = json.loads((packed / "packed.json").read_text())
    *parents, last = path.split(".")
    place = description
    for name in parents:
        place = place[name]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    (packed / "packed.json").write_text(json.dumps(description))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("splits.train.images", "../outside.bin"),
        ("splits.train.index", "/etc/passwd"),
        ("splits.train.images", ".."),
        ("splits.train.images", 3),
        ("splits.train.images", "val.images.bin"),
        ("splits.train.count", 10**15),
        ("splits.train.count", -1),
        ("splits.train.count", True),
        ("splits.train.shape", [40, 48]),
        ("splits.train.shape", [0, 48, 3]),
        ("splits.train.shape", "abc"),
        ("splits.train.shape", ...),
        ("splits.train.dtype", "object"),
        ("splits.train.dtype", ...),
        ("splits.train.bytes", "many"),
        ("splits.train.index_bytes", None),
        ("splits.train.chunks", [[1]]),
        ("splits.train.chunks", [[10**9, "0"]]),
        ("splits.train.chunks", 7),
        ("splits.train.index_sha256", ...),
        ("splits.train", []),
        ("splits", {}),
        ("splits", "train"),
        ("classes", ["a"]),
        ("classes", ["a", "a"]),
        ("classes", {"a": 1}),
        ("classes", ...),
        ("task", "regress"),
        ("task", ["classify"]),
        ("packing", 3),
        ("made_from", ...),
        ("skipped", "none"),
        ("version", [2]),
        ("version", 1.5),
        ("format", None),
    ],
)
def test_a_changed_description_is_refused_with_a_sentence(packed: Path, path: str, value: Any) -> None:
    changed(packed, path, value)
    with pytest.raises(VitrailError, match="Pack the dataset again"):
        open_source(f"packed:{packed}")


@pytest.mark.parametrize("text", ["", "[]", "null", "3", '{"format": "vitrail-packed", "version": 1}', "[" * 100_000, "\xff"])
def test_a_description_that_is_none(packed: Path, text: str) -> None:
    (packed / "packed.json").write_text(text, encoding="latin-1")
    with pytest.raises(VitrailError, match="Pack the dataset again"):
        open_source(f"packed:{packed}")


def test_truncated_files_are_found_before_they_are_mapped(packed: Path) -> None:
    split = open_source(f"packed:{packed}").splits["train"]
    images = packed / "train.images.bin"
    content = images.read_bytes()
    images.write_bytes(content[:-1])
    with pytest.raises(VitrailError, match=r"bytes, but .* are expected"):
        open_source(f"packed:{packed}")
    with pytest.raises(VitrailError, match=r"are expected|ends before the image is complete"):
        split.payload(len(split) - 1)  # after the source was opened, before the file is mapped


def test_data_check_verifies_checksums(packed: Path) -> None:
    assert "checksum" not in {problem.kind for problem in check(open_source(f"packed:{packed}"), workers=1).problems}
    content = bytearray((packed / "val.images.bin").read_bytes())
    content[5] ^= 1
    (packed / "val.images.bin").write_bytes(content)
    problems = {problem.kind: problem for problem in check(open_source(f"packed:{packed}"), workers=1).problems}
    assert "val.images.bin is corrupted between bytes 0 and" in problems["checksum"].items[0]


def test_an_index_with_other_targets_or_ends(packed: Path) -> None:
    file = packed / "train.index.npz"
    good = dict(np.load(file))
    for name, value in (
        ("targets", np.array([0, 1, 2, 9, 0])),
        ("targets", np.zeros(5)),
        ("targets", np.zeros(4, np.int64)),
        ("name_ends", np.array([5, 4, 3, 2, 1])),
        ("name_block", np.zeros(0, np.uint8)),
    ):
        np.savez(file, **{**good, name: value})
        changed(packed, "splits.train.index_bytes", file.stat().st_size)
        with pytest.raises(VitrailError, match=r"train\.index\.npz is corrupted"):
            open_source(f"packed:{packed}")


def test_two_processes_do_not_pack_into_one_folder(tmp_path: Path) -> None:
    source = open_source(str(folder_of(tmp_path / "photos", {"train/a": 2, "train/b": 2})))
    with locked(tmp_path / "p"), pytest.raises(VitrailError, match="Another process is packing"):
        pack(source, tmp_path / "p", choose_settings(source))
    pack(source, tmp_path / "p", choose_settings(source))
    assert read_description(tmp_path / "p")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p", "photos"]


def test_a_second_process_finds_what_the_first_has_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It looked for the folder before it held the lock, and then could not rename its own."""
    source = open_source(str(folder_of(tmp_path / "photos", {"train/a": 2, "train/b": 2})))
    settings = choose_settings(source)

    @contextmanager
    def late(place: Path) -> Iterator[None]:
        monkeypatch.setattr(pack_module, "locked", locked)
        first = pack(source, tmp_path / "p", settings)
        assert first["splits"]["train"]["count"] == 4
        with locked(place):
            yield

    monkeypatch.setattr(pack_module, "locked", late)
    assert pack(source, tmp_path / "p", settings) == read_description(tmp_path / "p")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p", "photos"]


def tar_of(path: Path, special: bool = False) -> bytes:
    with tarfile.open(path, "w") as archive:
        for number in range(4):
            for ending, content in (("png", b"picture" * 200), ("cls", b"%d" % (number % 2))):
                member = tarfile.TarInfo(f"{number}.{ending}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
        if special:
            pipe = tarfile.TarInfo("pipe.png")
            pipe.type = tarfile.FIFOTYPE
            archive.addfile(pipe)
            holes = tarfile.TarInfo("holes.png")
            holes.type, holes.size = tarfile.GNUTYPE_SPARSE, 0
            archive.addfile(holes)
    return path.read_bytes()


def test_a_tar_without_its_end_is_damaged(tmp_path: Path) -> None:
    content = tar_of(tmp_path / "x.tar")
    reference = f"wds:{tmp_path}/x.tar?index={tmp_path}/cache"
    assert len(open_source(reference).splits["train"]) == 4
    end = len(content.rstrip(b"\0")) // 512 * 512 + 512
    for damaged in (content[:end], content[: end - 512 * 2], content[:3072] + b"\xff" * 512 + content[3584:]):
        (tmp_path / "x.tar").write_bytes(damaged)
        with pytest.raises(VitrailError, match=r"cannot be read as a tar.*copy it again"):
            open_source(reference)


def test_a_torn_index_of_a_tar_is_made_again(tmp_path: Path) -> None:
    tar_of(tmp_path / "x.tar")
    reference = f"wds:{tmp_path}/x.tar?index={tmp_path}/cache"
    open_source(reference)
    (cached,) = (tmp_path / "cache").iterdir()
    good = cached.read_bytes()
    for torn in (
        good[:-20],
        b"",
        b"[]",
        b'{"keys": ["a"], "labels": [], "spans": []}',
        b'{"keys": [1], "labels": [null], "spans": [[0, -5]]}',
        b'{"keys": ["0.png"], "labels": ["0"], "spans": [[512, 1000000000000000]]}',
        b'{"keys": ["0.png"], "labels": ["0"], "spans": [[9223372036854775807, 9223372036854775807]]}',
    ):
        cached.write_bytes(torn)
        assert len(open_source(reference).splits["train"]) == 4
        assert cached.read_bytes() == good


def test_special_members_of_a_tar_are_skipped_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tar_of(tmp_path / "x.tar", special=True)
    with caplog.at_level(logging.WARNING):
        assert len(open_source(f"wds:{tmp_path}/x.tar?index={tmp_path}/cache").splits["train"]) == 4
    assert "skipped 2 members that are not regular files, for example pipe.png" in caplog.text


@pytest.mark.parametrize("header", [{"shape": (1 << 20, 1 << 20, 3)}, {"shape": (-1, 4)}, {"descr": "|O"}, {"descr": "<U99999999"}])
def test_a_npy_header_is_compared_with_the_bytes_present(header: dict[str, Any]) -> None:
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": "|u1", "fortran_order": False, "shape": (4, 4), **header})
    with pytest.raises(BadImage, match=r"its header claims|Python objects|header cannot be read"):
        decode(file.getvalue() + bytes(16), channels=1)
