"""Put the handwritten digits of scikit-learn into the package when it is built.

The package then trains a first model without scikit-learn (143 MB), and no dataset is kept in git.
"""

from __future__ import annotations

import gzip
import os
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

DIGITS = "src/vitrail/data/embedded/digits.gz"


class DigitsHook(BuildHookInterface):  # type: ignore[type-arg]
    """Run by hatchling before it collects the files of a wheel, an editable install or a source archive."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Write the digits unless they are there, and have them included though git ignores them."""
        write_digits(Path(self.root, DIGITS))
        build_data["artifacts"].append(DIGITS)


def write_digits(target: Path) -> None:
    """Write the file at once or not at all: a build that was stopped while it wrote would leave a part of it for all later ones."""
    if target.exists():
        return
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        temporary.write_bytes(_digits())
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def _digits() -> bytes:
    """Return rows of 64 values from 0 to 16 and the digit they show, one byte each, compressed."""
    import numpy as np
    from sklearn.datasets import load_digits

    bunch = load_digits()
    rows = np.column_stack([bunch.data, bunch.target]).astype(np.uint8)
    return gzip.compress(rows.tobytes(), mtime=0)
