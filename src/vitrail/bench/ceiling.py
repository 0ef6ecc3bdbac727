"""The most this machine gives a matrix product, measured: what a step's arithmetic is held against."""

from __future__ import annotations

import torch

from vitrail.bench.clock import Clock
from vitrail.models import ModelConfig, ViTConfig

Shape = tuple[int, int, int]

_ENOUGH = 0.15  # seconds a shape is timed for
_CUBE = {"cuda": 8192, "mps": 4096, "cpu": 2048}  # side of the large square product: large enough, and soon done
_ROWS = {"cuda": 2**17, "mps": 2**14, "cpu": 2048}  # at most, of the model's own products


def shapes(config: ModelConfig, batch: int, device_type: str) -> list[Shape]:
    """(rows, inner, columns): the model's own dense layers over a batch, and a large cube."""
    side = _CUBE[device_type]
    found = [(side, side, side)]
    if isinstance(config, ViTConfig):
        rows = min(batch * config.tokens, _ROWS[device_type])
        width, mlp = config.width, config.mlp
        found += [(rows, width, 3 * width), (rows, width, mlp), (rows, mlp, width)]
    return found


def ceiling(config: ModelConfig, batch: int, dtype: torch.dtype, clock: Clock) -> float:
    """Floating-point operations a second of the fastest of these products."""
    best = 0.0
    for rows, inner, columns in shapes(config, batch, clock.device.type):
        left = torch.randn(rows, inner, device=clock.device, dtype=dtype)
        right = torch.randn(columns, inner, device=clock.device, dtype=dtype).T  # as nn.Linear holds its weight
        out = torch.empty(rows, columns, device=clock.device, dtype=dtype)

        def product(left: torch.Tensor = left, right: torch.Tensor = right, out: torch.Tensor = out) -> torch.Tensor:
            return torch.mm(left, right, out=out)

        once = min(clock.steps(product, 1) for _ in range(3))
        times = max(1, round(_ENOUGH / 3 / max(once, 1e-6)))
        seconds = min(clock.steps(product, times) / times for _ in range(3))
        best = max(best, 2 * rows * inner * columns / seconds)
    return best
