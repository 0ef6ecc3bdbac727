"""Checkpoints of a run: what is corrupted, not finite, not theirs or malicious is never loaded, and a full disk is a sentence."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import os
import pickle
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from vitrail.errors import VitrailError
from vitrail.files import DiskError, sha256
from vitrail.train import snapshots as module
from vitrail.train.parallel import World
from vitrail.train.shard_metadata import read_metadata
from vitrail.train.snapshots import Snapshots, damage

STATE = {"skipped_steps": [1], "window": [0.1, 1e-9, 3.0], "scaler": None, "ranks": 1}


def tensors(value: float) -> dict[str, torch.Tensor]:
    return {
        "model.a": torch.full((2, 3), value),
        "optim.a.mean": torch.full((2, 3), value, dtype=torch.bfloat16),
        "optim.count": torch.tensor(7),
    }


def saved(folder: Path, **values: float) -> Snapshots:
    """Checkpoints of these steps, `_2=1.0`, with these weights."""
    made = Snapshots(folder, World(torch.device("cpu")))
    for step, value in values.items():
        made.save(int(step[1:]), tensors(value), STATE)
    made.finish()
    return made


def reseal(folder: Path, **changes: Any) -> None:
    """Give a checkpoint valid checksums after it was changed, as an attacker can."""
    state = json.loads((folder / "state.json").read_text())
    files = {path.name: sha256(path) for path in folder.iterdir() if path.name != "state.json"}
    state = {**state, "files": files, **changes}
    state["checksum"] = module.checksum(state)
    (folder / "state.json").write_text(json.dumps(state))


def test_a_checkpoint_is_read_as_it_was_saved(tmp_path: Path) -> None:
    made = saved(tmp_path, _2=1.0, _4=2.0)
    found = tensors(0.0)
    state = made.load(found)
    assert state is not None and state["step"] == 4 and state["window"] == STATE["window"]
    assert all(torch.equal(found[name], value) for name, value in tensors(2.0).items())


def test_every_byte_of_the_state_is_covered(tmp_path: Path) -> None:
    saved(tmp_path, _2=1.0)
    file = tmp_path / "step-00000002" / "state.json"
    content = file.read_bytes()
    for place in range(0, len(content), 5):
        changed = bytearray(content)
        changed[place] ^= 1
        file.write_bytes(changed)
        assert damage(file.parent), content[place : place + 20]
    file.write_bytes(content)
    assert damage(file.parent) == ""
    state = json.loads(content)
    for change in ({"step": 4}, {"format": 2}, {"window": [0.1, 1e-9, 4.0]}):
        file.write_text(json.dumps({**state, **change}))
        assert "state.json does not have its checksum" in damage(file.parent)
    del state["checksum"]
    file.write_text(json.dumps(state))
    assert "checksum" in damage(file.parent)


def test_a_state_belongs_to_its_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = saved(tmp_path, _2=1.0)
    shutil.copytree(tmp_path / "step-00000002", tmp_path / "step-00000009")
    state = made.load(tensors(0.0))
    assert state is not None and state["step"] == 2
    assert "step 9 is corrupted (state.json is that of step 2)" in caplog.text


def test_other_names_next_to_checkpoints_are_ignored(tmp_path: Path) -> None:
    made = saved(tmp_path, _2=1.0)
    for name in ("step-00000008.bak", "step-old", "step-9", "step-", "step-٠٠٠٠٠٠٠٩", "notes"):
        shutil.copytree(tmp_path / "step-00000002", tmp_path / name)
    (tmp_path / "step-00000010").write_text("a file")
    assert made.steps() == [2]
    made.save(4, tensors(1.0), STATE)
    made.save(6, tensors(1.0), STATE)
    made.finish()
    assert made.steps() == [6, 4]
    assert (tmp_path / "step-00000008.bak").exists()


def test_corrupted_checkpoints_do_not_outlive_new_ones(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = saved(tmp_path, _6=1.0, _8=1.0)
    for folder in tmp_path.glob("step-*"):
        next(folder.glob("*.distcp")).write_bytes(b"")
    assert made.load(tensors(0.0)) is None and made.found_corrupted
    assert "now called step-00000008.corrupted" in caplog.text
    made.save(2, tensors(1.0), STATE)
    made.finish()
    assert made.steps() == [2]


@pytest.mark.parametrize("number", [1, 2])
def test_checkpoints_of_older_formats_are_read(number: int, tmp_path: Path) -> None:
    made = saved(tmp_path, _2=3.0)
    file = tmp_path / "step-00000002" / "state.json"
    state = json.loads(file.read_text())
    del state["checksum"]
    file.write_text(json.dumps({**state, "format": number}))
    found = tensors(0.0)
    assert made.load(found) is not None and bool((found["model.a"] == 3).all())


def test_a_checkpoint_of_a_newer_version_is_refused_and_kept(tmp_path: Path) -> None:
    made = saved(tmp_path, _2=1.0)
    reseal(tmp_path / "step-00000002", format=99)
    with pytest.raises(VitrailError, match=r"format 99.*Update Vitrail"):
        made.load(tensors(0.0))
    assert made.steps() == [2]


def test_weights_that_are_not_finite_are_skipped_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = saved(tmp_path, _2=1.0, _4=float("nan"))
    found = tensors(0.0)
    state = made.load(found)
    assert state is not None and state["step"] == 2 and bool((found["model.a"] == 1).all())
    assert "step 4 is skipped: its weights are not finite, first a." in caplog.text
    made = saved(tmp_path / "other", _2=float("inf"))
    with pytest.raises(VitrailError, match=r"No checkpoint .* can be resumed"):
        made.load(tensors(0.0))


class Evil:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self.mark),)


def test_a_checkpoint_runs_no_code(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = saved(tmp_path / "run", _2=1.0)
    folder = tmp_path / "run" / "step-00000002"
    whole = pickle.loads((folder / ".metadata").read_bytes())
    whole.planner_data = Evil(tmp_path / "ran")
    (folder / ".metadata").write_bytes(pickle.dumps(whole))
    reseal(folder)
    assert made.load(tensors(0.0)) is None
    assert "it names posix.mkdir, which no checkpoint needs" in caplog.text
    assert not (tmp_path / "ran").exists()


def changed_place(tmp_path: Path, **changes: Any) -> str:
    saved(tmp_path, _2=1.0)
    folder = tmp_path / "step-00000002"
    whole = pickle.loads((folder / ".metadata").read_bytes())
    place = next(iter(whole.storage_data.values()))
    for name, value in changes.items():
        setattr(place, name, value)
    (folder / ".metadata").write_bytes(pickle.dumps(whole))
    reseal(folder)
    return damage(folder)


@pytest.mark.parametrize("changes", [{"relative_path": "../other"}, {"relative_path": "/etc/passwd"}, {"relative_path": 3}])
def test_a_checkpoint_reads_only_its_own_files(changes: dict[str, Any], tmp_path: Path) -> None:
    assert "is not a" in changed_place(tmp_path, **changes)


@pytest.mark.parametrize("changes", [{"offset": -1}, {"length": "1"}, {"transform_descriptors": ("zstd",)}])
def test_places_that_torch_does_not_write_are_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    assert ".metadata is not a checkpoint's" in changed_place(tmp_path, **changes)


def test_corrupted_metadata_is_a_value_error(tmp_path: Path) -> None:
    saved(tmp_path, _2=1.0)
    file = tmp_path / "step-00000002" / ".metadata"
    content, files = file.read_bytes(), {path.name for path in file.parent.iterdir()}
    read_metadata(file.parent, files)
    for place in range(0, len(content), 3):
        changed = bytearray(content)
        changed[place] ^= 1 << place % 8
        file.write_bytes(changed)
        with contextlib.suppress(ValueError):
            read_metadata(file.parent, files)


def test_a_full_disk_is_a_sentence_and_leaves_nothing(tmp_path: Path) -> None:
    """Torch raises a `CheckpointException`, which is not an `Exception`."""
    resource = pytest.importorskip("resource")
    made = saved(tmp_path, _2=1.0)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 12, hard))
    try:
        made.save(4, {"model.a": torch.zeros(1 << 12)}, STATE)
        with pytest.raises(DiskError, match=r"File too large. The one before it is valid \(step 2\)"):
            made.finish()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_no_process_is_forked_while_a_checkpoint_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fork would copy the locks that the writing thread holds, and a data worker would wait for them for ever."""
    writes, real = threading.Event(), module._save

    def slow(*arguments: Any) -> None:
        writes.set()
        time.sleep(0.1)
        real(*arguments)
        writes.clear()

    monkeypatch.setattr(module, "_save", slow)
    made = Snapshots(tmp_path, World(torch.device("cpu")))
    made.save(2, tensors(1.0), STATE)
    assert writes.wait(10)
    child = os.fork()
    if child == 0:
        os._exit(0)
    assert not writes.is_set()
    os.waitpid(child, 0)
    made.finish()


