from __future__ import annotations

import dataclasses
import json

import pytest

from vitrail.data.augment import LEVELS, Augment, augment_level
from vitrail.errors import VitrailError


def test_round_trip_through_json() -> None:
    augment = Augment(crop="inception-tensorflow", randaugment="big-vision", mixup=0.2, repeats=3, device="gpu")
    assert Augment.from_dict(json.loads(json.dumps(augment.to_dict()))) == augment
    assert Augment.from_dict({}) == Augment()


def test_an_unknown_key_is_refused_with_a_suggestion() -> None:
    with pytest.raises(VitrailError, match=r"'mixupp'.*mixup"):
        Augment.from_dict({"mixupp": 0.2})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("crop_area", 0.5), ("crop_aspect", "wide"), ("erase_area", ())),
        *(("crop", "center"), ("crop_area", (0.0, 1.0)), ("crop_area", (0.5, 0.2)), ("crop_area", (0.5, 1.2))),
        *(("flip", 1.5), ("mixup", -1.0), ("repeats", 0), ("randaugment", "timmm"), ("smoothing", -0.1)),
        *(("hue", 0.6), ("brightness", -0.1), ("contrast", float("nan")), ("mix_until", 1.1)),
        *(("device", "tpu"), ("mixup", float("nan")), ("mix_probability", float("nan"))),
    ],
)
def test_invalid_values_are_refused_with_the_field_name(field: str, value: object) -> None:
    with pytest.raises(VitrailError, match=field):
        Augment(**{field: value})  # type: ignore[arg-type]


def test_torchvision_magnitudes_are_integers_up_to_30() -> None:
    with pytest.raises(VitrailError, match="0 to 30"):
        Augment(randaugment="torchvision", randaugment_magnitude=31)
    assert Augment(randaugment="big-vision", randaugment_magnitude=31).randaugment_magnitude == 31


@pytest.mark.parametrize("two", [{"randaugment": "timm", "three_augment": True}, {"trivialaugment": True, "three_augment": True}])
def test_only_one_policy_can_be_on(two: dict[str, object]) -> None:
    with pytest.raises(VitrailError, match="on together"):
        Augment(**two)  # type: ignore[arg-type]


def test_timm_magnitudes_go_up_to_10() -> None:
    with pytest.raises(VitrailError, match="0 to 10"):
        Augment(randaugment="timm", randaugment_magnitude=11)


@pytest.mark.parametrize(("field", "value"), [("randaugment_deviation", 0.5), ("randaugment_increasing", True)])
def test_settings_of_timm_alone_are_refused_elsewhere(field: str, value: object) -> None:
    Augment(randaugment="timm", **{field: value})  # type: ignore[arg-type]
    with pytest.raises(VitrailError, match=f"{field}.*timm"):
        Augment(randaugment="big-vision", **{field: value})  # type: ignore[arg-type]


def test_probability_of_an_operation_is_the_variants_own_by_default() -> None:
    assert [Augment(randaugment=name).operation_probability for name in ("torchvision", "big-vision", "timm")] == [1, 1, 0.5]
    assert Augment(randaugment="timm", randaugment_probability=0.3).operation_probability == 0.3
    with pytest.raises(VitrailError, match="randaugment_probability"):
        Augment(randaugment_probability=1.5)


def test_augreg_levels() -> None:
    table = {
        name: (augment.randaugment_count, augment.randaugment_magnitude, augment.mixup)
        for name in LEVELS
        if (augment := augment_level(name)).randaugment == "big-vision"
    }
    assert table == {
        "light1": (2, 0, 0),
        "light2": (2, 10, 0.2),
        "medium1": (2, 15, 0.2),
        "medium2": (2, 15, 0.5),
        "strong1": (2, 20, 0.5),
        "strong2": (2, 20, 0.8),
    }
    assert augment_level("none") == Augment()
    assert augment_level("medium1", flip=0.0).flip == 0
    with pytest.raises(VitrailError, match="medium"):
        augment_level("medium")


def test_it_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Augment().flip = 0.0  # type: ignore[misc]
