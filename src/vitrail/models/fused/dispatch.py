"""Where the fused kernels enter a model: at the images, at the encoder's input, and from block to block.

Each entry asks two questions at every call. Does the module compute exactly what the kernels compute (`whitelist.py`,
`ordinary_call.py`)? And do the kernels run, and run rightly, on this device (`self_test.py`)? Where either answer is no, the
modules run as torch has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, get_args

import torch
from torch import Tensor, nn

from vitrail.errors import VitrailError
from vitrail.models.attention import grid_for
from vitrail.models.config import Pair
from vitrail.models.features import in_precision_of
from vitrail.models.fused import encoder, launch, self_test, whitelist
from vitrail.models.fused.encoder import PendingResidual
from vitrail.models.fused.ordinary_call import is_ordinary_call
from vitrail.models.fused.sharded import is_sharded
from vitrail.models.layers import PatchEmbedding
from vitrail.models.positions import Positions
from vitrail.models.recompute import Recompute

if TYPE_CHECKING:
    from vitrail.models.vit import Block, ViT

Kernels = Literal["auto", "plain", "fp8"]
_KERNELS: tuple[Kernels, ...] = get_args(Kernels)


def patchify(model: ViT, images: Tensor) -> Tensor:
    """Cut images into patches in the precision of the patch embedding, in one pass; or return images in the weights' precision."""
    if _fuses_patchify(model, images):
        from vitrail.models.fused.patchify import patchify as patchify_images

        dtype = encoder.matmul_dtype(model.patches.weight)
        assert dtype is not None
        return patchify_images(images, model.patches.patch, dtype)
    return in_precision_of(images, next(model.patches.parameters(), images))


def _fuses_patchify(model: ViT, images: Tensor) -> bool:
    """Tell whether a kernel makes the patches. It has no gradient, and a hybrid's ResNet takes images."""
    if model.kernels == "plain" or model.resnet is not None or not whitelist.is_plain(model.patches, PatchEmbedding):
        return False
    weight = model.patches.weight
    dtype = encoder.matmul_dtype(weight)
    if dtype is None or images.requires_grad or images.device != weight.device or images.numel() == 0:
        return False
    if weight.dtype is torch.float64:  # which autocast does not cast: it must meet patches of its own precision
        return False
    plain = whitelist.is_plain_tensor(images) and whitelist.is_plain_tensor(weight)
    return plain and is_ordinary_call() and _kernels_run(weight, dtype)


def fuses_positions(model: ViT, patches: Tensor) -> bool:
    """Tell whether prefix tokens and positions are added by a kernel."""
    if model.kernels == "plain" or type(model.patches) is not PatchEmbedding:
        return False
    # First what torch.compile stops at: it cannot read the dictionaries of modules.
    return can_fuse(patches) and whitelist.are_plain_positions(model.positions) and whitelist.holds_plain_tensors(model)


def add_prefix_and_positions(model: ViT, patches: Tensor, prefix: Sequence[Tensor], *other: Pair) -> Tensor:
    """z₀ of equation 1 in one pass: what all images share is computed once, and each image's patches are added to it."""
    from vitrail.models.fused import prefix_positions

    blank = torch.zeros(1, *patches.shape[1:], device=patches.device, dtype=model.patches.weight.dtype)
    # Times one, so that a token's gradient is not a slice of all tokens': DDP warns of strides other than the parameter's.
    # In the weight's precision: a token of another one must not decide that of all.
    shared = torch.cat([*((token * 1).to(blank.dtype) for token in prefix), blank], dim=1)
    return prefix_positions.add_prefix_and_positions(patches, model.positions.at_input(shared, *other)[0])


