"""`measure`: a checkpoint on a split, every figure there is for its task."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from vitrail.checkpoints import Bundle
from vitrail.data import open_source
from vitrail.data.preprocess import Preprocess
from vitrail.data.types import BadImage, Split
from vitrail.errors import VitrailError
from vitrail.evaluate import classification, labels, numbers
from vitrail.evaluate.classification import Answers
from vitrail.evaluate.intervals import Interval, wilson
from vitrail.evaluate.real_labels import real_hits
from vitrail.evaluate.running import BadImages, Running, all_bad, check_finite, on_own_device

Array = npt.NDArray[Any]
Match = Literal["name", "order"]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a model was found to do on a split."""

    task: str
    classes: tuple[str, ...]
    figures: dict[str, float]
    intervals: dict[str, Interval]
    """95 %: Wilson's for shares of images, a bootstrap over images for the rest."""
    images: int
    """Different images evaluated."""
    total: int
    """Images of the split; the difference is `bad`."""
    bad: list[BadImage]
    preprocess: Preprocess
    answers: Answers | None = None
    """Of a classifier."""
    outputs: Array | None = None
    """Probabilities [n, labels] of a multi-label model, predicted numbers [n, targets] of a regression."""
    truth: Array | None = None
    thresholds: Array | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def size(self) -> tuple[int, int]:
        return self.preprocess.size

    def summary(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "task": self.task,
            "size": list(self.size),
            "images": self.images,
            "of": self.total,
            "bad_images": [one.name for one in self.bad],
            "figures": {name: _known(value) for name, value in self.figures.items()},
            "intervals_95": {name: [_known(end) for end in both] for name, both in self.intervals.items()},
            "preprocess": self.preprocess.to_dict(),
            "preprocess_fingerprint": self.preprocess.fingerprint(),
            "notes": self.notes,
        }


def _known(value: float) -> float | None:
    """JSON has no NaN."""
    return None if math.isnan(value) else value


def measure(
    bundle: Bundle,
    data: str | Split,
    *,
    split: str | None = None,
    size: int | tuple[int, int] | None = None,
    match: Match = "name",
    real: Callable[[Split], Sequence[frozenset[int]]] | None = None,
    running: Running | None = None,
) -> Measured:
    """Evaluate a checkpoint on a data source, or on a split that is already open.

    `split` is val, or else test, unless named. `size` resizes a copy of the model, its positions resampled by its own rule.
    `match="order"` takes the data's classes in their order for the outputs, where the two only differ in names.
    `real` gives reassessed labels, as `real_labels.read_real` reads them.
    """
    bundle.check_head()
    running = running or on_own_device(bundle.model)
    opened = data if isinstance(data, Split) else open_split(bundle, data, split, match=match, bad_images=running.bad_images)
    notes = check_fits(bundle, opened)
    preprocess = bundle_preprocess(bundle)
    model = bundle.model
    if size is not None:
        model = copy.deepcopy(model).resize(size)
        preprocess = preprocess.with_size(model.config.image_size)
    remark = running.remark(model)
    notes += [remark] if remark is not None else []
    model = running.ready(model)
    passed = running.over(opened, preprocess, model, model.__call__)
    kept = (_keep_answers if bundle.task == "classify" else _keep_outputs)(bundle, opened, passed, running)
    common = {
        "task": bundle.task,
        "classes": opened.classes,
        "total": len(opened),
        "bad": all_bad(running, passed.bad),
        "preprocess": preprocess,
        "notes": notes,
    }
    if isinstance(kept, Answers):
        return _classified(kept, opened, common, real(opened) if real else None)
    return _predicted(bundle, kept, common)


def open_split(
    bundle: Bundle,
    reference: str,
    split: str | None = None,
    *,
    match: Match = "name",
    bad_images: BadImages = "error",
    ignore_unknown: bool = False,
) -> Split:
    """The split of a source to evaluate on, with its classes numbered as the checkpoint's outputs are."""
    named = bundle.classes if match == "name" and bundle.classes is not None else None
    source = open_source(reference, classes=named, bad_images=bad_images, ignore_unknown=ignore_unknown)
    if split is None:
        split = next((name for name in ("val", "test") if name in source.splits), next(iter(source.splits)))
    return source.split(split)


