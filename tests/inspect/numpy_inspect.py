"""Reference implementation of the inspected quantities in float64 numpy, with its own forward pass."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.models.numpy_reference import dense, layer_norm, mlp, patch_tokens, softmax

Array = NDArray[np.float64]


def attention_of(model: Any, image: Array) -> tuple[list[Array], Array]:
    """Return each layer's attention [head, query, key], and the weights of the pooling [token]."""
    config, state = model.config, {name: value.detach().double().numpy() for name, value in model.state_dict().items()}
    x = patch_tokens(image, state, config.patch)
    prefix = [state[name].reshape(-1, config.width) for name in ("class_token", "distill_token", "registers") if name in state]
    x = np.concatenate([*prefix, x]) + np.pad(
        state["positions.table"][0], ((len(x) + config.prefix - len(state["positions.table"][0]), 0), (0, 0))
    )
    layers = []
    for i in range(config.depth):
        name, size = f"blocks.{i}", config.width // config.heads
        q, k, v = np.split(dense(layer_norm(x, state, f"{name}.norm1", config.norm_eps), state, f"{name}.attention.qkv"), 3, -1)
        parts = [slice(h * size, (h + 1) * size) for h in range(config.heads)]
        layers.append(np.stack([softmax(q[:, p] @ k[:, p].T / math.sqrt(size)) for p in parts]))
        x = x + dense(
            np.concatenate([a @ v[:, p] for a, p in zip(layers[-1], parts, strict=True)], -1), state, f"{name}.attention.out"
        )
        x = x + mlp(layer_norm(x, state, f"{name}.norm2", config.norm_eps), state, f"{name}.mlp", config.gelu)
    return layers, _pooling(config, state, layer_norm(x, state, "norm", config.norm_eps))


def _pooling(config: Any, state: dict[str, Array], tokens: Array) -> Array:
    weights = np.zeros(len(tokens))
    if config.pooling == "map":
        size = config.width // config.heads
        q, k = dense(state["pool.probe"][0], state, "pool.q"), np.split(dense(tokens, state, "pool.kv"), 2, -1)[0]
        parts = [slice(h * size, (h + 1) * size) for h in range(config.heads)]
        return np.mean([softmax(q[:, p] @ k[:, p].T / math.sqrt(size))[0] for p in parts], axis=0)
    if config.pooling == "mean":
        weights[config.prefix :] = 1 / (len(tokens) - config.prefix)
    else:
        weights[: 1 + config.distill_token] = 1 / (1 + config.distill_token)
    return weights


def rollout(layers: list[Array], start: Array, prefix: int, grid: tuple[int, int]) -> Array:
    """Multiply the full matrices, from the input up."""
    total = np.eye(len(start))
    for attention in layers:
        mixed = 0.5 * attention.mean(axis=0) + 0.5 * np.eye(len(start))
        total = mixed / mixed.sum(axis=1, keepdims=True) @ total
    return (start @ total)[prefix:].reshape(grid)


def distance(layers: list[Array], prefix: int, grid: tuple[int, int], stride: tuple[int, int], among: str) -> Array:
    """[layer, head]."""
    found = np.zeros((len(layers), len(layers[0])))
    for layer, attention in enumerate(layers):
        for head, weights in enumerate(attention):
            means = []
            for query in range(grid[0] * grid[1]):
                row, column = divmod(query, grid[1])
                total = weight = 0.0
                for key in range(grid[0] * grid[1]):
                    distance_ = math.hypot((key // grid[1] - row) * stride[0], (key % grid[1] - column) * stride[1])
                    total += weights[prefix + query, prefix + key] * distance_
                    weight += weights[prefix + query, prefix + key]
                means.append(total / weight if among == "patches" else total)
            found[layer, head] = np.mean(means)
    return found