class ResidualStream:
    """The tokens on their way through the blocks, and through the norm after them.

    A block that is plain takes over the pending addition of the one before (`Block.forward_pending`); any other gets whole tokens
    and is called as a module, hooks and all. `other` is the grid of these tokens where it is not the model's own.
    """

    def __init__(self, x: Tensor, kernels: Kernels, recompute: Recompute | None = None, *other: Pair, fp8: bool = False) -> None:
        if kernels not in _KERNELS:
            raise VitrailError(f"model.kernels is {kernels!r}; it can be {', '.join(_KERNELS)}.")
        self._kernels, self._recompute, self._fp8, self._other = kernels, recompute or Recompute(), fp8, other
        self._continue_with(x)

    def _continue_with(self, x: Tensor) -> None:
        """Decide about tokens that modules have computed: a user's code may have changed anything."""
        self._pending = PendingResidual(x)
        self._uses_autocast = encoder.uses_autocast(x)
        self._dtype = encoder.matmul_dtype(x) if self._kernels != "plain" and can_fuse(x) else None

    def run(self, number: int, block: nn.Module, positions: Positions | None = None, num_queries: int | None = None) -> None:
        """Run block `number`, with what positions add before it or inside it."""
        dtype, x = self._dtype, self._pending.x
        if (
            dtype is not None
            and (positions is None or whitelist.add_only_at_input(positions))
            and fuses_block(block, x, dtype, uses_autocast=self._uses_autocast)
        ):
            self._run_fused(number, block, num_queries)  # type: ignore[arg-type]
            return
        x, bias = self.tokens, None
        if positions is not None:
            x, bias = positions.before_layer(x, number, *self._other), positions.bias(number, *self._other)
        if hasattr(block, "with_attention"):
            x = self._recompute.run(number, block, x, bias, num_queries, *grid_for(block, self._other))
        else:  # a module of a user's own, which takes tokens and returns all of them
            x = self._recompute.run(number, block, *((x,) if bias is None else (x, bias)))[:, :num_queries]
        self._continue_with(x)

    def _run_fused(self, number: int, block: Block, num_queries: int | None) -> None:
        cheap = self._recompute.keep == "matmuls" and self._recompute.applies_to(number)
        options = encoder.draw_noise(block, self._pending.x)
        options = options._replace(num_queries=num_queries, fp8=self._fp8, recompute_cheap=cheap)
        if cheap:  # the branches themselves keep matmul outputs only
            self._pending = block.forward_pending(self._pending, options)
        else:
            self._pending = self._recompute.run(number, block.forward_pending, self._pending, options, draws=False)

    @property
    def tokens(self) -> Tensor:
        """The tokens after the last block."""
        if self._pending.branch is not None:
            self._pending = PendingResidual(encoder.settle(self._pending))
        return self._pending.x

    def normed(self, norm: nn.Module) -> Tensor:
        """Return the tokens after the last block and a norm."""
        if self._pending.branch is not None and whitelist.is_plain_norm(norm, self._pending.x.shape[-1]):
            return encoder.settle_and_norm(self._pending, norm)  # type: ignore[arg-type]
        return norm(self.tokens)  # type: ignore[no-any-return]


def can_fuse(x: Tensor) -> bool:
    """Tell whether fused kernels can run on these tokens: on their device, in their precision, in this kind of call."""
    dtype = encoder.matmul_dtype(x)
    if dtype is None or x.dtype not in (torch.float32, dtype) or x.ndim != 3 or x.numel() == 0:
        return False
    return whitelist.is_plain_tensor(x) and is_ordinary_call() and _kernels_run(x, dtype)


def fuses_block(block: nn.Module, x: Tensor, dtype: torch.dtype, *, uses_autocast: bool) -> bool:
    """Tell whether a block runs in fused kernels on tokens that `can_fuse`, with matmuls of this precision."""
    device = x.get_device()
    if uses_autocast:
        shape = whitelist.shape_of_block(block, device, whitelist.AUTOCAST_DTYPES)
    else:  # torch's modules say what they think of mixed precisions; FSDP2 may gather others than it holds
        shape = whitelist.shape_of_block(block, device, (dtype,))
        if shape is None and is_sharded(block):
            shape = whitelist.shape_of_block(block, device, whitelist.AUTOCAST_DTYPES)
    return shape is not None and _block_runs(shape, x, dtype)


def is_fusable(model: ViT) -> bool:
    """Tell whether the fused kernels know all parts of the encoder, as it is now."""
    return whitelist.add_only_at_input(model.positions) and all(whitelist.is_plain_block(block) for block in model.blocks)


def _kernels_run(x: Tensor, dtype: torch.dtype) -> bool:
    """Tell whether the kernels run on the device of x, or whether x is fake and stands for a tensor on a GPU."""
    return launch.has_triton() and (launch.is_fake(x) or (x.is_cuda and self_test.works_on(x.device, dtype)))


def _block_runs(shape: whitelist.BlockShape, x: Tensor, dtype: torch.dtype) -> bool:
    """Tell whether blocks of this shape passed their self-test on the device of x."""
    return launch.is_fake(x) or self_test.works(x.device, dtype, *shape)
