"""How exact a kernel has to be: on a GPU at most twice as far off as torch's own kernels in the same precision."""

from __future__ import annotations

import torch
from torch import Tensor

FLOAT32 = 3e-6  # what the interpreter's float32 arithmetic reaches, of the largest value


def error(found: Tensor, exact: Tensor) -> float:
    """Return the largest absolute error; infinite if anything is not finite."""
    worst = float((found.detach().double() - exact.detach().double()).abs().max())
    return worst if worst == worst else float("inf")


def is_accurate(found: Tensor, rounded: Tensor, exact: Tensor, tolerance: float = FLOAT32) -> bool:
    """Tell whether an error against float64 is at most twice that of torch's result in the same low precision.

    Rounding the result alone costs half a unit in the last place, so that much counts as torch's error at least. For float32
    results, as the interpreter computes them, the error is at most `tolerance` of the largest value instead.
    """
    assert exact.dtype == torch.float64 and found.shape == exact.shape
    scale = max(float(exact.detach().abs().max()), 0.3)  # gradients that are zero in exact arithmetic hold rounding errors only
    if found.dtype == torch.float32 and rounded.dtype == torch.float32:
        return error(found, exact) <= tolerance * scale
    half_unit = torch.finfo(rounded.dtype).eps / 2 * scale
    return error(found, exact) <= 2 * max(error(rounded, exact), half_unit)
