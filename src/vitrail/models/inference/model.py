"""The module that `for_inference` returns: a model's copy, and what a caller of a model uses."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack
from typing import Any, NoReturn, Self

import torch
from torch import Tensor, nn

from vitrail.errors import VitrailError
from vitrail.models.bit import BiT
from vitrail.models.config import BiTConfig, Pair, PositionRule, ViTConfig
from vitrail.models.features import Features, check_images
from vitrail.models.fused.dispatch import Kernels
from vitrail.models.layers import Float32Linear
from vitrail.models.vit import ViT


class InferenceModel(nn.Module):
    """A copy of a model to compute with: `copy(images) → logits` in float32, and `features`, `attention` and the like.

    Images may be of any floating-point type and on any device. Everything is computed without gradients and in the precision that
    the copy was made for, whatever autocast says. It can be copied and pickled. It has no gradients and is no checkpoint: train and
    save the model it was made from.
    """

    model: ViT | BiT

    def __init__(self, model: ViT | BiT) -> None:
        super().__init__()
        self.model = model.eval().requires_grad_(False)
        self.training = False

    @property
    def config(self) -> ViTConfig | BiTConfig:
        return self.model.config

    @property
    def norm(self) -> nn.Module:
        return self.model.norm

    @property
    def head(self) -> nn.Module:
        return self.model.head

    @property
    def distill_head(self) -> nn.Module | None:
        return getattr(self.model, "distill_head", None)

    @property
    def kernels(self) -> Kernels:
        """As `ViT.kernels`; only copies on a CUDA GPU can choose others."""
        return self.model.kernels  # type: ignore[return-value]

    @kernels.setter
    def kernels(self, kernels: Kernels) -> None:
        _refuse("has no kernels to choose: those are for ViTs on CUDA GPUs")

    @property
    def device(self) -> torch.device:
        return self._parameter.device

    @property
    def dtype(self) -> torch.dtype:
        """The floating-point type that images are converted to."""
        return self._parameter.dtype

    @property
    def _parameter(self) -> Tensor:
        """One that shows where and in what the model computes; heads, which may differ, come last."""
        direct = next((tensor for tensor in self.model._parameters.values() if tensor is not None), None)  # quick, and usual
        return next(self.model.parameters()) if direct is None else direct

    def forward(self, images: Tensor) -> Tensor:
        """Compute logits [batch, outputs] in float32."""
        self._check(images)
        with self._computing():
            return self._logits(images).float()

    def features(self, images: Tensor, layers: Iterable[int] = ()) -> Features:
        self._check(images)
        with self._computing():
            return self.model.features(self._moved(images), layers)

    def distilled_logits(self, images: Tensor) -> tuple[Tensor, Tensor]:
        if not isinstance(self.model, ViT):
            raise VitrailError(f"{self.config.name} is a ResNet: it has no distillation token. Distilled ViTs have one.")
        self._check(images)
        with self._computing():
            one, two = self.model.distilled_logits(self._moved(images))
            return one.float(), two.float()

    def attention(
        self, images: Tensor, layers: Iterable[int] | None = None, *, pooling: bool = False
    ) -> Iterator[tuple[int, Tensor]]:
        self._check(images)
        return self._each(self.model.attention(self._moved(images), layers, pooling=pooling))

    def _each(self, found: Iterator[tuple[int, Tensor]]) -> Iterator[tuple[int, Tensor]]:
        """Yield each item, computed in this copy's precision and not in the caller's."""
        while True:
            with self._computing():
                item = next(found, None)
            if item is None:
                return
            yield item

    def resize(self, size: int | Pair, rule: PositionRule | None = None) -> Self:
        """Take images of another size (height, width) from now on, as `ViT.resize` does."""
        self.model.resize(size, rule)
        self._changed()
        return self

    def replace_head(self, outputs: int) -> Self:
        """Put a zero-initialised head in place of the old one, as `ViT.replace_head` does."""
        self.model.replace_head(outputs)
        cast_all_but_heads(self.model, self.dtype)  # the new head, too, is float32
        self.model.eval().requires_grad_(False)
        self._changed()
        return self

    def train(self, mode: bool = True) -> Self:
        return _refuse("cannot be trained") if mode else super().train(False)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        return _refuse("has no gradients") if requires_grad else super().requires_grad_(False)

    def attention_gradients(self, images: Tensor, outputs: Tensor) -> NoReturn:
        _refuse("has no gradients")

    def checkpoint_activations(self, blocks: int | None = None, keep: str = "nothing") -> NoReturn:
        _refuse("has no backward pass to recompute activations in")

    def state_dict(self, *arguments: Any, **named: Any) -> NoReturn:
        _refuse("holds packed and folded weights, which are no checkpoint")

    def load_state_dict(self, *arguments: Any, **named: Any) -> NoReturn:
        raise VitrailError(
            "This copy was made for inference and holds packed and folded weights. "
            "Load the weights into the model it was made from, and call for_inference again."
        )

    def _logits(self, images: Tensor) -> Tensor:
        return self.model(self._moved(images))  # type: ignore[no-any-return]

    def _changed(self) -> None:
        """Forget what was derived from the model as it was; overridden where there is such a thing."""

    def _check(self, images: Tensor) -> None:
        """Refuse wrong images as the model does, before they are converted to what it takes."""
        check_images(images, self.config)
        if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
            _refuse("cannot be transformed by torch.func, whose gradients of it would be zero")

    def _moved(self, images: Tensor) -> Tensor:
        return images.to(self.device, self.dtype)

    def _computing(self) -> AbstractContextManager[Any]:
        stack, device = ExitStack(), self.device
        stack.enter_context(torch.no_grad())
        if torch.is_autocast_enabled(device.type):
            stack.enter_context(torch.autocast(device.type, enabled=False))
        if device.type == "cuda":
            stack.enter_context(torch.cuda.device(device))
        return stack

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self._changed()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self


def deep_copied(model: ViT | BiT, memo: dict[int, Any] | None = None) -> ViT | BiT:
    """Copy a model, also where it holds tensors computed from its parameters (pruning, old-style weight norm).

    torch does not copy tensors with a history. `memo` maps what is copied already, by `id`, to the copy.
    """
    memo = {} if memo is None else memo
    for module in model.modules():
        for value in (*vars(module).values(), *module._buffers.values()):
            if isinstance(value, Tensor) and not value.is_leaf:
                memo.setdefault(id(value), value.detach().clone())
    return copy.deepcopy(model, memo)


def cast_all_but_heads(model: ViT | BiT, dtype: torch.dtype) -> None:
    """Cast a model's weights; heads that compute in float32 keep weights of that precision."""
    heads = {name: head for name in ("head", "distill_head") if type(head := getattr(model, name, None)) is Float32Linear}
    for name in heads:
        setattr(model, name, None)
    model.to(dtype)
    for name, head in heads.items():
        setattr(model, name, head.float())


def _refuse(what: str) -> NoReturn:
    raise VitrailError(f"This copy was made for inference and {what}. Use the model it was made from.")
