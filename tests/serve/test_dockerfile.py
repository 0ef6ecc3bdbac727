"""The Dockerfile passes its linter, and is what the documentation says: no root, no development packages, a health check."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "Dockerfile").read_text(encoding="utf-8")


def test_hadolint() -> None:
    linter = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")
    if linter is None:
        pytest.skip("hadolint is not installed")
    done = subprocess.run([linter, "Dockerfile"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_what_the_image_is() -> None:
    last = TEXT[TEXT.rindex("\nFROM ") :]
    instructions = re.findall(r"^([A-Z]+) ", last, re.MULTILINE)
    assert instructions.index("USER") < instructions.index("ENTRYPOINT") and re.search(r"^USER [1-9]\d*$", last, re.MULTILINE)
    assert "/v2/health/ready" in last and "pip" not in last and "[serve]" in TEXT and "dev" not in TEXT.replace("/dev", "")
    assert "VITRAIL_TOKEN" in TEXT and not re.search(r"^(ENV|ARG) .*TOKEN", TEXT, re.MULTILINE)


def test_everything_that_is_copied_exists_and_reaches_the_build() -> None:
    allowed = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    for names in re.findall(r"^COPY (?!--from)(.*) \S+$", TEXT, re.MULTILINE):
        for name in names.split():
            assert (ROOT / name).exists() and f"!{name}" in allowed
