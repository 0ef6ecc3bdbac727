"""The confidence interval of a proportion, such as an accuracy."""

from __future__ import annotations

from statistics import NormalDist

Interval = tuple[float, float]
LEVEL = 0.95


def wilson(hits: float, total: float, level: float = LEVEL) -> Interval:
    """Compute the Wilson score interval of a proportion. Unlike the normal approximation, it stays within 0 and 1."""
    if total == 0:
        return 0.0, 1.0
    z = NormalDist().inv_cdf(0.5 + level / 2)
    p, spread = hits / total, z * z / total
    middle = (p + spread / 2) / (1 + spread)
    half = z * ((p * (1 - p) / total + spread / (4 * total)) ** 0.5) / (1 + spread)
    # For 0 and `total` hits the formula gives exactly 0 and 1, but rounding may not.
    return (0.0 if hits == 0 else max(0.0, middle - half)), (1.0 if hits == total else min(1.0, middle + half))
