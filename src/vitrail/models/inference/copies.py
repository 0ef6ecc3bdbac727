"""Copies of models with their layers replaced by faster ones."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from threading import Barrier

import torch
from torch import Tensor, nn

from vitrail.errors import VitrailError
from vitrail.models.attention import AxialAttention
from vitrail.models.bit import BiT
from vitrail.models.features import Features
from vitrail.models.inference.blocks import CHUNK, FastBlock, Style
from vitrail.models.inference.linear import make_linear
from vitrail.models.inference.operations import Kind
from vitrail.models.layers import PatchEmbedding, cut
from vitrail.models.resnet import StandardisedConv
from vitrail.models.vit import Block, ViT


class FastViT(ViT):
    """A ViT whose layers were made for inference on a processor. It has no gradients and cannot be trained."""

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        return in_lanes(super().forward, images)

    @torch.no_grad()
    def features(self, images: Tensor, layers: Iterable[int] = ()) -> Features:
        return super().features(images, layers)

    def embed_patches(self, images: Tensor) -> Tensor:
        chunk = self.patches.chunk  # a few images at a time, or one, as the patch embedding has it: see there
        return torch.cat([ViT.embed_patches(self, part) for part in images.split(chunk)])

    def attention_gradients(self, images: Tensor, outputs: Tensor) -> Iterator[tuple[int, Tensor, Tensor | None]]:
        raise VitrailError("This copy was made for inference and has no gradients. Use the model it was made from.")


class FastPatches(nn.Module):
    """The patch embedding, in bfloat16 if that is what the processor is fast in.

    With int8 it, and a hybrid's ResNet before it, is done image by image (`chunk` is 1): a product's last bit may depend on how
    many rows it has, and a last bit can decide how a byte is rounded later on.
    """

    def __init__(self, patches: PatchEmbedding, kind: Kind, chunk: int) -> None:
        super().__init__()
        self.patch, self.chunk = patches.patch, chunk
        self.linear = make_linear(patches.weight.flatten(1), patches.bias, kind)

    def forward(self, images: Tensor) -> Tensor:
        return self.linear(cut(images, self.patch))  # type: ignore[no-any-return]


class FixedConv(StandardisedConv):
    """A standardised convolution whose filters were standardised once."""

    def __init__(self, conv: StandardisedConv) -> None:
        nn.Module.__init__(self)
        self.config, self.kernel, self.stride = conv.config, conv.kernel, conv.stride
        self.weight = nn.Parameter(conv.standardised().detach(), requires_grad=False)

    def standardised(self) -> Tensor:
        return self.weight


def fast_copy(model: ViT | BiT, style: Style) -> ViT | BiT:
    """The model with every layer that has a faster form replaced by it. Weights that are replaced are not copied first."""
    replaced = (module for module in model.modules() if isinstance(module, Block | PatchEmbedding | StandardisedConv))
    shared = {id(tensor): tensor for module in replaced for tensor in module.parameters() if tensor.ndim > 1}
    made = copy.deepcopy(model, shared)
    for parent in list(made.modules()):
        for name, child in list(parent.named_children()):
            faster = _faster(child, style)
            if faster is not None:
                setattr(parent, name, faster)
    if isinstance(made, ViT):
        made.__class__ = FastViT
    return made.float().eval().requires_grad_(False)


def _faster(module: nn.Module, style: Style) -> nn.Module | None:
    if isinstance(module, PatchEmbedding):
        # Pixels and their embedding are worth more than 8 bits, and are a hundredth of the work.
        half = style.kind == "bf16" or (style.kind == "int8" and style.attention_bf16)
        return FastPatches(module, "bf16" if half else "fp32", CHUNK[style.kind])
    if isinstance(module, StandardisedConv):
        return FixedConv(module)
    if not isinstance(module, Block):
        return None
    if not isinstance(module.attention, AxialAttention):
        return FastBlock(module, style)
    return _with_fast_products(module, style)


def _with_fast_products(block: Block, style: Style) -> Block:
    """For attention of other kinds: the block as it is, with its products replaced."""
    made = copy.deepcopy(block)
    for part, name in ((made.attention, "qkv"), (made.attention, "out"), (made.mlp, "up"), (made.mlp, "down")):
        linear = getattr(part, name)
        setattr(part, name, make_linear(linear.weight, linear.bias, style.kind))
    return made


def in_lanes(compute: Callable[[Tensor], Tensor], images: Tensor) -> Tensor:
    """Each of torch's threads computes images of its own: threads that share one operation wait for each other after it."""
    threads = torch.get_num_threads()
    lanes = min(threads, len(images))
    if lanes < 2:
        return compute(images)
    share = -(-len(images) // lanes)
    return torch.cat(list(_pool(lanes, threads // lanes).map(torch.no_grad()(compute), images.split(share))))


@cache
def _pool(lanes: int, threads: int) -> ThreadPoolExecutor:
    """Threads that stay: each keeps its scratch memory. `threads` is what torch may use within each."""
    before = torch.get_num_threads()
    barrier = Barrier(lanes)
    pool = ThreadPoolExecutor(lanes, "vitrail-lane", initializer=torch.set_num_threads, initargs=(threads,))
    for started in [pool.submit(barrier.wait) for _ in range(lanes)]:
        started.result()
    torch.set_num_threads(before)  # what one thread sets is otherwise taken over by every thread to come
    return pool
