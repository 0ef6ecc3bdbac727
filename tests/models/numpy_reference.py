"""The paper's networks once more, in float64 numpy with plain loops: slow, short, and sharing no code with ours."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
State = dict[str, Array]


def layer_norm(x: Array, state: State, name: str, eps: float) -> Array:
    mean, var = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) / np.sqrt(var + eps) * state[f"{name}.weight"] + state[f"{name}.bias"]


def dense(x: Array, state: State, name: str) -> Array:
    return x @ state[f"{name}.weight"].T + state.get(f"{name}.bias", 0.0)


def gelu(x: Array, kind: str) -> Array:
    if kind == "tanh":
        return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def attend(q: Array, k: Array, v: Array, heads: int) -> Array:
    size = q.shape[-1] // heads
    parts = []
    for head in range(heads):
        part = slice(head * size, (head + 1) * size)
        parts.append(softmax(q[:, part] @ k[:, part].T / math.sqrt(size)) @ v[:, part])
    return np.concatenate(parts, -1)


def mlp(x: Array, state: State, name: str, kind: str) -> Array:
    return dense(gelu(dense(x, state, f"{name}.up"), kind), state, f"{name}.down")


def patch_tokens(image: Array, state: State, patch: tuple[int, int]) -> Array:
    """image [channels, height, width], row by row of patches."""
    weight = state["patches.weight"].reshape(len(state["patches.bias"]), -1)
    corners = [(top, left) for top in range(0, image.shape[1], patch[0]) for left in range(0, image.shape[2], patch[1])]
    flat = [image[:, top : top + patch[0], left : left + patch[1]].ravel() for top, left in corners]
    return np.stack(flat) @ weight.T + state["patches.bias"]


def encode(tokens: Array, state: State, *, heads: int, depth: int, kind: str, eps: float) -> Array:
    x = tokens
    for i in range(depth):
        name = f"blocks.{i}"
        q, k, v = np.split(dense(layer_norm(x, state, f"{name}.norm1", eps), state, f"{name}.attention.qkv"), 3, -1)
        x = x + dense(attend(q, k, v, heads), state, f"{name}.attention.out")
        x = x + mlp(layer_norm(x, state, f"{name}.norm2", eps), state, f"{name}.mlp", kind)
    return x


def map_pool(tokens: Array, state: State, heads: int, kind: str, eps: float) -> Array:
    q = dense(state["pool.probe"][0], state, "pool.q")
    k, v = np.split(dense(tokens, state, "pool.kv"), 2, -1)
    x = dense(attend(q, k, v, heads), state, "pool.out")
    return (x + mlp(layer_norm(x, state, "pool.norm", eps), state, "pool.mlp", kind))[0]


def padded(x: Array, kernel: int, stride: int, padding: str, fill: float) -> Array:
    widths = [(0, 0)]
    for n in x.shape[1:]:
        if padding == "same":
            total = max((math.ceil(n / stride) - 1) * stride + kernel - n, 0)
            widths.append((total // 2, total - total // 2))
        else:
            widths.append((kernel // 2, kernel // 2))
    return np.pad(x, widths, constant_values=fill)


def standardised_conv(x: Array, weight: Array, stride: int, *, padding: str, rule: str, eps: float) -> Array:
    flat = weight.reshape(len(weight), -1)
    std = flat.std(1) + eps if rule == "std+eps" else np.sqrt(flat.var(1) + eps)
    flat = (flat - flat.mean(1, keepdims=True)) / std[:, None]
    kernel = weight.shape[-1]
    x = padded(x, kernel, stride, padding, 0.0)
    rows, columns = ((n - kernel) // stride + 1 for n in x.shape[1:])
    out = np.empty((len(weight), rows, columns))
    for i in range(rows):
        for j in range(columns):
            out[:, i, j] = flat @ x[:, i * stride : i * stride + kernel, j * stride : j * stride + kernel].ravel()
    return out


def max_pool(x: Array, padding: str, fill: float) -> Array:
    x = padded(x, 3, 2, padding, fill)
    rows, columns = ((n - 3) // 2 + 1 for n in x.shape[1:])
    windows = [[x[:, 2 * i : 2 * i + 3, 2 * j : 2 * j + 3].max((1, 2)) for j in range(columns)] for i in range(rows)]
    return np.array(windows).transpose(2, 0, 1)


def group_norm(x: Array, state: State, name: str, eps: float, groups: int = 32) -> Array:
    parts = x.reshape(groups, -1)
    parts = (parts - parts.mean(1, keepdims=True)) / np.sqrt(parts.var(1, keepdims=True) + eps)
    return parts.reshape(x.shape) * state[f"{name}.weight"][:, None, None] + state[f"{name}.bias"][:, None, None]
