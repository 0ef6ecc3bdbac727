"""Commands where Windows and macOS lack what Linux has: no fork, fewer signals, no file locks, no Triton, another encoding."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from vitrail import files
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
