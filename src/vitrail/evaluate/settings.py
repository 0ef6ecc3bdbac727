"""What the user chooses when evaluating models. It needs neither numpy nor torch, so that `--help` answers at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from vitrail.errors import VitrailError, did_you_mean
from vitrail.models.config import BiTConfig, ViTConfig
from vitrail.train.lengths import Length

if TYPE_CHECKING:
    from torch import Tensor

    from vitrail.models import Model
    from vitrail.models.inference import InferenceModel

Precision = Literal["auto", "fp32", "bf16", "fp16", "int8"]
Feature = Literal["pre_logits", "pooled", "class", "mean", "patches"]
SmallClasses = Literal["error", "drop"]
Match = Literal["name", "order"]
Metric = Literal["cosine", "euclidean"]
FeatureFormat = Literal["safetensors", "parquet"]
TableFormat = Literal["csv", "parquet"]

SHOTS, SEEDS = (1, 5, 10, 25), 3
L2 = 2.0**10
BIAS = 100.0
TARGETS = {
    "classify": "one class per image",
    "multilabel": "multi-label targets",
    "regress": "regression targets",
    "unlabelled": "no labels",
}
"""What a dataset has for its images, by task."""


def no_progress(images: int) -> None:
    """Report nothing."""


def check_choice(name: str, value: str, choices: Any) -> None:
    """Refuse a value that is not one of a Literal: it would silently mean another one."""
    known = get_args(choices)
    if value not in known:
        raise VitrailError(f"{name} is {value!r}; it can be {', '.join(known)}.{did_you_mean(str(value), known)}")


@dataclass(frozen=True, kw_only=True)
class FeatureSpec:
    """Which feature of the model represents an image.

    The paper's few-shot classifier uses `pre_logits`, the input of the head. A probe's accuracy can depend on the layer, on
    class token or mean over patches, and on whether the final norm is applied.
    """

    feature: Feature = "pre_logits"
    """pre_logits (the input of the head), pooled (before a pre-logits layer), class (the class token), mean (over patches) or
    patches (all patches, as a grid)."""
    layer: int | None = None
    """Take class, mean or patches after this encoder block, counted from 0; −1 is the last. None: the last."""
    norm: bool = True
    """Apply the final norm to class, mean and patches, before or after pooling as in the model.
    --no-norm: Take class, mean and patches without the final norm."""

    def __post_init__(self) -> None:
        check_choice("feature", self.feature, Feature)
        if self.layer is not None and self.feature in ("pre_logits", "pooled"):
            raise VitrailError(f"{self.feature} exists only for the last layer; for layer {self.layer} use class, mean or patches.")
        if not self.norm and self.feature in ("pre_logits", "pooled"):
            raise VitrailError(f"{self.feature} comes after the final norm; without the norm use class, mean or patches.")

    def check(self, model: Model | InferenceModel, *, any_size: bool = False) -> None:
        """Refuse features this model does not have, and grids of images of any size."""
        config, name = model.config, model.config.name
        if self.feature == "patches" and any_size:
            raise VitrailError(
                "Images of any size have grids of any size, which do not fit into one array. Use the feature mean or class."
            )
        if isinstance(config, BiTConfig):
            if self.feature == "class":
                raise VitrailError(f"{name} is a ResNet without a class token; use mean or pooled.")
            if self.layer is not None and self.norm:
                raise VitrailError(f"The final norm of {name} applies to its last stage only; pass --no-norm with --layer.")
        elif self.feature == "class" and not config.class_token:
            raise VitrailError(f"{name} has no class token; use mean or pooled.")

    def compute(self, model: Model | InferenceModel, images: Tensor) -> Tensor:
        """Compute the features of a batch: [images, channels], or for patches [images, rows, columns, channels]."""
        if self.feature in ("pre_logits", "pooled"):
            features: Tensor = getattr(model.features(images), self.feature)
            return features
        return (self._resnet_stage if isinstance(model.config, BiTConfig) else self._vit_layer)(model, images)

    def _vit_layer(self, model: Model | InferenceModel, images: Tensor) -> Tensor:
        config, layer = model.config, -1 if self.layer is None else self.layer
        assert isinstance(config, ViTConfig)
        found = model.features(images, layers=[layer])
        tokens = next(iter(found.layers.values()))
        norm_first = self.norm and config.final_norm == "before-pool"
        tokens = model.norm(tokens) if norm_first else tokens
        if self.feature == "class":
            features = tokens[:, 0]
        else:
            patches = tokens[:, config.prefix :]
            features = patches.mean(1) if self.feature == "mean" else patches.unflatten(1, found.grid)
        return model.norm(features) if self.norm and not norm_first else features

    def _resnet_stage(self, model: Model | InferenceModel, images: Tensor) -> Tensor:
        if self.norm:
            patches = model.features(images).patches
        else:
            patches = next(iter(model.features(images, layers=[-1 if self.layer is None else self.layer]).layers.values()))
        return patches.mean(dim=(1, 2)) if self.feature == "mean" else patches

    def to_dict(self) -> dict[str, Any]:
        return {"feature": self.feature, "layer": self.layer, "norm": self.norm}

    def describe(self) -> str:
        if self.feature in ("pre_logits", "pooled"):
            return f"{self.feature} of the last layer"
        layer = "the last layer" if self.layer is None else f"layer {self.layer}"
        return f"{self.feature} of {layer}, {'with' if self.norm else 'without'} the final norm"


@dataclass(frozen=True, kw_only=True)
class FewShotSpec:
    """The few-shot protocol. The defaults are those of the reference code."""

    shots: tuple[int, ...] = SHOTS
    """Images per class."""
    seeds: int = SEEDS
    """Number of random support sets; each is one trial."""
    l2: float = L2
    """L2 regularisation strength."""
    bias: float = BIAS
    """Value of the constant feature; large, so that the bias is hardly regularised."""
    small_classes: SmallClasses = "error"
    """What to do with a class that has fewer images than shots: stop with an error, or drop it for that number of shots."""

    def __post_init__(self) -> None:
        check_choice("small_classes", self.small_classes, SmallClasses)
        if self.seeds < 1:
            raise VitrailError(f"seeds is {self.seeds}; use 1 or more.")


@dataclass(frozen=True, kw_only=True)
class ProbeSpec:
    """How the probe is fitted."""

    method: Literal["logistic", "knn"] = "logistic"
    """logistic: multinomial logistic regression. knn: a weighted vote of the nearest training images by cosine similarity."""
    standardise: bool = True
    """logistic: standardise every feature to mean 0 and standard deviation 1 over the training images.
    --no-standardise: logistic: take the features as they are, not standardised."""
    l2: tuple[float, ...] = (1.0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6)
    """logistic: candidate penalties λ; the loss is the mean cross-entropy + λ/2·|W|². The bias is not penalised."""
    iterations: int = 500
    """logistic: maximum number of L-BFGS iterations."""
    neighbours: tuple[int, ...] = (1, 5, 10, 20, 50, 100)
    """knn: candidate numbers of neighbours."""
    temperature: float = 0.07
    """knn: a neighbour's vote has the weight exp(similarity / temperature)."""
    holdout: float = 0.1
    """Fraction of the training images on which l2 or neighbours is chosen; the probe is then refitted on all of them."""
    seed: int = 0
    """Seed of the held-out split."""

    def __post_init__(self) -> None:
        check_choice("method", self.method, Literal["logistic", "knn"])
        name, candidates = ("l2", self.l2) if self.method == "logistic" else ("neighbours", self.neighbours)
        if not candidates or min(candidates) <= 0:
            raise VitrailError(f"{name} is {list(candidates)}; a {self.method} probe needs one or more values above 0.")
        if not 0 < self.holdout < 1 and len(candidates) > 1:
            raise VitrailError(
                f"holdout is {self.holdout:g}; to choose among {len(candidates)} values it must be a fraction between 0 and 1."
            )


@dataclass(frozen=True, kw_only=True)
class SuiteSettings:
    """Changes to the paper's protocol. None keeps the recipe's value."""

    steps: int | None = None
    """Optimiser steps; 2,500 in the paper's VTAB protocol."""
    warmup: Length | None = None
    """Warm-up in steps, in epochs (10ep) or as a part of the run (5%)."""
    lr: float | None = None
    """Peak learning rate."""
    batch: int | None = None
    """Images per step."""
    image_size: int | None = None
    """Side of the input in pixels; 384 in the paper."""
    preprocess: str | None = None
    """A preset (google-vit, big-vision, timm, imagenet, deit, cifar) that replaces the checkpoint's own preprocessing."""
    seed: int = 0
    """Seed of the first run."""
    seeds: int = 3
    """Runs per task, with the seeds `seed`, `seed` + 1, …; the paper averages three, too."""
    device: str = "auto"
    """Device: auto, cpu, cuda or mps."""
    workers: int | None = None
    """Processes that read images. None: chosen from the number of CPU cores."""
