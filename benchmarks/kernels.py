"""Each of our GPU kernels against what torch runs for the same work, forward and backward, and against the memory's speed.

    python benchmarks/kernels.py            # on a GPU, about a minute
    python benchmarks/kernels.py --tiny     # on any machine with a GPU: does everything run?

Writes benchmarks/results/kernels-….csv: microseconds, the ratio, and the share of the device's copy speed that ours reaches.
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
from vitrail.models.fused.branches import attend, residual_norm
from vitrail.models.fused.cross_entropy import cross_entropy
from vitrail.models.fused.gelu import gelu, gelu_backward
from vitrail.models.fused.hopper_gelu_backward import matmul_gelu_backward
from vitrail.models.fused.hopper_matmul import matmul_bias, matmul_bias_gelu, matmul_bias_gelu_with_grad

LOW = torch.bfloat16
SHAPES = {"ViT-S/16": (384, 6), "ViT-B/16": (768, 12), "ViT-L/16": (1024, 16)}
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--batch", type=int, default=256)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("it times kernels on a CUDA GPU, and there is none here")
    batch = 4 if options.tiny else options.batch
    copying = copy_speed(2**20 if options.tiny else 2**28)
    rows: list[Row] = []
    for name, (width, heads) in SHAPES.items():
        for case in (norm_case, gelu_case, mlp_case, attention_case):
            for what, bytes_moved, ours, theirs in case(batch, 197, width, heads):
                one, two = microseconds(ours), microseconds(theirs)
                share = round(bytes_moved / one / 1e3 / copying, 3) if bytes_moved else None
                rows.append({"model": name, "what": what, "ours_us": round(one, 1), "torch_us": round(two, 1)})
                rows[-1] |= {"times_as_fast": round(two / one, 2), "share_of_copy_speed": share}
                print(rows[-1], flush=True)
    rows.append(cross_entropy_row(batch * 98 * 16))
    print(rows[-1])
    if not options.tiny:
        write(rows, copying)


def microseconds(work: Callable[[], Any]) -> float:
    for _ in range(3):
        work()
    times = []
    for _ in range(5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(10):
            work()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 100)
    return statistics.median(times)


def copy_speed(count: int) -> float:
    """Gigabytes a second of a plain copy, read and written."""
    source = torch.empty(count, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / microseconds(lambda: target.copy_(source)) / 1e3


Case = list[tuple[str, int, Callable[[], Any], Callable[[], Any]]]


def norm_case(batch: int, tokens: int, width: int, heads: int) -> Case:
    x, next_slope = torch.randn(2, batch, tokens, width, device="cuda")
    branch, slope = torch.randn(2, batch, tokens, width, device="cuda", dtype=LOW)
    bias = torch.randn(width, device="cuda")
    leaves = [one.requires_grad_() for one in (x, branch, bias)]

    def ours() -> tuple[Tensor, Tensor]:
        return residual_norm(x, branch, bias, None, None, 0.0, 1e-6, LOW)

    def theirs() -> tuple[Tensor, Tensor]:
        added = x + (branch + bias.to(LOW))
        return added, F.layer_norm(added, (width,), eps=1e-6).to(LOW)

    forward, backward = x.numel() * 12, x.numel() * 14
    return [
        ("residual + norm, forward", forward, without_gradients(ours), without_gradients(theirs)),
        ("residual + norm, backward", backward, *(gradients(way(), leaves, (next_slope, slope)) for way in (ours, theirs))),
    ]


def gelu_case(batch: int, tokens: int, width: int, heads: int) -> Case:
    hidden, slope = torch.randn(2, batch * tokens, 4 * width, device="cuda", dtype=LOW)
    bias = torch.randn(4 * width, device="cuda", dtype=LOW, requires_grad=True)
    leaf = hidden.clone().requires_grad_()
    value = F.gelu(leaf + bias)
    return [
        ("GELU, forward", hidden.numel() * 4, lambda: gelu(hidden, bias, False), lambda: F.gelu(hidden)),
        (
            "GELU, backward with bias sums and its value again",
            hidden.numel() * 8,
            lambda: gelu_backward(hidden, bias, slope, False),
            gradients((value,), [leaf, bias], (slope,)),
        ),
    ]


def mlp_case(batch: int, tokens: int, width: int, heads: int) -> Case:
    """A bias or GELU in the ends of products, against the library's products with torch's GELU."""
    y, dbranch = torch.randn(2, batch * tokens, width, device="cuda", dtype=LOW)
    up, down = torch.randn(4 * width, width, device="cuda", dtype=LOW), torch.randn(width, 4 * width, device="cuda", dtype=LOW)
    bias = torch.randn(4 * width, device="cuda", dtype=LOW, requires_grad=True)
    slope = torch.empty(batch * tokens, 4 * width, device="cuda", dtype=LOW)
    leaf = F.linear(y, up).requires_grad_()
    value = F.gelu(leaf + bias)
    qkv, added = torch.randn(3 * width, width, device="cuda", dtype=LOW), torch.randn(3 * width, device="cuda", dtype=LOW)
    return [
        (
            "product and bias",
            0,
            lambda: matmul_bias(y, qkv, added),
            lambda: F.linear(y, qkv, added),
        ),
        (
            "product and GELU, forward with its derivative",
            0,
            lambda: matmul_bias_gelu_with_grad(y, up, bias, False),
            without_gradients(lambda: F.gelu(F.linear(y, up, bias))),
        ),
        (
            "product and GELU, without",
            0,
            lambda: matmul_bias_gelu(y, up, bias, False),
            without_gradients(lambda: F.gelu(F.linear(y, up, bias))),
        ),
        (
            "product and GELU, backward with bias sums",
            0,
            lambda: matmul_gelu_backward(dbranch, down, slope),
            lambda: torch.autograd.grad((value,), [leaf, bias], (dbranch @ down,), retain_graph=True),
        ),
    ]


def attention_case(batch: int, tokens: int, width: int, heads: int) -> Case:
    qkv = torch.randn(batch, tokens, 3 * width, device="cuda", dtype=LOW)
    slope = torch.randn(batch, tokens, width, device="cuda", dtype=LOW)
    out, lse = attend(qkv, None, heads, True)
    leaf, bias = qkv.clone().requires_grad_(), torch.zeros(3 * width, device="cuda", dtype=LOW, requires_grad=True)
    q, k, v = (leaf + bias).unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)

    def library() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        value = library()
    assert lse is not None
    return [
        ("attention, forward", 0, lambda: attend(qkv, None, heads, True), without_gradients(library)),
        (
            "attention, backward with bias sums",
            0,
            lambda: attention_backward(qkv, None, out, slope, lse, heads)[2].sum(0),
            gradients((value,), [leaf, bias], (slope,)),
        ),
    ]


def cross_entropy_row(rows: int) -> Row:
    logits = torch.randn(rows, 512, device="cuda", dtype=LOW, requires_grad=True)
    targets = torch.randint(512, (rows,), device="cuda")

    def run(way: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(way(logits, targets).sum(), logits)

    one = microseconds(run(cross_entropy))
    two = microseconds(run(lambda a, b: F.cross_entropy(a.float(), b, reduction="none")))
    found = {
        "model": f"{rows} rows of 512",
        "what": "cross-entropy, both ways",
        "ours_us": round(one, 1),
        "torch_us": round(two, 1),
    }
    return found | {"times_as_fast": round(two / one, 2)}


def without_gradients(way: Callable[[], Any]) -> Callable[[], Any]:
    return torch.no_grad()(way)


def gradients(outputs: tuple[Tensor, ...], leaves: list[Tensor], slopes: tuple[Tensor, ...]) -> Callable[[], Any]:
    return lambda: torch.autograd.grad(outputs, leaves, slopes, retain_graph=True)


def write(rows: list[Row], copying: float) -> None:
    hardware, version = torch.cuda.get_device_name(), torch.__version__.split("+")[0]
    file = Path(__file__).parent / "results" / f"kernels-{hardware.lower().replace(' ', '-')}-torch{version}.csv"
    about = {"copy_gb_per_s": round(copying), "hardware": hardware, "torch": torch.__version__}
    with file.open("w", newline="", encoding="utf-8") as handle:
        writer = csv.DictWriter(handle, [*rows[0], *about], lineterminator="\n")
        writer.writeheader()
        writer.writerows({**row, **about} for row in rows)
    print(f"written to {file}")


if __name__ == "__main__":
    main()
