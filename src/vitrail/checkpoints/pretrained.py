"""The pretrained models that are part of this package: found by name, without a network."""

from __future__ import annotations

from pathlib import Path

DEFAULT = "vitrail-ti8-tiny-imagenet"
"""The model of `vitrail predict` and `vitrail inspect` if no checkpoint is given."""

_FOLDER = Path(__file__).parents[1] / "pretrained"


def pretrained_models() -> dict[str, Path]:
    """Return the checkpoint folder of each included model by its name."""
    return {DEFAULT: _FOLDER / DEFAULT}


def card_notes(name: str | None) -> list[str]:
    """Return the part of an included model's card that is written by hand, or nothing."""
    file = pretrained_models().get(name or "", _FOLDER) / "notes.md"
    return [file.read_text(encoding="utf-8").strip()] if file.is_file() else []
