"""Progress in logs and pipes."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.commands.test_eval import run
from tests.evaluate.conftest import backbone, checkpoint, photos, tiny_model  # noqa: F401 - fixtures
from vitrail.commands import doctor
from vitrail.commands.options import progress_bar
from vitrail.commands.terminal import Console


def test_a_slow_command_prints_a_line_now_and_then(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with progress_bar(Console(), "evaluating", 2000) as advance:
        for _ in range(10):
            now[0] += 4
            advance(200)
    out, err = capsys.readouterr()
    assert out == "" and err.splitlines() == [f"evaluating: {count} of 2,000" for count in ("400", "1,000", "1,600")]
    with progress_bar(Console(), "evaluating", 2000, hidden=True) as advance:
        now[0] += 40
        advance(200)
    assert capsys.readouterr().err == ""


def test_doctor_says_in_a_terminal_that_it_works(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, Any] = {"system": "Linux", "python": "3.12", "cpus": 2, "versions": {}, "devices": [], "extras": {}}
    monkeypatch.setattr(doctor, "examine", lambda: found)
    status, out, err = run(capsys, "doctor")
    assert status == 0 and "Linux" in out and err == ""
    monkeypatch.setenv("TTY_COMPATIBLE", "1")  # as a terminal is
    status, out, err = run(capsys, "doctor", "--json")
    assert status == 0 and out.startswith("{") and "trying devices" in err


def test_export_says_in_a_terminal_that_it_works(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    checkpoint: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    comparison = SimpleNamespace(describe=lambda: "equal", problems=lambda *_: [])
    monkeypatch.setattr("vitrail.export.write.export_model", lambda _, out, *__, **___: out.mkdir() or comparison)
    status, out, err = run(capsys, "export", checkpoint, tmp_path / "one")
    assert status == 0 and "equal" in out and "exporting" not in err
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    status, out, err = run(capsys, "export", checkpoint, tmp_path / "two")
    assert status == 0 and "exporting, then comparing on 24 images" in err and "exporting" not in out
