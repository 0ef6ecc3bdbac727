"""Benchmark training and inference against other libraries and against the machine's matmul peak.

    from vitrail.bench import BenchPlan, run

    rows = run(BenchPlan(model=("B/16",), task=("train",), against=("timm",)))

Names are imported on first use, so that importing one part of this package stays cheap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vitrail.lazy import lazy_attributes

if TYPE_CHECKING:
    from vitrail.bench.benchmark import run as run
    from vitrail.bench.plan import BenchPlan as BenchPlan
    from vitrail.bench.results import Ratio as Ratio
    from vitrail.bench.results import Row as Row
    from vitrail.bench.results import ratios as ratios

_MODULES = {
    "BenchPlan": "vitrail.bench.plan",
    "Ratio": "vitrail.bench.results",
    "Row": "vitrail.bench.results",
    "ratios": "vitrail.bench.results",
    "run": "vitrail.bench.benchmark",
}

__getattr__, __dir__ = lazy_attributes(__name__, _MODULES)
