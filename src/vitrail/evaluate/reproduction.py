"""Evaluate published weights with their own preprocessing, and compare with the published accuracy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vitrail.checkpoints import Bundle, load, published
from vitrail.checkpoints.published import PublishedWeights
from vitrail.checkpoints.references import is_name
from vitrail.data import imagenet
from vitrail.data.types import Split
from vitrail.errors import VitrailError, counted
from vitrail.evaluate.classification import Predictions, top_k_accuracy
from vitrail.evaluate.context import EvalContext, check_finite, default_context, gather_bad_images, none_read
from vitrail.evaluate.imagenet_sets import (
    ALEXNET_ERROR,
    SETS,
    SEVERITIES,
    ImageNetSet,
    corruption_folders,
    open_corruptions,
    open_set,
)
from vitrail.evaluate.real_labels import read_real, real_hits
from vitrail.wilson import Interval, wilson


@dataclass(frozen=True, kw_only=True)
class ReproducedMetric:
    """One metric in percent, next to the published value."""

    benchmark: str
    metric: str
    value: float
    low: float | None = None
    high: float | None = None
    published: float | None = None
    difference: float | None = None
    verdict: str | None = None
    """`within`: the published value is in the 95 % interval; `outside`: it is not; None: nothing is published."""
    images: int = 0
    total_images: int = 0
    """Images of the whole set; a part of it has another accuracy."""


@dataclass(frozen=True, kw_only=True)
class Reproduction:
    """The metrics of one checkpoint on ImageNet and its test sets."""

    checkpoint: str
    weights: PublishedWeights | None
    metrics: list[ReproducedMetric]
    preprocess: str
    notes: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "checkpoint": self.checkpoint,
            "weights": self.weights.to_dict() if self.weights else None,
            "preprocess": self.preprocess,
            "metrics": [asdict(one) for one in self.metrics],
            "notes": self.notes,
        }


Folders = Mapping[str, str | Path]


def reproduce(
    reference: str,
    folders: Folders,
    *,
    real: str | Path | None = None,
    load_bundle: Callable[[], Bundle] | None = None,
    context: EvalContext | None = None,
    compare: bool = True,
    announce: Callable[[str, int], None] = lambda title, images: None,
) -> Reproduction:
    """Evaluate weights on each set for which a folder is given: `imagenet`, `v2`, `a`, `r`, `sketch` and `c`.

    `real` is the JSON file of the reassessed labels of ImageNet's validation images. `load_bundle` loads the checkpoint, after the
    folders were looked at; default: `load(reference)`. `compare=False` shows no published values, for other preprocessing.
    `announce` is called with the name and size of a set before it is evaluated.
    """
    weights = published.find(reference) if is_name(reference) and not reference.startswith("hf:") else None
    if weights is not None:
        check_classifier(weights)
    _check_folders(folders, real)
    opened = {key: open_set(key, folder) for key, folder in folders.items() if key in SETS}
    corrupted = corruption_folders(folders["c"]) if "c" in folders else {}
    run = _Run(load_bundle() if load_bundle is not None else load(reference), context, announce)
    metrics: list[ReproducedMetric] = []
    for key, split in opened.items():
        predictions = run.predict(split, SETS[key])
        metrics += _accuracies(predictions, SETS[key], weights if key == "imagenet" and compare else None)
        if key == "imagenet" and real is not None:
            metrics.append(_real(predictions, split, real))
    if corrupted:
        metrics += _corruptions(run, corrupted)
    parts = {one.benchmark: one for one in metrics if one.images < one.total_images and one.metric in ("top-1", "mean error")}
    notes = run.notes + [
        f"{name}: {one.images:,} of {one.total_images:,} images; the whole set may give another value"
        for name, one in parts.items()
    ]
    return Reproduction(
        checkpoint=run.bundle.report.source, weights=weights, metrics=metrics, preprocess=run.preprocess.describe(), notes=notes
    )


def check_classifier(weights: PublishedWeights) -> None:
    """Refuse weights without ImageNet-1k's classes before they are downloaded."""
    if weights.outputs == 1000:
        return
    what = f"has {weights.outputs:,} outputs" if weights.outputs else "has no head"
    others = [one.reference for one in published.tags(weights.name) if one.outputs == 1000]
    advice = f"Use {', '.join(others[:4])}." if others else "`vitrail reproduce --list` lists weights that classify it."
    raise VitrailError(f"{weights.reference} {what}, so it cannot classify ImageNet-1k. {advice}")


def _check_folders(folders: Folders, real: str | Path | None) -> None:
    unknown = [key for key in folders if key not in (*SETS, "c")]
    if unknown:
        raise VitrailError(f"There is no set {unknown[0]!r}. The sets are {', '.join(SETS)} and c.")
    if not folders:
        raise VitrailError(
            "No images are given. Pass --imagenet DIR with ImageNet's validation images, or --v2, --a, --r, --sketch, --c."
        )
    if real is not None and "imagenet" not in folders:
        raise VitrailError("--real has labels of ImageNet's validation images; pass these, too: --imagenet DIR.")


