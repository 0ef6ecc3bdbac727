"""The error for mistakes of the user, and words for its messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class VitrailError(ValueError):
    """An error whose message tells the user what was found, what was expected and what to do next.

    The command line prints it without a traceback and exits with status 2.
    """


class StoppedBySignal(VitrailError):
    """A command was stopped by a signal, and can be resumed. The command line exits with status 128 + its number."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message, number)  # both, so that it can be pickled
        self.number = number

    def __str__(self) -> str:
        return str(self.args[0])


def did_you_mean(word: str, known: Iterable[str], *, count: int = 3) -> str:
    """Return ` Did you mean …?` with the known words that differ from a mistyped one by little, or only complete it."""
    by_key, key = {name.casefold(): name for name in known}, word.casefold()
    close = difflib.get_close_matches(key, by_key, n=count, cutoff=_CLOSE)
    likeness = [difflib.SequenceMatcher(None, one, key).ratio() for one in close]
    close = [one for one, ratio in zip(close, likeness, strict=True) if ratio > likeness[0] - _AS_CLOSE]
    close = close or [one for one in by_key if len(one) == len(key) and sorted(one) == sorted(key)][:count]
    if not close and len(key) >= 3:
        close = sorted((one for one in by_key if key in one), key=len)[:count]
    return f" Did you mean {' or '.join(by_key[one] for one in close)}?" if close else ""


_CLOSE, _AS_CLOSE = 0.75, 0.1  # likeness of two words, from 0 to 1; and how much less than the best is as good


def counted(count: int, noun: str, plural: str | None = None) -> str:
    """Return `1 image` or `2,000 images`."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def reason_of(error: Exception) -> str:
    """Return why something failed, for the brackets of a message: the system's words, the missing key, or what the error says."""
    if isinstance(error, KeyError) and error.args:
        key = error.args[0]
        return f"it has no {key.decode() if isinstance(key, bytes) else repr(key)}"
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
