"""The digits are written into the package when it is built."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits

import hatch_build
from vitrail.data import embedded


def test_the_embedded_digits_are_those_of_scikit_learn() -> None:
    images, labels = embedded.digits()
    bunch = load_digits()
    assert np.array_equal(images, bunch.images) and np.array_equal(labels, bunch.target)


def test_a_build_that_is_stopped_leaves_no_part_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "digits.gz"

    def write_a_part(self: Path, data: bytes) -> int:
        with self.open("wb") as stream:
            stream.write(data[:100])
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", write_a_part)
        with pytest.raises(KeyboardInterrupt):
            hatch_build.write_digits(target)
    assert not list(tmp_path.iterdir())
    hatch_build.write_digits(target)
    written, installed = target.read_bytes(), (Path(embedded.__file__).parent / "digits.gz").read_bytes()
    assert gzip.decompress(written) == gzip.decompress(installed)
    assert [file.name for file in tmp_path.iterdir()] == ["digits.gz"]
