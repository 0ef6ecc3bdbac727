"""Attention as it is used, layer by layer: the maps themselves, and how an output depends on them.

Both recompute softmax(qkᵀ/√d) from each block's own q and k, in eval mode, whatever kernel `forward` uses, and carry the block's
output on from that very matrix. Nothing is hooked, so an empty capture cannot happen. A block with hooks or patched methods is
called as it is, with that softmax in place of its kernel.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from vitrail.errors import VitrailError, counted
from vitrail.models.attention import Attention, AxialAttention, attention_weights, grid_for
from vitrail.models.config import Pair
from vitrail.models.features import check_images, chosen_layers, evaluating, other_grid
from vitrail.models.fused.ordinary_call import is_patched
from vitrail.models.fused.whitelist import is_plain

if TYPE_CHECKING:
    from vitrail.models.vit import ViT

Maps = Iterator[tuple[int, Tensor]]
"""Layer number, attention [batch, head, query, key]."""
MapsWithGradients = Iterator[tuple[int, Tensor, Tensor | None]]
"""The same, and the gradient of an output by it."""


def attention(model: ViT, images: Tensor, layers: Iterable[int] | None = None, *, pooling: bool = False) -> Maps:
    """Yield each layer's number and its attention, one layer at a time, without gradients.

    Layers that are not in `layers` run as in `forward`, and nothing runs past the last one in it. With `pooling` one more
    comes at the end, numbered as if it were the next layer: how the pooled output weighs the last tokens, [batch, head, 1, key].
    """
    check_images(images, model.config)
    return _attention(model, images, chosen_layers(layers, len(model.blocks)), pooling)


@torch.no_grad()
def _attention(model: ViT, images: Tensor, layers: tuple[int, ...], pooling: bool) -> Maps:
    other = other_grid(model.config, images)
    with evaluating(model):
        x = model.add_prefix_and_positions(model.embed_patches(images), *other)
    for number in range(len(model.blocks) if pooling else layers[-1] + 1):
        block = model.blocks[number]
        x, bias = model.positions.before_layer(x, number, *other), model.positions.bias(number, *other)
        with evaluating(block):  # only while computing: between layers the caller finds the model as it was
            if number not in layers:
                x = _run(block, x, bias, other)
                continue
            x, weights = _with_attention(number, block, x, bias, other)
        yield number, weights
    if pooling:
        with evaluating(model):
            yield len(model.blocks), _pooling_weights(model, x)


def attention_gradients(model: ViT, images: Tensor, outputs: Tensor) -> MapsWithGradients:
    """Yield, from the last layer to the first, its number, its attention, and the gradient of an output by that attention.

    `outputs` names one output per image. First comes the pooling, as `attention` gives it, without a gradient. The forward pass
    keeps only what enters each block; a block is run again for its gradients, so that a single layer's attention is alive at a
    time. Parameters get no gradients.
    """
    config = model.config
    check_images(images, config)
    if not config.outputs:
        raise VitrailError(f"{config.name} has no head, so it has no output to take gradients of. Use attention, which needs none.")
    if outputs.shape != images.shape[:1] or not 0 <= int(outputs.min()) <= int(outputs.max()) < config.outputs:
        raise VitrailError(
            f"`outputs` is {str(outputs.tolist())[:60]}; it takes one number from 0 to {config.outputs - 1} for each of "
            f"{counted(len(images), 'image')}."
        )
    return _attention_gradients(model, images, outputs)


def _attention_gradients(model: ViT, images: Tensor, outputs: Tensor) -> MapsWithGradients:
    inputs, other = list[Tensor](), other_grid(model.config, images)
    with evaluating(model), torch.no_grad():
        x = model.add_prefix_and_positions(model.embed_patches(images), *other)
        for number, block in enumerate(model.blocks):
            inputs.append(model.positions.before_layer(x, number, *other))
            x = _run(block, inputs[-1], model.positions.bias(number, *other), other)
        pooling = _pooling_weights(model, x)
    yield len(model.blocks), pooling, None
    with evaluating(model), torch.enable_grad():
        x.requires_grad_()
        output = model.logits(normed_tokens(model, x)).gather(1, outputs[:, None]).sum()
        (grad_x,) = torch.autograd.grad(output, x)
    for number in reversed(range(len(model.blocks))):
        block = model.blocks[number]
        with evaluating(block), torch.enable_grad():
            x, bias = inputs.pop().requires_grad_(), model.positions.bias(number, *other)
            x_after, weights = _with_attention(number, block, x, bias, other)
            grad_weights, grad_x = torch.autograd.grad(x_after, (weights, x), grad_x)
        yield number, weights.detach(), grad_weights


def _run(block: nn.Module, x: Tensor, bias: Tensor | None, other: tuple[Pair, ...]) -> Tensor:
    if grid := grid_for(block, other):
        return block(x, bias, None, *grid)  # type: ignore[no-any-return]
    return block(x) if bias is None else block(x, bias)  # type: ignore[no-any-return]


def _with_attention(number: int, block: Any, x: Tensor, bias: Tensor | None, other: tuple[Pair, ...]) -> tuple[Tensor, Tensor]:
    """Return the block's output and its attention, also where a hook or a patched method changes what the block computes."""
    from vitrail.models.vit import Block

    if not hasattr(block, "with_attention"):
        raise VitrailError(
            f"Block {number} ({type(block).__name__}) does not say what it attends to. "
            "Choose other layers, or give its class a method `with_attention(x, bias)`, as that of Block."
        )
    attention, grid = getattr(block, "attention", None), grid_for(block, other)
    if not isinstance(block, Block) or not isinstance(attention, Attention):
        return block.with_attention(x, bias, *grid)  # type: ignore[no-any-return]
    known = type(attention) in (Attention, AxialAttention) and is_plain(attention, type(attention))
    if known and is_plain(block, Block) and not is_patched():
        return block.with_attention(x, bias, *grid)
    found: list[Tensor] = []

    def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, *grid: Pair) -> Tensor:
        weights = attention_weights(q, k, attention._with_mask(bias, x, *grid))
        found.append(weights)
        return weights.to(v.dtype) @ v

    call: Any = block._call_impl  # hooks and all, but not a compiled form, which may hold `_attend`
    before = vars(attention).get("_attend")
    vars(attention)["_attend"] = attend
    try:
        x_after = call(x, bias, None, *grid) if grid else call(x, bias)
    finally:
        del vars(attention)["_attend"]
        if before is not None:
            vars(attention)["_attend"] = before
    if len(found) == 1:
        return x_after, found[0]
    if type(attention).with_weights is Attention.with_weights:
        raise VitrailError(
            "A method of this model's attention was replaced by one that does not say what it attends to. "
            "Put the method back, or define `with_weights` in a subclass."
        )
    return block.with_attention(x, bias, *grid)


def normed_tokens(model: ViT, x: Tensor) -> Tensor:
    """Return the last block's tokens as pooling sees them."""
    return model.norm(x) if model.config.final_norm == "before-pool" else x


def _pooling_weights(model: ViT, x: Tensor) -> Tensor:
    """Return how the pooled output weighs the last block's tokens [batch, token, width]: [batch, head, 1, token]."""
    if model.pool is not None:
        return model.pool.weights(normed_tokens(model, x))
    weights = torch.zeros(x.shape[0], 1, 1, x.shape[1], device=x.device)
    heads = 2 if model.distill_head is not None else 1  # of the classifier: their logits are averaged
    read = slice(model.config.prefix, None) if model.config.pooling == "mean" else slice(heads)
    weights[..., read] = 1.0
    return weights / weights.sum(dim=-1, keepdim=True)
