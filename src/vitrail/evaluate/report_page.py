"""Build the HTML page of an evaluation report, as one self-contained file."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from vitrail.data.types import Split
from vitrail.drawing.page import Headline, Page, PageSection, Table
from vitrail.errors import counted
from vitrail.evaluate.evaluator import EvalResult
from vitrail.version import __version__

METRIC_NAMES = {
    "accuracy": "accuracy",
    "top5_accuracy": "top-5 accuracy",
    "balanced_accuracy": "balanced accuracy",
    "macro_f1": "macro F1",
    "real_accuracy": "ReaL accuracy",
    "nll": "negative log-likelihood",
    "ece": "expected calibration error",
    "map": "mean average precision",
    "f1_micro": "micro F1",
    "f1_macro": "macro F1",
    "exact_match": "exact match",
    "mae": "mean absolute error",
    "rmse": "root mean squared error",
    "r2": "R²",
}
IN_PERCENT = {"accuracy", "top5_accuracy", "balanced_accuracy", "macro_f1", "real_accuracy", "ece"}
IN_PERCENT |= {"map", "f1_micro", "f1_macro", "exact_match"}
_MAX_LISTED = 100


def format_metric(name: str, value: float) -> str:
    """Format a metric for people: in per cent, or with four digits where per cent makes no sense."""
    if math.isnan(value):
        return "–"
    return f"{value:.2%}" if name in IN_PERCENT else f"{value:.4g}"


def page(result: EvalResult, split: Split, about: Mapping[str, Any], sections: Sequence[PageSection]) -> str:
    """Build the whole page. The first metric of the result is the headline."""
    headline = next(iter(result.metrics))
    info = {
        **{name: value for name, value in about.items() if isinstance(value, str)},
        "split": f"{split.name}: evaluated {result.images}/{result.total} unique images",
        "preprocessing": result.preprocess.describe(),
        "preprocessing fingerprint": result.preprocess.fingerprint(),
    }
    rows = [[METRIC_NAMES[name], format_metric(name, value), interval_text(result, name)] for name, value in result.metrics.items()]
    return Page(
        title=f"{about['checkpoint']} on {about['data']}",
        headline=Headline(
            format_metric(headline, result.metrics[headline]),
            METRIC_NAMES[headline],
            f"95 % confidence interval: {interval_text(result, headline)}",
        ),
        info=info,
        warnings=result.trained_on.notes if result.trained_on else (),
        notes=[*result.notes, *(f"assumed: {one}" for one in about.get("assumptions", ()))],
        bad_images=_bad_images(result),
        sections=[PageSection("Metrics", [Table(["metric", "value", "95 % interval"], rows)]), *sections],
        footer=f"Made with Vitrail {__version__}.",
    ).html()


def interval_text(result: EvalResult, name: str) -> str:
    """Format the interval of a metric; a dash if it has none."""
    interval = result.intervals.get(name, (math.nan, math.nan))
    return "–" if math.isnan(interval[0]) else " – ".join(format_metric(name, end) for end in interval)


def _bad_images(result: EvalResult) -> list[str]:
    """Return a summary of the images that could not be read, then their names and reasons."""
    if not result.bad:
        return []
    more = [f"and {len(result.bad) - _MAX_LISTED} more"] if len(result.bad) > _MAX_LISTED else []
    listed = [f"{one.name}: {one.reason}" for one in result.bad[:_MAX_LISTED]]
    return [f"skipped {counted(len(result.bad), 'image')} that could not be read", *listed, *more]
