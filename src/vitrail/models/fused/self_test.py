"""Whether the kernels run, and run rightly, on a device: asked once, before they are first used there.

GPUs, drivers and versions of Triton differ more than any test can cover. A kernel that does not compile, or that computes
another function, must cost speed and not a training.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.nn.functional as F
from torch import Tensor, nn

log = logging.getLogger("vitrail")

_TOLERANCE = 0.05  # relative, of values and gradients in low precision
_EIGHT_TOLERANCE = 0.2  # the same with three bits of mantissa


@functools.cache
def works(device: torch.device, dtype: torch.dtype) -> bool:
    """Run a small encoder both ways, forward and backward. Leaves every random generator as it was."""
    parts = (_cut_difference, _block_difference, _loss_difference)
    otherwise = "Vitrail's own GPU kernels are not used here (%s); going on with torch's, more slowly."
    return passes(device, _TOLERANCE, lambda: max(part(device, dtype) for part in parts), otherwise)


@functools.cache
def fp8_fault(device: torch.device) -> str:
    """Why eight-bit products cannot be used on a device; empty where they can."""
    return fault(device, _EIGHT_TOLERANCE, lambda: _block_difference(device, torch.bfloat16, eight=True))


@functools.cache
def attention_works(
    device: torch.device, dtype: torch.dtype, queries: int, keys: int, heads: int, channels: int, learns: bool
) -> bool:
    """Whether attention over so many tokens is right, with its gradients if it learns: every length is compiled anew."""
    otherwise = f"Vitrail's own attention over {keys} tokens is not used here (%s); going on with torch's."
    given = device, dtype, queries, keys, heads, channels, learns
    return passes(device, _TOLERANCE, lambda: _attention_difference(*given), otherwise)


def passes(device: torch.device, tolerance: float, difference: Callable[[], float], otherwise: str) -> bool:
    """Whether kernels have no `fault`; if they have, a warning says so, with the reason in place of its %s."""
    reason = fault(device, tolerance, difference)
    if reason:
        log.warning(otherwise, reason)
    return not reason


def fault(device: torch.device, tolerance: float, difference: Callable[[], float]) -> str:
    """What is wrong with kernels whose difference from what they should compute is asked for; empty if nothing is.

    They are asked in a thread of their own, where nothing is in force that was set for this one: no autocast, no mode, and no
    hooks on what autograd keeps, such as those by which activations are computed again.
    """

    def ask() -> float:
        cuda = device.type == "cuda"
        with torch.cuda.device(device) if cuda else contextlib.nullcontext(), torch.random.fork_rng([device] if cuda else []):
            torch.manual_seed(0)
            return difference()

    try:
        with ThreadPoolExecutor(1) as pool:
            found = pool.submit(ask).result()
    except Exception as error:  # whatever it is, there is another path
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
    return "" if found <= tolerance else f"they are off by {found:.1%}"


def _block_difference(device: torch.device, dtype: torch.dtype, *, eight: bool = False) -> float:
    """The largest relative difference of a small encoder's output and gradients."""
    from vitrail.models.config import ViTConfig
    from vitrail.models.fused.branches import add_prefix_and_positions
    from vitrail.models.fused.encoder import run_blocks, settle_and_norm
    from vitrail.models.vit import Block

    config = ViTConfig(name="check", width=64, depth=2, heads=2, mlp=96, patch=(1, 1), image_size=(4, 4))
    blocks = [Block(config, number).to(device) for number in range(2)]
    norm = nn.LayerNorm(64).to(device)  # of a stream so small that the branches matter in it
    patches, fixed = 0.1 * torch.randn(3, 16, 64, device=device).to(dtype), 0.1 * torch.randn(1, 17, 64, device=device)
    weights = [norm.weight, *(one for block in blocks for one in block.parameters())]
    leaves = [patches.requires_grad_(), fixed.requires_grad_(), *weights]
    with torch.autocast(device.type, dtype=dtype):
        plain = norm(blocks[1](blocks[0](fixed + F.pad(patches, (0, 0, 1, 0))), None, 1))
        x = add_prefix_and_positions(patches, fixed[0])
        fused = settle_and_norm(run_blocks(blocks, x, num_queries=1, fp8=eight), norm)
        for block in blocks:  # compiled and run; what it drops is its own
            block.dropout.p = 0.5
        dropped = settle_and_norm(run_blocks(blocks, x), norm)
    torch.autograd.grad(dropped.sum(), leaves)
    slope = torch.randn_like(plain)
    return largest_difference(
        [plain, *torch.autograd.grad(plain, leaves, slope)], [fused, *torch.autograd.grad(fused, leaves, slope)]
    )


