"""Whether the fast path on a GPU computes what the plain one does.

1. Layer by layer: ViT-B/16's tokens after every block, and every weight's gradient, in bf16 by the fused and by the plain path,
   each against the plain path in float32. The fused one should be no farther off than the plain one.
2. Training: the same batches of real images for some hundred steps in several ways, from the same weights. The loss curves should
   lie on top of each other, and every loss and gradient be finite.

    python benchmarks/numerics.py --data packed:TINY                                              # on a GPU, about two minutes
    python benchmarks/numerics.py --data packed:TINY --only training --model L/8 --ways fused fp8
    python benchmarks/numerics.py --data packed:TINY --only training --model S/16 --image-size 224 --ways fused --steps 1000
    python benchmarks/numerics.py --data packed:TINY --only training --model Ti/16 --batch 64 --steps 400 \\
        --ways fp8-simulated float32 --seeds 3                                                    # on two cores, 15 minutes
    python benchmarks/numerics.py --data digits --only training --model Ti/4 --image-size 8 --depth 4 --batch 32 --steps 300 \\
        --ways plain float32                                                                      # bf16 on a CPU, a minute
    python benchmarks/numerics.py --data digits --tiny                                            # anywhere: does everything run?

`fp8-simulated` rounds the inputs of the blocks' matmuls as fp8 does and computes them in float32, so it also runs on a CPU.

Writes numerics-….csv and, for the training, loss-curves-….png and .csv into --out.
"""

from __future__ import annotations

import argparse
import csv
import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from vitrail.data import open_source
from vitrail.data.augment.spec import Augment
from vitrail.data.loader import TrainLoader
from vitrail.data.preprocess import preset
from vitrail.models import ViT, create_model
from vitrail.train.captured_step import capture
from vitrail.train.parallel import choose_device

Row = dict[str, Any]
WAYS = {
    "fused": ("auto", True),
    "plain": ("plain", True),
    "fp8": ("fp8", True),
    "fp8-simulated": ("plain", False),
    "float32": ("plain", False),
}
NAMES = {
    "fused": "fused, bf16",
    "plain": "plain, bf16",
    "fp8": "fused, fp8",
    "fp8-simulated": "fp8, simulated",
    "float32": "plain, float32",
}


def main() -> None:
    options = parse()
    device = choose_device("auto")
    if options.only != "training":
        write(options.out / f"numerics-{machine(device)}.csv", layer_by_layer(options, device))
    if options.only != "layers":
        compare_training(options, device)


def compare_training(options: argparse.Namespace, device: torch.device) -> None:
    runs = {(NAMES[way], seed): trained(way, seed, options, device) for seed in range(options.seeds) for way in options.ways}
    curves = {way if options.seeds == 1 else f"{way}, seed {seed}": losses for (way, seed), (losses, _) in runs.items()}
    name = f"loss-curves-{options.model.lower().replace('/', '-')}-{options.image_size}px-{machine(device)}"
    write(options.out / f"{name}.csv", [{"step": n, **{way: c[n] for way, c in curves.items()}} for n in range(options.steps)])
    pictured = {key: losses for key, (losses, _) in runs.items()}
    draw(pictured, options.out / f"{name}.png", f"ViT-{options.model}, {options.image_size} pixels: the same training")
    reference = NAMES[options.ways[-1]]
    for (way, seed), (losses, norms) in runs.items():
        apart = max(abs(a - b) for a, b in zip(smooth(losses), smooth(runs[reference, seed][0]), strict=True))
        finite = sum(math.isfinite(loss + norm) for loss, norm in zip(losses, norms, strict=True))
        print(
            f"{way:>16}, seed {seed}: {finite} of {len(losses)} steps finite, largest gradient norm {max(norms):.3g}, "
            f"last losses {np.mean(losses[-50:]):.4f}, at most {apart:.4f} from {reference} (means of 20 steps)"
        )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="a data source for the training")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--only", choices=("layers", "training"))
    parser.add_argument("--model", default="S/8", help="of the training")
    parser.add_argument("--image-size", type=int, default=64, help="of the training; images are enlarged to it")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=["fused", "plain", "float32"], help="the last is compared with")
    parser.add_argument("--seeds", type=int, default=1, help="trainings of each way, each with other weights and batches")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--warmup", type=int, default=0, help="steps over which the learning rate rises")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--tiny", action="store_true", help="a small model and few steps")
    parser.add_argument("--depth", type=int, help="of the training's model; default: the model's own")
    options = parser.parse_args()
    if options.tiny:
        options.depth = 2
        options.steps, options.batch, options.model, options.image_size = 30, 16, "Ti/4", 16
        options.ways = ["fused", "fp8-simulated", "float32"]
    options.out.mkdir(parents=True, exist_ok=True)
    return options


