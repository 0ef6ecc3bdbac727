"""Time each GPU kernel against what torch runs for the same work, forward and backward, and against the copy bandwidth.

    python benchmarks/kernels.py            # on a Hopper GPU, about a minute
    python benchmarks/kernels.py --tiny     # does everything run?

Writes benchmarks/results/kernels-….csv: microseconds, the speedup, and the fraction of the device's copy bandwidth that ours reach.
"""

from __future__ import annotations

import argparse
import csv
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.models.fused.attention_backward import attention_backward
from vitrail.models.fused.branches import attend
from vitrail.models.fused.cross_entropy import cross_entropy
from vitrail.models.fused.gelu import gelu, gelu_backward
from vitrail.models.fused.hopper_gelu_backward import matmul_gelu_backward
from vitrail.models.fused.hopper_matmul import matmul_bias, matmul_bias_gelu, matmul_bias_gelu_with_grad
from vitrail.models.fused.residual_norm import residual_centred, residual_norm

LOW = torch.bfloat16
SHAPES = {"ViT-S/16": (384, 6), "ViT-B/16": (768, 12), "ViT-L/16": (1024, 16)}
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--batch", type=int, default=256)
    options = parser.parse_args()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        parser.error("this benchmark needs a Hopper GPU")
    batch = 4 if options.tiny else options.batch
    bandwidth = copy_bandwidth(2**20 if options.tiny else 2**28)
    rows: list[Row] = []
    for name, (width, heads) in SHAPES.items():
        for case in (norm_case, gelu_case, matmul_case, folded_norm_case, attention_case):
            for kernel, bytes_moved, ours, torchs in case(batch, 197, width, heads):
                rows.append(timed(name, kernel, ours, torchs, bytes_moved, bandwidth))
                print(rows[-1], flush=True)
    rows.append(cross_entropy_row(batch * 98 * 16))
    print(rows[-1])
    if not options.tiny:
        write(rows, bandwidth)


def timed(
    model: str, kernel: str, ours: Callable[[], Any], torchs: Callable[[], Any], bytes_moved: int = 0, bandwidth: float = 1.0
) -> Row:
    one, two = microseconds(ours), microseconds(torchs)
    fraction = round(bytes_moved / one / 1e3 / bandwidth, 3) if bytes_moved else None
    row = {"model": model, "kernel": kernel, "ours_us": round(one, 1), "torch_us": round(two, 1), "speedup": round(two / one, 2)}
    return row | {"fraction_of_copy_bandwidth": fraction}


def microseconds(run: Callable[[], Any]) -> float:
    for _ in range(3):
        run()
    times = []
    for _ in range(5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(10):
            run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 100)
    return statistics.median(times)


