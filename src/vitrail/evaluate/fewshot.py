"""Few-shot linear evaluation: k images a class, frozen features, a classifier in closed form (§4.1, fig. 4).

It takes seconds where fine-tuning takes hours, so the paper uses it to watch models while they are trained.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from vitrail.checkpoints import Bundle
from vitrail.data import open_source
from vitrail.data.preprocess import Preprocess
from vitrail.data.types import BadImage, Split
from vitrail.errors import VitrailError
from vitrail.evaluate.features import FeatureSpec, extract
from vitrail.evaluate.measuring import bundle_preprocess
from vitrail.evaluate.ridge import BIAS, L2, fit_ridge
from vitrail.evaluate.running import Running, on_own_device
from vitrail.evaluate.shots import Choice, ShortClass, choose_shots
from vitrail.models import Model

Array = npt.NDArray[Any]
SHOTS, SEEDS = (1, 5, 10, 25), 3


@dataclass(frozen=True, kw_only=True)
class FewShotSpec:
    """The protocol; its defaults are the reference's."""

    shots: tuple[int, ...] = SHOTS
    """Images a class."""
    seeds: int = SEEDS
    """How many draws of the images; each is one experiment."""
    l2: float = L2
    """Strength of the regularisation."""
    bias: float = BIAS
    """The constant feature; large, so that it is hardly regularised."""
    short_class: ShortClass = "fail"
    """What to do about a class with fewer images than shots: fail, or drop it for that number of shots."""

    def __post_init__(self) -> None:
        if self.seeds < 1:
            raise VitrailError(f"seeds is {self.seeds}; at least one draw is needed.")


@dataclass(frozen=True)
class Trial:
    """One number of shots with one draw."""

    shots: int
    seed: int
    accuracy: float
    test_images: int
    dropped: tuple[str, ...]  # classes with too few images
    files: tuple[str, ...]  # the images learnt from


@dataclass(frozen=True)
class FewShot:
    """The scores, and everything needed to obtain them again."""

    trials: tuple[Trial, ...]
    protocol: FewShotSpec
    features: FeatureSpec
    preprocess: Preprocess
    bad: tuple[BadImage, ...] = ()

    def accuracies(self, shots: int) -> Array:
        return np.array([one.accuracy for one in self.trials if one.shots == shots])

    def mean(self, shots: int) -> float:
        return float(self.accuracies(shots).mean())

    def deviation(self, shots: int) -> float:
        """The standard deviation over draws; NaN where there is one draw only."""
        found = self.accuracies(shots)
        return float(found.std(ddof=1)) if len(found) > 1 else float("nan")

    def to_dict(self) -> dict[str, Any]:
        several = self.protocol.seeds > 1  # JSON has no NaN
        scores = {
            str(k): {"mean": self.mean(k), "sd": self.deviation(k) if several else None, "seeds": self.accuracies(k).tolist()}
            for k in self.protocol.shots
        }
        return {
            "scores": scores,
            "protocol": dataclasses.asdict(self.protocol),
            "features": self.features.to_dict(),
            "preprocess": self.preprocess.to_dict(),
            "bad_images": [one.name for one in self.bad],
            "trials": [dataclasses.asdict(one) for one in self.trials],
        }


def few_shot(
    bundle: Bundle,
    data: str,
    *,
    train: str = "train",
    test: str | None = None,
    protocol: FewShotSpec | None = None,
    features: FeatureSpec | None = None,
    running: Running | None = None,
) -> FewShot:
    """Few-shot accuracy of a checkpoint on any classes: its own head is not used. `test` is val, or else test."""
    running = running or on_own_device(bundle.model)
    support, held = support_and_test(data, train, test, running)
    evaluator = FewShotEvaluator(support, held, bundle_preprocess(bundle), protocol=protocol, features=features)
    return evaluator.run(bundle.model, running)


def support_and_test(data: str, train: str, test: str | None, running: Running) -> tuple[Split, Split]:
    """The two splits of a source; they must be different ones with classes."""
    source = open_source(data, bad_images=running.bad_images)
    if test is None:
        test = next((name for name in ("val", "test") if name in source.splits), None)
    if test is None:
        raise VitrailError(f"{data} has only the split {', '.join(source.splits)}; images to test on are needed too.")
    if test == train:
        raise VitrailError(f"Both splits are {test!r}; testing on the images that were learnt from says nothing.")
    support, held = source.split(train), source.split(test)
    for split in (support, held):
        if split.task != "classify":
            raise VitrailError(f"{data} has {split.task} targets; few-shot and probes need one class an image.")
        if len(split) == 0:
            raise VitrailError(f"The split {split.name!r} of {data} has no images.")
    return support, held


class FewShotEvaluator:
    """Few-shot accuracy again and again, as a model is trained: `evaluator(model)` gives {"5shot": 0.61, …}.

    The images are chosen once, so scores of different steps differ by the model alone. The model stays on its device and in
    its mode; with several ranks, `running` has to hold their world.
    """

    def __init__(
        self,
        support: Split,
        test: Split,
        preprocess: Preprocess,
        *,
        protocol: FewShotSpec | None = None,
        features: FeatureSpec | None = None,
        running: Running | None = None,
    ) -> None:
        self.protocol, self.features = protocol or FewShotSpec(), features or FeatureSpec()
        self.preprocess, self.running = preprocess, running
        if self.features.what == "patches":
            raise VitrailError("Few-shot needs one vector an image; take mean instead of patches.")
        spec = self.protocol
        draws = range(spec.seeds)
        self.choices = choose_shots(support.targets, support.classes, shots=spec.shots, seeds=draws, short_class=spec.short_class)
        self.support, self.test = support, test
        # Only the images that are drawn at all are computed: for ImageNet a few thousand instead of a million.
        self.drawn = np.unique(np.concatenate([choice.indices for choice in self.choices]))

    def __call__(self, model: Model) -> dict[str, float]:
        found = self.run(model, self.running or on_own_device(model))
        return {f"{shots}shot": found.mean(shots) for shots in self.protocol.shots}

    def run(self, model: Model, running: Running) -> FewShot:
        exactly = dataclasses.replace(running, bad_images="error")  # without one of its images a draw would not have k
        known = extract(model, self.support.subset(self.drawn), self.preprocess, self.features, exactly)
        held = extract(model, self.test, self.preprocess, self.features, running)
        targets = self.test.targets[held.indices]
        trials = tuple(self._trial(choice, known.features, held.features, targets) for choice in self.choices)
        return FewShot(trials, self.protocol, self.features, self.preprocess, tuple(held.bad))

    def _trial(self, choice: Choice, known: Array, held: Array, targets: Array) -> Trial:
        names = self.support.classes
        rows = np.searchsorted(self.drawn, choice.indices)
        # Classes that take part are numbered anew, so that dropped ones cannot be predicted.
        number = np.full(len(names), -1, np.int64)
        number[choice.classes] = np.arange(len(choice.classes))
        asked = np.flatnonzero(number[targets] >= 0)
        if not len(asked):
            raise VitrailError("Not one test image belongs to a class that was learnt.")
        learnt = number[self.support.targets[choice.indices]]
        fitted = fit_ridge(known[rows], learnt, len(choice.classes), l2=self.protocol.l2, bias=self.protocol.bias)
        right = fitted.predict(held[asked]).numpy() == number[targets[asked]]
        return Trial(
            shots=choice.shots,
            seed=choice.seed,
            accuracy=float(right.mean()),
            test_images=len(asked),
            dropped=tuple(names[k] for k in choice.dropped),
            files=tuple(self.support.image_name(int(index)) for index in choice.indices),
        )
