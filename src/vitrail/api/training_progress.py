"""Progress of a run that was started from Python: one bar with the latest metrics, in a notebook or a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vitrail.api.progress import NotebookBar
from vitrail.notebook import in_notebook
from vitrail.train.callbacks import Callback, Record, RunInfo
from vitrail.train.record_text import remaining, validation_text


@contextmanager
def training_progress(*, shown: bool | None = None) -> Iterator[list[Callback]]:
    """Yield the callbacks that show a run; none where the output is piped."""
    if shown is False or not (shown or in_notebook() or sys.stderr.isatty()):
        yield []
        return
    bar = _NotebookProgress() if in_notebook() else _TerminalProgress()
    try:
        yield [bar]
    finally:
        bar.closed()


class _NotebookProgress(Callback):
    def __init__(self) -> None:
        self._bar: NotebookBar | None = None
        self._validation = ""

    def started(self, info: RunInfo) -> None:
        self.info, self._bar = info, NotebookBar(info.name, info.steps)

    def trained(self, record: Record) -> None:
        if self._bar is not None:
            self._bar.update(record["step"], f"{_loss_text(record, self.info)}{self._validation}")

    def validated(self, record: Record) -> None:
        self._validation = f"; validation: {validation_text(record)}"

    def closed(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


class _TerminalProgress(Callback):
    def __init__(self) -> None:
        self._bars: Any = None

    def started(self, info: RunInfo) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        from vitrail.api.terminal import Console

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[text]}"))
        self._bars = Progress(*columns, console=Console(stderr=True), transient=True)
        self.info, self._task = info, self._bars.add_task(info.name, total=info.steps, completed=info.first, text="")
        self._bars.start()

    def trained(self, record: Record) -> None:
        if self._bars is not None:
            self._bars.update(self._task, completed=record["step"], text=_loss_text(record, self.info))

    def validated(self, record: Record) -> None:
        if self._bars is not None:
            self._bars.console.print(f"step {record['step']}/{self.info.steps}: {validation_text(record)}", highlight=False)

    def closed(self) -> None:
        if self._bars is not None:
            self._bars.stop()
            self._bars = None


def _loss_text(record: Record, info: RunInfo) -> str:
    return f"loss {record['loss']:.4f}, ETA {remaining(record, info)}"
