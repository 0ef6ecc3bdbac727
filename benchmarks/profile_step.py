"""Profile a training step: GPU time of every kernel, grouped by kind.

    python benchmarks/profile_step.py                          # ViT-B/16 and ViT-L/16, batch 256
    python benchmarks/profile_step.py --model S/16 --infer     # a forward pass of the inference copy

Writes benchmarks/results/profile-….csv: milliseconds and calls per step, for each kind and for each kernel.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

from vitrail.models import create_model
from vitrail.models.inference import for_inference

KINDS = {
    "_matmul_bias_kernel": "matmul with bias or GELU epilogue",
    "_matmul_gelu_backward": "matmul with GELU gradient epilogue",
    "_attention_forward": "attention forward",
    "_hopper_attention": "attention forward",
    "_attention_backward": "attention backward",
    "_norm_": "residual and norm",
    "_gelu_": "separate GELU",
    "_fold": "folding norms into linear layers",
    "_unfold": "folding norms into linear layers",
    "_sums": "column sums",
    "nvjet": "cuBLAS matmul",
    "gemm": "cuBLAS matmul",
    "cutlass": "cuBLAS matmul",
    "FusedAdam": "optimizer",
    "multi_tensor": "optimizer",
}
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="*", default=["B/16", "L/16"])
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--infer", action="store_true")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("profiling needs a CUDA GPU, and none was found")
    rows: list[Row] = []
    for name in options.model:
        images = torch.randn(options.batch, 3, 224, 224, device="cuda")
        step = forward_pass(name, images) if options.infer else training_step(name, images)
        rows += profile_steps(name, step, options.steps)
    write(rows, options)


def training_step(name: str, images: torch.Tensor) -> Callable[[], Any]:
    model = create_model(name, outputs=1000, seed=0, gelu="erf").cuda().train()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    labels = torch.randint(1000, (len(images),), device="cuda")

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def forward_pass(name: str, images: torch.Tensor) -> Callable[[], Any]:
    model = for_inference(create_model(name, outputs=1000, seed=0, gelu="erf"), "bf16", device="cuda")
    return lambda: model(images)


def profile_steps(name: str, step: Callable[[], Any], steps: int) -> list[Row]:
    for _ in range(8):
        step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    kernels = [(event.key, event.self_device_time_total / steps / 1e3, event.count / steps) for event in profiler.key_averages()]
    kinds: dict[str, list[float]] = {}
    for kernel, milliseconds, calls in kernels:
        total = kinds.setdefault(kind_of(kernel), [0.0, 0.0])
        total[0] += milliseconds
        total[1] += calls
    total_ms = sum(ms for ms, _ in kinds.values())
    print(f"\nViT-{name}: {total_ms:.2f} ms of GPU time")
    rows: list[Row] = []
    for kind, (total, calls) in sorted(kinds.items(), key=lambda one: -one[1][0]):
        print(f"{total:9.3f} ms {total / total_ms:6.1%} {calls:7.0f} ×  {kind}")
        rows.append({"model": name, "kind": kind, "kernel": "", "ms": round(total, 4), "calls": round(calls, 1)})
    for kernel, total, calls in sorted(kernels, key=lambda one: -one[1]):
        if total > total_ms / 20_000:
            rows.append(
                {"model": name, "kind": kind_of(kernel), "kernel": kernel[:80], "ms": round(total, 4), "calls": round(calls, 1)}
            )
    return rows


def kind_of(kernel: str) -> str:
    return next((kind for part, kind in KINDS.items() if part in kernel), "other")


def write(rows: list[Row], options: argparse.Namespace) -> None:
    hardware, version = torch.cuda.get_device_name(), torch.__version__.split("+")[0]
    what = "infer" if options.infer else "train"
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / f"profile-{what}-batch{options.batch}-{hardware.lower().replace(' ', '-')}-torch{version}.csv"
    with file.open("w", newline="", encoding="utf-8") as handle:
        writer = csv.DictWriter(handle, [*rows[0], "hardware", "torch"], lineterminator="\n")
        writer.writeheader()
        writer.writerows({**row, "hardware": hardware, "torch": torch.__version__} for row in rows)
    print(f"\nwritten to {file}")


if __name__ == "__main__":
    main()
