"""Predictions as rows of a table, one per image: the same columns in CSV and Parquet files."""

from __future__ import annotations

from typing import Any

from vitrail.checkpoints import Bundle, Prediction
from vitrail.evaluate.predictor import ImagePredictions


class PredictionTable:
    """The columns of a bundle's predictions: image, label and probability of the best classes (or the values), error."""

    def __init__(self, bundle: Bundle, top: int) -> None:
        self._regress, self._multilabel = bundle.task == "regress", bundle.task == "multilabel"
        outputs = bundle.model.config.outputs
        if self._regress:
            self.columns: dict[str, type] = {bundle.label(k): float for k in range(outputs)}
        else:
            kinds: dict[str, type] = {"label": str, "probability": float} | ({"above_threshold": bool} if self._multilabel else {})
            self.columns = {f"{name}_{k}": kind for k in range(1, min(top, outputs) + 1) for name, kind in kinds.items()}
        self.headings = ["image", *self.columns, "error"]

    def values(self, one: ImagePredictions) -> list[Any]:
        """Return the row of an image; None where there is nothing."""
        if one.error is not None:
            return [one.name, *([None] * len(self.columns)), one.error]
        return [one.name, *(value for prediction in one.predictions for value in self._values(prediction)), None]

    def cells(self, one: ImagePredictions) -> list[str]:
        """Return the row of an image as text."""
        return [self._cell(value) for value in self.values(one)]

    def _values(self, prediction: Prediction) -> tuple[Any, ...]:
        if self._regress:
            return (prediction.score,)
        chosen = (prediction.chosen,) if self._multilabel else ()
        return prediction.label, prediction.score, *chosen

    def _cell(self, value: Any) -> str:
        if isinstance(value, float):
            return f"{value:.7g}" if self._regress else f"{value:.6f}"
        return "" if value is None else str(int(value)) if isinstance(value, bool) else str(value)
