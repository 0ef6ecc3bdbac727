"""Files and folders appear whole or not at all, whatever the disk does."""

from __future__ import annotations

import errno
import io
import logging
import os
import shutil
import stat
import threading
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from vitrail import files
from vitrail.data.pack import choose_settings, pack
from vitrail.data.sources import open_source
from vitrail.errors import VitrailError
from vitrail.files import (
    DiskError,
    atomic_file,
    atomic_folder,
    disk_errors,
    read_csv,
    restore_folder,
    sha256,
    take_lock,
    write_csv,
    write_text,
)
from vitrail.npy import read_npz
from vitrail.regular_files import NotRegular, parse_json, read_json_object


@pytest.mark.parametrize("mask", [0o022, 0o027, 0o077, 0o000])
def test_files_and_folders_have_the_mode_of_the_umask(mask: int, tmp_path: Path) -> None:
    before = os.umask(mask)
    try:
        write_text(tmp_path / "file", "text")
        with atomic_file(tmp_path / "weights") as temporary:
            save_file({"weight": torch.zeros(1)}, temporary)
        with atomic_folder(tmp_path / "folder") as temporary:
            (temporary / "inside").write_text("text")
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.rglob("*")}
    file, folder = 0o666 & ~mask, 0o777 & ~mask
    assert modes == {"file": file, "weights": file, "folder": folder, "inside": file}


def test_all_of_a_folder_is_on_the_disk_before_the_old_one_is_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, done = tmp_path / "model", list[str]()
    target.mkdir()
    sync, delete = files.fsync, shutil.rmtree

    def synced(path: Path) -> None:
        done.append("parent" if path == tmp_path else path.name if path.name in ("part", "weights") else "new")
        sync(path)

    def deleted(path: Path, **options: bool) -> None:
        done.append("delete")
        delete(path, **options)

    monkeypatch.setattr(files, "fsync", synced)
    monkeypatch.setattr(shutil, "rmtree", deleted)
    with atomic_folder(target) as temporary:
        (temporary / "part").mkdir()
        (temporary / "part" / "weights").write_text("new")
    assert done[:5] == ["part", "weights", "new", "parent", "delete"]


def test_the_umask_is_never_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It belongs to the whole process: files that other threads create meanwhile would be open to everyone."""
    monkeypatch.setattr(os, "umask", lambda mask: pytest.fail("changed the umask"))
    write_text(tmp_path / "file", "text")
    with atomic_folder(tmp_path / "folder"):
        pass


def test_a_failed_rename_restores_the_old_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "model"
    target.mkdir()
    (target / "weights").write_text("old")
    real = Path.replace

    def replace(self: Path, to: Path) -> Path:
        if (self / "weights").exists() and (self / "weights").read_text() == "new":
            raise OSError(errno.EBUSY, "Device or resource busy")
        return real(self, to)

    monkeypatch.setattr(Path, "replace", replace)
    with pytest.raises(OSError, match="busy"), atomic_folder(target) as temporary:
        (temporary / "weights").write_text("new")
    assert (target / "weights").read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG])
@pytest.mark.parametrize("atomic", [atomic_file, atomic_folder])
def test_an_error_of_the_disk_is_a_sentence_and_leaves_nothing(number: int, atomic, tmp_path: Path) -> None:
    with pytest.raises(DiskError, match=rf"Cannot write .*out: {os.strerror(number)}\. Free"), atomic(tmp_path / "out"):
        try:
            raise OSError(number, os.strerror(number))
        except OSError as error:
            raise VitrailError("out is damaged") from error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [errno.ENOENT, errno.EIO])
def test_other_errors_stay_what_they_are(number: int, tmp_path: Path) -> None:
    with pytest.raises(OSError) as caught, atomic_file(tmp_path / "out"):
        raise OSError(number, os.strerror(number))
    assert caught.value.errno == number


def test_a_folder_that_cannot_be_written_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(VitrailError, match=r"Permission denied\. Choose another folder"), atomic_file(tmp_path / "out"):
        pass


LIBRARIES = {
    "python": lambda path: path.write_bytes(bytes(1 << 20)),
    "numpy": lambda path: np.save(path, np.zeros(1 << 18)),
    "torch": lambda path: torch.save(torch.zeros(1 << 18), path),
    "safetensors": lambda path: save_file({"one": torch.zeros(1 << 18)}, path),
}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("library", ["python", "numpy", "torch"])  # safetensors replaces the link
def test_a_full_disk_is_one_sentence_whatever_library_writes(library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitrail.files._is_full", lambda folder: True)
    full = tmp_path / "out.npy"
    full.symlink_to("/dev/full")
    with pytest.raises(DiskError, match="No space left on device"), disk_errors(full):
        LIBRARIES[library](full)


def test_a_full_disk_is_not_a_damaged_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `torch.save` within a conversion: its error does not say why it could not write."""
    monkeypatch.setattr("vitrail.files._is_full", lambda folder: True)
    with pytest.raises(DiskError, match="No space left on device"), atomic_file(tmp_path / "out.pth"):
        try:
            raise RuntimeError("[enforce fail at inline_container.cc:671] . unexpected pos 15040 vs 14928")
        except RuntimeError as error:
            raise VitrailError("out.pth is damaged") from error
    with pytest.raises(VitrailError, match="bad image"), atomic_file(tmp_path / "out.pth"):
        raise VitrailError("bad image")


