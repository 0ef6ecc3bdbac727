"""`vitrail explore`, as a user types it."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.commands.test_eval import run
from tests.evaluate.conftest import backbone, checkpoint, photos, tiny_model  # noqa: F401 - fixtures
from vitrail.commands.explore import _file_of, _read
from vitrail.data import open_source
from vitrail.data.decode import decode
from vitrail.data.sources.arrays import ArraySplit
from vitrail.errors import VitrailError


def test_save(capsys: pytest.CaptureFixture[str], checkpoint: Path, photos: Path, tmp_path: Path) -> None:  # noqa: F811
    page = tmp_path / "page.html"
    file = photos / "val" / "red" / "red000.jpg"
    status, _, err = run(capsys, "explore", checkpoint, file, "--save", page)
    assert status == 0 and f"wrote {page}" in "".join(err.splitlines())
    text = page.read_text(encoding="utf-8")
    assert '"names": ["red000.jpg"]' in text and "script-src 'sha256-" in text and 'src="' not in text and 'href="/' not in text
    assert list(tmp_path.iterdir()) == [page]


def test_errors(capsys: pytest.CaptureFixture[str], photos: Path, tmp_path: Path) -> None:  # noqa: F811
    bad = tmp_path / "bad.jpg"
    bad.write_text("no image")
    status, _, err = run(capsys, "explore", bad, "--save", tmp_path / "page.html")
    assert status == 2 and "bad.jpg" in err and not (tmp_path / "page.html").exists()
    status, _, err = run(capsys, "explore", *[photos / "val" / "red" / "red000.jpg"] * 25)
    assert status == 2 and "up to 24" in err


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="SIGINT")
def test_it_prints_its_address_and_ends_with_ctrl_c(checkpoint: Path, photos: Path) -> None:  # noqa: F811
    image = photos / "val" / "red" / "red000.jpg"
    command = [sys.executable, "-m", "vitrail", "explore", str(checkpoint), str(image), "--no-browser"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert server.stderr is not None
        line = server.stderr.readline()
        address = re.search(r"http://127\.0\.0\.1:\d+/", line)
        assert address, line
        with urllib.request.urlopen(address[0], timeout=60) as answer:
            assert b"Vitrail" in answer.read()
        with urllib.request.urlopen(address[0] + "explorer/start", timeout=60) as answer:
            assert b"red000.jpg" in answer.read()
        server.send_signal(signal.SIGINT)
        assert server.wait(60) == 0
    finally:
        server.kill()
        server.wait()


def test_images_of_a_source_that_are_no_files(capsys: pytest.CaptureFixture[str], checkpoint: Path, tmp_path: Path) -> None:  # noqa: F811
    status, _, err = run(capsys, "explore", checkpoint, "example:cat", "--save", tmp_path / "cat.html")
    assert status == 0, err
    assert "example:cat" in (tmp_path / "cat.html").read_text(encoding="utf-8")
    with pytest.raises(VitrailError, match="There are 360 images"):
        _read(["digits?classes=0-1"])
    number = _file_of(open_source("digits").splits["val"], 3)
    with Image.open(io.BytesIO(number)) as image:
        assert image.size == (8, 8) and image.mode == "L"


def test_stored_pixels_of_any_kind_are_shown() -> None:
    for shape, kind in (((4, 6, 3), np.uint8), ((1, 6, 1), np.uint8), ((4, 6, 5), np.uint8), ((4, 6, 3), np.uint16)):
        pixels = np.random.default_rng(0).integers(0, np.iinfo(kind).max, (1, *shape)).astype(kind)
        file = _file_of(ArraySplit("train", "classify", pixels, np.zeros(1, np.int64), ("a",)), 0)
        assert np.array_equal(decode(file, channels=shape[2], bits=8 * pixels.itemsize), pixels[0])
