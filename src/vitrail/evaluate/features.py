"""Features of frozen models: which ones is always said, and saved with whatever is computed from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
from torch import Tensor

from vitrail.data.preprocess import Preprocess
from vitrail.data.types import BadImage, Split
from vitrail.errors import VitrailError
from vitrail.evaluate.running import Running, all_bad
from vitrail.models import BiTConfig, Model
from vitrail.models.inference import InferenceModel

Array = npt.NDArray[Any]
What = Literal["pre_logits", "pooled", "class", "mean", "patches"]


@dataclass(frozen=True, kw_only=True)
class FeatureSpec:
    """Which numbers stand for an image.

    The paper's few-shot classifier uses `pre_logits`, what the head sees. Whether features come before or after the final
    norm, from the class token or a mean over patches, from the last layer or one below, can decide a probe's result.
    """

    what: What = "pre_logits"
    """pre_logits (what the head sees), pooled (before a pre-logits layer), class (the class token), mean (over patches) or
    patches (all of them, in their grid)."""
    layer: int | None = None
    """The encoder block after which class, mean or patches are taken, counted from 0, or from the end with −1; None: the last."""
    norm: bool = True
    """Whether class, mean and patches go through the model's final norm, before or after pooling as the model itself does."""

    def __post_init__(self) -> None:
        if self.what not in get_args(What):
            raise VitrailError(f"Features are called {', '.join(get_args(What))}; {self.what!r} is none of them.")
        if self.layer is not None and self.what in ("pre_logits", "pooled"):
            raise VitrailError(
                f"{self.what} is what the model makes of its last layer; for layer {self.layer} take class, mean or patches."
            )
        if not self.norm and self.what in ("pre_logits", "pooled"):
            raise VitrailError(f"{self.what} comes after the final norm; features without it are class, mean or patches.")

    def check(self, model: Model | InferenceModel) -> None:
        """Refuse features this model does not have."""
        name = model.config.name
        if isinstance(model.config, BiTConfig):
            if self.what == "class":
                raise VitrailError(f"{name} is a ResNet without a class token; take mean or pooled.")
            if self.layer is not None and self.norm:
                raise VitrailError(f"The final norm of {name} fits its last stage only; pass --no-norm with --layer.")
        elif self.what == "class" and not model.config.class_token:
            raise VitrailError(f"{name} has no class token; take mean or pooled.")

    def of(self, model: Model | InferenceModel, images: Tensor) -> Tensor:
        """The features of a batch: [images, channels], or for patches [images, rows, columns, channels]."""
        if self.what in ("pre_logits", "pooled"):
            found: Tensor = getattr(model.features(images), self.what)
            return found
        return (self._of_stage if isinstance(model.config, BiTConfig) else self._of_layer)(model, images)

    def _of_layer(self, model: Model | InferenceModel, images: Tensor) -> Tensor:
        config, layer = model.config, -1 if self.layer is None else self.layer
        tokens = next(iter(model.features(images, layers=[layer]).layers.values()))
        first = self.norm and config.final_norm == "before-pool"
        tokens = model.norm(tokens) if first else tokens
        if self.what == "class":
            found = tokens[:, 0]
        else:
            patches = tokens[:, config.prefix :]
            found = patches.mean(1) if self.what == "mean" else patches.unflatten(1, config.grid)
        return model.norm(found) if self.norm and not first else found

    def _of_stage(self, model: Model | InferenceModel, images: Tensor) -> Tensor:
        if self.norm:
            patches = model.features(images).patches
        else:
            patches = next(iter(model.features(images, layers=[-1 if self.layer is None else self.layer]).layers.values()))
        return patches.mean(dim=(1, 2)) if self.what == "mean" else patches

    def to_dict(self) -> dict[str, Any]:
        return {"what": self.what, "layer": self.layer, "norm": self.norm}

    def describe(self) -> str:
        if self.what in ("pre_logits", "pooled"):
            return f"{self.what} of the last layer"
        layer = "the last layer" if self.layer is None else f"layer {self.layer}"
        return f"{self.what} of {layer}, {'with' if self.norm else 'without'} the final norm"


@dataclass(frozen=True)
class Extracted:
    """Features of a split's images, in its order; images that could not be read are missing from all arrays."""

    features: Array  # float32 [n, …]
    indices: Array  # int64 [n], positions in the split
    bad: list[BadImage]


def extract(model: Model, split: Split, preprocess: Preprocess, spec: FeatureSpec, running: Running) -> Extracted:
    """Features of every image of a split, of all ranks together."""
    spec.check(model)
    if len(split) == 0:
        raise VitrailError(f"The split {split.name!r} has no images to compute features of.")
    model = running.ready(model)
    passed = running.over(split, preprocess, model, lambda images: spec.of(model, images))
    found, places, row = np.empty(0, np.float32), np.empty(len(split), np.int64), 0
    for features, batch in passed:
        values = features.float().cpu().numpy()
        if row == 0:
            found = np.empty((len(split), *values.shape[1:]), np.float32)
        found[row : row + len(values)], places[row : row + len(values)] = values, batch.indices.numpy()
        row += len(values)
    parts = running.world.gather((found[:row], places[:row]))
    parts = [part for part in parts if len(part[1])]
    if not parts:
        raise VitrailError(f"Not one image of {split.name!r} could be read. `vitrail data check` says what is wrong with them.")
    if len(parts) == 1:  # the usual case, without a copy of what may fill half the memory
        return Extracted(parts[0][0], parts[0][1], all_bad(running, passed.bad))
    indices = np.concatenate([part[1] for part in parts])
    order = np.argsort(indices, kind="stable")
    return Extracted(np.concatenate([part[0] for part in parts])[order], indices[order], all_bad(running, passed.bad))
