"""Show a download: a progress bar on a terminal or in a notebook, one line elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from vitrail.checkpoints.download import Progress as OnProgress
from vitrail.text import printable


@contextmanager
def download_bar(what: str) -> Iterator[OnProgress]:
    """Yield a function that shows how much of a file is there. Nothing is shown until it is called."""
    console = Console(stderr=True, markup=False, emoji=False, highlight=False)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    bars = Progress(*columns, console=console, transient=True, disable=not (console.is_terminal or console.is_jupyter))
    task = None

    def show(name: str, done: int, total: int | None) -> None:
        nonlocal task
        if task is None:
            task = bars.add_task(printable(f"downloading {what}"), total=total)
            bars.start()
            if bars.disable:
                size = f", {total / 1e6:,.1f} MB" if total else ""
                resumed = f", resumed at {done / 1e6:,.1f} MB" if done else ""
                console.print(printable(f"downloading {what}{size}{resumed}"), soft_wrap=True)
        bars.update(task, completed=done, total=total)

    try:
        yield show
    finally:
        bars.stop()
