"""Where the time of a training step goes: every kernel that ran on the GPU, by kind.

    python benchmarks/profile_step.py                          # ViT-B/16 and ViT-L/16, batch 256
    python benchmarks/profile_step.py --model S/16 --infer     # a forward pass of the copy that `predict` uses

Writes benchmarks/results/profile-….csv: milliseconds and calls a step for each kind, and for each kernel.
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
    "_matmul_bias_kernel": "product with a bias or GELU",
    "_matmul_gelu_backward": "product with GELU's gradient",
    "_attention_forward": "attention forward",
    "_hopper_attention": "attention forward",
    "_attention_backward": "attention backward",
    "_norm_": "residual and norm",
    "_gelu_": "GELU alone",
    "_fold": "norms' weights into products",
    "_unfold": "norms' weights into products",
    "_sums": "sums",
    "nvjet": "products by the library",
    "gemm": "products by the library",
    "cutlass": "products by the library",
    "FusedAdam": "optimiser",
    "multi_tensor": "optimiser",
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
        parser.error("it looks at a CUDA GPU's kernels, and there is no such GPU here")
    rows: list[Row] = []
    for name in options.model:
        images = torch.randn(options.batch, 3, 224, 224, device="cuda")
        step = forward_pass(name, images) if options.infer else training_step(name, images)
        rows += profiled(name, step, options.steps)
    write(rows, options)


def training_step(name: str, images: torch.Tensor) -> Callable[[], Any]:
    model = create_model(name, outputs=1000, seed=0, gelu="erf").cuda().train()
    optimiser = torch.optim.AdamW(model.parameters(), fused=True)
    labels = torch.randint(1000, (len(images),), device="cuda")

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()

    return step


def forward_pass(name: str, images: torch.Tensor) -> Callable[[], Any]:
    model = for_inference(create_model(name, outputs=1000, seed=0, gelu="erf"), "bf16", device="cuda")
    return lambda: model(images)


def profiled(name: str, step: Callable[[], Any], steps: int) -> list[Row]:
    for _ in range(8):
        step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    kernels = [(one.key, one.self_device_time_total / steps / 1e3, one.count / steps) for one in found.key_averages()]
    kinds: dict[str, list[float]] = {}
    for kernel, milliseconds, calls in kernels:
        total = kinds.setdefault(kind_of(kernel), [0.0, 0.0])
        total[0] += milliseconds
        total[1] += calls
    whole = sum(total for total, _ in kinds.values())
    print(f"\nViT-{name}: {whole:.2f} ms on the GPU")
    rows: list[Row] = []
    for kind, (total, calls) in sorted(kinds.items(), key=lambda one: -one[1][0]):
        print(f"{total:9.3f} ms {total / whole:6.1%} {calls:7.0f} ×  {kind}")
        rows.append({"model": name, "kind": kind, "kernel": "", "ms": round(total, 4), "calls": round(calls, 1)})
    for kernel, total, calls in sorted(kernels, key=lambda one: -one[1]):
        if total > whole / 20_000:
            rows.append(
                {"model": name, "kind": kind_of(kernel), "kernel": kernel[:80], "ms": round(total, 4), "calls": round(calls, 1)}
            )
    return rows


def kind_of(kernel: str) -> str:
    return next((kind for part, kind in KINDS.items() if part in kernel), "the rest")


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
