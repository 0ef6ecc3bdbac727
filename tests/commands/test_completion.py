"""Completion: the script for bash in a real bash, those for zsh and fish where these are installed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from vitrail.cli import main
from vitrail.commands.completion import words_of
from vitrail.commands.table import COMMANDS
from vitrail.data.preprocess import PRESETS
from vitrail.recipes import RECIPES
from vitrail.study import STUDIES


def script(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as end:
        main(["completion", shell])
    assert not end.value.code
    return capsys.readouterr().out


def completed(file: Path, *words: str) -> set[str]:
    """Return what bash offers for the last word."""
    typed = " ".join(f"'{word}'" for word in words)
    lines = [
        f"source {file}",
        f"COMP_WORDS=({typed})",
        f"COMP_CWORD={len(words) - 1}",
        "_vitrail",
        'printf "%s\\n" "${COMPREPLY[@]}"',
    ]
    done = subprocess.run(["bash", "-c", "\n".join(lines)], capture_output=True, text=True, check=True, cwd=file.parent)
    assert done.stderr == ""
    return set(done.stdout.split())


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "vitrail.bash"
    file.write_text(script("bash", capsys))
    assert completed(file, "vitrail", "pro") == {"probe"}
    assert completed(file, "vitrail", "") >= {name.split()[0] for name in COMMANDS}
    assert completed(file, "vitrail", "data", "") >= {"check", "split", "pack", "sheet"}
    assert completed(file, "vitrail", "export", "ver") == {"verify"}
    assert completed(file, "vitrail", "train", "finetune-c") == {name for name in RECIPES if name.startswith("finetune-c")}
    assert completed(file, "vitrail", "study", "") >= set(STUDIES)
    assert completed(file, "vitrail", "eval", "ViT-B/1") == {"ViT-B/14", "ViT-B/16"}
    assert completed(file, "vitrail", "data", "pack", "a", "--st") == {"--store"}
    assert completed(file, "vitrail", "data", "pack", "a", "--store", "") == {"arrays", "encoded"}
    assert completed(file, "vitrail", "train", "digits", "--optim.na") == {"--optim.name"}
    assert completed(file, "vitrail", "train", "digits", "--optim.name", "ad") == {"adam", "adamw"}
    assert completed(file, "vitrail", "train", "digits", "--model.name", "ViT-H/1") == {"ViT-H/14", "ViT-H/16"}
    assert completed(file, "vitrail", "eval", "x", "--preprocess", "") == set(PRESETS)
    assert completed(file, "vitrail", "eval", "vitrail.b") == {"vitrail.bash"}  # a file
    for name in COMMANDS:
        flags = {flag for option in words_of(name)[0] for flag in option.flags}
        assert completed(file, "vitrail", *name.split(), "x", "-") == flags


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells(shell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = script(shell, capsys)
    for name in COMMANDS:
        flags = [flag for option in words_of(name)[0] for flag in option.flags if flag.startswith("--")]
        assert all((flag if shell == "zsh" else f"-l {flag[2:]} ") in text for flag in flags)
    assert "finetune-cifar10" in text and "data-size" in text
    if shutil.which(shell) is not None:
        (tmp_path / "script").write_text(text)
        subprocess.run([shell, "-n", str(tmp_path / "script")], check=True, capture_output=True)
