"""The examples and tables of docs/data.md are correct."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from vitrail.data.preprocess import PRESETS
from vitrail.data.sources import KINDS
from vitrail.data.sources.layout import ACCEPTED
from vitrail.data.sources.torchvision import DATASETS

PAGE = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("code", re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL))
def test_the_examples_run(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    exec(code, names)
    shown = capsys.readouterr().out.strip()
    assert shown in code


def test_every_source_preset_and_layout_is_on_the_page() -> None:
    for kind in KINDS:
        assert f"`{kind}" in PAGE
    for preset in PRESETS:
        assert f"| `{preset}` |" in PAGE
    for name in DATASETS:
        assert name in PAGE
    for line in ACCEPTED.splitlines():
        assert line.strip() in PAGE
