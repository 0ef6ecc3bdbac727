"""Evaluate a checkpoint on a split with all metrics of its task."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from vitrail.checkpoints import Bundle
from vitrail.data.preprocess import Preprocess
from vitrail.data.settings import BadImages
from vitrail.data.trained_on import Overlap, evaluation_split, open_for, overlap
from vitrail.data.types import BadImage, Split
from vitrail.errors import VitrailError, counted
from vitrail.evaluate import classification, multilabel, regression
from vitrail.evaluate.classification import Predictions
from vitrail.evaluate.context import EvalContext, check_finite, default_context, gather_bad_images, none_read
from vitrail.evaluate.flip_average import flip_average
from vitrail.evaluate.real_labels import real_hits
from vitrail.evaluate.settings import TARGETS, Match, check_choice
from vitrail.notebook import data_frame, html_image, html_lines, html_table
from vitrail.wilson import Interval, wilson

if TYPE_CHECKING:
    from vitrail.drawing.figure import Figure

Array = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class EvalResult:
    """The metrics of a checkpoint on a split."""

    task: str
    classes: tuple[str, ...]
    metrics: dict[str, float]
    intervals: dict[str, Interval]
    """95 % confidence intervals: Wilson's for shares, a bootstrap over images for the rest; the calibration error has none."""
    images: int
    """Number of distinct images evaluated."""
    total: int
    """Images of the split; the difference is `bad`."""
    bad: list[BadImage]
    preprocess: Preprocess
    predictions: Predictions | None = None
    """Classification only."""
    outputs: Array | None = None
    """Probabilities [n, labels] of a multi-label model, predicted values [n, targets] of a regression model."""
    truth: Array | None = None
    thresholds: Array | None = None
    notes: list[str] = field(default_factory=list)
    trained_on: Overlap | None = None
    """Which of the images the checkpoint was trained on; None if a split was given that was opened elsewhere."""
    split: Split | None = field(default=None, compare=False)
    """The images, as they were opened."""

    def __repr__(self) -> str:
        headline = next(iter(self.metrics))
        from vitrail.evaluate.report_page import METRIC_NAMES, format_metric, interval_text

        value = f"{METRIC_NAMES[headline]} {format_metric(headline, self.metrics[headline])}"
        on = f" of {self.split.name}" if self.split is not None else ""
        seen = f", {self.trained_on.images} of them trained on" if self.trained_on is not None and self.trained_on.images else ""
        return f"EvalResult({value}, 95 % interval {interval_text(self, headline)}, {counted(self.images, 'image')}{on}{seen})"

    def _repr_html_(self) -> str:
        from vitrail.evaluate.report_page import METRIC_NAMES, format_metric, interval_text

        rows = [[METRIC_NAMES[name], format_metric(name, value), interval_text(self, name)] for name, value in self.metrics.items()]
        seen = list(self.trained_on.notes) if self.trained_on is not None else []
        bad = [f"skipped {counted(len(self.bad), 'image')} that could not be read"] if self.bad else []
        table = html_table(["metric", "value", "95 % interval"], rows)
        figures = "".join(html_image(figure._repr_png_(), name) for name, figure in self.figures.items() if name == "confusion")
        return html_lines([repr(self), *seen, *self.notes, *bad]) + table + figures

    @property
    def confusion(self) -> Array:
        """Images by [true class, predicted class]."""
        if self.predictions is None:
            raise VitrailError(
                f"A confusion matrix needs one class per image; this is {_MODELS[self.task]}. Use to_pandas('classes')."
            )
        return classification.confusion_matrix(self.predictions.targets, self.predictions.predicted, len(self.classes))

    @property
    def figures(self) -> dict[str, Figure]:
        """The figures of the task: `confusion` and `reliability`; `scatter-0` and so on for a regression."""
        from vitrail.evaluate.result_tables import result_figures

        return result_figures(self)

    def to_pandas(self, what: Literal["metrics", "classes", "images"] = "metrics") -> Any:
        """Return a DataFrame of the metrics with their intervals, of the metrics per class, or of the predictions per image."""
        from vitrail.evaluate import result_tables

        if what == "images":
            if self.predictions is None or self.split is None:
                raise VitrailError(
                    f"A table of images needs one class per image; this is {_MODELS[self.task]}. Use to_pandas('classes')."
                )
            headings, rows = result_tables.IMAGE_HEADINGS, [list(row) for row in result_tables.image_rows(self, self.split)]
        elif what == "classes":
            headings, rows = result_tables.class_table(self)
        elif what == "metrics":
            headings, rows = result_tables.metric_table(self)
        else:
            raise VitrailError(f"There is no table {what!r}; use 'metrics', 'classes' or 'images'.")
        return data_frame({name: [row[k] for row in rows] for k, name in enumerate(headings)})

    @property
    def size(self) -> tuple[int, int]:
        return self.preprocess.size

    def summary(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "task": self.task,
            "size": list(self.size),
            "images": self.images,
            "total_images": self.total,
            "bad_images": [one.name for one in self.bad],
            "metrics": {name: _or_none(value) for name, value in self.metrics.items()},
            "intervals_95": {name: [_or_none(end) for end in both] for name, both in self.intervals.items()},
            "preprocess": self.preprocess.to_dict(),
            "preprocess_fingerprint": self.preprocess.fingerprint(),
            "notes": self.notes,
            "warnings": list(self.trained_on.notes) if self.trained_on is not None else [],
            "trained_on": self.trained_on.to_dict() if self.trained_on is not None else None,
        }


