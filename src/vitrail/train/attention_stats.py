"""How sharp attention is, block by block: a cheap look at whether a Vision Transformer trains well.

When the learning rate is too high for the warm-up, attention collapses: scores grow until nearly every query attends to one key,
and gradients through softmax vanish. The loss alone does not show it, it just falls slowly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from vitrail.data.batch import Batch
from vitrail.data.loader import EvalLoader
from vitrail.models import ViT, ViTConfig
from vitrail.models.attention import Attention, AttentionPool
from vitrail.models.features import evaluating
from vitrail.models.masked import Pretraining
from vitrail.train.precision import autocast

if TYPE_CHECKING:
    from vitrail.train.loop import Loop

_IMAGES = 32
_SCORES = 16 * 2**20  # of a block at a time: 64 MiB
COLLAPSED = 0.1
"""Of the entropy of uniform attention. Local heads of healthy models lower a block's mean entropy, but not to this: it means that
queries attend to one key or two. In a collapsed run, 11 of 12 blocks had .005 to .045 of it (docs/log.md)."""
SATURATED = 30.0
"""Deviation of the scores from which softmax picks the largest alone: the entropy that is left is that of equal keys. The included
model has 0.8 to 3.8; a collapsing run had 7 after 2 epochs, 20 after 4 and 56 after 8 (docs/log.md)."""


@dataclass(frozen=True)
class AttentionStats:
    """Attention of the encoder's blocks, averaged over images, heads and those queries whose output is used."""

    score_std: tuple[float, ...]
    """Standard deviation of the scores qkᵀ/√d over the keys of a query."""
    entropy: tuple[float, ...]
    """Of the attention weights of a query, in nats."""
    uniform: tuple[float, ...]
    """The entropy of uniform attention: the logarithm of the number of keys."""
    pooling: tuple[float, float, float] | None = None
    """The same three of attention pooling."""

    def record(self) -> dict[str, Any]:
        """Return what a validation record holds: means, and lists by block."""
        by_block: dict[str, Any] = {
            "score_std": _rounded(self.score_std),
            "entropy": _rounded(self.entropy),
            "uniform_entropy": _rounded(self.uniform),
        }
        if self.pooling is not None:
            by_block["pooling_score_std"], by_block["pooling_entropy"], _ = _rounded(self.pooling)
        return {
            "attention_entropy": _mean(self.entropy),
            "attention_uniform_entropy": _mean(self.uniform),
            "attention_score_std": _mean(self.score_std),
            "attention": by_block,
        }

    def collapsed(self) -> list[int]:
        """Return the blocks whose attention has collapsed."""
        blocks = zip(self.entropy, self.uniform, self.score_std, strict=True)
        return [n for n, (entropy, most, std) in enumerate(blocks) if entropy < COLLAPSED * most or std > SATURATED]

    def warning(self, *, qk_norm: bool) -> str:
        """Return what to say when attention has collapsed in more than half of the blocks, else an empty string."""
        blocks = self.collapsed()
        if 2 * len(blocks) <= len(self.entropy):
            return ""
        entropies, deviations = ([values[number] for number in blocks] for values in (self.entropy, self.score_std))
        cures = ["a lower --optim.lr", "a longer --schedule.warmup", *([] if qk_norm else ["--model.qk-norm True"])]
        return (
            f"warning: attention has collapsed in {len(blocks)} of {len(self.entropy)} blocks: each token attends to little more "
            f"than one token, or to equal ones (entropy {min(entropies):.2f} to {max(entropies):.2f} nats, uniform attention has "
            f"{np.mean(self.uniform):.2f}; score std {min(deviations):.1f} to {max(deviations):.1f}). Such a model learns slowly "
            f"and rarely recovers. Start again with {', '.join(cures[:-1])} or {cures[-1]}."
        )


