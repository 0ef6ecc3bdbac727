"""The tables and figures of an evaluation, for its report and for Python."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from vitrail.data.types import Split
from vitrail.drawing.figure import Figure
from vitrail.evaluate import multilabel, plots, regression
from vitrail.evaluate.classification import calibration, confusion_matrix, per_class
from vitrail.evaluate.evaluator import EvalResult

Table = tuple[list[str], list[list[Any]]]
"""Headings, and rows."""
MAX_CLASSES_PLOT = 300
_MAX_SCATTERS = 12


def metric_table(result: EvalResult) -> Table:
    """Return each metric with the ends of its 95 % interval."""
    none = (math.nan, math.nan)
    return ["metric", "value", "low", "high"], [
        [name, value, *result.intervals.get(name, none)] for name, value in result.metrics.items()
    ]


def class_table(result: EvalResult) -> Table:
    """Return the metrics of each class, label or target."""
    return {"classify": _classes, "multilabel": _labels, "regress": _targets}[result.task](result)


def _classes(result: EvalResult) -> Table:
    predictions, classes = result.predictions, result.classes
    assert predictions is not None
    scores = per_class(predictions.targets, predictions.predicted, len(classes))
    columns = (scores.precision, scores.recall, scores.f1)
    return ["class", "images", "predicted", "precision", "recall", "f1"], [
        [name, int(scores.support[k]), int(scores.predicted[k]), *(float(one[k]) for one in columns)]
        for k, name in enumerate(classes)
    ]


def _labels(result: EvalResult) -> Table:
    assert result.outputs is not None and result.truth is not None
    scores = multilabel.per_label(result.outputs, result.truth, result.thresholds)
    columns = (scores.average_precision, scores.precision, scores.recall, scores.f1, scores.threshold, scores.best_threshold)
    return ["label", "images", "average precision", "precision", "recall", "f1", "threshold", "best threshold"], [
        [name, int(scores.support[k]), *(float(one[k]) for one in columns)] for k, name in enumerate(result.classes)
    ]


def _targets(result: EvalResult) -> Table:
    assert result.outputs is not None and result.truth is not None
    scores = regression.per_target(result.outputs, result.truth)
    columns = (scores.mae, scores.rmse, scores.r2, scores.mean)
    return ["target", "mean absolute error", "root mean squared error", "R²", "mean true value"], [
        [name, *(float(one[k]) for one in columns)] for k, name in enumerate(result.classes)
    ]


def image_rows(result: EvalResult, split: Split) -> Iterable[Sequence[Any]]:
    """Yield one row per image of a classification: name, true and predicted class, probability, whether it is right."""
    predictions, classes = result.predictions, result.classes
    assert predictions is not None
    for row in range(len(predictions)):
        true, predicted = int(predictions.targets[row]), int(predictions.predicted[row])
        name = split.image_name(int(predictions.indices[row]))
        yield name, classes[true], classes[predicted], float(predictions.confidence[row]), true == predicted


IMAGE_HEADINGS = ["image", "true", "predicted", "probability", "correct"]


def result_figures(result: EvalResult) -> dict[str, Figure]:
    """Draw the figures that fit the task: `confusion` and `reliability`, or `scatter-0` and so on for a regression."""
    if result.task == "regress":
        assert result.outputs is not None and result.truth is not None
        return {
            f"scatter-{k}": plots.scatter(result.outputs[:, k], result.truth[:, k], name)
            for k, name in enumerate(result.classes[:_MAX_SCATTERS])
        }
    predictions = result.predictions
    if predictions is None:
        return {}
    figures = {"reliability": plots.reliability(calibration(predictions.confidence, predictions.correct))}
    if len(result.classes) <= MAX_CLASSES_PLOT:
        matrix = confusion_matrix(predictions.targets, predictions.predicted, len(result.classes))
        figures["confusion"] = plots.confusion(matrix, result.classes)
    return figures
