"""What a source string says: `kind:location?option=value&option=value`."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from vitrail.data.types import BadImage, Split
from vitrail.errors import VitrailError, nearest

BadImages = Literal["error", "skip"]
CACHE = Path("~/.cache/vitrail")
"""Where downloaded sets and indices of tars lie unless an option names another folder."""


@dataclass(frozen=True)
class Request:
    """A source string taken apart, with what the caller wants of it."""

    reference: str
    kind: str
    location: str
    options: dict[str, str]
    seed: int = 0
    bad_images: BadImages = "error"

    def allow(self, *names: str) -> None:
        """Refuse an option that this kind of source does not have: it may be a mistyped one."""
        for option in self.options:
            if option not in names:
                known = f"It has {', '.join(names)}." if names else "It has none."
                raise VitrailError(f"{self.kind}: has no option {option!r}.{nearest(option, names)} {known}")

    def fraction(self, option: str, default: float) -> float:
        text = self.options.get(option, str(default))
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not 0 <= value < 1:
            raise VitrailError(f"{option}={text} in {self.reference}: a share from 0 up to (not including) 1 is expected.")
        return value

    def flag(self, option: str) -> bool:
        value = self.options.get(option, "0").casefold()
        if value not in ("0", "1", "true", "false", "yes", "no"):
            raise VitrailError(f"{option}={value} in {self.reference}: write {option}=1 or leave it out.")
        return value in ("1", "true", "yes")


@dataclass(frozen=True, kw_only=True)
class Opened:
    """What the reader of one kind of source gives back: splits whose classes are not yet aligned."""

    splits: dict[str, Split]
    detail: str = ""
    left_out: tuple[BadImage, ...] = field(default=())


def taken_apart(reference: str) -> tuple[str | None, str, dict[str, str]]:
    """(kind or None, location, options). A single letter before the colon is a Windows drive and not a kind."""
    reference = reference.strip()  # a trailing blank from a shell script is no reason to fail
    if Path(reference).exists():
        return None, reference, {}
    location, mark, tail = reference.rpartition("?")
    options: dict[str, str] = {}
    if mark and re.match(r"[a-z_]+=", tail):
        for part in tail.split("&"):
            key, _, value = part.partition("=")
            options[key] = value
    else:
        location = reference
    kind = re.match(r"([a-z][a-z]+):(?!//)", location)
    return (kind[1], location[kind.end() :], options) if kind else (None, location, options)