def machine(device: torch.device) -> str:
    name = torch.cuda.get_device_name(device).lower().replace(" ", "-") if device.type == "cuda" else "cpu"
    return f"{name}-torch{torch.__version__.split('+')[0]}"


def layer_by_layer(options: argparse.Namespace, device: torch.device) -> list[Row]:
    """Relative errors (norm of the difference over the norm) against the plain path in float32."""
    model = create_model("Ti/16" if options.tiny else "B/16", seed=0, depth=2 if options.tiny else 12).to(device)
    assert isinstance(model, ViT)
    torch.manual_seed(0)
    torch.nn.init.trunc_normal_(model.head.weight, std=0.02)  # a zero-initialised head would stop all gradients
    images = torch.randn(4 if options.tiny else 32, 3, 224, 224, device=device)
    labels = torch.randint(0, 1000, (len(images),), device=device)
    found = {NAMES[way]: passed(model, images, labels, way) for way in ("fused", "plain", "float32")}
    exact = found.pop(NAMES["float32"])
    rows = []
    for name in exact:
        errors = {way: float((values[name] - exact[name]).norm() / exact[name].norm()) for way, values in found.items()}
        rows.append({"what": name, **{way: f"{error:.3e}" for way, error in errors.items()}})
    for kind in ("tokens after block", "gradient of"):
        worst = {way: max(float(row[way]) for row in rows if row["what"].startswith(kind)) for way in found}
        print(f"{kind}: largest relative error {worst}")
    return rows


def passed(model: ViT, images: torch.Tensor, labels: torch.Tensor, way: str) -> dict[str, torch.Tensor]:
    """Tokens after every block, logits and gradients of one pass."""
    kernels, low = WAYS[way]
    model.kernels = kernels  # type: ignore[assignment]
    found: dict[str, torch.Tensor] = {}
    blocks = model.blocks
    with torch.autocast(images.device.type, dtype=torch.bfloat16, enabled=low):
        with torch.no_grad():
            x = model.add_prefix_and_positions(model.embed_patches(images))
            for count in range(1, len(blocks) + 1):  # a shorter encoder each time: between fused blocks nothing is whole
                model.blocks = blocks[:count]
                found[f"tokens after block {count - 1}"] = model.encode(x).float()
        model.blocks = blocks
        logits = model(images)
    model.zero_grad()
    F.cross_entropy(logits.float(), labels).backward()
    found["logits"] = logits.detach().float()
    return found | {
        f"gradient of {name}": one.grad.float().clone() for name, one in model.named_parameters() if one.grad is not None
    }


class Fp8Matmul(torch.autograd.Function):
    """x Wᵀ as fp8 computes it: both rounded to e4m3 with a scale a row, forward and for the gradient at x; not for that at W."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return rounded(x) @ rounded(weight).t()

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return rounded(grad_out) @ rounded(weight.t()).t(), grad_out.flatten(0, -2).t() @ x.flatten(0, -2)


def rounded(x: torch.Tensor) -> torch.Tensor:
    scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 448
    return (x / scale).to(torch.float8_e4m3fn).to(x.dtype) * scale


def simulate_fp8(model: ViT) -> None:
    """In the layers that fp8 covers: all blocks' but the last's attention, of which only the class token's part is computed."""
    for number, block in enumerate(model.blocks):
        _use_fp8(block.mlp.up, block.norm2)
        _use_fp8(block.mlp.down)
        if number < len(model.blocks) - 1:
            _use_fp8(block.attention.qkv, block.norm1)
            _use_fp8(block.attention.out)


