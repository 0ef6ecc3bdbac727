"""Inspect models: compute the paper's figures for any model, as arrays first and as plots second.

    maps = vitrail.inspect.rollout(model, images)            # [image, row, column]
    pixels = vitrail.inspect.attention_distance(model, images)  # [layer, head]

Everything runs in eval mode, one layer and a few images at a time, and returns numpy arrays.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vitrail.inspect.distance import attention_distance, attention_distances, head_attention, uniform_distance
from vitrail.inspect.inputs import UntrainedWarning, untrained
from vitrail.inspect.layers import feature_colours, feature_similarity, layer_features, layer_outputs
from vitrail.inspect.rollout import gradient_rollout, rollout, token_similarity
from vitrail.inspect.weights import Filters, filters, position_similarity
from vitrail.lazy import lazy_attributes

if TYPE_CHECKING:
    from vitrail.inspect.inspection import Inspection as Inspection

__all__ = [
    "Filters", "Inspection", "UntrainedWarning", "attention_distance", "attention_distances",
    "feature_colours", "feature_similarity", "filters",
    "gradient_rollout", "head_attention", "layer_features", "layer_outputs", "position_similarity", "rollout", "token_similarity",
    "uniform_distance", "untrained",
]  # fmt: skip

__getattr__ = lazy_attributes(__name__, {"Inspection": "vitrail.inspect.inspection"})[0]  # it draws, with matplotlib


def __dir__() -> list[str]:
    return __all__
