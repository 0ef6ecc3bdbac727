"""Copies of models for inference on a CPU: plain parts replaced by faster ones, everything else as it is."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from threading import Barrier
from typing import Any, Self

import torch
from torch import Tensor, nn

from vitrail.errors import VitrailError
from vitrail.models.bit import BiT, PreActivationUnit
from vitrail.models.inference.model import InferenceModel, deep_copied
from vitrail.models.inference.packed_block import CHUNK, BlockPrecision, PackedBlock
from vitrail.models.inference.packed_linear import make_linear
from vitrail.models.inference.replaceable import blocks_of_known_parts, is_replaceable, replaceable_blocks, runs_known_code
from vitrail.models.layers import PatchEmbedding, patchify
from vitrail.models.resnet import HybridStem, PostActivationUnit, StandardisedConv
from vitrail.models.vit import Block, ViT


class CpuModel(InferenceModel):
    """A ViT with layers packed for the CPU, which computes the images of a batch on all of torch's threads side by side."""

    def _logits(self, images: Tensor) -> Tensor:
        images = self._moved(images)
        if torch._C._len_torch_dispatch_stack() or not runs_known_code(self.model):
            return self.model(images)  # type: ignore[no-any-return]
        return on_worker_threads(self.model, images)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        trial = torch.empty(0, dtype=torch.float32, device="cpu")
        moved = fn(trial)
        if moved.device != trial.device or moved.dtype != trial.dtype:
            raise VitrailError(
                "This copy's layers are packed for the CPU; they cannot be moved to another device or converted to another type. "
                "Call for_inference(model, precision, device) with the model it was made from."
            )
        return super()._apply(fn, recurse)


class PackedPatchEmbedding(nn.Module):
    """The patch embedding, in bfloat16 if the CPU is fast in it, a chunk of images at a time.

    With int8 blocks `chunk` is 1: a matmul's last bit may depend on how many rows it has, and a last bit can decide how a value is
    rounded to int8 later on.
    """

    def __init__(self, patches: PatchEmbedding, precision: BlockPrecision) -> None:
        super().__init__()
        self.patch, self.chunk = patches.patch, CHUNK[precision.matmul]
        # Pixels and their embedding are worth more than 8 bits, and are a hundredth of the work.
        bf16 = precision.matmul == "bf16" or (precision.matmul == "int8" and precision.attention_bf16)
        self.linear = make_linear(patches.weight.flatten(1), patches.bias, "bf16" if bf16 else "fp32")

    def forward(self, images: Tensor) -> Tensor:
        found = [self.linear(patchify(part, self.patch)) for part in images.split(self.chunk)]
        return found[0] if len(found) == 1 else torch.cat(found)


class ChunkedStem(nn.Module):
    """A hybrid's ResNet, a chunk of images at a time for the same reason."""

    def __init__(self, resnet: HybridStem, chunk: int) -> None:
        super().__init__()
        self.resnet, self.chunk = resnet, chunk

    def forward(self, images: Tensor) -> Tensor:
        found = [self.resnet(part) for part in images.split(self.chunk)]
        return found[0] if len(found) == 1 else torch.cat(found)


class FixedConv(StandardisedConv):
    """A standardised convolution whose filters were standardised once."""

    def __init__(self, conv: StandardisedConv) -> None:
        nn.Module.__init__(self)
        self.config, self.kernel, self.stride = conv.config, conv.kernel, conv.stride
        self.weight = nn.Parameter(conv.standardised().detach().float(), requires_grad=False)

    def standardised(self) -> Tensor:
        return self.weight


@torch.inference_mode(False)
@torch.no_grad()
def cpu_copy(model: ViT | BiT, precision: BlockPrecision) -> InferenceModel:
    """Copy a model that is on the CPU, with every plain part that has a faster form replaced by it."""
    # What the memo has counts as copied already: the weights of replaced modules are never copied as they are.
    memo: dict[int, Any] = {id(old): new for old, new in _replacements(model, precision).items()}
    made = deep_copied(model, memo).float()
    if not isinstance(made, ViT):
        return InferenceModel(made)
    if is_replaceable(made.resnet, HybridStem):
        made.resnet = ChunkedStem(made.resnet, CHUNK[precision.matmul])  # type: ignore[arg-type, assignment]
    return CpuModel(made)


def _replacements(model: ViT | BiT, precision: BlockPrecision) -> dict[nn.Module, nn.Module]:
    """Return the modules of a model that have a faster form, each with that form."""
    found: dict[nn.Module, nn.Module] = {}
    for parent in model.modules():
        if type(parent) in (PreActivationUnit, PostActivationUnit, HybridStem, BiT):
            convs = [child for child in parent.children() if is_replaceable(child, StandardisedConv)]
            found |= {conv: FixedConv(conv) for conv in convs}  # type: ignore[arg-type]
    if type(model) is not ViT:
        return found
    if is_replaceable(model.patches, PatchEmbedding):
        found[model.patches] = PackedPatchEmbedding(model.patches, precision)
    for block in replaceable_blocks(model):
        found[block] = PackedBlock(block, precision)
    for block in blocks_of_known_parts(model):
        found |= _packed_linears(block, precision)
    return found


def _packed_linears(block: Block, precision: BlockPrecision) -> dict[nn.Module, nn.Module]:
    layers = (block.attention.qkv, block.attention.out, block.mlp.up, block.mlp.down)
    linears = [layer for layer in layers if type(layer) is nn.Linear and (layer.bias is None or layer.bias.ndim < 2)]
    return {layer: make_linear(layer.weight, layer.bias, precision.matmul) for layer in linears}


def on_worker_threads(compute: Callable[[Tensor], Tensor], images: Tensor) -> Tensor:
    """Give each of torch's threads images of its own: threads that share one operation wait for each other after it."""
    threads = torch.get_num_threads()
    workers = min(threads, len(images))
    if workers < 2:
        return compute(images)
    per_worker, per_call = -(-len(images) // workers), threads // workers
    pool = _pool(threads // per_call, per_call)  # not one for every batch size: on many cores that would be thousands of threads
    return torch.cat(list(pool.map(torch.no_grad()(compute), images.split(per_worker))))


@cache
def _pool(workers: int, threads: int) -> ThreadPoolExecutor:
    """Return threads that are kept: each keeps its scratch memory. `threads` is what torch may use within each."""
    before = torch.get_num_threads()
    barrier = Barrier(workers)
    pool = ThreadPoolExecutor(workers, "vitrail-worker", initializer=torch.set_num_threads, initargs=(threads,))
    for started in [pool.submit(barrier.wait) for _ in range(workers)]:
        started.result()
    torch.set_num_threads(before)  # what one thread sets is otherwise the default of every later thread
    return pool


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)  # a child process has none of its parent's threads
