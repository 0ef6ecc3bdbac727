"""The error for mistakes of the user, and suggestions for mistyped names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class VitrailError(ValueError):
    """An error whose message tells the user what was found, what was expected and what to do next.

    The command line prints it without a traceback and exits with status 2.
    """


def did_you_mean(word: str, known: Iterable[str], *, count: int = 3) -> str:
    """Return ` Did you mean …?` with the known words closest to a mistyped one, or an empty string if none is close."""
    by_key = {name.casefold(): name for name in known}
    close = difflib.get_close_matches(word.casefold(), by_key, n=count, cutoff=0.5)
    return f" Did you mean {' or '.join(by_key[key] for key in close)}?" if close else ""


def counted(count: int, noun: str, plural: str | None = None) -> str:
    """Return `1 image` or `2,000 images`."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"