def copy_bandwidth(count: int) -> float:
    """GB/s of a plain copy, read and written."""
    source = torch.empty(count, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / microseconds(lambda: target.copy_(source)) / 1e3


Case = list[tuple[str, int, Callable[[], Any], Callable[[], Any]]]


def norm_case(batch: int, tokens: int, width: int, heads: int) -> Case:
    x, grad_sum = torch.randn(2, batch, tokens, width, device="cuda")
    branch, grad_normed = torch.randn(2, batch, tokens, width, device="cuda", dtype=LOW)
    bias = torch.randn(width, device="cuda")
    leaves = [one.requires_grad_() for one in (x, branch, bias)]

    def ours() -> tuple[Tensor, Tensor]:
        return residual_norm(x, branch, bias, None, None, 0.0, 1e-6, LOW)

    def torchs() -> tuple[Tensor, Tensor]:
        total = x + (branch + bias.to(LOW))
        return total, F.layer_norm(total, (width,), eps=1e-6).to(LOW)

    forward, backward = x.numel() * 12, x.numel() * 14
    grads = grad_sum, grad_normed
    return [
        ("residual + norm, forward", forward, without_grad(ours), without_grad(torchs)),
        ("residual + norm, backward", backward, *(backward_of(run(), leaves, grads) for run in (ours, torchs))),
    ]


def gelu_case(batch: int, tokens: int, width: int, heads: int) -> Case:
    hidden, grad_out = torch.randn(2, batch * tokens, 4 * width, device="cuda", dtype=LOW)
    bias = torch.randn(4 * width, device="cuda", dtype=LOW, requires_grad=True)
    leaf = hidden.clone().requires_grad_()
    value = F.gelu(leaf + bias)
    return [
        ("GELU, forward", hidden.numel() * 4, lambda: gelu(hidden, bias, False), lambda: F.gelu(hidden)),
        (
            "GELU, backward with bias gradient, value recomputed",
            hidden.numel() * 8,
            lambda: gelu_backward(hidden, bias, grad_out, False),
            backward_of((value,), [leaf, bias], (grad_out,)),
        ),
    ]


def matmul_case(batch: int, tokens: int, width: int, heads: int) -> Case:
    """Bias and GELU epilogues, against cuBLAS's matmuls and torch's GELU."""
    x, grad_out = torch.randn(2, batch * tokens, width, device="cuda", dtype=LOW)
    qkv, up, down = (
        torch.randn(size, device="cuda", dtype=LOW) for size in ((3 * width, width), (4 * width, width), (width, 4 * width))
    )
    qkv_bias, bias = (torch.randn(len(weight), device="cuda", dtype=LOW) for weight in (qkv, up))
    gelu_grad = torch.empty(batch * tokens, 4 * width, device="cuda", dtype=LOW)
    leaf, bias_leaf = F.linear(x, up).requires_grad_(), bias.clone().requires_grad_()
    value = F.gelu(leaf + bias_leaf)

    def torchs_gelu() -> Tensor:
        return F.gelu(F.linear(x, up, bias))

    return [
        ("matmul + bias", 0, lambda: matmul_bias(x, qkv, qkv_bias), lambda: F.linear(x, qkv, qkv_bias)),
        ("matmul + bias + GELU and its derivative", 0, lambda: matmul_bias_gelu_with_grad(x, up, bias, False), torchs_gelu),
        ("matmul + bias + GELU", 0, lambda: matmul_bias_gelu(x, up, bias, False), torchs_gelu),
        (
            "matmul + GELU backward with bias gradient",
            0,
            lambda: matmul_gelu_backward(grad_out, down, gelu_grad),
            lambda: torch.autograd.grad((value,), [leaf, bias_leaf], (grad_out @ down,), retain_graph=True),
        ),
    ]


def folded_norm_case(batch: int, tokens: int, width: int, heads: int) -> Case:
    """Inference with the layer norm in the epilogue, against torch's addition, norm and matmul."""
    x, branch = torch.randn(2, batch, tokens, width, device="cuda", dtype=LOW)
    qkv, up = (torch.randn(size, width, device="cuda", dtype=LOW) for size in (3 * width, 4 * width))
    branch_bias, qkv_bias, up_bias = (torch.randn(size * width, device="cuda", dtype=LOW) for size in (1, 3, 4))

    def residual() -> tuple[Tensor, Tensor, Tensor]:
        return residual_centred(x, branch, branch_bias, None, None, 0.0, 1e-6, None)

    def normed() -> Tensor:
        return F.layer_norm(x + (branch + branch_bias), (width,))

    def ours() -> Tensor:
        centred, rstd, _ = residual()
        return matmul_bias(centred, qkv, qkv_bias, rstd)

    def ours_gelu() -> Tensor:
        centred, rstd, _ = residual()
        return matmul_bias_gelu(centred, up, up_bias, False, rstd)

    rstd = residual()[1]
    return [
        ("residual without its mean, and rstd", x.numel() * 6, residual, lambda: x + (branch + branch_bias)),
        ("residual + norm + matmul + bias", 0, ours, lambda: F.linear(normed(), qkv, qkv_bias)),
        ("residual + norm + matmul + bias + GELU", 0, ours_gelu, lambda: F.gelu(F.linear(normed(), up, up_bias))),
        # The epilogue alone: against the same matmul without a norm in it.
        (
            "norm in the epilogue of matmul + bias; torch_us: without it",
            0,
            lambda: matmul_bias(x, qkv, qkv_bias, rstd),
            lambda: matmul_bias(x, qkv, qkv_bias),
        ),
        (
            "norm in the epilogue of matmul + bias + GELU; torch_us: without it",
            0,
            lambda: matmul_bias_gelu(x, up, up_bias, False, rstd),
            lambda: matmul_bias_gelu(x, up, up_bias, False),
        ),
    ]


def attention_case(batch: int, tokens: int, width: int, heads: int) -> Case:
    qkv = torch.randn(batch, tokens, 3 * width, device="cuda", dtype=LOW)
    grad_out = torch.randn(batch, tokens, width, device="cuda", dtype=LOW)
    out, lse = attend(qkv, None, heads, True)
    leaf, bias = qkv.clone().requires_grad_(), torch.zeros(3 * width, device="cuda", dtype=LOW, requires_grad=True)
    q, k, v = (leaf + bias).unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)

    def torchs() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        value = torchs()
    assert lse is not None
    return [
        ("attention, forward", 0, lambda: attend(qkv, None, heads, True), without_grad(torchs)),
        (
            "attention, backward with bias gradient",
            0,
            lambda: attention_backward(qkv, None, out, grad_out, lse, heads)[2].sum(0),
            backward_of((value,), [leaf, bias], (grad_out,)),
        ),
    ]


def cross_entropy_row(rows: int) -> Row:
    logits = torch.randn(rows, 512, device="cuda", dtype=LOW, requires_grad=True)
    targets = torch.randint(512, (rows,), device="cuda")

    def forward_and_backward(loss: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(loss(logits, targets).sum(), logits)

    torchs = forward_and_backward(lambda a, b: F.cross_entropy(a.float(), b, reduction="none"))
    return timed(f"{rows} rows of 512", "cross-entropy, forward and backward", forward_and_backward(cross_entropy), torchs)


def without_grad(run: Callable[[], Any]) -> Callable[[], Any]:
    return torch.no_grad()(run)


def backward_of(outputs: tuple[Tensor, ...], leaves: list[Tensor], grads: tuple[Tensor, ...]) -> Callable[[], Any]:
    return lambda: torch.autograd.grad(outputs, leaves, grads, retain_graph=True)


def write(rows: list[Row], bandwidth: float) -> None:
    hardware, version = torch.cuda.get_device_name(), torch.__version__.split("+")[0]
    file = Path(__file__).parent / "results" / f"kernels-{hardware.lower().replace(' ', '-')}-torch{version}.csv"
    about = {"copy_gb_per_s": round(bandwidth), "hardware": hardware, "torch": torch.__version__}
    with file.open("w", newline="", encoding="utf-8") as handle:
        writer = csv.DictWriter(handle, [*rows[0], *about], lineterminator="\n")
        writer.writeheader()
        writer.writerows({**row, **about} for row in rows)
    print(f"written to {file}")


if __name__ == "__main__":
    main()
