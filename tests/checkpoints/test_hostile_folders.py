"""Checkpoint folders with special files and absurd configs: a sentence, at once, and nothing is opened."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

import vitrail
from tests.checkpoints.small_models import KINDS, random_model
from vitrail.errors import VitrailError


@pytest.mark.parametrize("depth", [10**5, 10**9])
def test_a_depth_that_no_file_has_is_an_error_at_once(depth: int, tmp_path: Path) -> None:
    vitrail.save(tmp_path / "own", random_model(KINDS["plain"]))
    config = tmp_path / "own" / "config.json"
    values = json.loads(config.read_text())
    values["model"]["depth"] = depth
    start = time.perf_counter()
    with pytest.raises(VitrailError, match=f"tensors, but the config means {depth:,} blocks"):
        vitrail.load(tmp_path / "own", depth=depth)
    config.write_text(json.dumps(values))
    with pytest.raises(VitrailError, match=f"tensors, but the config means {depth:,} blocks"):
        vitrail.load(tmp_path / "own")
    assert time.perf_counter() - start < 5


@pytest.mark.parametrize("kind", ["fifo", "device"])
def test_special_files_in_an_index_are_never_opened(kind: str, tmp_path: Path) -> None:
    vitrail.save(tmp_path / "own", random_model(KINDS["plain"]), shard_size=20_000)
    shard = min((tmp_path / "own").glob("model-*.safetensors"))
    shard.unlink()
    if kind == "fifo":
        os.mkfifo(shard)
    else:
        shard.symlink_to("/dev/zero")
    with pytest.raises(VitrailError, match=r"a (FIFO|character device), not a regular file"):
        vitrail.load(tmp_path / "own")


def test_a_fifo_as_a_checkpoint(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.pth")
    with pytest.raises(VitrailError, match="is a FIFO, not a checkpoint"):
        vitrail.load(tmp_path / "model.pth")
