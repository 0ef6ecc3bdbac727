"""Schedules against the reference's formulas, and what holds for all of them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitrail.errors import VitrailError
from vitrail.train.config import Recipe, ScheduleSpec
from vitrail.train.schedules import check_schedule, describe_schedule, factor, in_steps


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
    with pytest.raises(VitrailError, match="warm-up of 500 steps is longer than the whole run of 100"):
        check_schedule(ScheduleSpec(warmup=500), 100)


@pytest.mark.parametrize(
    ("written", "stored", "steps"),
    [
        (500, 500, 500),
        ("500", 500, 500),
        ("500 steps", 500, 500),
        ("10ep", "10ep", 1900),
        ("10 epochs", "10ep", 1900),
        ("0.5 Epochs", "0.5ep", 95),
        ("5%", "5%", 2850),
        ("2.5 %", "2.5%", 1425),
        ("0%", 0, 0),
        ("0ep", 0, 0),
        (0, 0, 0),
        ("0.0001%", "0.0001%", 1),  # a warm-up that is asked for is not rounded away
        ("0.00001%", "1e-05%", 1),  # stored with an exponent, and read again
        ("1e3", 1000, 1000),
    ],
)
def test_a_warm_up_in_steps_epochs_or_as_a_part_of_the_run(written, stored, steps):
    spec = ScheduleSpec(warmup=written, cooldown=written)
    assert (spec.warmup, spec.cooldown) == (stored, stored) and type(spec.warmup) is type(stored)
    found = in_steps(spec, 57_000, 190)
    assert (found.warmup, found.cooldown) == (steps, steps)
    assert Recipe.from_dict(Recipe(schedule=spec).to_dict()).schedule == spec


@pytest.mark.parametrize("written", [-1, "-5%", "100%", "ten epochs", "10 ep 5", 0.05, 10.0, True, "", "5pc", None])
def test_a_warm_up_that_means_nothing_is_refused(written):
    with pytest.raises(VitrailError, match=r"schedule\.warmup is .*steps such as 500, of epochs such as 10ep, or .* 5%"):
        ScheduleSpec(warmup=written)


def test_a_schedule_is_described_in_its_words_and_in_steps():
    spec = ScheduleSpec(warmup="10ep", cooldown="5%")
    text = describe_schedule(spec, "57,000 steps", in_steps(spec, 57_000, 190))
    assert text == "cosine over 57,000 steps, warm-up 10 epochs = 1,900 steps, cool-down 5 % of the run = 2,850 steps"
    assert describe_schedule(ScheduleSpec(warmup=1), "9 steps") == "cosine over 9 steps, warm-up 1 step"


def test_a_warm_up_longer_than_the_run_is_refused_in_its_own_words():
    with pytest.raises(VitrailError, match="warm-up of 10 epochs is as long as the whole run of 1900 steps"):
        in_steps(ScheduleSpec(warmup="10ep"), 1900, 190)
    with pytest.raises(VitrailError, match="only 5 epochs"):
        Recipe(epochs=5, schedule=ScheduleSpec(warmup="10ep"))
    with pytest.raises(VitrailError, match=r"only 1 epoch\."):
        Recipe(epochs=1, schedule=ScheduleSpec(warmup="10ep"))
    with pytest.raises(TypeError, match="in_steps"):
        factor(ScheduleSpec(warmup="10ep"), 0, 100, 1.0)


@pytest.mark.parametrize("length", ["100%", "150%"])
def test_a_warm_up_of_the_whole_run_or_more_is_a_sentence(length: str) -> None:
    with pytest.raises(VitrailError, match=f"schedule.warmup is {length}; a part of the run is less than 100%"):
        ScheduleSpec(warmup=length)