def _or_none(value: float) -> float | None:
    """JSON has no NaN."""
    return None if math.isnan(value) else value


def evaluate(
    bundle: Bundle,
    data: str | Split,
    *,
    split: str | None = None,
    image_size: int | tuple[int, int] | None = None,
    match: Match = "name",
    real: Callable[[Split], Sequence[frozenset[int]]] | None = None,
    tta: bool = False,
    context: EvalContext | None = None,
    trained_on: Overlap | None = None,
) -> EvalResult:
    """Evaluate a checkpoint on a data source, or on a split that is already open (by `open_data`, which returns `trained_on`).

    `split` defaults to val, then test, then what the run held out itself. `image_size` resizes a copy of the model (position
    embeddings are resampled). `match="order"` assigns the dataset's classes to the outputs by order instead of by name. `real`
    returns reassessed labels, see `real_labels.read_real`. With `tta`, predictions are averaged over each image and its mirror
    image.
    """
    bundle.check_head()
    context = context or default_context(bundle.model)
    if isinstance(data, Split):
        opened = data
    else:
        opened, trained_on = open_data(bundle, data, split, match=match, bad_images=context.bad_images)
    notes = check_fits(bundle, opened)
    preprocess = bundle.stored_preprocess()
    model = bundle.model
    if image_size is not None:
        model = copy.deepcopy(model).resize(image_size)
        preprocess = preprocess.with_size(model.config.image_size)
    preprocess = context.preprocess_for(preprocess, model)
    note = context.precision_note(model)
    notes += [note] if note is not None else []
    notes += ["predictions were averaged over each image and its mirror image"] if tta else []
    prepared = context.prepare(model)
    results = context.run(opened, preprocess, prepared, flip_average(bundle, prepared) if tta else prepared.__call__)
    collected = (_collect_predictions if bundle.task == "classify" else _collect_outputs)(bundle, opened, results, context)
    common = {
        "task": bundle.task,
        "classes": opened.classes,
        "total": len(opened),
        "bad": gather_bad_images(context, results.bad),
        "preprocess": preprocess,
        "notes": notes,
        "trained_on": trained_on,
        "split": opened,
    }
    if isinstance(collected, Predictions):
        return _classification_result(collected, opened, common, real(opened) if real else None)
    return _output_result(bundle, collected, common)


def open_data(
    bundle: Bundle,
    reference: str,
    split: str | None = None,
    *,
    match: Match = "name",
    bad_images: BadImages = "error",
    ignore_unknown: bool = False,
) -> tuple[Split, Overlap | None]:
    """Open the split to evaluate on, with its classes in the order of the outputs, and find which images were trained on."""
    check_choice("match", match, Match)
    classes = bundle.classes if match == "name" and bundle.classes is not None else None
    records = bundle.trained_on
    try:
        source = open_for(records, reference, classes=classes, bad_images=bad_images, ignore_unknown=ignore_unknown)
    except VitrailError:
        if classes is None or not bundle.classes_assumed:
            raise
        # Other classes than assumed: matched by order, and noted.
        source = open_for(records, reference, bad_images=bad_images, ignore_unknown=ignore_unknown)
    chosen = evaluation_split(records, source, split)
    return chosen, overlap(records, source, chosen)


