"""What a pre-trained ViT has learned about positions, in a few numbers (Fig. 7)."""

from __future__ import annotations

import numpy as np

from vitrail.checkpoints import Bundle
from vitrail.inspect.distance import attention_distance, uniform_distance
from vitrail.inspect.images import from_source, preprocess_images
from vitrail.inspect.inputs import Array
from vitrail.inspect.weights import position_similarity
from vitrail.models import ViTConfig

_IMAGES = 64


def inspection(bundle: Bundle, target: str) -> dict[str, float]:
    """Return similarities of position embeddings, and attention distances relative to uniform attention."""
    config = bundle.model.config
    if not isinstance(config, ViTConfig):
        return {}
    images = preprocess_images(bundle, from_source(bundle, target, None, _IMAGES, seed=0), 0).images
    distance = attention_distance(bundle.model, images.to(next(bundle.model.parameters()).device)) / uniform_distance(config)
    found = {
        "first_layer_distance": float(distance[0].mean()),
        "last_layer_distance": float(distance[-1].mean()),
        "first_layer_nearest": float(distance[0].min()),
        "first_layer_farthest": float(distance[0].max()),
    }
    if config.position in ("learned", "learned-2d", "sincos2d"):
        found |= _similarities(position_similarity(bundle.model))
    return found


def _similarities(similarity: Array) -> dict[str, float]:
    """Average [row, column, row, column] over adjacent patches, over all pairs, and within and off rows and columns."""
    rows, columns = similarity.shape[:2]
    y, x = np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij")
    down, right = (abs(axis.reshape(-1, 1) - axis.reshape(1, -1)) for axis in (y, x))
    apart = np.hypot(down, right)
    flat = similarity.reshape(rows * columns, rows * columns)
    found = {"neighbour_similarity": float(flat[apart == 1].mean()), "mean_similarity": float(flat[apart > 0].mean())}
    line = (apart >= 2) & ((down == 0) | (right == 0))
    off = (apart >= 2) & ~line
    # Averaged distance by distance, since similarity falls with distance and lines reach less far than diagonals.
    shared = [d for d in range(2, max(rows, columns)) if (line & (apart == d)).any() and (off & (np.rint(apart) == d)).any()]
    if shared:
        found["line_similarity"] = float(np.mean([flat[line & (apart == d)].mean() for d in shared]))
        found["off_line_similarity"] = float(np.mean([flat[off & (np.rint(apart) == d)].mean() for d in shared]))
    return found
