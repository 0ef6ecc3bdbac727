"""Images per second of a ViT on a CPU, against timm in several modes, with the images in memory.

All take the same images, on all of torch's threads: timm eager in float32 (the baseline), in bfloat16, under torch.compile, with
torch's dynamic int8 layers; onnxruntime if it is installed; the model as `vitrail.create_model` returns it; and the copies of
`vitrail.models.inference.for_inference`. They run interleaved, so that other load on the machine affects all alike, and ratios are
medians over the rounds.

    python benchmarks/cpu_inference.py                 # ViT-B/16: about four minutes on two free cores
    python benchmarks/cpu_inference.py --model S/16
    python benchmarks/cpu_inference.py --images 1      # latency of a single image
    python benchmarks/cpu_inference.py --tiny          # test that everything runs

Prints a table and writes benchmarks/results/cpu-inference-….csv with hardware and versions.
"""

from __future__ import annotations

import argparse
import csv
import io
import os
import platform
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import timm
import torch
from torch import Tensor

import vitrail
from vitrail.models.inference import for_inference

ARCHITECTURES = {"Ti/16": "vit_tiny_patch16_224", "S/16": "vit_small_patch16_224", "B/16": "vit_base_patch16_224"}
BASELINE = "timm, eager fp32"
Variant = Callable[[Tensor], Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="B/16", choices=ARCHITECTURES)
    parser.add_argument("--images", type=int, default=16, help="batch size")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tiny", action="store_true", help="a few images of a small model, no results written")
    options = parser.parse_args()
    if options.tiny:
        options.model, options.images, options.rounds = "Ti/16", 2, 1
    warnings.simplefilter("ignore")
    images = torch.randn(options.images, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        variants = make_variants(options.model, images)
        rows = time_variants(variants, images, options.rounds)
    report(rows, options)


def make_variants(name: str, images: Tensor) -> dict[str, Variant]:
    ours = vitrail.create_model(name, gelu="erf", seed=0).eval()
    torch.nn.init.normal_(ours.head.weight, std=0.05, generator=torch.Generator().manual_seed(0))
    theirs = timm.create_model(ARCHITECTURES[name]).eval()
    half = timm.create_model(ARCHITECTURES[name]).eval().bfloat16()
    variants: dict[str, Variant] = {
        BASELINE: theirs,
        "timm, bf16": lambda x: half(x.bfloat16()),
        "timm, dynamic int8": dynamic_int8(theirs),
    }
    compiled = {"timm, torch.compile fp32": (theirs, images.dtype), "timm, torch.compile bf16": (half, torch.bfloat16)}
    for label, (model, dtype) in compiled.items():
        if (made := compile_or_none(model, images.to(dtype))) is not None:
            variants[label] = lambda x, made=made, dtype=dtype: made(x.to(dtype))  # type: ignore[misc]
    if (session := onnxruntime_or_none(theirs, images)) is not None:
        variants["timm, onnxruntime fp32"] = session
    variants["vitrail, plain fp32"] = ours
    for precision in ("fp32", "bf16", "int8"):
        variants[f"vitrail, for_inference {precision}"] = for_inference(ours, precision)  # type: ignore[arg-type]
    check_results(variants, images)
    return variants


def dynamic_int8(model: torch.nn.Module) -> Variant:
    return torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)


def compile_or_none(model: torch.nn.Module, images: Tensor) -> Variant | None:
    """Compiling needs a C++ compiler; without one this variant is skipped."""
    compiled = torch.compile(model, dynamic=False)
    try:
        compiled(images)
    except Exception as error:
        print(f"torch.compile does not work here: {type(error).__name__}")
        return None
    return compiled


def onnxruntime_or_none(model: torch.nn.Module, images: Tensor) -> Variant | None:
    try:
        import onnxruntime
    except ImportError:
        return None
    file = io.BytesIO()
    torch.onnx.export(model, (images,), file, input_names=["images"], dynamo=False)
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(file.getvalue(), settings, providers=["CPUExecutionProvider"])
    return lambda x: torch.from_numpy(session.run(None, {"images": x.numpy()})[0])


def check_results(variants: dict[str, Variant], images: Tensor) -> None:
    """Variants that compute something else cannot be compared."""
    plain = variants["vitrail, plain fp32"](images)
    for precision, limit in {"fp32": 2e-5, "bf16": 0.03, "int8": 0.08}.items():
        found = variants[f"vitrail, for_inference {precision}"](images)
        error = float((found - plain).norm() / plain.norm())
        print(f"for_inference {precision}: relative error of the logits {error:.1e}")
        if error > limit:
            raise SystemExit(f"for_inference {precision} has a relative error of {error:.2%}; expected at most {limit:.2%}.")


def time_variants(variants: dict[str, Variant], images: Tensor, rounds: int) -> list[dict[str, object]]:
    times: dict[str, list[float]] = {name: [] for name in variants}
    for variant in variants.values():
        variant(images)
    for _ in range(rounds):
        for name, variant in variants.items():
            began = time.perf_counter()
            variant(images)
            times[name].append(time.perf_counter() - began)
    return [
        {
            "variant": name,
            "images_per_second": round(len(images) / statistics.median(spent), 2),
            "best_images_per_second": round(len(images) / min(spent), 2),
            "times_timm_eager": round(statistics.median(np.divide(times[BASELINE], spent).tolist()), 2),
        }
        for name, spent in times.items()
    ]


def report(rows: list[dict[str, object]], options: argparse.Namespace) -> None:
    for row in rows:
        print(f"{row['variant']:30} {row['images_per_second']:>8} images/s {row['times_timm_eager']:>6} ×")
    if options.tiny:
        return
    cores = len(os.sched_getaffinity(0))
    about = {
        "model": options.model,
        "images": options.images,
        "machine": f"{torch.cpu.get_capabilities().get('cpu_name', platform.machine())} {cores} cores",
        "torch": torch.__version__,
        "timm": timm.__version__,
    }
    name = f"cpu-inference-{platform.machine()}-{cores}cores-{options.model.replace('/', '-')}-batch{options.images}.csv"
    path = Path(__file__).parent / "results" / name
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*about, *rows[0]], lineterminator="\n")
        writer.writeheader()
        writer.writerows([{**about, **row} for row in rows])
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
