"""The pretrained models that are part of this package: found by name, without a network."""

from __future__ import annotations

from pathlib import Path

DEFAULT = "vitrail-ti8-tiny-imagenet"
"""The model of `vitrail predict` and `vitrail inspect` if no checkpoint is given."""

_FOLDER = Path(__file__).parents[1] / "pretrained"


def pretrained_models() -> dict[str, Path]:
    """Return the checkpoint folder of each included model by its name."""
    return {DEFAULT: _FOLDER / DEFAULT}