def check_fits(bundle: Bundle, split: Split) -> list[str]:
    """Refuse targets that do not match the checkpoint's outputs. Returns notes on what was assumed."""
    outputs = bundle.model.config.outputs
    if len(split) == 0:
        raise VitrailError(f"The split {split.name!r} has no images to evaluate. Choose another one.")
    if split.task == "unlabelled":
        raise VitrailError(f"The split {split.name!r} has no labels to compare with. `vitrail predict` needs no labels.")
    if split.task != bundle.task:
        raise VitrailError(
            f"{bundle.report.source} is {_MODELS[bundle.task]}, but this dataset has {TARGETS[split.task]}. "
            "Evaluate it on a dataset for the same task."
        )
    if len(split.classes) != outputs:
        raise VitrailError(
            f"{bundle.report.source} has {counted(outputs, 'output')}{'' if bundle.classes else ' without names'}, the dataset has "
            f"{counted(len(split.classes), 'class', 'classes')}. The numbers must be equal; "
            "`vitrail fewshot` and `vitrail probe` work with any classes."
        )
    if bundle.classes is None:
        return ["the checkpoint has no class names: the dataset's classes were matched by order"]
    if split.classes != bundle.classes:
        return ["classes were matched by order, not by name"]
    return []


_MODELS = {"classify": "a classifier", "multilabel": "a multi-label classifier", "regress": "a regression model"}


def _collect_predictions(bundle: Bundle, split: Split, results: Any, context: EvalContext) -> Predictions:
    parts = []
    for outputs, batch in results:
        check_finite(outputs, batch, split)
        parts.append(Predictions.from_logits(outputs, batch.targets, batch.indices, sigmoid=bundle.sigmoid))
    all_ranks = [part for rank in context.world.gather(parts) for part in rank]
    return Predictions.concat(_not_empty(all_ranks, split, results, context))


def _collect_outputs(bundle: Bundle, split: Split, results: Any, context: EvalContext) -> tuple[Array, Array, Array]:
    parts = []
    for outputs, batch in results:
        check_finite(outputs, batch, split)
        outputs = outputs.float()
        values = outputs.sigmoid() if bundle.task == "multilabel" else outputs
        parts.append((batch.indices.numpy(), values.cpu().numpy(), batch.targets.cpu().numpy()))
    all_ranks = _not_empty([part for rank in context.world.gather(parts) for part in rank], split, results, context)
    indices, values, truth = (np.concatenate([part[k] for part in all_ranks]) for k in range(3))
    order = np.argsort(indices, kind="stable")
    return indices[order], values[order], truth[order]


def _not_empty(parts: list[Any], split: Split, results: Any, context: EvalContext) -> list[Any]:
    if not parts:
        raise VitrailError(none_read(repr(split.name), gather_bad_images(context, results.bad)))
    return parts


def _classification_result(
    predictions: Predictions, split: Split, common: dict[str, Any], real: Sequence[frozenset[int]] | None
) -> EvalResult:
    metrics, intervals = classification.metrics(predictions, len(split.classes))
    notes = common["notes"]
    if real is not None:
        hits, labelled, unlabelled = real_hits(predictions.predicted, [real[index] for index in predictions.indices])
        metrics["real_accuracy"], intervals["real_accuracy"] = hits / max(labelled, 1), wilson(hits, labelled)
        notes = [*notes, f"ReaL: images with labels: {labelled:,}; without labels, skipped: {unlabelled:,}"]
    common, images = {**common, "notes": notes}, _distinct(predictions.indices)
    return EvalResult(**common, metrics=metrics, intervals=intervals, images=images, predictions=predictions)


def _output_result(bundle: Bundle, collected: tuple[Array, Array, Array], common: dict[str, Any]) -> EvalResult:
    indices, values, truth = collected
    thresholds = None
    if bundle.task == "multilabel":
        saved = bundle.task_info.get("thresholds")
        thresholds = np.asarray(bundle.thresholds, np.float64)
        metrics, intervals = multilabel.metrics(values, truth, thresholds)
        common["notes"].append(f"thresholds: {'saved with the checkpoint' if saved is not None else '0.5 for every label'}")
    else:
        metrics, intervals = regression.metrics(values, truth)
    common["images"] = _distinct(indices)
    return EvalResult(**common, metrics=metrics, intervals=intervals, outputs=values, truth=truth, thresholds=thresholds)


def _distinct(indices: Array) -> int:
    count = len(np.unique(indices))
    if count != len(indices):
        raise VitrailError(f"Images evaluated twice: {len(indices) - count}. This is a bug in Vitrail; please report it.")
    return count
