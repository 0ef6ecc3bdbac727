"""Few-shot linear evaluation: k images per class, frozen features, ridge regression in closed form (§4.1, fig. 4).

It takes seconds instead of the hours of fine-tuning, so the paper uses it to monitor models during training.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from vitrail.checkpoints import Bundle
from vitrail.data.preprocess import Preprocess
from vitrail.data.trained_on import Overlap, open_for, overlap
from vitrail.data.types import BadImage, Split
from vitrail.errors import VitrailError, counted
from vitrail.evaluate.context import EvalContext, default_context
from vitrail.evaluate.features import extract_features
from vitrail.evaluate.ridge import fit_ridge
from vitrail.evaluate.settings import TARGETS, FeatureSpec, FewShotSpec
from vitrail.evaluate.support_set import SupportSet, draw_support_sets
from vitrail.models import Model

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Trial:
    """The result for one number of shots and one seed."""

    shots: int
    seed: int
    accuracy: float
    test_images: int
    dropped: tuple[str, ...]  # classes with too few images
    files: tuple[str, ...]  # the support set


@dataclass(frozen=True)
class FewShotResult:
    """The accuracies, and everything needed to reproduce them."""

    trials: tuple[Trial, ...]
    protocol: FewShotSpec
    features: FeatureSpec
    preprocess: Preprocess
    bad: tuple[BadImage, ...] = ()
    trained_on: Overlap | None = None
    """Which of the test images the checkpoint was trained on."""

    def accuracies(self, shots: int) -> Array:
        return np.array([one.accuracy for one in self.trials if one.shots == shots])

    def mean(self, shots: int) -> float:
        return float(self.accuracies(shots).mean())

    def std(self, shots: int) -> float:
        """Return the standard deviation over seeds; NaN with one seed."""
        accuracies = self.accuracies(shots)
        return float(accuracies.std(ddof=1)) if len(accuracies) > 1 else float("nan")

    def to_dict(self) -> dict[str, Any]:
        several = self.protocol.seeds > 1  # JSON has no NaN
        scores = {
            str(k): {"mean": self.mean(k), "std": self.std(k) if several else None, "seeds": self.accuracies(k).tolist()}
            for k in self.protocol.shots
        }
        return {
            "scores": scores,
            "protocol": dataclasses.asdict(self.protocol),
            "features": self.features.to_dict(),
            "preprocess": self.preprocess.to_dict(),
            "bad_images": [one.name for one in self.bad],
            "trained_on": self.trained_on.to_dict() if self.trained_on is not None else None,
            "warnings": list(self.trained_on.notes) if self.trained_on is not None else [],
            "trials": [dataclasses.asdict(one) for one in self.trials],
        }


def few_shot(
    bundle: Bundle,
    data: str,
    *,
    train_split: str = "train",
    split: str | None = None,
    protocol: FewShotSpec | None = None,
    features: FeatureSpec | None = None,
    context: EvalContext | None = None,
) -> FewShotResult:
    """Compute the few-shot accuracy of a checkpoint on any set of classes.

    The checkpoint's own head is not used. `split`, to test on, defaults to val, or test if there is no val.
    """
    context = context or default_context(bundle.model)
    train, test, trained_on = open_train_and_test(bundle, data, train_split, split, context)
    evaluator = FewShotEvaluator(train, test, bundle.stored_preprocess(), protocol=protocol, features=features)
    return dataclasses.replace(evaluator.run(bundle.model, context), trained_on=trained_on)


def open_train_and_test(
    bundle: Bundle, data: str, train: str, test: str | None, context: EvalContext
) -> tuple[Split, Split, Overlap | None]:
    """Open two different classification splits of a source, and find which test images the checkpoint was trained on.

    A source that a run was trained on is divided as it was there.
    """
    records = bundle.trained_on
    source = open_for(records, data, bad_images=context.bad_images)
    if test is None:
        test = next((name for name in ("val", "test") if name in source.splits), None)
    if test is None:
        raise VitrailError(
            f"{data} has only the split {', '.join(source.splits)}; a test split is needed too. "
            "Add one, or make one with `vitrail data split`."
        )
    if test == train:
        raise VitrailError(
            f"Both splits are {test!r}; test on images that were not used for training. Change --split or --train-split."
        )
    train_split, test_split = source.split(train), source.split(test)
    for split in (train_split, test_split):
        if split.task != "classify":
            raise VitrailError(f"{data} has {TARGETS[split.task]}; few-shot and probes need one class per image.")
        if len(split) == 0:
            raise VitrailError(f"The split {split.name!r} of {data} has no images. Choose another one.")
    return train_split, test_split, overlap(records, source, test_split)


class FewShotEvaluator:
    """Compute few-shot accuracy repeatedly during training: `evaluator(model)` returns {"5shot": 0.61, …}.

    The support sets are drawn once, so the scores of different steps differ by the model only. The model keeps its device
    and mode. With several ranks, `context` must hold their `World`.
    """

    def __init__(
        self,
        train: Split,
        test: Split,
        preprocess: Preprocess,
        *,
        protocol: FewShotSpec | None = None,
        features: FeatureSpec | None = None,
        context: EvalContext | None = None,
    ) -> None:
        self.protocol, self.features = protocol or FewShotSpec(), features or FeatureSpec()
        self.preprocess, self.context = preprocess, context
        if self.features.feature == "patches":
            raise VitrailError("Few-shot needs one vector per image; use mean instead of patches.")
        spec = self.protocol
        self.support_sets = draw_support_sets(
            train.targets, train.classes, shots=spec.shots, seeds=range(spec.seeds), small_classes=spec.small_classes
        )
        self.train, self.test = train, test
        # Only images of some support set are computed: for ImageNet a few thousand instead of a million.
        self.drawn = np.unique(np.concatenate([support.indices for support in self.support_sets]))

    def __call__(self, model: Model) -> dict[str, float]:
        result = self.run(model, self.context or default_context(model))
        return {f"{shots}shot": result.mean(shots) for shots in self.protocol.shots}

    def run(self, model: Model, context: EvalContext) -> FewShotResult:
        strict = dataclasses.replace(context, bad_images="error")  # a support set must have exactly k images per class
        preprocess = context.preprocess_for(self.preprocess, model)
        train = extract_features(model, self.train.subset(self.drawn), preprocess, self.features, strict)
        test = extract_features(model, self.test, preprocess, self.features, context)
        targets = self.test.targets[test.indices]
        trials = tuple(self._trial(support, train.features, test.features, targets) for support in self.support_sets)
        return FewShotResult(trials, self.protocol, self.features, preprocess, tuple(test.bad))

    def _trial(self, support: SupportSet, train_features: Array, test_features: Array, targets: Array) -> Trial:
        names = self.train.classes
        rows = np.searchsorted(self.drawn, support.indices)
        # The remaining classes are renumbered, so that dropped ones cannot be predicted.
        new_label = np.full(len(names), -1, np.int64)
        new_label[support.classes] = np.arange(len(support.classes))
        tested = np.flatnonzero(new_label[targets] >= 0)
        if not len(tested):
            raise VitrailError(
                f"None of the {counted(len(targets), 'test image')} belongs to one of the {len(support.classes)} classes of the "
                "support set. Test on images of the same classes."
            )
        labels = new_label[self.train.targets[support.indices]]
        classifier = fit_ridge(train_features[rows], labels, len(support.classes), l2=self.protocol.l2, bias=self.protocol.bias)
        return Trial(
            shots=support.shots,
            seed=support.seed,
            accuracy=classifier.accuracy(test_features[tested], new_label[targets[tested]]),
            test_images=len(tested),
            dropped=tuple(names[k] for k in support.dropped),
            files=tuple(self.train.image_name(int(index)) for index in support.indices),
        )
