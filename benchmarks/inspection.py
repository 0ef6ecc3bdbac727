"""Measure the cost of inspection: attention distance and rollout against a forward pass with unfused attention.

    python benchmarks/inspection.py                       # ViT-B/16, 128 images at 224, on the CPU
    python benchmarks/inspection.py --device cuda         # the same on a GPU
    python benchmarks/inspection.py --device cuda --model H/14 --size 518   # memory of the largest model
    python benchmarks/inspection.py --tiny                # smoke test

The target is at most 1.5 times the unfused forward pass; the fused pass and gradient-weighted rollout are timed for comparison.
All run in alternating rounds over the same images with the same batch size, and the median is reported. Prints a table and writes
benchmarks/results/inspection-….csv with hardware and versions. (It is not called inspect.py, because that would shadow Python's
own `inspect` module in every script of this folder.)
"""

from __future__ import annotations

import argparse
import csv
import platform
import resource
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import vitrail
from vitrail import inspect
from vitrail.bench.machine import hardware
from vitrail.inspect.inputs import fitting_batch
from vitrail.models import ViT

TARGET = 1.5


def main() -> None:
    options = parse()
    torch.manual_seed(0)
    if options.threads:
        torch.set_num_threads(options.threads)
    model = vitrail.create_model(options.model, image_size=options.size, device=options.device, seed=0).eval()
    torch.nn.init.normal_(model.norm.bias, std=0.01)  # avoids the warning about untrained models
    torch.nn.init.normal_(model.head.weight, std=0.02)
    images = torch.randn(options.images, 3, *model.config.image_size)
    batch = options.batch or min(fitting_batch(model.config), options.images)
    report(benchmark(model, images, batch, options), batch, options)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--model", default="B/16")
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--images", type=int, default=128)
    parser.add_argument("--batch", type=int, help="images per batch; default: as many as need about 1 GiB")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    if options.tiny:
        options.model, options.size, options.images, options.repeats = "Ti/16", 64, 4, 1
    return options


@torch.no_grad()
def plain(model: ViT, images: torch.Tensor, batch: int, kernel: SDPBackend | None) -> None:
    """Run a forward pass over all images, with the batch size of the inspection."""
    for part in images.split(batch):
        part = part.to(model.norm.weight.device)
        if kernel is None:
            model(part)
        else:
            with sdpa_kernel(kernel):
                model(part)


def benchmark(model: ViT, images: torch.Tensor, batch: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    runs: dict[str, Callable[[], object]] = {
        "forward, unfused attention": partial(plain, model, images, batch, SDPBackend.MATH),
        "forward, fused attention": partial(plain, model, images, batch, None),
        "attention distance": partial(inspect.attention_distance, model, images, batch=batch),
        "rollout": partial(inspect.rollout, model, images, batch=batch),
        "gradient-weighted rollout": partial(inspect.gradient_rollout, model, images, batch=batch),
    }
    times: dict[str, list[float]] = {name: [] for name in runs}
    memory: dict[str, float] = {}
    for repeat in range(options.repeats + 1):  # the first round warms up
        for name, run in runs.items():
            seconds, peak = timed(run, options.device)
            memory[name] = max(memory.get(name, 0.0), peak)
            if repeat or options.repeats == 0:
                times[name].append(seconds)
                print(f"{name:28} {seconds:8.3f} s", flush=True)
    base = statistics.median(times["forward, unfused attention"])
    return [
        {
            "run": name,
            "seconds": round(statistics.median(times[name]), 4),
            "relative_to_unfused_forward": round(statistics.median(times[name]) / base, 3),
            "target": TARGET if name in ("attention distance", "rollout") else "",
            "peak_memory_gib": round(memory[name], 2),
        }
        for name in runs
    ]


def timed(run: Callable[[], object], device: str) -> tuple[float, float]:
    """Return seconds and peak memory in GiB: of the GPU, or of the process so far on a CPU."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    run()
    if device == "cuda":
        torch.cuda.synchronize()
        return time.perf_counter() - start, torch.cuda.max_memory_allocated() / 2**30
    return time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def report(rows: list[dict[str, Any]], batch: int, options: argparse.Namespace) -> None:
    about = {
        "model": options.model,
        "size": options.size,
        "images": options.images,
        "batch": batch,
        "hardware": hardware(torch.device(options.device)),
        "torch": torch.__version__.split("+")[0],
        "python": platform.python_version(),
    }
    print(f"\n{', '.join(f'{key} {value}' for key, value in about.items())}")
    for row in rows:
        print(
            f"{row['run']:28} {row['seconds']:9.3f} s {row['relative_to_unfused_forward']:7.2f}× {row['peak_memory_gib']:7.2f} GiB"
        )
    machine = options.device if options.device == "cpu" else torch.cuda.get_device_name().split()[-1].lower()
    name = f"inspection-{machine}-{options.model.replace('/', '-')}-{options.size}-torch{about['torch']}.csv"
    file = Path(__file__).parent / "results" / name
    if options.tiny:
        return
    file.parent.mkdir(exist_ok=True)
    with file.open("w", newline="") as handle:
        writer = csv.DictWriter(handle, [*rows[0], *about], lineterminator="\n")
        writer.writeheader()
        writer.writerows({**row, **about} for row in rows)
    print(f"written: {file}")


if __name__ == "__main__":
    main()
