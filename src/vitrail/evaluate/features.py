"""Extract features from frozen models. The feature's definition is saved with every result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
from torch import Tensor

from vitrail.data.preprocess import Preprocess
from vitrail.data.types import BadImage, Split
from vitrail.errors import VitrailError
from vitrail.evaluate.context import EvalContext, gather_bad_images
from vitrail.models import BiTConfig, Model, ViTConfig
from vitrail.models.inference import InferenceModel

Array = npt.NDArray[Any]
Feature = Literal["pre_logits", "pooled", "class", "mean", "patches"]


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
    """Apply the final norm to class, mean and patches, before or after pooling as in the model. --no-norm skips it."""

    def __post_init__(self) -> None:
        if self.feature not in get_args(Feature):
            raise VitrailError(f"Unknown feature {self.feature!r}. Use one of {', '.join(get_args(Feature))}.")
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


@dataclass(frozen=True)
class ExtractedFeatures:
    """Features of a split's images, in its order. Images that could not be read are not in the arrays."""

    features: Array  # float32 [n, …]
    indices: Array  # int64 [n], positions in the split
    bad: list[BadImage]


def extract_features(
    model: Model, split: Split, preprocess: Preprocess, spec: FeatureSpec, context: EvalContext
) -> ExtractedFeatures:
    """Compute the features of every image of a split, gathered from all ranks."""
    spec.check(model, any_size=context.any_size)
    if len(split) == 0:
        raise VitrailError(f"The split {split.name!r} has no images.")
    prepared = context.prepare(model)
    results = context.run(split, preprocess, prepared, lambda images: spec.compute(prepared, images))
    features, indices, row = np.empty(0, np.float32), np.empty(len(split), np.int64), 0
    for output, batch in results:
        values = output.float().cpu().numpy()
        if row == 0:
            features = np.empty((len(split), *values.shape[1:]), np.float32)
        features[row : row + len(values)], indices[row : row + len(values)] = values, batch.indices.numpy()
        row += len(values)
    parts = context.world.gather((features[:row], indices[:row]))
    parts = [part for part in parts if len(part[1])]
    if not parts:
        raise VitrailError(f"No image of {split.name!r} could be read. Run `vitrail data check` to see why.")
    bad = gather_bad_images(context, results.bad)
    if len(parts) == 1:  # the usual case, without copying what may fill half of the memory
        return ExtractedFeatures(parts[0][0], parts[0][1], bad)
    indices = np.concatenate([part[1] for part in parts])
    order = np.argsort(indices, kind="stable")
    return ExtractedFeatures(np.concatenate([part[0] for part in parts])[order], indices[order], bad)
