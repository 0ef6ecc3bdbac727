"""Plans: how a study is made to fit its budget, and what makes a row the same row."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.study.made_rows import plan_of
from vitrail.errors import VitrailError
from vitrail.study.definition import Point, changed
from vitrail.study.definitions import STUDIES, study_named
from vitrail.study.ladders import FAMILIES, ladder_for
from vitrail.study.plan import MEASURING, SAFETY, SHORTEST, Plan, describe, fitted, left_out_rows, probes, stored_plan
from vitrail.study.settings import StudySettings, public_name
from vitrail.study.speeds import Sample, Speeds, cost
from vitrail.train.config import Recipe
from vitrail.train.prepare import prepare


def speeds_of(plan: Plan, per_flop: float, overhead: float) -> Speeds:
    speeds = Speeds()
    for row in probes(plan):
        speeds.add(row, Sample(*(per_flop * cost(one) if one else None for one in (row.pretrain, None)), overhead))
    return speeds


def test_without_a_budget_the_study_is_whole() -> None:
    plan = plan_of("data-size")
    planned = fitted(plan, speeds_of(plan, 1e-9, 1.0), None, jobs=1)
    assert (planned.scale, planned.kept, len(planned.rows())) == (1.0, tuple(range(12)), 12)
    assert planned.estimate is not None and planned.estimate > 12


def test_runs_become_shorter_before_points_are_left_out() -> None:
    plan = plan_of("data-size")
    speeds = speeds_of(plan, 1e-9, 0.5)
    whole = fitted(plan, speeds, None, 1).estimate
    assert whole is not None
    half = fitted(plan, speeds, whole / 2 / SAFETY, 1)
    assert len(half.kept) == 12 and 0.3 < half.scale < 0.6
    assert half.estimate == pytest.approx(whole / 2, rel=0.02)
    roomy = fitted(plan, speeds, 2 * whole, 1)
    assert (roomy.scale, roomy.kept) == (1.0, plan.kept)


def test_points_are_left_out_by_priority_and_shown() -> None:
    plan = plan_of("data-size", budget=2.0)
    speeds = speeds_of(plan, 1e-12, 10.0)  # nothing but overhead, which no shorter run can save
    planned = fitted(plan, speeds, 95, 1)
    points = plan.study.points(plan.ladder)
    assert len(planned.kept) == 8 and planned.scale > SHORTEST
    missing = {(one.series, one.label) for number, one in enumerate(points) if number not in planned.kept}
    # The ends of the axis stay for every family, and the middle of ViT and BiT goes last.
    assert missing == {("hybrid", "25 %"), ("hybrid", "50 %"), ("ViT", "50 %"), ("BiT", "50 %")}
    assert any("left out, for the budget" in line and "hybrid 25 %" in line for line in describe(planned, 1))
    assert {(row.series, row.label) for row in left_out_rows(planned)} == missing
    assert {row.status for row in left_out_rows(planned)} == {"left out"}


def test_a_budget_that_cannot_be_kept_is_refused() -> None:
    plan = plan_of("data-size")
    with pytest.raises(VitrailError, match=r"Even the shortest form .* \(6 rows\) takes about .* Use --budget"):
        fitted(plan, speeds_of(plan, 1e-9, 60.0), 30, 1)
    slow = dataclasses.replace(plan, settings=dataclasses.replace(plan.settings, budget=2.0))
    with pytest.raises(
        VitrailError, match=r"of the budget of 2 minutes 0\.0 are left after measuring the speed\. Use --budget \d+,"
    ) as refused:
        fitted(slow, speeds_of(plan, 1e-9, 60.0), -120, 1)
    advised = int(str(refused.value).partition("--budget ")[2].partition(",")[0])
    fitted(slow, speeds_of(plan, 1e-9, 60.0), (1 - MEASURING) * 60 * advised, 1)  # is enough, however long measuring takes


def test_more_processes_take_less_time() -> None:
    plan = plan_of("data-size")
    speeds = speeds_of(plan, 1e-9, 1.0)
    one, four = (fitted(plan, speeds, None, jobs).estimate for jobs in (1, 4))
    assert one is not None and four is not None and four == pytest.approx(one / 4, rel=0.01)


def test_pre_training_that_rows_share_counts_once_and_cannot_be_divided() -> None:
    plan = plan_of("resolution")
    speeds, rows = speeds_of(plan, 1e-9, 1.0), plan.rows()
    before = {row.pretrain_key: speeds.training(row)[0] for row in rows}
    after = sum(speeds.training(row)[1] for row in rows)
    assert len(before) == 3 and len(rows) == 9
    one, many = (fitted(plan, speeds, None, jobs).estimate for jobs in (1, 100))
    assert one == pytest.approx(sum(before.values()) + after + 9)
    longest = max(before[key] + sum(speeds.training(row)[1] + 1 for row in rows if row.pretrain_key == key) for key in before)
    assert many == pytest.approx(longest)


def test_speed_is_interpolated_between_measured_costs() -> None:
    rows = {row.point.label: row for row in plan_of("compute").rows() if row.point.series == "ViT"}
    small, middle, large = (rows[name] for name in ("small", "medium", "large"))
    speeds = Speeds()
    speeds.add(small, Sample(1e-3, None, 0.0))
    speeds.add(large, Sample(9e-3, None, 0.0))
    assert middle.pretrain is not None and small.pretrain is not None
    assert speeds.per_image(small.pretrain) == 1e-3
    assert 1e-3 < speeds.per_image(middle.pretrain) < 9e-3


def test_the_plan_is_kept_whatever_the_speed_is_later(tmp_path: Path) -> None:
    settings = {"budget": 2.0, "out": tmp_path}
    plan = plan_of("positions", **settings)
    planned = dataclasses.replace(plan, scale=0.3, kept=(0, 1), estimate=50.0)
    planned.save(tmp_path / "plan.json")
    again = stored_plan(tmp_path / "plan.json", plan.study, plan.settings)
    assert again is not None and [row.key for row in again.rows()] == [row.key for row in planned.rows()]
    more_seeds = stored_plan(tmp_path / "plan.json", plan.study, dataclasses.replace(plan.settings, seeds=2, jobs=4))
    assert more_seeds is not None and {row.key for row in planned.rows()} < {row.key for row in more_seeds.rows()}
    with pytest.raises(VitrailError, match=r"other settings: budget 2.0 → 5.0\. To resume it"):
        stored_plan(tmp_path / "plan.json", plan.study, dataclasses.replace(plan.settings, budget=5.0))
    (tmp_path / "plan.json").write_text("{")
    with pytest.raises(VitrailError, match="is not the plan of a study"):
        stored_plan(tmp_path / "plan.json", plan.study, plan.settings)


@pytest.mark.parametrize("name", STUDIES)
def test_rows_have_different_keys(name: str) -> None:
    plan = plan_of(name, seeds=2)
    keys = [row.key for row in plan.rows()]
    assert len(set(keys)) == len(keys)
    assert not {row.key for row in dataclasses.replace(plan, scale=0.5).rows()} & set(keys)
    where = dataclasses.replace(plan, settings=dataclasses.replace(plan.settings, device="cuda", jobs=3, workers=2))
    assert [row.key for row in where.rows()] == keys  # where it runs does not make it another row


def test_models_of_different_resolution_share_their_pre_training() -> None:
    rows = [row for row in plan_of("resolution").rows() if row.point.series == "ViT"]
    assert len(rows) == 3 and len({row.pretrain_key for row in rows}) == 1


def test_every_part_of_the_data_is_seen_for_as_many_steps() -> None:
    rows = plan_of("data-size").rows()
    seen = {row.pretrain.steps * row.pretrain.batch for row in rows if row.pretrain and row.pretrain.steps}
    assert max(seen) - min(seen) <= 64
    assert {row.pretrain.data.fraction for row in rows if row.pretrain} == {0.1, 0.25, 0.5, 1.0}


def test_a_batch_is_no_larger_than_the_part_it_is_drawn_from(tmp_path: Path) -> None:
    """10 % of 24 images in each of five classes are 10 images, not 12."""
    pixels = np.zeros((8, 8, 3), np.uint8)
    for split, count in (("train", 24), ("test", 4)):
        for number, label in itertools.product(range(count), "abcde"):
            file = tmp_path / "images" / split / label / f"{number}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(file)
    plan = plan_of("data-size", data=f"folder:{tmp_path / 'images'}")
    plan.save(tmp_path / "plan.json")
    again = stored_plan(tmp_path / "plan.json", plan.study, plan.settings)
    assert again == plan and [row.key for row in again.rows()] == [row.key for row in plan.rows()]
    for row in plan.rows():
        assert row.pretrain is not None and row.pretrain.batch <= len(prepare(row.pretrain).train)


@pytest.mark.parametrize("size", [16, 32, 64, 96, 128, 224])
@pytest.mark.parametrize("name", STUDIES)
def test_every_study_can_be_built_at_any_size(name: str, size: int) -> None:
    """Every model of the grid exists, and its cost is known."""
    plan = plan_of(name, image_size=size, channels=3)
    for row in plan.rows():
        for recipe in (row.pretrain, row.finetune):
            if recipe is not None and (recipe is row.pretrain or row.pretrain is None):
                assert cost(recipe) > 0


def test_the_models_of_a_rung_cost_about_the_same() -> None:
    plan = plan_of("data-size", image_size=64, channels=3)
    base = plan.ladder.pretrain()
    costs = [cost(changed(base, plan.ladder.model(family))) for family in FAMILIES]
    assert max(costs) < 2 * min(costs)


def test_sizes_and_sources_are_chosen_by_the_images() -> None:
    plan = plan_of("data-size")
    assert (plan.ladder.name, plan.ladder.image_size, plan.ladder.channels, plan.ladder.flip) == ("tiny", 16, 1, 0.0)
    with pytest.raises(VitrailError, match="--image-size 90 is not a multiple of 8"):
        plan_of("data-size", image_size=90)
    from vitrail.data import open_source

    digits = open_source("digits").split("train")
    assert ladder_for(digits, source="folder:x", image_size=224).name == "paper"
    assert ladder_for(digits, source="folder:x").flip == 0.5


def test_unknown_names_are_refused() -> None:
    with pytest.raises(VitrailError, match="Did you mean data-size"):
        study_named("datasize")
    with pytest.raises(VitrailError, match=r"There is no setting optim\.rate"):
        changed(Recipe(), {"optim.rate": 1})
    with pytest.raises(VitrailError, match="--seeds is 0"):
        StudySettings(seeds=0)
    with pytest.raises(VitrailError, match="--budget is -1"):
        StudySettings(budget=-1)


def test_commands_and_names_hide_the_folders_of_a_machine() -> None:
    assert public_name("packed:/data/me/tiny?verify=1") == "packed:tiny?verify=1"
    assert (public_name("digits?classes=0-4"), public_name("/data/photos")) == ("digits?classes=0-4", "photos")
    settings = StudySettings(data="packed:/data/tiny", target="packed:/data/cifar", budget=5, jobs=4)
    assert settings.command("compute") == "vitrail study compute --data packed:tiny --target packed:cifar --budget 5 --jobs 4"
    assert StudySettings(budget=2).command("compute") == "vitrail study compute --budget 2"
    assert StudySettings(data="photos").target == "photos"


def test_a_point_is_a_change_of_two_recipes() -> None:
    point = Point(series="a", label="b")
    assert point.pretrain == {} and point.finetune == {} and point.priority == 0