def test_a_dataset_that_does_not_fit_is_a_sentence(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    source = open_source("digits")
    settings = choose_settings(source)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 14, hard))
    try:
        with pytest.raises(DiskError, match=r"Cannot write .*packed\.partial: File too large"):
            pack(source, tmp_path / "packed", settings)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not (tmp_path / "packed").exists()


def test_a_failing_file_size_limit_is_found_by_writing(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 12, hard))
    try:
        for write in LIBRARIES.values():
            with pytest.raises(DiskError, match=r"File too large|No space left"), atomic_file(tmp_path / "out.npy") as temporary:
                write(temporary)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


def test_threads_may_write_the_same_file(tmp_path: Path) -> None:
    threads = [threading.Thread(target=write_text, args=(tmp_path / "file", str(number))) for number in range(8)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert (tmp_path / "file").read_text() in map(str, range(8))
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_folder_survives_a_kill_between_the_two_renames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "model[1]"
    real = Path.replace
    with atomic_folder(target) as temporary:
        (temporary / "weights").write_text("old")
    child = os.fork()
    if child == 0:
        monkeypatch.setattr(Path, "replace", lambda self, to: os._exit(0) if to == target else real(self, to))
        with atomic_folder(target) as temporary:
            (temporary / "weights").write_text("new")
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not target.exists()
    restore_folder(target)
    assert not target.exists()  # renamed just now, perhaps by a process that is replacing it
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 10)
    with pytest.raises(VitrailError, match="stop"), atomic_folder(target):
        assert (target / "weights").read_text() == "old"
        raise VitrailError("stop")
    assert (target / "weights").read_text() == "old"
    with atomic_folder(target) as temporary:
        (temporary / "weights").write_text("newest")
    assert (target / "weights").read_text() == "newest"
    assert not list(tmp_path.glob(".*.old"))


def test_an_old_folder_that_cannot_be_deleted_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def rmtree(path: Path, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            raise OSError(errno.EBUSY, "Device or resource busy")

    for content in ("old", "new"):
        with atomic_folder(tmp_path / "model") as temporary:
            (temporary / "weights").write_text(content)
            monkeypatch.setattr(shutil, "rmtree", rmtree)
    assert (tmp_path / "model" / "weights").read_text() == "new"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs FIFOs")
def test_checksums_are_those_of_regular_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", Path("/dev/zero"), tmp_path):
        with pytest.raises(NotRegular):
            sha256(path)


def test_a_lock_has_one_owner(tmp_path: Path) -> None:
    lock = take_lock(tmp_path / "lock")
    assert lock is not None and take_lock(tmp_path / "lock") is None
    lock.close()
    again = take_lock(tmp_path / "lock")
    assert again is not None
    again.close()


def test_a_file_system_without_locks_is_not_a_busy_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fcntl = pytest.importorskip("fcntl")

    def flock(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    with caplog.at_level(logging.WARNING):
        lock = take_lock(tmp_path / "lock")
    assert lock is not None and "cannot be locked (No locks available)" in caplog.text
    lock.close()
    source = open_source("digits")
    pack(source, tmp_path / "packed", choose_settings(source))


def test_a_lock_file_that_its_owner_deletes_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise one process would hold the lock of the deleted file, and another that of the new one."""
    fcntl = pytest.importorskip("fcntl")
    real = fcntl.flock

    def flock(handle: object, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", real)
        (tmp_path / "lock").unlink()
        real(handle, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    lock = take_lock(tmp_path / "lock")
    assert lock is not None and take_lock(tmp_path / "lock") is None
    lock.close()


@dataclass
class Line:
    name: str
    value: float


def test_tables_keep_names_that_are_not_utf8(tmp_path: Path) -> None:
    rows = [Line("caf\udce9, a\rb", 0.5), Line("ü", 2.0)]
    write_csv(tmp_path / "table.csv", Line, rows)
    assert b"caf\xe9" in (tmp_path / "table.csv").read_bytes()
    assert read_csv(tmp_path / "table.csv", Line) == rows


@pytest.mark.parametrize("depth", [200, 900, 100_000])
@pytest.mark.parametrize(("start", "end"), [("[", "]"), ('{"a":', "}")])
def test_deeply_nested_json_is_a_value_error(depth: int, start: str, end: str, tmp_path: Path) -> None:
    text = start * depth + "1" + end * depth
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_json(text)
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ValueError, match="nested too deeply"):
        read_json_object(tmp_path / "a.json")
    assert parse_json(start * 50 + "1" + end * 50)


def test_the_arrays_of_a_file_are_not_larger_than_it(tmp_path: Path) -> None:
    """A directory of a zip file may list the same bytes many times."""
    content = io.BytesIO()
    np.save(content, np.zeros(1000))
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("a.npy", content.getvalue())
        archive.filelist += archive.filelist * 40
    with pytest.raises(ValueError, match="larger than the file"):
        read_npz(tmp_path / "a.npz")


def test_a_folder_is_not_replaced_by_a_file(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    with pytest.raises(VitrailError, match=r"photos is a folder; give the name of a file"), atomic_file(tmp_path / "photos"):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["photos"]
