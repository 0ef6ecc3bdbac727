"""Compare timm's variant of RandAugment with timm's own functions on Pillow images."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from scipy import stats
from timm.data import auto_augment, create_transform

from tests.data.memory_splits import picture, stored
from tests.data.test_augment_ops import images
from vitrail.data.augment import Augment
from vitrail.data.augment.apply import randaugment
from vitrail.data.augment.randaugment import OPERATIONS, SKIPPED, Operations, Rules, draw_operations
from vitrail.data.batch import Batch
from vitrail.data.loader import TrainLoader
from vitrail.data.preprocess import preset
from vitrail.data.types import Array

MEAN = (0.485, 0.456, 0.406)
DEIT = Augment(
    randaugment="timm",
    randaugment_magnitude=9,
    randaugment_deviation=0.5,
    randaugment_increasing=True,
    interpolation="bicubic",
)
CHANGED_NAMES = ("Posterize", "Solarize", "Color", "Contrast", "Brightness", "Sharpness")


def timm_name(name: str, increasing: bool) -> str:
    if name.startswith("Translate"):
        return f"{name}Rel"
    return f"{name}Increasing" if increasing and name in CHANGED_NAMES else name


def timm_operation(name: str, magnitude: float, interpolation: str, increasing: bool) -> Callable[[Image.Image], Image.Image]:
    """Return timm's operation with the arguments that its create_transform gives."""
    hparams = {
        "translate_const": 100,
        "img_mean": (124, 116, 104),
        "interpolation": getattr(Image.Resampling, interpolation.upper()),
    }
    operation: Any = auto_augment.AugmentOp(timm_name(name, increasing), prob=1.0, magnitude=magnitude, hparams=hparams)
    return operation  # type: ignore[no-any-return]


def ours(augment: Augment, name: str, magnitude: float, sign: float, batch: Array) -> Array:
    operations = Operations(
        Rules.of(augment, MEAN if batch.shape[3] == 3 else (0.5,) * batch.shape[3]),
        np.full((len(batch), 1), OPERATIONS["timm"].index(name)),
        np.full((len(batch), 1), magnitude),
        np.full((len(batch), 1), sign),
        np.zeros((len(batch), 1, 2)),
    )
    result = randaugment(torch.from_numpy(batch.copy()).permute(0, 3, 1, 2), operations)
    return result.permute(0, 2, 3, 1).numpy()


