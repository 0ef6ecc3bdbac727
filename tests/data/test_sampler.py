from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.memory_splits import MemorySplit
from vitrail.data.sampler import EpochOrder, batch_slices, class_weights
from vitrail.errors import VitrailError


def split(n: int, targets: np.ndarray | None = None, classes: int = 3) -> MemorySplit:
    return MemorySplit([b""] * n, classes=classes, targets=targets)


def test_an_epoch_is_a_permutation_that_depends_on_seed_and_epoch() -> None:
    order = EpochOrder(split(50), batch=7, seed=1)
    first, second = order.epoch(0), order.epoch(1)
    assert sorted(first) == list(range(50)) and sorted(second) == list(range(50))
    assert (first != second).any()
    assert (EpochOrder(split(50), batch=5, seed=1).epoch(0) == first).all()
    assert (EpochOrder(split(50), batch=7, seed=2).epoch(0) != first).any()
    assert (order.epoch(0) == first).all()


@settings(max_examples=150, deadline=None)
@given(
    total=st.integers(1, 70),
    ranks=st.integers(1, 7),
    micro=st.one_of(st.none(), st.integers(1, 40)),
    partner=st.booleans(),
)
def test_slices_divide_the_global_batch(total: int, ranks: int, micro: int | None, partner: bool) -> None:
    order = EpochOrder(split(total * 2), batch=total)
    where = {"epoch": 0, "step": 1, "ranks": ranks, "micro_batch": micro, "with_partner": partner}
    if total < ranks:
        with pytest.raises(VitrailError, match="divided among"):
            list(batch_slices(order, rank=0, **where))  # type: ignore[arg-type]
        return
    parts = [list(batch_slices(order, rank=rank, **where)) for rank in range(ranks)]  # type: ignore[arg-type]
    whole = order.global_batch(0, 1)
    own = [part.indices[-part.count :] for rank in parts for part in rank]
    assert np.concatenate(own).tolist() == whole.tolist()
    assert len({len(rank) for rank in parts}) == 1
    assert all(part.count >= 1 for rank in parts for part in rank)
    assert max(sum(p.count for p in r) for r in parts) - min(sum(p.count for p in r) for r in parts) <= 1
    if micro is not None and micro * ranks <= total:
        assert max(part.count for rank in parts for part in rank) <= micro + 1
    for rank in parts:
        for part in rank:
            positions = np.concatenate([np.arange(first, first + count) for first, count in part.ranges])
            assert (whole[positions - total] == part.indices).all()
            assert part.has_partner == (partner and part.count < total)
            if part.has_partner:
                assert positions[0] - total == (part.offset - 1) % total


def test_an_epoch_without_steps_is_an_error() -> None:
    with pytest.raises(VitrailError, match=r"0 optimiser steps per epoch: 50 images < batch 128"):
        EpochOrder(split(50), batch=128)
    assert EpochOrder(split(50), batch=128, keep_last=True).steps == 1


def test_the_last_batch_may_be_kept() -> None:
    order = EpochOrder(split(50), batch=16, keep_last=True)
    assert order.steps == 4
    seen = np.concatenate([order.global_batch(0, step) for step in range(4)])
    assert sorted(seen) == list(range(50))
    assert len(order.global_batch(0, 3)) == 2


@pytest.mark.parametrize("repeats", [2, 3])
def test_repeats_are_not_adjacent_in_a_batch(repeats: int) -> None:
    order = EpochOrder(split(120), batch=16, repeats=repeats)
    seen = []
    for step in range(order.steps):
        batch = order.global_batch(0, step)
        _, counts = np.unique(batch, return_counts=True)
        assert counts.max() == repeats and counts.min() >= repeats - 1
        assert (batch != np.roll(batch, 1)).all()
        seen.append(np.unique(batch))
    assert len(np.unique(np.concatenate(seen))) == sum(map(len, seen))  # no image in two batches of an epoch


def test_balanced_epochs_have_every_class_equally_often() -> None:
    targets = np.array([0] * 80 + [1] * 15 + [3] * 4)  # class 2 has no image
    order = EpochOrder(split(99, targets, classes=4), batch=9, sampling="balanced")
    for epoch in range(3):
        chosen = order.epoch(epoch)
        assert len(chosen) == 99
        counts = np.bincount(targets[chosen], minlength=4)
        assert counts.tolist() == [33, 33, 0, 33]
        rare = np.bincount(chosen, minlength=99)[95:]
        assert rare.min() >= 8 and rare.max() <= 9
    assert (order.epoch(0) != order.epoch(1)).any()


def test_balancing_needs_one_class_per_image() -> None:
    many = MemorySplit([b""] * 4, task="multilabel", targets=np.ones((4, 3), dtype=np.float32))
    with pytest.raises(VitrailError, match="one class"):
        EpochOrder(many, batch=2, sampling="balanced")
    with pytest.raises(VitrailError, match="balanced"):
        EpochOrder(split(4), batch=2, sampling="balancd")  # type: ignore[arg-type]


def test_class_weights(tmp_path: Path) -> None:
    data = split(10, np.array([0] * 8 + [1] * 2))
    automatic = class_weights(data, "auto")
    assert automatic is not None
    np.testing.assert_allclose(automatic, [10 / 16, 10 / 4, 0])
    assert automatic[data.targets].mean() == pytest.approx(1.0)
    (tmp_path / "weights.json").write_text(json.dumps({"class 1": 4.0}))
    from_file = class_weights(data, str(tmp_path / "weights.json"))
    assert from_file is not None and from_file.tolist() == [1, 4, 1]
    assert class_weights(data, None) is None
    with pytest.raises(VitrailError, match="class 9"):
        class_weights(data, {"class 9": 1.0})
    with pytest.raises(VitrailError, match="JSON"):
        class_weights(data, str(tmp_path / "absent.json"))
    with pytest.warns(UserWarning, match="both on"):
        class_weights(data, "auto", sampling="balanced")
