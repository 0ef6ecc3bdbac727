"""The only way to the terminal: whatever is shown is escaped here, because it contains names that others chose."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TextIO

from rich.console import Console as RichConsole
from rich.console import ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from vitrail.text import printable


class Console(RichConsole):
    """Rich's console, with control characters escaped in everything but rich's own codes.

    Markup is off, because a file may be called `[/]`: use `Text.assemble` for styles.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, **options)

    def render_str(self, text: str, *arguments: Any, **options: Any) -> Text:
        return super().render_str(printable(text), *arguments, **options)  # before widths are measured

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))


def say(text: str = "", *, file: TextIO | None = None, flush: bool = False) -> None:
    """Print a line."""
    print(printable(text), file=file, flush=flush)
