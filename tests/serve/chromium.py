"""Find or install Debian's Chromium for the browser tests."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
from filelock import FileLock


def chromium() -> str:
    """Return the path of Chromium, installed with apt-get where that is possible. Under CI it must be there."""
    found = _path()
    if found is None and shutil.which("apt-get") and hasattr(os, "geteuid") and os.geteuid() == 0:
        # Tests run in several processes, and apt-get refuses to run beside another.
        with FileLock(Path(tempfile.gettempdir()) / "install-chromium.lock", timeout=1200):
            found = _path() or _installed()
    if found is None:
        message = "Chromium is not installed, and apt-get cannot install it here."
        if os.environ.get("CI", "").lower() in ("1", "true"):
            pytest.fail(message)
        pytest.skip(message)
    return found


def _installed() -> str | None:
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (["apt-get", "update"], ["apt-get", "install", "-y", "--no-install-recommends", "chromium"]):
        subprocess.run(command, capture_output=True, check=False, env=environment, timeout=600)
    return _path()


def _path() -> str | None:
    return next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None)