class AttentionProbe:
    """Measures the attention of a run's encoder on a few validation images, always the same ones.

    They are run as in validation, with a hook on each attention module: so it sees the tokens that the task gives the encoder
    (the visible patches of an autoencoder, say), shards are gathered, and modules of a user's own are left alone.
    """

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        trained = loop.prepared.trained
        encoder = trained.encoder if isinstance(trained, Pretraining) else trained
        self._blocks: list[Attention] = []
        self._encoder = encoder if isinstance(encoder, ViT) else None
        if self._encoder is not None:
            attentions = [getattr(block, "attention", None) for block in self._encoder.blocks]
            self._blocks = [one for one in attentions if isinstance(one, Attention)]
        self._batch: Batch | None = None
        self._was_read = False

    @torch.no_grad()
    def measure(self) -> AttentionStats | None:
        """Return the statistics of the weights as they are now, the same on every rank; None for models without attention."""
        if self._encoder is None or not self._blocks:
            return None
        runner, task, device = self.loop.step.runner, self.loop.prepared.task, self.loop.world.device
        if not self._was_read:
            self._batch, self._was_read = self._read(), True
        batch = self._batch
        if batch is None:
            return None
        seen: dict[nn.Module, Tensor] = {}
        eager = torch.compiler.set_stance("force_eager")  # a compiled model would not see the hooks
        with eager, evaluating(runner.model), self._hooks(seen), autocast(self.loop.precision, device):
            task.predict(runner, batch.images, batch.indices)
        if self.loop.world.sharded:
            runner.reshard()
        modules = [one for one in self._blocks if one in seen]
        if not modules:
            return None
        pool = self._encoder.pool
        pools = [pool] if pool is not None and pool in seen else []
        rows = torch.stack([seen[one] for one in (*modules, *pools)]).tolist()  # here the host waits, once
        deviations, entropies, uniform = zip(*rows[: len(modules)], strict=True)
        return AttentionStats(deviations, entropies, uniform, tuple(rows[-1]) if pools else None)

    def _read(self) -> Batch | None:
        """Read the images: evenly spaced, because a split is often sorted by class. None where none of them can be read."""
        loop, split = self.loop, self.loop.prepared.validation
        assert split is not None and self._encoder is not None
        count = min(num_images(self._encoder.config), len(split))
        chosen = np.unique(np.linspace(0, len(split) - 1, count).round().astype(np.int64))
        loader = EvalLoader(
            split.subset(chosen),
            preprocess=loop.prepared.preprocess,
            batch=len(chosen),
            workers=0,
            bad_images=loop.recipe.data.bad_images,
            device=loop.world.device,
        )
        batch = next(iter(loader), None)
        return batch if batch is not None and len(batch) else None

    @contextmanager
    def _hooks(self, seen: dict[nn.Module, Tensor]) -> Iterator[None]:
        """Fill `seen` with the statistics of every attention module that runs while the block does."""
        assert self._encoder is not None
        config, pool = self._encoder.config, self._encoder.pool
        last = self._encoder.blocks[-1]
        # Mean pooling does not read the last block's prefix tokens; masked training reads them, or none but the masked patches.
        skipped = config.prefix if config.pooling == "mean" and not isinstance(self.loop.prepared.trained, Pretraining) else 0

        def hook(first: int) -> Callable[..., None]:
            def measure(module: Attention, inputs: Sequence[Any], named: dict[str, Any]) -> None:
                x, bias, num_queries = _arguments(*inputs, **named)
                seen[module] = summary(module.scores(x, bias)[:, :, first:num_queries])

            return measure

        def measure_pool(module: AttentionPool, inputs: Sequence[Any]) -> None:
            seen[module] = summary(module.scores(inputs[0]))

        handles = [
            one.register_forward_pre_hook(hook(skipped if one is getattr(last, "attention", None) else 0), with_kwargs=True)
            for one in self._blocks
        ]
        if pool is not None:
            handles.append(pool.register_forward_pre_hook(measure_pool))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def summary(scores: Tensor) -> Tensor:
    """Return the mean deviation, entropy and uniform entropy of attention scores [image, head, query, key], −inf where masked."""
    visible = scores.isfinite()
    count = visible.sum(dim=-1)
    finite = scores.where(visible, 0.0)
    centred = (finite - (finite.sum(dim=-1) / count)[..., None]).where(visible, 0.0)
    deviation = (centred.square().sum(dim=-1) / count).sqrt()
    entropy = torch.special.entr(scores.softmax(dim=-1)).sum(dim=-1)
    return torch.stack([deviation.mean(), entropy.mean(), count.float().log().mean()])


def num_images(config: ViTConfig) -> int:
    """Return how many images are looked at, so that one block's scores stay small."""
    return max(1, min(_IMAGES, _SCORES // (config.heads * config.tokens**2)))


def _arguments(x: Tensor, bias: Tensor | None = None, num_queries: int | None = None) -> tuple[Tensor, Tensor | None, int | None]:
    """The arguments of `Attention.forward`."""
    return x, bias, num_queries


def _mean(values: Sequence[float]) -> float:
    return round(float(np.mean(values)), 5)


def _rounded(values: Sequence[float]) -> list[float]:
    return [round(value, 5) for value in values]
