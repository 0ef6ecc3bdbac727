from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from vitrail.data.augment.rng import Purpose, generator, uniforms


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**64 - 1),
    epoch=st.integers(0, 10_000),
    first=st.integers(0, 2**40),
    count=st.integers(1, 20),
    draws=st.integers(1, 23),
)
def test_numbers_depend_on_the_position_alone(seed: int, epoch: int, first: int, count: int, draws: int) -> None:
    together = uniforms(seed, epoch, Purpose.CROP, first, count, draws)
    alone = np.concatenate([uniforms(seed, epoch, Purpose.CROP, first + i, 1, draws) for i in range(count)])
    assert (together == alone).all()
    assert ((together >= 0) & (together < 1)).all()


def test_every_part_of_the_key_matters() -> None:
    base = uniforms(1, 2, Purpose.CROP, 3, 4, 8)
    others = [
        uniforms(2, 2, Purpose.CROP, 3, 4, 8),
        uniforms(1, 3, Purpose.CROP, 3, 4, 8),
        uniforms(1, 2, Purpose.FLIP, 3, 4, 8),
        uniforms(1, 2, Purpose.CROP, 7, 4, 8),
        generator(1, 2, Purpose.CROP, 3).random((4, 8)),
    ]
    assert all(not np.isin(other, base).any() for other in others)


def test_numbers_are_uniform_and_independent() -> None:
    numbers = uniforms(0, 0, Purpose.CROP, 0, 20_000, 3)
    for column in numbers.T:
        assert stats.kstest(column, "uniform").pvalue > 1e-4
    assert np.abs(np.corrcoef(numbers.T) - np.eye(3)).max() < 0.03
    assert abs(np.corrcoef(numbers[:-1, 0], numbers[1:, 0])[0, 1]) < 0.03


def test_global_generators_are_not_advanced() -> None:
    numpy_state, torch_state = np.random.get_state()[1].copy(), torch.get_rng_state()  # noqa: NPY002
    uniforms(0, 0, Purpose.CROP, 0, 10, 4)
    generator(0, 0, Purpose.ORDER).permutation(10)
    assert (np.random.get_state()[1] == numpy_state).all()  # noqa: NPY002
    assert torch.equal(torch.get_rng_state(), torch_state)
