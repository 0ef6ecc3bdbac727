"""Progress bars: HTML in a notebook, rich in a terminal, nothing in a pipe."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import IPython.display
import pytest

from vitrail.api import progress, training_progress
from vitrail.train.callbacks import RunInfo


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def record(step: int) -> dict[str, Any]:
    return {"kind": "train", "step": step, "loss": 0.5, "speed": {"images_per_second": 10.0}}


def info(out: Path) -> RunInfo:
    return RunInfo("pets\x1b[2J", out, steps=20, steps_per_epoch=5, first=0, headline="accuracy", config={"batch": 10})


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Pretend that this is a notebook, and collect what its cell shows."""
    pages: list[str] = []

    class Handle:
        def update(self, content: IPython.display.HTML) -> None:
            pages.append(str(content.data))

    def display(content: IPython.display.HTML, *, display_id: bool) -> Handle:
        assert display_id
        pages.append(str(content.data))
        return Handle()

    monkeypatch.setattr(IPython.display, "display", display)
    monkeypatch.setattr(progress, "in_notebook", lambda: True)
    monkeypatch.setattr(training_progress, "in_notebook", lambda: True)
    monkeypatch.setattr(progress, "_PAUSE", 0.0)
    return pages


def test_a_notebook_gets_a_bar_that_is_updated_and_removed(shown: list[str]) -> None:
    with pytest.raises(RuntimeError), progress.progress_bar("predicting <b>", 10) as advance:
        advance(4)
        raise RuntimeError
    assert "predicting &lt;b&gt;" in shown[0] and "0/10" in shown[0] and "value='4' max='10'" in shown[1] and shown[-1] == ""
    with progress.progress_bar("predicting", 10, shown=False) as advance:
        advance(4)
    assert len(shown) == 3


def test_a_run_in_a_notebook(shown: list[str], tmp_path: Path) -> None:
    with training_progress.training_progress() as [callback]:
        callback.started(info(tmp_path))
        callback.trained(record(10))
        callback.validated({"step": 10, "accuracy": 0.75})
        callback.trained(record(15))
    assert "loss 0.5000, ETA 0:00:10" in shown[1] and "accuracy 75.00%" in shown[2] and "15/20" in shown[2] and shown[-1] == ""


def test_a_terminal_gets_a_bar_and_a_pipe_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for stream, expected in ((Terminal(), True), (io.StringIO(), False)):
        monkeypatch.setattr(sys, "stderr", stream)
        monkeypatch.setenv("TERM", "xterm")
        with progress.progress_bar("predicting", 10) as advance:
            advance(10)
        with training_progress.training_progress() as callbacks:
            for callback in callbacks:
                callback.started(info(tmp_path))
                callback.trained(record(10))
                callback.validated({"step": 10, "accuracy": 0.75})
        text = stream.getvalue()
        assert ("predicting" in text and "accuracy 75.00%" in text and "10/20" in text) is expected, text
        assert (expected or text == "") and "\x1b[2J" not in text, "names cannot control the terminal"
