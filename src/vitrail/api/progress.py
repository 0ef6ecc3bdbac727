"""Progress bars: in a terminal by rich, in a notebook as HTML, and none where the output is piped."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from vitrail.evaluate.settings import no_progress
from vitrail.notebook import html_text, in_notebook

if TYPE_CHECKING:
    from rich.progress import Progress

    from vitrail.api.terminal import Console

Advance = Callable[[int], None]
_PAUSE = 0.25  # seconds between updates in a notebook


@contextmanager
def progress_bar(description: str, total: int, *, shown: bool | None = None) -> Iterator[Advance]:
    """Show a bar while images are computed; default: in notebooks, and in terminals that stderr goes to."""
    if shown is False:
        yield no_progress
    elif in_notebook():
        bar = NotebookBar(description, total)
        try:
            yield bar.advance
        finally:
            bar.close()
    elif shown or sys.stderr.isatty():
        from vitrail.api.terminal import Console

        with terminal_bar(Console(stderr=True), description, total) as advance:
            yield advance
    else:
        yield no_progress


def image_progress(console: Console, *, hidden: bool = False) -> Progress:
    """Make bars that count images and disappear when they are done."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True, disable=hidden)


@contextmanager
def terminal_bar(console: Console, description: str, total: int, *, ranks: int = 1) -> Iterator[Advance]:
    """Show a bar that disappears when it is done. With several ranks, each image stands for one on every rank."""
    with image_progress(console) as bars:
        bar = bars.add_task(description, total=total)
        yield lambda images: bars.advance(bar, images * ranks)


class NotebookBar:
    """A bar in the output of a notebook's cell, which is updated in place. (Rich's own needs ipywidgets.)"""

    def __init__(self, description: str, total: int) -> None:
        from IPython.display import HTML, display

        self.description, self.total, self.done, self.text = description, total, 0, ""
        self._html: Any = HTML
        self._last = time.monotonic()
        self._handle: Any = display(HTML(self._content()), display_id=True)

    def advance(self, count: int) -> None:
        self.update(self.done + count)

    def update(self, done: int, text: str | None = None) -> None:
        self.done, self.text = done, self.text if text is None else text
        if time.monotonic() - self._last >= _PAUSE:
            self._last = time.monotonic()
            self._handle.update(self._html(self._content()))

    def close(self) -> None:
        """Remove the bar."""
        self._handle.update(self._html(""))

    def _content(self) -> str:
        bar = f"<progress value='{self.done}' max='{max(self.total, 1)}' style='width:20em;vertical-align:middle'></progress>"
        return f"{html_text(self.description)} {bar} {self.done:,}/{self.total:,} {html_text(self.text)}"
