"""Extract features from frozen models. The feature's definition is saved with every result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from vitrail.data.preprocess import Preprocess
from vitrail.data.types import BadImage, Split
from vitrail.errors import VitrailError
from vitrail.evaluate.context import EvalContext, gather_bad_images, none_read
from vitrail.evaluate.settings import FeatureSpec
from vitrail.models import Model

Array = npt.NDArray[Any]


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
        raise VitrailError(f"The split {split.name!r} has no images. Choose another one.")
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
    bad = gather_bad_images(context, results.bad)
    if not parts:
        raise VitrailError(none_read(repr(split.name), bad))
    if len(parts) == 1:  # the usual case, without copying what may fill half of the memory
        return ExtractedFeatures(parts[0][0], parts[0][1], bad)
    indices = np.concatenate([part[1] for part in parts])
    order = np.argsort(indices, kind="stable")
    return ExtractedFeatures(np.concatenate([part[0] for part in parts])[order], indices[order], bad)