def _attention_difference(
    device: torch.device, dtype: torch.dtype, queries: int, keys: int, heads: int, channels: int, learns: bool
) -> float:
    """Laid out as the encoder does it: all side by side or, where only a few are asked, their queries apart."""
    from vitrail.models.fused.attention_backward import attention_backward
    from vitrail.models.fused.attention_forward import attention

    width = heads * channels
    sizes = [3 * width] if queries == keys else [width, 2 * width]
    given = [torch.randn(3, count, size, device=device).to(dtype) for count, size in zip((queries, keys), sizes, strict=False)]
    q, k, v = split = [part for one in given for part in one.split(width, dim=-1)]
    leaves = [one.detach().float().requires_grad_() for one in split]
    in_heads = [one.unflatten(-1, (heads, channels)).transpose(1, 2) for one in leaves]
    with torch.autocast(device.type, enabled=False):
        scores = in_heads[0] @ in_heads[1].transpose(-2, -1) * channels**-0.5
        plain = (scores.softmax(-1) @ in_heads[2]).transpose(1, 2).flatten(2)
    apart, _ = attention(q, k, v, heads, together=False)
    fused, lse = attention(q, k, v, heads, together=True)
    off = largest_difference([plain, plain], [apart, fused])
    if not learns:
        return off
    slope, found = torch.randn_like(plain).to(dtype), [torch.empty_like(one) for one in given]
    dq, dk, dv = (part for one in found for part in one.split(width, dim=-1))
    attention_backward(q, k, v, fused, slope, lse, heads, (dq, dk, dv))
    expected, gradients = torch.autograd.grad(plain, leaves, slope.float()), (dq, dk, dv)
    # With one key there is nothing to choose from: queries and keys have no gradient, and rounding is all there is of it.
    first = 2 if keys == 1 else 0
    return max(off, largest_difference(expected[first:], gradients[first:]))


def _cut_difference(device: torch.device, dtype: torch.dtype) -> float:
    from vitrail.models.fused.patchify import patchify
    from vitrail.models.layers import patchify as plain

    images = torch.randn(2, 3, 28, 42, device=device)
    return largest_difference([plain(images, (14, 14))], [patchify(images, (14, 14), dtype)])


def _loss_difference(device: torch.device, dtype: torch.dtype) -> float:
    from vitrail.models.fused.cross_entropy import CrossEntropy

    logits = torch.randn(5, 12, device=device).to(dtype).requires_grad_()
    targets = torch.arange(5, device=device)
    plain, fused = F.cross_entropy(logits.float(), targets, reduction="none"), CrossEntropy.apply(logits, targets)
    return largest_difference(
        [plain, *torch.autograd.grad(plain.sum(), logits)], [fused, *torch.autograd.grad(fused.sum(), logits)]
    )


def largest_difference(expected: Sequence[Tensor], found: Sequence[Tensor]) -> float:
    """Of all pairs, relative to the expected one's size; infinite if anything is not a number."""
    return max(_difference(one.detach().float(), two.detach().float()) for one, two in zip(expected, found, strict=True))


def _difference(one: Tensor, two: Tensor) -> float:
    found = float((two - one).norm() / one.norm())
    return found if math.isfinite(found) else math.inf  # a NaN would be neither more nor less than the others
