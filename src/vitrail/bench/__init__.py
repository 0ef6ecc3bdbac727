"""How fast a model trains and answers, against its peers and against what the machine can do at most.

    from vitrail.bench import BenchPlan, run

    rows = run(BenchPlan(model=("B/16",), mode=("train",), against=("timm",)))

Names are fetched on first use, so that importing one small part of this room stays cheap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vitrail.lazy import fetched_from

if TYPE_CHECKING:
    from vitrail.bench.plan import BenchPlan as BenchPlan
    from vitrail.bench.rows import Ratio as Ratio
    from vitrail.bench.rows import Row as Row
    from vitrail.bench.rows import ratios as ratios
    from vitrail.bench.running import run as run

_HOMES = {
    "BenchPlan": "vitrail.bench.plan",
    "Ratio": "vitrail.bench.rows",
    "Row": "vitrail.bench.rows",
    "ratios": "vitrail.bench.rows",
    "run": "vitrail.bench.running",
}

__getattr__, __dir__ = fetched_from(__name__, _HOMES)
