"""Commands where Windows and macOS lack what Linux has (no fork, fewer signals, no file locks, no Triton, another encoding), and
where something else is missing: docstrings, a home folder."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from PIL import Image

from vitrail import files
from vitrail.cli import main
from vitrail.errors import VitrailError

# A file, because spawned data workers import the main module again.
SCRIPT = """
import multiprocessing, os, signal, sys

for name in ("triton", "fcntl", "resource", "pwd", "grp", "termios"):
    sys.modules[name] = None

if __name__ == "__main__":
    import torch
    import torchvision

    for name in ("fork", "register_at_fork", "sched_getaffinity", "O_NONBLOCK", "O_CLOEXEC", "getuid", "killpg", "mkfifo"):
        if hasattr(os, name):
            delattr(os, name)
    for name in ("SIGHUP", "SIGQUIT", "SIGUSR1", "SIGALRM", "sigwaitinfo", "setitimer"):
        if hasattr(signal, name):
            delattr(signal, name)
    multiprocessing.set_start_method("spawn", force=True)
    from PIL import Image

    from vitrail.cli import main

    Image.new("RGB", (80, 60), (200, 30, 30)).save("photo.png")
    for line in (
        "predict photo.png --top 1",
        "train digits --steps 12 --schedule.warmup 2 --data.workers 1 --out run",
        "eval run --data digits --workers 0",
        "info run",
    ):
        try:
            main(line.split())
        except SystemExit as end:
            if end.code:
                raise
"""


@pytest.mark.slow
def test_predict_train_and_eval_without_what_only_linux_has(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT, encoding="utf-8")
    environment = {**os.environ, "PYTHONIOENCODING": "cp1252", "HF_HOME": str(tmp_path), "TRITON_INTERPRET": "0"}
    command = [sys.executable, "script.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, timeout=300, check=False)
    out, err = done.stdout.decode("cp1252"), done.stderr.decode("cp1252", "replace")
    assert done.returncode == 0, out + err
    assert "photo.png: " in out and "64×64 pixels" in err and (tmp_path / "run" / "model" / "config.json").is_file()


def run_vitrail(*words: str, flags: tuple[str, ...] = (), cwd: Path | None = None, **environment: str) -> tuple[int, str, str]:
    command = [sys.executable, *flags, "-m", "vitrail", *words]
    inherited = {
        name: value for name, value in os.environ.items() if name not in ("MPLCONFIGDIR", "XDG_CONFIG_HOME", "XDG_CACHE_HOME")
    }
    done = subprocess.run(command, cwd=cwd, env={**inherited, **environment}, capture_output=True, timeout=300, check=False)
    return done.returncode, done.stdout.decode("utf-8", "replace"), done.stderr.decode("utf-8", "replace")


@pytest.mark.slow
def test_a_python_without_docstrings_and_asserts(tmp_path: Path) -> None:
    status, out, err = run_vitrail("train", "--recipes", flags=("-OO",))
    assert status == 0 and "vit-b16-imagenet" in out, err
    words = ("--steps", "2", "--schedule.warmup", "1", "--model.depth", "1", "--out", "run")
    status, out, err = run_vitrail("train", *words, flags=("-OO",), cwd=tmp_path)
    assert status == 0 and (tmp_path / "run" / "evaluation" / "report.html").is_file(), err


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="permissions are others there")
def test_a_home_folder_that_cannot_be_written(tmp_path: Path) -> None:
    """matplotlib and the tars want to keep files there."""
    home = tmp_path / "file"
    home.write_text("a file, where root cannot make folders either")
    for number in range(4):
        Image.new("RGB", (70, 70), (60 * number, 90, 30)).save(tmp_path / f"{number}.png")
    words = ("inspect", "1.png", "--out", "figures")
    status, out, err = run_vitrail(*words, cwd=tmp_path, HOME=str(home))
    assert status == 0 and (tmp_path / "figures" / "index.html").is_file(), err
    assert "atplotlib" not in out + err and "Traceback" not in err
    with tarfile.open(tmp_path / "photos.tar", "w") as tar:
        for number in range(4):
            tar.add(tmp_path / f"{number}.png", f"{number}.png")
    status, out, err = run_vitrail("data", "check", "wds:photos.tar", cwd=tmp_path, HOME=str(home))
    assert status == 0 and "The index of tar files is not kept" in out and "Traceback" not in err, out + err


def test_a_user_without_a_home_folder(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def unknown(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", unknown)
    monkeypatch.delenv("VITRAIL_CACHE", raising=False)
    with pytest.raises(VitrailError, match=r"There is no home folder to keep files in\. Set VITRAIL_CACHE"):
        files.cache_folder()
    with pytest.raises(SystemExit) as end:
        main(["predict", "~/photo.png"])
    assert end.value.code == 2 and "There is no home folder: ~ has no meaning" in capsys.readouterr().err


def test_a_file_that_cannot_be_replaced_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows does not rename over an open file; a loaded model maps its weights."""

    def refuse(self: Path, target: Path) -> Path:
        raise PermissionError(13, "Permission denied", str(target))

    monkeypatch.setattr(Path, "replace", refuse)
    with (
        pytest.raises(VitrailError, match=r"Cannot replace .*: Permission denied\. If a program has it open"),
        files.atomic_folder(tmp_path / "model"),
    ):
        pass
    with (
        pytest.raises(VitrailError, match=r"Cannot replace .*: Permission denied\. If a program has it open"),
        files.atomic_file(tmp_path / "a.csv"),
    ):
        pass
    assert list(tmp_path.iterdir()) == []