def _use_fp8(layer: Any, norm: Any = None) -> None:
    """Fold the weights of the norm before it into the layer before rounding, as the kernels do."""
    layer.forward = partial(_fp8_layer, layer, norm)
    if norm is not None:
        norm.forward = partial(F.layer_norm, normalized_shape=norm.normalized_shape, eps=norm.eps)


def _fp8_layer(layer: torch.nn.Linear, norm: torch.nn.LayerNorm | None, x: torch.Tensor) -> torch.Tensor:
    if norm is None:
        return Fp8Matmul.apply(x, layer.weight) + layer.bias  # type: ignore[no-any-return]
    return Fp8Matmul.apply(x, layer.weight * norm.weight) + (layer.bias + layer.weight @ norm.bias)  # type: ignore[no-any-return]


def trained(way: str, seed: int, options: argparse.Namespace, device: torch.device) -> tuple[list[float], list[float]]:
    """The losses and gradient norms of a short training: the same weights, the same batches in the same order."""
    kernels, low = WAYS[way]
    source = open_source(options.data).split("train")
    channels, stored = (1, 16) if options.data == "digits" else (3, 64)
    fields: Row = {"image_size": options.image_size, "channels": channels} | ({"depth": options.depth} if options.depth else {})
    model = create_model(options.model, outputs=len(source.classes), seed=seed, **fields).to(device).train()
    assert isinstance(model, ViT)
    model.kernels = kernels  # type: ignore[assignment]
    if way == "fp8-simulated":
        simulate_fp8(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.05)

    def backward(images: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=low):
            logits = model(images)
        loss = F.cross_entropy(logits.float(), targets)
        loss.backward()
        return loss.detach()

    step = capture(backward, model.parameters()) if device.type == "cuda" else backward
    losses, norms = [], []
    loader = TrainLoader(
        source, preprocess=preset("google-vit", size=stored, channels=channels), batch=options.batch,
        augment=Augment(crop="none", flip=0.0), seed=seed, workers=0, device=device,
    )  # fmt: skip
    for number, batch in zip(range(options.steps), loader, strict=False):
        for group in optimizer.param_groups:
            group["lr"] = 3e-4 * min(1.0, (number + 1) / max(options.warmup, 1))
        images = batch.images
        if options.image_size != stored:
            images = F.interpolate(images, size=options.image_size, mode="bilinear")
        losses.append(step(images, batch.targets).clone())
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    loader.close()
    return torch.stack(losses).tolist(), torch.stack(norms).tolist()


def smooth(values: list[float], width: int = 20) -> list[float]:
    return [float(one) for one in np.convolve(values, np.ones(width) / width, mode="valid")]


def draw(runs: dict[tuple[str, int], list[float]], file: Path, title: str) -> None:
    """A line style for each way; a colour for each way or, where there are several seeds, for each seed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    ways, seeds = list(dict.fromkeys(way for way, _ in runs)), len({seed for _, seed in runs})
    for (way, seed), losses in runs.items():
        place = ways.index(way)
        label = way if seeds == 1 else f"{way}, seed {seed}"
        axes.plot(smooth(losses), ("-", "--", ":", "-.")[place % 4], lw=1.6, color=f"C{place if seeds == 1 else seed}", label=label)
    axes.set(xlabel="step", ylabel="loss (mean of 20 steps)", title=title)
    axes.legend(frameon=False)
    figure.savefig(file, dpi=150)


def write(file: Path, rows: list[Row]) -> None:
    with file.open("w", newline="", encoding="utf-8") as handle:
        writer = csv.DictWriter(handle, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    print(f"written to {file}")


if __name__ == "__main__":
    main()
