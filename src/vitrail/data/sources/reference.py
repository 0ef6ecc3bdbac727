"""Parse and write source strings: `kind:location?option=value&option=value`."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from vitrail.data.settings import BadImages
from vitrail.data.types import BadImage, Split
from vitrail.errors import VitrailError, did_you_mean


@dataclass(frozen=True)
class Request:
    """A parsed source string, with the options of the caller."""

    reference: str
    kind: str
    location: str
    options: dict[str, str]
    rule: str = "names"
    """How images are held out if the source has no validation split; see `split.hold_out`."""
    bad_images: BadImages = "error"

    def allow_options(self, *names: str) -> None:
        """Refuse options that this kind of source does not have."""
        for option in self.options:
            if option not in names:
                known = f"Its options are {', '.join(names)}." if names else "It has no options."
                raise VitrailError(f"{self.kind}: has no option {option!r}.{did_you_mean(option, names)} {known}")

    def fraction(self, option: str, default: float) -> float:
        text = self.options.get(option, str(default))
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not 0 <= value < 1:
            raise VitrailError(f"{option}={text} in {self.reference}: a fraction from 0 to below 1 is expected.")
        return value

    def flag(self, option: str) -> bool:
        value = self.options.get(option, "0").casefold()
        if value not in ("0", "1", "true", "false", "yes", "no"):
            raise VitrailError(f"{option}={value} in {self.reference}: write {option}=1, or remove it.")
        return value in ("1", "true", "yes")


@dataclass(frozen=True, kw_only=True)
class OpenResult:
    """What opening one kind of source returns: splits whose classes are not yet aligned."""

    splits: dict[str, Split]
    detail: str = ""
    skipped: tuple[BadImage, ...] = field(default=())
    rule: str | None = None
    """The rule by which images were held out; None if the source has its own splits."""
    made_from: str | None = None
    """Of a packed dataset: the reference it was packed from."""


def parse_reference(reference: str) -> tuple[str | None, str, dict[str, str]]:
    """Return (kind or None, location, options). A single letter before the colon is a Windows drive, not a kind."""
    reference = reference.strip()  # shell scripts often leave trailing blanks
    if os.path.exists(reference):  # noqa: PTH110 - False for a name that is too long, where Path raises
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


def format_reference(kind: str, location: str, options: Mapping[str, str]) -> str:
    """Invert `parse_reference`."""
    tail = "&".join(f"{name}={value}" for name, value in options.items())
    return f"{kind}:{location}{'?' if tail else ''}{tail}"
