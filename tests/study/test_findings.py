"""Would results like the paper's be recognised as such, and others not?"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math

import numpy as np
import pytest

from tests.study.made_rows import Accuracy, made_rows
from vitrail.models import flops
from vitrail.study.definition import Outcome
from vitrail.study.definitions import STUDIES
from vitrail.study.judge import cost_to_reach, difference, frontier, interpolated
from vitrail.study.plan import PlannedRow
from vitrail.study.rows import DONE, Row
from vitrail.study.summary import Summary
from vitrail.train.plan import config_of


def outcomes(name: str, accuracy: Accuracy, **values: object) -> list[Outcome]:
    summary = Summary(STUDIES[name], made_rows(name, accuracy, **values))
    return [finding.judge(summary) for finding in STUDIES[name].findings]


def by_data(vit: tuple[float, float], bit: tuple[float, float]) -> Accuracy:
    """Accuracy at 10 % and at all of the data, linear between in the logarithm."""
    ends = {"ViT": vit, "hybrid": vit, "BiT": bit}

    def accuracy(row: PlannedRow) -> float:
        low, high = ends[row.point.series]
        return low + (high - low) * (1 + math.log10(row.point.x or 1))

    return accuracy


@pytest.mark.parametrize(
    ("vit", "bit", "agrees"),
    [
        ((0.3, 0.8), (0.5, 0.7), "yes"),
        ((0.3, 0.65), (0.5, 0.7), "partly"),
        ((0.3, 0.4), (0.5, 0.7), "no"),
        ((0.6, 0.8), (0.5, 0.7), "no"),
    ],
)
def test_data_size(vit: tuple[float, float], bit: tuple[float, float], agrees: str) -> None:
    (outcome,) = outcomes("data-size", by_data(vit, bit))
    assert outcome.agrees == agrees
    assert f"{100 * (bit[0] - vit[0]):+.1f} points at 10 %".replace("-", "−") in outcome.ours


def test_data_size_with_one_seed_says_so() -> None:
    (outcome,) = outcomes("data-size", by_data((0.3, 0.8), (0.5, 0.7)), seeds=1)
    assert outcome.agrees == "yes" and "one seed" in outcome.why


def test_a_point_with_one_seed_differs_between_seeds_as_the_others_do() -> None:
    """A study that its budget cut off has some points with fewer seeds: their error is not that of counting test images alone."""
    level = by_data((0.5, 0.8), (0.5, 0.77))
    rows = made_rows("data-size", lambda row: level(row) + 0.04 * (row.seed - 1))
    (finding,) = STUDIES["data-size"].findings
    assert finding.judge(Summary(STUDIES["data-size"], rows)).agrees == "unclear"
    cut_off = Summary(STUDIES["data-size"], [row for row in rows if row.seed == 1 or row.x not in (0.1, 1.0)])
    outcome = finding.judge(cut_off)
    assert outcome.agrees == "unclear" and "some points have one seed" in outcome.why
    assert cut_off.seeds == "1 to 3"
    (alone,) = outcomes("data-size", level, seeds=1)
    assert "differences between seeds are not known" in alone.why


def test_equal_points_seldom_differ_clearly() -> None:
    """By two standard errors of three seeds each, which are often alike by chance, 12 % of pairs of equal points would."""
    generator, found = np.random.default_rng(0), []
    for _ in range(200):
        values = generator.normal(0.5, 0.02, size=(10, 3))
        rows = [
            Row(study="x", point=point, series="ViT", label=str(point), seed=seed, status=DONE, test_images=10_000, finetuned=value)
            for (point, seed), value in np.ndenumerate(values)
        ]
        reached = [value for entry in Summary(STUDIES["shape"], rows).entries if (value := entry.value("finetuned"))]
        found += [difference(one, other)[1] for one, other in itertools.combinations(reached, 2)]
    assert len(found) == 200 * 45 and sum(found) / len(found) < 0.08


def test_data_size_with_equal_ends_gives_one_reason() -> None:
    (outcome,) = outcomes("data-size", by_data((0.3, 0.7), (0.5, 0.7)))
    assert (outcome.agrees, outcome.why) == ("partly", "level with all data")


def by_compute(lead: dict[str, float]) -> Accuracy:
    """Accuracy grows by a tenth with each decade of compute; families lead by some points."""

    def accuracy(row: PlannedRow) -> float:
        assert row.pretrain is not None and row.pretrain.steps is not None
        compute = 3 * flops(config_of(row.pretrain.model, 5)) * row.pretrain.steps * row.pretrain.batch
        return 0.1 * math.log10(compute) - 0.8 + lead[row.point.series]

    return accuracy


def test_compute() -> None:
    resnets, hybrids = outcomes("compute", by_compute({"ViT": 0.1, "hybrid": 0.1, "BiT": 0.0}))
    assert resnets.agrees == "yes" and "times as many" in resnets.ours
    assert hybrids.agrees == "unclear"
    resnets, hybrids = outcomes("compute", by_compute({"ViT": 0.0, "hybrid": 0.05, "BiT": 0.1}))
    assert resnets.agrees == "no" and "times fewer" in resnets.ours
    assert hybrids.agrees == "no" and "the gap does not clearly close" in hybrids.why


def by_lead(small: float, large: float) -> Accuracy:
    """Accuracy grows with compute; the hybrid leads by this much with the least and with the most of it."""

    def accuracy(row: PlannedRow) -> float:
        assert row.pretrain is not None and row.pretrain.steps is not None
        compute = flops(config_of(row.pretrain.model, 5)) * row.pretrain.steps * row.pretrain.batch
        at = min(max(math.log10(compute / 4e10) / math.log10(15), 0), 1)  # 0 and 1 at the ends that both families have
        return 0.3 + 0.2 * at + (small + (large - small) * at if row.point.series == "hybrid" else 0)

    return accuracy


@pytest.mark.parametrize(
    ("small", "large", "agrees", "why"),
    [
        (0.05, 0.0, "yes", ""),
        (0.05, 0.03, "partly", "is not closed"),
        (0.05, -0.03, "partly", "ViT leads"),
        (0.05, 0.1, "no", "the lead grows"),
        (-0.05, 0.0, "no", "does not lead"),
    ],
)
def test_hybrids(small: float, large: float, agrees: str, why: str) -> None:
    _, hybrids = outcomes("compute", by_lead(small, large))
    assert hybrids.agrees == agrees and why in hybrids.why and bool(hybrids.why) == bool(why)


def test_a_lead_vanishes_only_if_it_clearly_becomes_smaller() -> None:
    """At large compute it may be within the noise by less than a point."""
    _, hybrids = outcomes("compute", by_lead(0.05, 0.042), seeds=1, test_images=1000)
    assert hybrids.agrees == "unclear" and "are noise" in hybrids.why
    _, alone = outcomes("compute", by_lead(0.05, 0.0), seeds=1)
    assert alone.agrees == "yes" and "one seed" in alone.why


@pytest.mark.parametrize(
    ("deep", "wide", "fine", "agrees"),
    [(0.1, 0.02, 0.05, "yes"), (0.0, 0.1, 0.05, "no"), (0.1, 0.02, -0.1, "no"), (0.1, 0.02, 0.0, "unclear")],
)
def test_shape(deep: float, wide: float, fine: float, agrees: str) -> None:
    gains = {"depth": deep, "width": wide, "MLP": 0.01, "patch size": fine}

    def accuracy(row: PlannedRow) -> float:
        up = {"×½": -1, "×1": 0, "×2": 1, "×4": 2}[row.point.label]
        up = -up if row.point.series == "patch size" else up
        return 0.5 + up * gains.get(row.point.series, 0)

    (outcome,) = outcomes("shape", accuracy)
    assert outcome.agrees == agrees and "depth" in outcome.ours


def test_depth_leads_only_if_that_can_be_told() -> None:
    """Smaller patches clearly help here; whether depth helps more than width does not show."""

    def accuracy(row: PlannedRow) -> float:
        return 0.5 + {"depth ×2": 0.02, "patch size ×½": 0.2}.get(f"{row.point.series} {row.point.label}", 0)

    (outcome,) = outcomes("shape", accuracy, seeds=1, test_images=400)
    assert outcome.agrees == "unclear" and "are noise" in outcome.why


def test_shape_is_judged_by_the_metric_that_all_points_have() -> None:
    rows = made_rows("shape", lambda row: 0.5 + (0.1 if row.point.label in ("×2", "×½") else 0))
    rows = [dataclasses.replace(row, few_shot=None) if row.series == "base" else row for row in rows]
    (finding,) = STUDIES["shape"].findings
    assert "depth" in finding.judge(Summary(STUDIES["shape"], rows)).ours


@pytest.mark.parametrize(
    ("none", "others", "agrees"),
    [(0.6, (0.64, 0.642, 0.638), "yes"), (0.6, (0.64, 0.7, 0.8), "partly"), (0.6, (0.55, 0.64, 0.64), "no")],
)
def test_positions(none: float, others: tuple[float, ...], agrees: str) -> None:
    reached = dict(zip(("1-d learned", "2-d learned", "relative"), others, strict=True)) | {"none": none, "2-d fixed": 0.9}
    learned = {"neighbour_similarity": 0.6, "mean_similarity": 0.1, "line_similarity": 0.3, "off_line_similarity": 0.1}
    attention = {"first_layer_distance": 0.6, "last_layer_distance": 0.9, "first_layer_nearest": 0.2, "first_layer_farthest": 0.95}
    kinds, similarity, distance = outcomes("positions", lambda row: reached[row.point.label], **learned, **attention)
    assert (kinds.agrees, similarity.agrees, distance.agrees) == (agrees, "yes", "yes")


def test_kinds_of_positions_are_equal_only_if_that_can_be_told() -> None:
    """Each kind is clearly better than none, but they may differ by as much."""
    reached = {"none": 0.6, "1-d learned": 0.65, "2-d learned": 0.63, "relative": 0.64, "2-d fixed": 0.65}
    kinds, _, _ = outcomes("positions", lambda row: reached[row.point.label], seeds=1, test_images=4000)
    assert kinds.agrees == "unclear" and "are noise" in kinds.why
    rows = made_rows("positions", lambda row: reached[row.point.label])
    judge = STUDIES["positions"].findings[0].judge
    cut_off = judge(Summary(STUDIES["positions"], [row for row in rows if row.label in ("none", "1-d learned", "2-d fixed")]))
    assert cut_off.agrees == "partly" and "fewer than two" in cut_off.why


def test_what_is_still_random_is_not_called_learned() -> None:
    near = {"neighbour_similarity": 0.01, "mean_similarity": 0.0}
    uniform = dict.fromkeys(("first_layer_distance", "last_layer_distance", "first_layer_nearest", "first_layer_farthest"), 0.98)
    _, similarity, distance = outcomes("positions", lambda row: 0.5, **near, **uniform)
    assert (similarity.agrees, distance.agrees) == ("no", "unclear")


@functools.cache
def untrained(seeds: int) -> list[Row]:
    return made_rows("positions", lambda row: 0.5, seeds=seeds)


def learned_positions(growth: np.ndarray, lines: np.ndarray) -> list[Outcome]:
    """Judge similarity and distance where last − first layer and within − off a line are these, [point, seed]."""
    rows = []
    for row in untrained(growth.shape[1]):
        found = {"first_layer_distance": 0.7, "last_layer_distance": 0.7 + growth[row.point, row.seed]}
        found |= {"first_layer_nearest": 0.5, "first_layer_farthest": 0.9}
        if row.label not in ("none", "relative"):
            found |= {"neighbour_similarity": 0.5, "mean_similarity": 0.0}
            found |= {"line_similarity": lines[row.point, row.seed], "off_line_similarity": 0.0}
        rows.append(dataclasses.replace(row, **found))
    summary = Summary(STUDIES["positions"], rows)
    return [finding.judge(summary) for finding in STUDIES["positions"].findings[1:]]


@pytest.mark.parametrize("seeds", [1, 2, 3])
def test_distance_and_similarity_within_noise_cannot_tell(seeds: int) -> None:
    """Without an effect, either sign is as likely, so that half of all studies agreed."""
    generator, agree = np.random.default_rng(0), np.zeros(2)
    for _ in range(100):
        found = learned_positions(*generator.normal(0, 0.04, size=(2, 5, seeds)))
        agree += [outcome.agrees == "yes" for outcome in found]
        assert all("one seed" in outcome.why for outcome in found) or seeds > 1
    assert (agree <= 10).all()


def test_distance_and_similarity_beyond_noise() -> None:
    seeds = np.linspace(-0.02, 0.02, 3)[None].repeat(5, 0)
    assert [one.agrees for one in learned_positions(0.2 + seeds, 0.2 + seeds)] == ["yes", "yes"]
    assert [one.agrees for one in learned_positions(seeds - 0.2, seeds - 0.2)] == ["partly", "partly"]
    similarity, distance = learned_positions(seeds + 0.01, seeds + 0.01)
    assert "do not clearly show" in similarity.why
    assert "growth with depth +0.01, differences up to 0.02 are noise" in distance.why


@pytest.mark.parametrize(("masked", "agrees"), [(0.6, "yes"), (0.9, "partly"), (0.3, "partly"), (0.501, "unclear")])
def test_self_supervision(masked: float, agrees: str) -> None:
    reached = {"from scratch": 0.5, "masked patches": masked, "masked autoencoder": 0.7, "supervised": 0.8}
    (outcome,) = outcomes("self-supervision", lambda row: reached[row.point.label])
    assert outcome.agrees == agrees and "over scratch" in outcome.why


def test_pooling_resolution_and_optimizer() -> None:
    assert outcomes("pooling", lambda row: 0.7 if row.point.series == "class token" else 0.5)[0].agrees == "no"
    (higher,) = outcomes("resolution", lambda row: 0.5 + (row.point.x or 0) / 100, target_pixels=8)
    assert higher.agrees == "yes" and "have 8 pixels, so 32 only enlarges them" in higher.why
    (adam,) = outcomes("optimizer", lambda row: 0.6 if row.point.label == "Adam" else 0.5)
    assert adam.agrees == "yes" and "+10.0 points" in adam.ours


def by_pooling(row: PlannedRow) -> float:
    """The mean is best at the highest learning rate, the class token at the usual one."""
    best = 2e-3 if row.point.series == "class token" else 6e-3
    return 0.5 if row.point.x == pytest.approx(best) else 0.4


def test_poolings_are_equal_only_if_that_can_be_told() -> None:
    (equal,) = outcomes("pooling", by_pooling)
    assert equal.agrees == "yes"
    (same_rate,) = outcomes("pooling", lambda row: 0.5)
    assert same_rate.agrees == "partly" and "same learning rate" in same_rate.why
    (few_images,) = outcomes("pooling", by_pooling, seeds=1, test_images=100)
    assert few_images.agrees == "unclear" and "are noise" in few_images.why


def test_a_gap_closes_only_if_it_does_so_clearly() -> None:
    (level,) = outcomes("data-size", by_data((0.4, 0.42), (0.7, 0.7)), seeds=1, test_images=100)
    assert (level.agrees, level.why.split(";")[0]) == ("no", "the gap does not clearly close")
    (noisy,) = outcomes("data-size", by_data((0.4, 0.6), (0.7, 0.7)), seeds=1, test_images=200)
    assert noisy.agrees == "partly"
    (behind,) = outcomes("data-size", by_data((0.5, 0.9), (0.5, 0.7)))
    assert (behind.agrees, behind.why) == ("partly", "level on the smallest part")


def test_compute_within_noise_cannot_tell() -> None:
    resnets, _ = outcomes("compute", by_compute({"ViT": 0.05, "hybrid": 0.0, "BiT": 0.0}), seeds=1, test_images=100)
    assert resnets.agrees == "unclear" and "are noise" in resnets.why
    resnets, _ = outcomes("compute", by_compute({"ViT": 0.02, "hybrid": 0.05, "BiT": 0.0}))
    assert resnets.agrees == "partly" and "less than twice" in resnets.why


@pytest.mark.parametrize("level", [{"ViT": 0.5, "hybrid": 0.5, "BiT": 0.5}, {"ViT": 0.52, "hybrid": 0.5, "BiT": 0.5}])
def test_compute_cannot_tell_where_the_cheapest_model_already_reaches_the_height(level: dict[str, float]) -> None:
    """The cheapest BiT costs more than the cheapest ViT, which says nothing about what BiT would need."""
    resnets, _ = outcomes("compute", lambda row: level[row.point.series])
    assert resnets.agrees == "unclear" and "cheapest BiT" in resnets.why


def test_seeds_that_hit_equally_many_images_are_not_certain() -> None:
    """Three seeds with the same accuracy have no deviation, which does not make the next image's difference clear."""
    rows = made_rows("optimizer", lambda row: 0.9 + (0.01 if row.point.label == "Adam" else 0), test_images=100)
    rows = [dataclasses.replace(row, finetuned=round(row.finetuned or 0, 2)) for row in rows]
    (finding,) = STUDIES["optimizer"].findings
    outcome = finding.judge(Summary(STUDIES["optimizer"], rows))
    assert "± 0.0" in outcome.ours and outcome.agrees == "unclear"


def test_an_mlp_that_helps_more_than_depth_is_not_the_papers_shape() -> None:
    gains = {"depth": 0.1, "width": 0.02, "MLP": 0.2, "patch size": 0.1}

    def accuracy(row: PlannedRow) -> float:
        up = {"×½": -1, "×1": 0, "×2": 1, "×4": 2}[row.point.label]
        return 0.4 + (-up if row.point.series == "patch size" else up) * gains.get(row.point.series, 0)

    (outcome,) = outcomes("shape", accuracy)
    assert outcome.agrees == "partly" and "MLP" in outcome.why


@pytest.mark.parametrize("name", STUDIES)
def test_nothing_measured(name: str) -> None:
    assert {finding.judge(Summary(STUDIES[name], [])).ours for finding in STUDIES[name].findings} == {"not measured"}


def test_lines() -> None:
    line = [(1.0, 0.2), (10.0, 0.6), (100.0, 0.5)]
    assert frontier(line)[-1] == (100.0, 0.6)
    assert cost_to_reach(line, 0.4) == pytest.approx(math.sqrt(10))
    assert cost_to_reach(line, 0.1) == 1.0 and cost_to_reach(line, 0.7) is None
    assert interpolated(line, math.sqrt(10)) == pytest.approx(0.4)
