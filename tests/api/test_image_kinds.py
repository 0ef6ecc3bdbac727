"""Every way in which an image can be given to Python, and the sentence for what is not one."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail
from tests.evaluate.conftest import checkpoint, photos  # noqa: F401 - fixtures
from vitrail.errors import VitrailError


@pytest.fixture(scope="module")
def bundle(checkpoint: Path) -> vitrail.Bundle:  # noqa: F811
    return vitrail.load(checkpoint)


def test_open_files_buffers_and_arrays_of_paths(bundle: vitrail.Bundle, photos: Path) -> None:  # noqa: F811
    path = sorted((photos / "val").rglob("*.*"))[0]
    expected = bundle.predict(path)[0]
    with path.open("rb") as file:
        assert bundle.predict(file)[0] == expected
    assert bundle.predict(memoryview(path.read_bytes()))[0] == expected
    assert bundle.predict(np.array([str(path), str(path)])).labels == [expected[0].label] * 2
    assert list(bundle.predict(np.array([path], dtype=object))) == [expected]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (np.zeros((3, 40, 50), np.uint8), r"An array of shape \(3, 40, 50\) .* \[height, width, channels\] .* numpy.moveaxis"),
        (torch.zeros(40, 50, 3, dtype=torch.uint8), r"A uint8 tensor of shape \(40, 50, 3\) .* \[channels, height, width\]"),
        ({"a.png": 1}, "A value of type dict is not an image"),
        (io.StringIO("text"), "opened as text"),
    ],
)
def test_what_is_not_an_image_is_a_sentence(bundle: vitrail.Bundle, given: object, message: str) -> None:
    with pytest.raises(VitrailError, match=message):
        bundle.predict(given)


def test_errors_name_arguments_not_options(bundle: vitrail.Bundle, tmp_path: Path) -> None:
    with pytest.raises(VitrailError, match=r"pass bad_images='skip'"):
        bundle.predict(b"not an image")
    with pytest.raises(VitrailError, match=r"device='cpu'|no such device") as error:
        bundle.predict(np.zeros((8, 8, 3), np.uint8), device="cuda" if not torch.cuda.is_available() else "mps")
    assert "--" not in str(error.value)
    (tmp_path / "photos" / "zebra").mkdir(parents=True)
    for number in range(4):
        Image.new("RGB", (8, 8), (60 * number, 90, 30)).save(tmp_path / "photos" / "zebra" / f"{number}.png")
    with pytest.raises(VitrailError, match="or pass ignore_unknown_classes=True to skip its images"):
        bundle.evaluate(tmp_path / "photos")
    (tmp_path / "report").mkdir()
    (tmp_path / "report" / "report.html").touch()
    with pytest.raises(VitrailError, match="Pass overwrite=True to replace it"):
        bundle.evaluate("digits", out=tmp_path / "report")
    with pytest.raises(VitrailError, match="Choose another name for out"):
        bundle.inspect(out=tmp_path / "report" / "report.html")
    for top in (0, 1.5, "3"):
        with pytest.raises(VitrailError, match=f"top is {top!r}"):
            bundle.predict(np.zeros((8, 8, 3), np.uint8), top=top)  # type: ignore[arg-type]


def test_a_float_tensor_of_pixels_is_mentioned(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:  # noqa: F811
    bundle = vitrail.load(checkpoint)
    channels, size = bundle.model.config.channels, bundle.model.config.image_size
    for scale, warned in ((1, False), (255, True)):
        caplog.clear()
        bundle.predict(scale * torch.rand(2, channels, *size))
        assert ("Pass pixels as uint8" in caplog.text) is warned
