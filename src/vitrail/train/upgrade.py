"""Read runs that an older version began.

`config.json` and a checkpoint's `state.json` carry a format. Files of an older format are rewritten here when they are read, and
nowhere else; new files are always written in the newest format.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from vitrail.errors import VitrailError

FORMAT = 4
CHECKSUM = 3  # since 3, state.json has a checksum

# Settings that have another name now, with the last format that had the old one; and values of format 1 that have another word.
_NAMES = {
    ("model", "recompute_keeps"): ("recompute_keep", 1),
    ("augment", "cutmix_share"): ("cutmix_probability", 1),
    ("task", "distil_share"): ("distill_weight", 1),
    ("task", "distil_weight"): ("distill_weight", 3),
    ("task", "distil"): ("distill", 3),
}
_VALUES: dict[tuple[str, str], dict[str, str]] = {
    ("model", "recompute_keep"): {"products": "matmuls"},
    ("optim", "decay"): {"times-lr": "scaled-by-lr", "times-schedule": "independent-of-lr"},
    ("augment", "crop"): {"inception-reference": "inception-tensorflow"},
    ("augment", "mix"): {"reference": "batch"},
}


def upgrade(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a run's config.json says, in the newest format."""
    config = copy.deepcopy(dict(values))
    recipe = config.get("recipe", {})
    parts = (
        [recipe.get(name, {}) for name in ("data", *(part for part, _ in _NAMES | _VALUES))] if isinstance(recipe, dict) else [None]
    )
    if not all(isinstance(part, dict) for part in parts):
        raise TypeError("'recipe' or a part of it is not an object")
    for (part, old), (new, last) in _NAMES.items():
        if _format(config) <= last and old in recipe.get(part, {}):
            recipe[part][new] = recipe[part].pop(old)
    if _format(config) == 1:
        for (part, name), words in _VALUES.items():
            value = recipe.get(part, {}).get(name)
            if isinstance(value, str) and value in words:
                recipe[part][name] = words[value]
    data = recipe.get("data", {})
    # Once, held-out images were drawn with a seed: a setting of its own, or still before the seed of the run.
    seed = data.pop("holdout_seed", recipe.get("seed", 0))
    if data.get("holdout") and "holdout_rule" not in data:
        data["holdout_rule"] = f"seed-{seed}"
    if data and "split_rule" not in data:  # and so were, in sources without a validation split, the validation images
        data["split_rule"] = f"seed-{recipe.get('seed', 0)}"
    return {**config, "format": FORMAT}


def upgrade_state(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a checkpoint's state.json says, in the newest format."""
    state = dict(values)
    if _format(state) == 1 and "passed_over" in state:
        state["skipped_steps"] = state.pop("passed_over")
    return {**state, "format": FORMAT}


def _format(values: Mapping[str, Any]) -> int:
    number = values.get("format", 1)
    if not isinstance(number, int):
        raise TypeError("'format' is not a whole number")
    if number not in range(1, FORMAT + 1):
        raise VitrailError(
            f"This run has format {number}, and this version of Vitrail reads formats 1 to {FORMAT}. Update Vitrail."
        )
    return int(number)
