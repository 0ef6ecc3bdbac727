"""Rank the true class among all classes, with one rule for equal scores that does not depend on the order of classes."""

from __future__ import annotations

import torch
from torch import Tensor


def ranked(scores: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return (ranks, predicted classes) from scores [n, classes] and class indices [n].

    The rank is the number of other classes that score at least as much as the true class: 0 is best. So a class that ties with
    others counts as predicted last of them, and a model with constant outputs is never right, whatever the order of classes. A NaN,
    of the true class or another, is a miss. The predicted class is the true class at rank 0, else the best other class, the first
    of equals.
    """
    true = scores.gather(1, targets[:, None])
    ranks = (~(scores < true)).sum(1) - 1
    others = scores.scatter(1, targets[:, None], -torch.inf).argmax(1)
    return ranks, torch.where(ranks == 0, targets, others)
