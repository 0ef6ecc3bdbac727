"""The rules the code base holds itself to: style, types, rooms, sizes, and a light import."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "vitrail"


@pytest.mark.parametrize(
    "command",
    [
        ["ruff", "check", "."],
        ["ruff", "format", "--check", "."],
        ["mypy"],
        ["importlinter.cli", "lint"],
    ],
    ids=lambda command: " ".join(command),
)
def test_tool(command: list[str]) -> None:
    if command[0] == "importlinter.cli":
        words = [sys.executable, "-c", "from importlinter.cli import lint_imports_command; lint_imports_command()"]
    else:
        words = [sys.executable, "-m", *command]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_importing_is_silent_and_light() -> None:
    code = "import vitrail, sys; assert 'torch' not in sys.modules; vitrail.create_model"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_files_stay_small() -> None:
    limits = {SOURCE / "models": 300, SOURCE: 500}
    for folder, limit in limits.items():
        for file in folder.rglob("*.py"):
            assert len(file.read_text().splitlines()) <= limit, f"{file.relative_to(ROOT)} is longer than {limit} lines"


def test_ci_runs_exactly_the_command_the_readme_gives() -> None:
    commands = re.findall(r"^(pip install uv && uv run .*)$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert (ROOT / ".ci" / "run").read_text().splitlines()[-1] in commands