def check_fits(bundle: Bundle, split: Split) -> list[str]:
    """Refuse targets this checkpoint has no outputs for; returns what was taken for granted."""
    outputs = bundle.model.config.outputs
    if len(split) == 0:
        raise VitrailError(f"The split {split.name!r} has no images, so there is nothing to evaluate.")
    if split.task == "unlabelled":
        raise VitrailError(f"The split {split.name!r} has no labels to compare with. `vitrail predict` needs none.")
    if split.task != bundle.task:
        raise VitrailError(
            f"{bundle.report.source} was made to {_DOES[bundle.task]}, this data set is one to {_DOES[split.task]} with. "
            "Evaluate it on data of its own kind."
        )
    if len(split.classes) != outputs:
        raise VitrailError(
            f"{bundle.report.source} has {outputs} outputs{'' if bundle.classes else ' without names'}, the data set "
            f"{len(split.classes)} classes. They must be the same; few-shot and probes (`vitrail fewshot`) work with any classes."
        )
    if bundle.classes is None:
        return ["the checkpoint does not name its classes: those of the data were taken in their order"]
    if split.classes != bundle.classes:
        return ["classes were matched by their order, not by name"]
    return []


_DOES = {"classify": "classify", "multilabel": "give several labels", "regress": "predict numbers"}


def bundle_preprocess(bundle: Bundle) -> Preprocess:
    if bundle.preprocess is None:
        raise VitrailError(
            f"No preprocessing recorded in {bundle.report.source}. Official Google ViTs use [-1,1] and a square resize; "
            "pass --preprocess google-vit (or imagenet)."
        )
    return bundle.preprocess


def _keep_answers(bundle: Bundle, split: Split, passed: Any, running: Running) -> Answers:
    parts = []
    for outputs, batch in passed:
        check_finite(outputs, batch, split)
        parts.append(Answers.of(outputs, batch.targets, batch.indices, sigmoid=bundle.sigmoid))
    everyone = [part for rank in running.world.gather(parts) for part in rank]
    return Answers.joined(_some(everyone))


def _keep_outputs(bundle: Bundle, split: Split, passed: Any, running: Running) -> tuple[Array, Array, Array]:
    parts = []
    for outputs, batch in passed:
        check_finite(outputs, batch, split)
        outputs = outputs.float()
        values = outputs.sigmoid() if bundle.task == "multilabel" else outputs
        parts.append((batch.indices.numpy(), values.cpu().numpy(), batch.targets.cpu().numpy()))
    everyone = _some([part for rank in running.world.gather(parts) for part in rank])
    indices, values, truth = (np.concatenate([part[k] for part in everyone]) for k in range(3))
    order = np.argsort(indices, kind="stable")
    return indices[order], values[order], truth[order]


def _some(parts: list[Any]) -> list[Any]:
    if not parts:
        raise VitrailError("Not one image of the split could be read. `vitrail data check` says what is wrong with them.")
    return parts


def _classified(answers: Answers, split: Split, common: dict[str, Any], real: Sequence[frozenset[int]] | None) -> Measured:
    figures, intervals = classification.figures(answers, len(split.classes))
    notes = common["notes"]
    if real is not None:
        right, known, without = real_hits(answers.predicted, [real[index] for index in answers.indices])
        figures["real_accuracy"], intervals["real_accuracy"] = right / max(known, 1), wilson(right, known)
        notes = [*notes, f"ReaL: {known:,} images have labels, {without:,} have none and are skipped"]
    common, images = {**common, "notes": notes}, _distinct(answers.indices)
    return Measured(**common, figures=figures, intervals=intervals, images=images, answers=answers)


def _predicted(bundle: Bundle, kept: tuple[Array, Array, Array], common: dict[str, Any]) -> Measured:
    indices, values, truth = kept
    thresholds = None
    if bundle.task == "multilabel":
        saved = bundle.reading.get("thresholds")
        thresholds = np.asarray(saved if saved is not None else [0.5] * values.shape[1], np.float64)
        figures, intervals = labels.figures(values, truth, thresholds)
        common["notes"].append(f"thresholds: {'those saved with the checkpoint' if saved is not None else '0.5 for every label'}")
    else:
        figures, intervals = numbers.figures(values, truth)
    common["images"] = _distinct(indices)
    return Measured(**common, figures=figures, intervals=intervals, outputs=values, truth=truth, thresholds=thresholds)


def _distinct(indices: Array) -> int:
    count = len(np.unique(indices))
    if count != len(indices):
        raise VitrailError(f"{len(indices) - count} images were evaluated twice. This is a fault in Vitrail: please report it.")
    return count
