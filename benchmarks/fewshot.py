"""Measure time and memory of the few-shot classifier at the size of ImageNet: 50,000 × 768 features, 1,000 classes.

    python benchmarks/fewshot.py

Prints a row with the peak memory of the process, and writes benchmarks/results/fewshot-….csv.
"""

from __future__ import annotations

import csv
import os
import platform
import resource
import time
from pathlib import Path

import torch

from vitrail.evaluate import fit_ridge

IMAGES, FEATURES, CLASSES = 50_000, 768, 1000


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(IMAGES) % CLASSES
    centres = torch.randn(CLASSES, FEATURES, generator=generator)
    x, x_test = (0.3 * centres[y] + torch.randn(IMAGES, FEATURES, generator=generator) for _ in range(2))
    memory_before = peak_memory()
    start = time.perf_counter()
    classifier = fit_ridge(x, y, CLASSES)
    fit_seconds = time.perf_counter() - start
    accuracy = classifier.accuracy(x_test, y)
    row = {
        "images": IMAGES,
        "features": FEATURES,
        "classes": CLASSES,
        "fit_seconds": round(fit_seconds, 2),
        "fit_and_predict_seconds": round(time.perf_counter() - start, 2),
        "peak_memory_gb": round(peak_memory(), 2),
        "memory_before_fit_gb": round(memory_before, 2),
        "accuracy": round(accuracy, 4),
        "cores": len(os.sched_getaffinity(0)),
        "torch": torch.__version__,
    }
    print(row)
    path = Path(__file__).parent / "results" / f"fewshot-{platform.machine()}-{row['cores']}cores.csv"
    path.parent.mkdir(exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(row), lineterminator="\n")
        writer.writeheader()
        writer.writerow(row)


def peak_memory() -> float:
    """Return the peak memory of this process in GB (on Linux, ru_maxrss is in kilobytes)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


if __name__ == "__main__":
    main()
