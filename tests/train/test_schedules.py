"""Schedules against the reference's formulas, and what holds for all of them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitrail.errors import VitrailError
from vitrail.train.config import ScheduleSpec
from vitrail.train.schedules import check_schedule, factor


def test_cosine_of_the_paper():
    spec = ScheduleSpec(kind="cosine", warmup=10)
    assert factor(spec, 0, 110, 3e-3) == 0
    assert factor(spec, 5, 110, 3e-3) == pytest.approx(0.5)
    assert factor(spec, 10, 110, 3e-3) == 1
    assert factor(spec, 60, 110, 3e-3) == pytest.approx(0.5)
    assert factor(spec, 110, 110, 3e-3) == pytest.approx(0, abs=1e-12)


def test_linear_to_1e_5():
    spec = ScheduleSpec(kind="linear", warmup=10_000, end=1e-5)
    assert 1e-3 * factor(spec, 100_000, 100_000, 1e-3) == pytest.approx(1e-5)
    assert 1e-3 * factor(spec, 55_000, 100_000, 1e-3) == pytest.approx((1e-3 + 1e-5) / 2)


def test_rsqrt_with_cooldown():
    spec = ScheduleSpec(kind="rsqrt", warmup=10, timescale=100, cooldown=50)
    assert factor(spec, 310, 1000, 1.0) == pytest.approx(1 / math.sqrt(4))
    assert factor(spec, 975, 1000, 1.0) == pytest.approx(0.5 / math.sqrt(1 + 965 / 100))
    assert factor(spec, 1000, 1000, 1.0) == 0


@given(
    kind=st.sampled_from(["constant", "linear", "cosine", "rsqrt"]),
    warmup=st.integers(0, 50),
    total=st.integers(51, 500),
    share=st.floats(0, 1),
    end=st.floats(0, 1),
)
def test_it_stays_between_0_and_the_peak_and_never_rises_after_the_warm_up(kind, warmup, total, share, end):
    spec = ScheduleSpec(kind=kind, warmup=warmup, end=end)
    step = int(share * (total - 1))
    now, later = factor(spec, step, total, 1.0), factor(spec, step + 1, total, 1.0)
    assert 0 <= now <= 1 + 1e-12
    assert later <= now + 1e-12 if step >= warmup else later >= now - 1e-12 or kind != "constant"


def test_an_endless_warm_up_is_refused():
    with pytest.raises(VitrailError, match="as long as the whole run of 100"):
        check_schedule(ScheduleSpec(warmup=100), 100)
