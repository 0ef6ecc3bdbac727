"""FIFOs, sockets and devices among images: skipped and said, never a wait without end."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.data.image_files import folder_of
from vitrail.data.check import check
from vitrail.data.sources import open_source
from vitrail.data.types import BadImage
from vitrail.errors import VitrailError
from vitrail.evaluate.predictor import find_images
from vitrail.regular_files import read_bytes

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such files")


@pytest.fixture(autouse=True)
def no_hang() -> Iterator[None]:
    def stop(number: int, frame: object) -> None:
        raise TimeoutError("it hangs")

    previous = signal.signal(signal.SIGALRM, stop)
    signal.alarm(10)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, previous)


def image(path: Path, value: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((4, 4, 3), value, np.uint8)).save(path)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for number, label in enumerate("aabb"):
        image(tmp_path / label / f"{number}.png", number)
    os.mkfifo(tmp_path / "a" / "pipe.png")
    (tmp_path / "a" / "link.png").symlink_to("pipe.png")
    (tmp_path / "b" / "zero.jpg").symlink_to("/dev/zero")
    monkeypatch.chdir(tmp_path / "b")  # the address of a socket is short
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("socket.png")
    return tmp_path


@pytest.mark.parametrize("options", ["?val=0", "?labels=none"])
def test_a_folder_skips_them_and_says_it(folder: Path, options: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        source = open_source(f"folder:{folder}{options}")
    assert len(source.splits["train"]) == 4
    reasons = {Path(bad.name).name: bad.reason for bad in source.skipped}
    assert reasons == {
        "pipe.png": "a FIFO, not a regular file",
        "link.png": "a FIFO, not a regular file",
        "zero.jpg": "a character device, not a regular file",
        "socket.png": "a socket, not a regular file",
    }
    assert "skipped 4 files that are not regular files" in caplog.text
    problems = {problem.kind: problem for problem in check(source, workers=1).problems}
    assert problems["special-file"].message == "4 images skipped: not a regular file."
    assert "missing" not in problems


@pytest.mark.parametrize(
    ("name", "what"), [("a/pipe.png", "a FIFO"), ("b/zero.jpg", "a character device"), ("b/socket.png", "a socket")]
)
def test_a_table_and_predict_report_them_when_read(folder: Path, name: str, what: str) -> None:
    (folder / "table.csv").write_text(f"path,label\na/0.png,a\n{name},b\n")
    for split in (open_source(f"csv:{folder}/table.csv?val=0").splits["train"], find_images([folder / "a/0.png", folder / name])):
        assert split.payload(0)
        with pytest.raises(BadImage, match=f"{what}, not a regular file"):
            split.payload(1)


def test_tables_and_lists_that_are_no_regular_files(folder: Path) -> None:
    os.mkfifo(folder / "table.csv")
    os.mkfifo(folder / "list.txt")
    with pytest.raises(VitrailError, match=r"Cannot read the table .*a FIFO, not a regular file"):
        open_source(f"csv:{folder}/table.csv")
    with pytest.raises(VitrailError, match=r"Cannot read the list .*a FIFO, not a regular file"):
        find_images([folder / "list.txt"])


def test_a_file_above_the_limit_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "huge.jpg").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(BadImage, match=r"1,099,511,627,776 bytes, more than the limit of 1,073,741,824"):
        find_images([tmp_path / "huge.jpg"]).payload(0)
    with pytest.raises(OSError, match="more than the limit of 10 bytes"):
        read_bytes("/proc/self/maps", 10)  # its size is said to be 0


@pytest.mark.parametrize("pattern", ["{0..999999999999}", "{0..9999}{0..9999}{0..9999}", f"{{0..{'9' * 5000}}}"])
def test_a_pattern_of_too_many_tars_is_refused_before_it_expands(pattern: str) -> None:
    with pytest.raises(VitrailError, match=r"more than 1,000,000 names"):
        open_source(f"wds:train-{pattern}.tar")


def test_photos_of_formats_that_are_not_read_are_mentioned(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder_of(tmp_path / "photos", {"cat": 3, "dog": 3})
    (tmp_path / "photos" / "cat" / "IMG_1.HEIC").write_bytes(b"....ftypheic")
    open_source(str(tmp_path / "photos"))
    assert "skipped 1 photo of a format that is not read" in caplog.text and "convert it to JPEG or PNG" in caplog.text
    caplog.clear()
    assert len(find_images([tmp_path / "photos"])) == 6 and "IMG_1.HEIC" in caplog.text


def test_a_link_to_the_folder_of_all_classes_does_not_mix_them(tmp_path: Path) -> None:
    folder_of(tmp_path / "photos", {"cat": 3, "dog": 3})
    (tmp_path / "photos" / "cat" / "all").symlink_to(tmp_path / "photos")
    splits = open_source(f"{tmp_path / 'photos'}?val=0").splits
    assert len(splits["train"]) == 6
