"""Provenance without what is private to a machine: local paths, and logins in URLs.

A checkpoint stores where its data and its starting weights were. That helps its owner, but a path often has a user's name, so
only its last part is published.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any

from vitrail.checkpoints.download import hide_secrets, is_url
from vitrail.checkpoints.references import is_name
from vitrail.data.sources.reference import parse_reference

_REFERENCES = ("start", "source", "teacher", "data")  # fields with one path or name, not a text
_LOCAL = ("folder", "csv", "packed", "wds", "tar")
_REMOVED = "removed"
# In a text: /home/ada/x, ~/x, C:\Users\ada\x, \\server\share\x. Not the slash of ViT-B/16, of a URL, or of 3 / 4.
_PATH = re.compile(r"(?<![\w/.\\+-])(?<!:(?=//))(?:file://)?(?:~[\w.-]*)?/[^\s,;'\"()<>/]+(?:/[^\s,;'\"()<>]*)*")
_WINDOWS_PATH = re.compile(r"(?<!\w)(?:[A-Za-z]:[\\/]|\\\\)[^\s,;'\"()<>]+")
_TOKEN = re.compile(r"(?<!\w)hf_[A-Za-z0-9]{16,}")
_RUN_PARTS = ("model", "model-best", "model-last")


def public_provenance(provenance: Mapping[str, Any]) -> dict[str, Any]:
    """Return provenance that may be published: of every local path only the last part, of every URL no login and no query."""
    return {key: _public(key, value) for key, value in provenance.items()}


def _public(key: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        return {public_text(str(name)): _public(str(name), one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_public(key, one) for one in value]
    if not isinstance(value, str):
        return value
    if key == "location":  # a digest of a path: a guess of the path could be confirmed by it
        return _REMOVED
    value = _without_home(value)
    return _reference(value) if key in _REFERENCES else public_text(value)


def _reference(value: str) -> str:
    """Shorten a reference to weights or data if it is a local path. A name has no path to shorten."""
    if is_url(value) or (value.startswith("hf:") and not value.endswith(".parquet")):
        return public_text(value)
    kind, location, options = _split(value)
    if "://" in location:
        return public_text(value)
    if kind in _LOCAL or (kind is None and _is_path(location)):
        chosen = "&".join(f"{name}={one}" for name, one in options.items())
        return f"{f'{kind}:' if kind else ''}{_last(location)}{'?' if chosen else ''}{public_text(chosen)}"
    return public_text(value)


def _split(value: str) -> tuple[str | None, str, dict[str, str]]:
    kind, location, options = parse_reference(value)
    return (kind, location, options) if kind != "file" else (None, location, options)


def _is_path(text: str) -> bool:
    if text.startswith(("/", "~", "\\", "./", "../")) or re.match(r"[A-Za-z]:[\\/]", text):
        return True
    return ("/" in text or "\\" in text) and " " not in text and not is_name(text)


def public_text(text: str) -> str:
    """Return a text with the last part of every local path in it, URLs without logins, and no token of the Hub."""
    text = _TOKEN.sub(_REMOVED, _without_home(text))
    text = _WINDOWS_PATH.sub(lambda found: _last(found[0]), text)
    return hide_secrets(_PATH.sub(lambda found: _last(found[0]), text))


def _without_home(text: str) -> str:
    """Replace the user's own folder by ~. Where a path with spaces ends is not known; of this one it is."""
    home = os.path.expanduser("~")  # noqa: PTH111 - Path.home() raises an error for a user without one
    return re.sub(rf"{re.escape(home)}(?![\w.-])", "~", text) if len(home) > 1 else text


def _last(path: str) -> str:
    """Return the last part of a path; of `runs/pets/model` the run."""
    parts = PureWindowsPath(path).parts if "\\" in path or re.match(r"[A-Za-z]:/", path) else PurePosixPath(path).parts
    named = [part for part in parts if part.strip("/\\~.") and not re.fullmatch(r"[A-Za-z]:[\\/]?", part)]
    while len(named) > 1 and named[-1] in _RUN_PARTS:
        named.pop()
    return named[-1] if named else _REMOVED
