"""Errors of benchmarks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.error_tour.case import Case, at
from vitrail.bench import BenchPlan, baselines
from vitrail.bench.benchmark import Benchmark
from vitrail.bench.results import read_csv
from vitrail.models import model_config


def begin(**settings: Any) -> Benchmark:
    return Benchmark(BenchPlan(model=("Ti/16",), device="cpu", **settings), print, "")


# fmt: off
CASES: tuple[Case, ...] = (
    at("bench/baselines.py:build", lambda: baselines.build("timm", model_config("R50x1")),
       "R50x1 has no equivalent in timm.", "Only plain Vision Transformers with a class token can be compared."),
    at("bench/benchmark.py:Benchmark.__init__#1", lambda: begin(largest_batch=True),
       "--largest-batch needs a GPU, but the device is cpu,",
       "`vitrail plan` computes the largest micro-batch for a GPU you do not have."),
    at("bench/benchmark.py:Benchmark.__init__#2", lambda: begin(out=Path("notes.txt")),
       "notes.txt is a file;", "--out must be a folder, for bench.csv and bench.png. Choose another name."),
    at("bench/plan.py:BenchPlan.__post_init__#1", "vitrail bench --batch 0", "--batch is 0;", "it must be at least 1."),
    at("bench/plan.py:BenchPlan.__post_init__#2", "vitrail bench --clip 0",
       "--clip is 0;", "it must be above 0. Leave it out for no clipping."),
    at("bench/plan.py:BenchPlan.__post_init__#3", lambda: BenchPlan(model=()),
       "No model given.", "--model takes one or more names, such as B/16 L/16."),
    at("bench/plan.py:BenchPlan.__post_init__#4", lambda: BenchPlan(against=("tim",)),  # type: ignore[arg-type]
       "--against takes timm, torchvision, hf, not 'tim'.", "Did you mean timm?"),
    at("bench/plan.py:BenchPlan.__post_init__#5", "vitrail bench --latency --task train",
       "--latency measures inference:", "use --task infer, not train."),
    at("bench/plan.py:BenchPlan._check_modes#1", "vitrail bench --mode keras:eager",
       "--mode keras:eager: unknown library 'keras'.", "Use one of vitrail, timm, torchvision, hf."),
    at("bench/plan.py:BenchPlan._check_modes#2", "vitrail bench --mode hf:eager",
       "--mode hf:eager: hf is not in --against.", "Add it there."),
    at("bench/plan.py:BenchPlan._check_modes#3", "vitrail bench --mode timm:eagr",
       "--mode timm:eagr: there is no mode 'eagr' for train.", "Did you mean eager? Use one of eager, compiled, graphs."),
    at("bench/results.py:read_csv", lambda: read_csv(Path("table.csv")),
       "table.csv does not have the columns or the values of a benchmark.",
       "Choose another --out, or replace it with --overwrite."),
)
# fmt: on