@pytest.mark.parametrize("increasing", [False, True])
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("magnitude", [0.0, 1.3, 8.6, 9.0, 10.0])
@pytest.mark.parametrize("name", OPERATIONS["timm"])
def test_each_operation_equals_timms(
    name: str, magnitude: float, interpolation: str, increasing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    augment = Augment(randaugment="timm", randaugment_increasing=increasing, interpolation=interpolation)  # type: ignore[arg-type]
    operation = timm_operation(name, magnitude, interpolation, increasing)
    batch = images()
    for sign in (-1.0, 1.0):
        monkeypatch.setattr(auto_augment, "_randomly_negate", lambda value, sign=sign: sign * value)
        expected = np.stack([np.asarray(operation(Image.fromarray(image))) for image in batch]).astype(int)
        difference = np.abs(ours(augment, name, magnitude, sign, batch).astype(int) - expected)
        # Coordinates in float32 may be on the other side of the image's border than in float64.
        assert (difference > 1).mean() < 1e-3
        # Pillow truncates. So a value within a rounding error of an integer may become the next smaller one.
        assert (difference > 0).mean() < 0.03


def test_operations_are_timms() -> None:
    assert [timm_name(name, True) for name in OPERATIONS["timm"]] == auto_augment._RAND_INCREASING_TRANSFORMS
    assert [timm_name(name, False) for name in OPERATIONS["timm"]] == auto_augment._RAND_TRANSFORMS


def test_fill_and_interpolation_are_those_of_create_transform() -> None:
    transform = create_transform(
        224, is_training=True, auto_augment="rand-m9-mstd0.5-inc1", interpolation="bicubic", mean=MEAN, color_jitter=0.3
    )
    policy = next(part for part in transform.transforms if isinstance(part, auto_augment.RandAugment))
    assert (policy.num_layers, len(policy.ops)) == (DEIT.randaugment_count, len(OPERATIONS["timm"]))
    rules = Rules.of(DEIT, MEAN)
    for operation in policy.ops:
        assert operation.kwargs["fillcolor"] == rules.fill == (124, 116, 104)
        assert operation.kwargs["resample"] == Image.Resampling.BICUBIC
        assert (operation.prob, operation.magnitude, operation.magnitude_std) == (DEIT.operation_probability, 9, 0.5)
    assert not any(type(part).__name__ == "ColorJitter" for part in transform.transforms)  # not together with RandAugment


def test_magnitudes_have_the_distribution_of_timms() -> None:
    drawn = draw_operations(DEIT, MEAN, 0, 0, 0, 40_000)
    assert abs((drawn.codes == SKIPPED).mean() - 0.5) < 0.01
    magnitudes = drawn.magnitudes.ravel()
    assert magnitudes.min() > 6 and magnitudes.max() == 10
    # timm clips at 10, two deviations above 9.
    assert abs((magnitudes == 10).mean() - stats.norm.sf(2)) < 0.002
    below = magnitudes[magnitudes < 10]
    assert stats.kstest(below, lambda m: stats.norm.cdf(m, 9, 0.5) / stats.norm.cdf(2)).pvalue > 1e-3
    # Everything is drawn independently: operation, whether it is applied, magnitude, sign, and between the two operations.
    applied = (drawn.codes != SKIPPED).astype(float)
    columns = np.concatenate([applied, drawn.magnitudes, drawn.signs], axis=1)
    correlations = np.corrcoef(columns.T) - np.eye(columns.shape[1])
    assert np.abs(correlations).max() < 0.025
    for k in (0, 1):
        counts = np.bincount(drawn.codes[:, k][applied[:, k] > 0], minlength=15)
        assert stats.chisquare(counts).pvalue > 1e-4


@pytest.mark.parametrize("probability", [0.0, 0.2, 1.0])
def test_probability_of_an_operation(probability: float) -> None:
    for variant in ("torchvision", "big-vision", "timm"):
        augment = Augment(randaugment=variant, randaugment_probability=probability)  # type: ignore[arg-type]
        drawn = draw_operations(augment, MEAN, 1, 0, 0, 20_000)
        assert abs((drawn.codes != SKIPPED).mean() - probability) < 0.01
        assert (drawn.magnitudes == 10).all()
    if probability == 0:
        batch = torch.from_numpy(images()).permute(0, 3, 1, 2)
        drawn = draw_operations(augment, MEAN, 1, 0, 0, len(batch))
        assert torch.equal(randaugment(batch.clone(), drawn), batch)


def test_operations_do_not_depend_on_the_probability_or_the_deviation() -> None:
    plain = draw_operations(Augment(randaugment="timm", randaugment_probability=1), MEAN, 3, 2, 17, 100)
    varied = draw_operations(DEIT, MEAN, 3, 2, 17, 100)
    applied = varied.codes != SKIPPED
    assert (plain.codes[applied] == varied.codes[applied]).all() and (plain.signs == varied.signs).all()


def test_workers_and_the_device_agree() -> None:
    """The stored images have the model's size and the crop is the whole image, so that even the resize is exact."""
    preprocess = preset("imagenet", size=40)
    batches = {}
    for device in ("cpu", "gpu"):
        augment = Augment(**{**DEIT.to_dict(), "crop_area": (1, 1), "crop_aspect": (1, 1), "device": device})
        loader = TrainLoader(stored(40), preprocess=preprocess, augment=augment, batch=40, seed=2, workers=0)
        batches[device] = next(iter(loader))
    assert isinstance(batches["cpu"], Batch)
    assert torch.equal(batches["cpu"].images, batches["gpu"].images)


@settings(max_examples=40, deadline=None)
@given(
    height=st.integers(1, 33),
    width=st.integers(1, 33),
    channels=st.sampled_from([1, 3, 4]),
    count=st.integers(1, 5),
    seed=st.integers(0, 1000),
    interpolation=st.sampled_from(["bilinear", "bicubic"]),
)
def test_any_size_and_number_of_channels(height: int, width: int, channels: int, count: int, seed: int, interpolation: str) -> None:
    batch = torch.from_numpy(np.stack([picture(seed + i, height, width, channels) for i in range(count)])).permute(0, 3, 1, 2)
    augment = Augment(**{**DEIT.to_dict(), "randaugment_probability": 1.0, "randaugment_count": 4, "interpolation": interpolation})
    mean = (0.5,) * channels
    together = randaugment(batch.clone(), draw_operations(augment, mean, seed, 0, 0, count))
    assert together.shape == batch.shape and together.dtype == torch.uint8
    for i in range(count):
        alone = randaugment(batch[i : i + 1].clone(), draw_operations(augment, mean, seed, 0, i, 1))
        assert torch.equal(together[i], alone[0])


def test_grey_images_equal_timms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto_augment, "_randomly_negate", lambda value: value)
    batch = np.stack([picture(i, 20, 24, 1) for i in range(3)])
    for name in OPERATIONS["timm"]:
        operation = timm_operation(name, 9, "bicubic", True)
        operation.kwargs["fillcolor"] = 128  # type: ignore[attr-defined]
        expected = np.stack([np.asarray(operation(Image.fromarray(image[..., 0]))) for image in batch]).astype(int)
        difference = np.abs(ours(DEIT, name, 9, 1, batch)[..., 0].astype(int) - expected)
        assert (difference > 0).mean() < 0.01, name
