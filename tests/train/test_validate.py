"""Validation of a run in progress."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from vitrail.data.preprocess import Preprocess
from vitrail.train.parallel import World
from vitrail.train.validate import _join_others


def test_a_rank_without_images_computes_in_the_precision_of_the_others() -> None:
    """Weights that FSDP2 gathers are bf16, and a matmul of these with float32 images fails."""
    seen: list[tuple[torch.Size, bool]] = []

    def predict(run: Any, images: torch.Tensor, indices: torch.Tensor) -> None:
        seen.append((images.shape, torch.is_autocast_enabled("cpu")))

    runner: Any = SimpleNamespace(world=World(torch.device("cpu"), mode="fsdp"))
    task: Any = SimpleNamespace(predict=predict)
    _join_others(runner, task, Preprocess(size=(8, 8)), "bf16", 2)
    assert seen == [(torch.Size([1, 3, 8, 8]), True)] * 2
