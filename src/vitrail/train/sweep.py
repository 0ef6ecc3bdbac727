"""The paper's search for a fine-tuning learning rate: try a few on a held-out part of the training split, keep the best."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path

from vitrail.errors import StoppedBySignal, VitrailError
from vitrail.tasks.base import lower_is_better
from vitrail.train.callbacks import Callback
from vitrail.train.config import Recipe
from vitrail.train.loop import CheckImages, MakeEvaluator, train
from vitrail.train.nonfinite import Diverged
from vitrail.train.result import Result


def sweep_and_train(
    recipe: Recipe,
    out: Path,
    *,
    sweep: bool,
    say: Callable[[str], None],
    callbacks: Sequence[Callback] = (),
    evaluators: Sequence[MakeEvaluator] = (),
    allow_change: Sequence[str] = (),
    check_images: CheckImages | None = None,
) -> Result:
    """Train a recipe, after a search for its learning rate if `sweep`."""
    if sweep:
        recipe = best_rate(recipe, out, say=say, check_images=check_images)
    return train(recipe, out, callbacks=callbacks, evaluators=evaluators, allow_change=allow_change, check_images=check_images)


def best_rate(recipe: Recipe, out: Path, *, say: Callable[[str], None], check_images: CheckImages | None = None) -> Recipe:
    """Return the recipe with the best of its `lr_grid`. Each try is a run of its own below `out`; finished ones are not repeated.

    The validation split is not looked at: a part of the training split takes its place. Rates that diverge are skipped.
    """
    if not recipe.lr_grid:
        raise VitrailError("This recipe has no learning rates to try: add --lr-grid 0.001 0.003 0.01 0.03.")
    scores: dict[float, float] = {}
    for lr in recipe.lr_grid:
        data = recipe.data if recipe.data.holdout else dataclasses.replace(recipe.data, holdout=recipe.sweep_holdout)
        attempt = recipe.replace(data=data, optim=dataclasses.replace(recipe.optim, lr=lr), name=f"{recipe.name}-lr-{lr:g}")
        try:
            result = train(attempt, out / "sweep" / f"lr-{lr:g}", check_images=check_images)
        except Diverged as error:
            say(f"learning rate {lr:g} diverged: {error}")
            continue
        if result.ended_by is not None:
            text = f"The sweep was interrupted at learning rate {lr:g}; run the same command again to resume."
            raise StoppedBySignal(text, result.ended_by)
        value = result.metrics[result.headline]
        say(f"learning rate {lr:g}: {result.headline} {value:.4f} on the held-out part")
        if math.isfinite(value):
            scores[lr] = -value if lower_is_better(result.headline) else value
    if not scores:
        raise VitrailError("Training diverged with every learning rate of the grid. Try lower ones with --lr-grid.")
    best = max(scores, key=lambda lr: scores[lr])
    grid = recipe.lr_grid
    edge = " (at the edge of the grid: a wider one may be better)" if len(grid) > 1 and best in (min(grid), max(grid)) else ""
    say(f"best learning rate: {best:g}{edge}")
    return recipe.replace(optim=dataclasses.replace(recipe.optim, lr=best))
