"""Progress in logs and pipes."""

from __future__ import annotations

import time

import pytest

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
