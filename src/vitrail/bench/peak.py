"""Measure this machine's matmul peak, which a step's FLOP/s are compared with."""

from __future__ import annotations

import torch

from vitrail.bench.timer import Timer
from vitrail.models import ModelConfig, ViTConfig

Shape = tuple[int, int, int]

_SECONDS = 0.15  # timed per shape
_SQUARE = {"cuda": 8192, "mps": 4096, "cpu": 2048}  # side of the large square matmul: near the peak, and still quick
_MAX_ROWS = {"cuda": 2**17, "mps": 2**14, "cpu": 2048}  # of the model's own matmuls


def matmul_shapes(config: ModelConfig, batch: int, device_type: str) -> list[Shape]:
    """List (M, K, N) of the model's own linear layers over a batch, and of one large square matmul."""
    side = _SQUARE[device_type]
    shapes = [(side, side, side)]
    if isinstance(config, ViTConfig):
        rows = min(batch * config.tokens, _MAX_ROWS[device_type])
        width, mlp = config.width, config.mlp
        shapes += [(rows, width, 3 * width), (rows, width, mlp), (rows, mlp, width)]
    return shapes


def measure_peak_flops(config: ModelConfig, batch: int, dtype: torch.dtype, timer: Timer) -> float:
    """Return the FLOP/s of the fastest of these matmuls."""
    best = 0.0
    for m, k, n in matmul_shapes(config, batch, timer.device.type):
        left = torch.randn(m, k, device=timer.device, dtype=dtype)
        right = torch.randn(n, k, device=timer.device, dtype=dtype).T  # the layout of nn.Linear's weight
        out = torch.empty(m, n, device=timer.device, dtype=dtype)

        def matmul(left: torch.Tensor = left, right: torch.Tensor = right, out: torch.Tensor = out) -> torch.Tensor:
            return torch.mm(left, right, out=out)

        once = min(timer.total(matmul, 1) for _ in range(3))
        count = max(1, round(_SECONDS / 3 / max(once, 1e-6)))
        seconds = min(timer.total(matmul, count) / count for _ in range(3))
        best = max(best, 2 * m * k * n / seconds)
    return best