class _Run:
    """A checkpoint on its device, prepared once for all sets."""

    def __init__(self, bundle: Bundle, context: EvalContext | None, announce: Callable[[str, int], None]) -> None:
        bundle.check_head()
        if bundle.classes is None or imagenet.recognise(bundle.classes) != imagenet.wordnet_ids("1k"):
            raise VitrailError(
                f"{bundle.report.source} does not have the classes of ImageNet-1k. `vitrail eval` takes any classes."
            )
        self.bundle, self.announce = bundle, announce
        self.context = context or default_context(bundle.model)
        self.preprocess = self.context.preprocess_for(bundle.stored_preprocess(), bundle.model)
        note = self.context.precision_note(bundle.model)
        self.notes = [*([note] if note else []), *(f"assumed: {one}" for one in bundle.report.assumptions)]
        self._model = self.context.prepare(bundle.model)

    def predict(self, split: Split, which: ImageNetSet) -> Predictions:
        self.announce(which.title, len(split))
        outputs = torch.tensor(which.outputs) if which.outputs is not None else None
        position = torch.full((1000,), -1)
        if outputs is not None:
            position[outputs] = torch.arange(len(outputs))
        results = self.context.run(split, self.preprocess, self._model, self._model.__call__)
        parts = []
        for logits, batch in results:
            check_finite(logits, batch, split)
            targets = batch.targets.to(logits.device)
            if outputs is not None:  # only the classes of the set compete
                logits, targets = logits[:, outputs.to(logits.device)], position.to(logits.device)[targets]
            parts.append(Predictions.from_logits(logits, targets, batch.indices, sigmoid=self.bundle.sigmoid))
        gathered = [part for rank in self.context.world.gather(parts) for part in rank]
        bad = gather_bad_images(self.context, results.bad)
        if not gathered:
            raise VitrailError(none_read(which.title, bad))
        self.notes += [f"{which.title}: skipped {counted(len(bad), 'image')} that cannot be read"] if bad else []
        return Predictions.concat(gathered)


def _accuracies(predictions: Predictions, which: ImageNetSet, weights: PublishedWeights | None) -> list[ReproducedMetric]:
    total, found = len(predictions), []
    for k, value in ((1, weights.top1 if weights else None), (5, weights.top5 if weights else None)):
        share = top_k_accuracy(predictions, k)
        found.append(_metric(which.title, f"top-{k}", share, wilson(round(share * total), total), value, total, which.images))
    return found


def _real(predictions: Predictions, split: Split, file: str | Path) -> ReproducedMetric:
    labels = read_real(file, split, split.classes)
    hits, labelled, _ = real_hits(predictions.predicted, [labels[index] for index in predictions.indices])
    return _metric("ImageNet ReaL", "top-1", hits / max(labelled, 1), wilson(hits, labelled), None, labelled, 46_837)


def _metric(
    benchmark: str, metric: str, share: float, interval: Interval, reported: float | None, images: int, total: int
) -> ReproducedMetric:
    value, low, high = 100 * share, 100 * interval[0], 100 * interval[1]
    verdict = None if reported is None else "within" if low <= reported <= high else "outside"
    return ReproducedMetric(
        benchmark=benchmark,
        metric=metric,
        value=value,
        low=low,
        high=high,
        published=reported,
        difference=None if reported is None else value - reported,
        verdict=verdict,
        images=images,
        total_images=total,
    )


def _corruptions(run: _Run, folders: dict[str, Path]) -> list[ReproducedMetric]:
    """Evaluate ImageNet-C. mCE needs all corruptions and severities; the images of all are the same, so there is no interval."""
    errors: dict[str, dict[int, float]] = {}
    images: dict[str, int] = {}
    for name, severity, split in open_corruptions(folders):
        predictions = run.predict(split, ImageNetSet(f"ImageNet-C {name} {severity}", 50_000))
        errors.setdefault(name, {})[severity] = 1 - float(predictions.correct.mean())
        images[name] = images.get(name, 0) + len(predictions)
    if not errors:
        has = "has" if len(folders) == 1 else "have"
        raise VitrailError(
            f"--c: {', '.join(folders)} of ImageNet-C {has} no severity; folders 1 to 5 with class folders are expected, such as "
            "gaussian_noise/1/n01440764."
        )
    by_name = {name: float(np.mean(list(one.values()))) for name, one in errors.items()}
    found = [_error(name, "error", by_name[name], images[name], 5 * 50_000) for name in by_name]
    total = sum(images.values())
    found.append(_error("", "mean error", float(np.mean(list(by_name.values()))), total, 75 * 50_000))
    missing = [name for name in ALEXNET_ERROR if set(errors.get(name, ())) != set(SEVERITIES)]
    if missing:
        run.notes.append(f"ImageNet-C: no mCE, which needs all severities of all 15 corruptions; missing: {', '.join(missing)}")
        return found
    mce = float(np.mean([by_name[name] / ALEXNET_ERROR[name] for name in ALEXNET_ERROR]))
    return [*found, _error("", "mCE", mce, total, 75 * 50_000)]


def _error(name: str, metric: str, share: float, images: int, total: int) -> ReproducedMetric:
    title = f"ImageNet-C {name}".strip()
    return ReproducedMetric(benchmark=title, metric=metric, value=100 * share, images=images, total_images=total)
