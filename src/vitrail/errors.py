"""The one error a user should ever see, and the help it gives with mistyped names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class VitrailError(ValueError):
    """A sentence for a person: what was found, what was expected, what to do next.

    The command line prints it without a traceback and exits with status 2.
    """


def nearest(word: str, known: Iterable[str], *, count: int = 3) -> str:
    """A phrase naming the known words closest to a mistyped one, or an empty string where none is close."""
    by_key = {name.casefold(): name for name in known}
    close = difflib.get_close_matches(word.casefold(), by_key, n=count, cutoff=0.5)
    return f" Did you mean {' or '.join(by_key[key] for key in close)}?" if close else ""
