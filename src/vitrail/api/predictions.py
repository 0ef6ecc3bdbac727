"""`PredictionList`: what `bundle.predict` returns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vitrail.checkpoints import Prediction
from vitrail.data.types import BadImage, Split
from vitrail.errors import counted
from vitrail.notebook import Markup, data_frame, html_lines, html_table, short_path
from vitrail.text import printable

_SHOWN, _THUMBNAIL = 20, 64


class PredictionList(list[list[Prediction]]):
    """A list with one list of predictions per image, best first, that also knows the images' names.

    An image that could not be read has an empty list of predictions, and is in `bad`.
    """

    def __init__(
        self,
        rows: Sequence[Sequence[Prediction]],
        names: Sequence[str],
        *,
        task: str = "classify",
        bad: Sequence[BadImage] = (),
        notes: Sequence[str] = (),
        images: Split | None = None,
    ) -> None:
        super().__init__(list(row) for row in rows)
        self.names, self.task, self.bad, self.notes = tuple(names), task, tuple(bad), list(notes)
        self._images = images

    @property
    def labels(self) -> list[str | None]:
        """The most probable label of each image; None for an image that could not be read."""
        return [row[0].label if row else None for row in self]

    def to_pandas(self) -> Any:
        """Return a DataFrame with one row per prediction: image, rank from 1, label, index and probability (or value)."""
        rows = [(name, rank, one) for name, row in zip(self.names, self, strict=True) for rank, one in enumerate(row, 1)]
        score = "value" if self.task == "regress" else "probability"
        columns: dict[str, list[Any]] = {
            "image": [name for name, _, _ in rows],
            "rank": [rank for _, rank, _ in rows],
            "label": [one.label for _, _, one in rows],
            "index": [one.index for _, _, one in rows],
            score: [one.score for _, _, one in rows],
        }
        if self.task == "multilabel":
            columns["above_threshold"] = [one.chosen for _, _, one in rows]
        return data_frame(columns)

    def to_dicts(self) -> list[dict[str, Any]]:
        """Return plain values for JSON, as `vitrail predict --json` prints them."""
        errors = {one.name: one.reason for one in self.bad}
        return [
            {"image": name, "error": errors[name]} if not row and name in errors else prediction_dict(name, row, self.task)
            for name, row in zip(self.names, self, strict=True)
        ]

    def __repr__(self) -> str:
        shown = zip(self.names[:_SHOWN], self[:_SHOWN], strict=True)
        lines = [f"  {printable(name, one_line=True)}: {self._text(row)}" for name, row in shown]
        more = [f"  and {counted(len(self) - _SHOWN, 'more image')}"] if len(self) > _SHOWN else []
        return "\n".join([f"PredictionList of {counted(len(self), 'image')}", *lines, *more, *(f"  {note}" for note in self.notes)])

    def _repr_html_(self) -> str:
        rows = [
            [self._thumbnail(number), short_path(name), self._text(self[number])] for number, name in enumerate(self.names[:_SHOWN])
        ]
        more = [f"and {counted(len(self) - _SHOWN, 'more image')}"] if len(self) > _SHOWN else []
        return html_table(["", "image", "predictions"], rows) + html_lines([*more, *self.notes])

    def _text(self, row: Sequence[Prediction]) -> str:
        return predictions_text(row, self.task) if row else "could not be read"

    def _thumbnail(self, number: int) -> Markup:
        from vitrail.data.thumbnails import jpeg_uri, split_thumbnail

        image = split_thumbnail(self._images, number, _THUMBNAIL) if self._images is not None else None
        return Markup(f"<img src='{jpeg_uri(image)}' alt=''>" if image is not None else "")


def predictions_text(row: Sequence[Prediction], task: str) -> str:
    """Return `tabby 55.8%, Egyptian cat 43.2%`; the values of a regression; labels below their threshold apart."""
    form = ".5g" if task == "regress" else ".1%"
    chosen, rest = ([f"{p.label} {p.score:{form}}" for p in row if p.chosen is yes] for yes in (True, False))
    below = f"; below the threshold: {', '.join(rest)}" if rest else ""
    return f"{', '.join(chosen) or 'no label'}{below}"


def prediction_dict(name: str, row: Sequence[Prediction], task: str) -> dict[str, Any]:
    """Return the predictions for one image as plain values."""
    key = "value" if task == "regress" else "probability"
    predictions: list[dict[str, Any]] = [{"label": p.label, "index": p.index, key: p.score} for p in row]
    if task == "multilabel":
        for prediction, p in zip(predictions, row, strict=True):
            prediction["above_threshold"] = p.chosen
    return {"image": name, "predictions": predictions}