def test_warnings_are_the_packages(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    """`vitrail train` shows what is logged there."""
    caplog.set_level(logging.WARNING, "vitrail")
    saved(tmp_path, _2=float("nan"), _4=1.0)
    (tmp_path / "step-00000004" / "state.json").write_text("{")
    with pytest.raises(VitrailError):
        saved(tmp_path).load(tensors(0.0))
    assert {record.name for record in caplog.records} == {"vitrail.train"}


@contextlib.contextmanager
def within(seconds: int) -> Iterator[None]:
    """Fail instead of waiting for ever."""

    def stop(number: int, frame: object) -> None:
        pytest.fail("it hangs")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


unix = pytest.mark.skipif(not hasattr(signal, "SIGALRM"), reason="needs Unix")


@unix
@pytest.mark.parametrize("name", ["/dev/zero", "../outside", "", "..", "a/b"])
def test_a_checkpoint_names_only_files_in_its_folder(name: str, tmp_path: Path) -> None:
    saved(tmp_path, _2=1.0)
    folder = tmp_path / "step-00000002"
    (tmp_path / "outside").write_text("text")
    state = json.loads((folder / "state.json").read_text())
    reseal(folder, files={**state["files"], name: sha256(tmp_path / "outside")})
    with within(10):
        assert damage(folder)


@unix
@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "state.json"])
def test_a_checkpoint_with_a_fifo_is_corrupted(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = saved(tmp_path, _2=1.0)
    file = tmp_path / "step-00000002" / name
    file.unlink()
    os.mkfifo(file)
    with within(10):
        assert made.load(tensors(0.0)) is None and made.found_corrupted
    assert "a FIFO, not a regular file" in caplog.text


def test_a_replaced_checkpoint_survives_a_kill(tmp_path: Path) -> None:
    saved(tmp_path, _2=1.0, _4=2.0)
    (tmp_path / "step-00000004").rename(tmp_path / ".step-00000004.0123abcd.old")
    (tmp_path / ".step-00000004.4567abcd").mkdir()
    made = Snapshots(tmp_path, World(torch.device("cpu")))
    found = tensors(0.0)
    state = made.load(found)
    assert state is not None and state["step"] == 4 and bool((found["model.a"] == 2).all())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000004"]


def test_importing_the_module_changes_no_fork(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hooks: list[Any] = []
    monkeypatch.setattr(os, "register_at_fork", lambda **some: hooks.append(some), raising=False)
    spec = importlib.util.spec_from_file_location("second_copy", module.__file__)
    assert spec is not None and spec.loader is not None
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    assert not hooks
    for _ in range(2):
        copy.Snapshots(tmp_path, World(torch.device("cpu")))
    assert len(hooks) == 1


@pytest.mark.parametrize("value", [None, [], "model.a"])
def test_a_state_lists_its_tensors(value: Any, tmp_path: Path) -> None:
    saved(tmp_path, _2=1.0)
    reseal(tmp_path / "step-00000002", tensors=value)
    assert "does not list its tensors" in damage(tmp_path / "step-00000002")
