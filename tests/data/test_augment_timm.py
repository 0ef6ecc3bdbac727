"""Compare timm's variant of RandAugment with timm's own functions on Pillow images."""

from __future__ import annotations

import dataclasses
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
from vitrail.data.augment import Augment, apply
from vitrail.data.augment.apply import apply_operations, draw_operations
from vitrail.data.augment.batch_ops import affine
from vitrail.data.augment.operations import GEOMETRIC, SKIPPED, Operations
from vitrail.data.augment.randaugment import OPERATIONS, draw_randaugment, randaugment_arguments, randaugment_style
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
    one = np.ones((len(batch), 1))
    arguments = randaugment_arguments(augment, name, magnitude * one, sign * one, batch.shape[1:3])
    style = randaugment_style(augment, MEAN if batch.shape[3] == 3 else (0.5,) * batch.shape[3])
    operations = Operations((name,), np.zeros((len(batch), 1), int), arguments, style)
    result = apply_operations(torch.from_numpy(batch.copy()).permute(0, 3, 1, 2), [operations])
    return result.permute(0, 2, 3, 1).numpy()


def warp_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apply, "_warp", lambda images, m, _, style: affine(images, m, style.fill, style.interpolation))


@pytest.mark.parametrize("increasing", [False, True])
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("magnitude", [0.0, 1.3, 8.6, 9.0, 10.0])
@pytest.mark.parametrize(("name", "device"), [(n, "cpu") for n in OPERATIONS["timm"]] + [(n, "gpu") for n in GEOMETRIC])
def test_each_operation_equals_timms(
    name: str, magnitude: float, interpolation: str, increasing: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device == "gpu":
        warp_as_on_a_gpu(monkeypatch)
    augment = Augment(randaugment="timm", randaugment_increasing=increasing, interpolation=interpolation)  # type: ignore[arg-type]
    operation = timm_operation(name, magnitude, interpolation, increasing)
    batch = images()
    for sign in (-1.0, 1.0):
        monkeypatch.setattr(auto_augment, "_randomly_negate", lambda value, sign=sign: sign * value)
        expected = np.stack([np.asarray(operation(Image.fromarray(image))) for image in batch]).astype(int)
        difference = np.abs(ours(augment, name, magnitude, sign, batch).astype(int) - expected)
        # Coordinates in float32 may be on the other side of the image's border than in float64.
        assert (difference > 1).mean() < (1e-3 if device == "gpu" else 1e-9)
        # Pillow truncates. So a value within a rounding error of an integer may become the next smaller one.
        assert (difference > 0).mean() < (0.03 if device == "gpu" else 0.01)


def test_operations_are_timms() -> None:
    assert [timm_name(name, True) for name in OPERATIONS["timm"]] == auto_augment._RAND_INCREASING_TRANSFORMS
    assert [timm_name(name, False) for name in OPERATIONS["timm"]] == auto_augment._RAND_TRANSFORMS


def test_fill_and_interpolation_are_those_of_create_transform() -> None:
    transform = create_transform(
        224, is_training=True, auto_augment="rand-m9-mstd0.5-inc1", interpolation="bicubic", mean=MEAN, color_jitter=0.3
    )
    policy = next(part for part in transform.transforms if isinstance(part, auto_augment.RandAugment))
    assert (policy.num_layers, len(policy.ops)) == (DEIT.randaugment_count, len(OPERATIONS["timm"]))
    style = randaugment_style(DEIT, MEAN)
    for operation in policy.ops:
        assert operation.kwargs["fillcolor"] == style.fill == (124, 116, 104)
        assert operation.kwargs["resample"] == Image.Resampling.BICUBIC and style.interpolation == "bicubic"
        assert (operation.prob, operation.magnitude, operation.magnitude_std) == (DEIT.operation_probability, 9, 0.5)
    assert not any(type(part).__name__ == "ColorJitter" for part in transform.transforms)  # not together with RandAugment


def test_magnitudes_have_the_distribution_of_timms() -> None:
    drawn = draw_randaugment(DEIT, MEAN, (64, 64), 0, 0, 0, 200_000)
    applied = drawn.codes != SKIPPED
    assert abs(applied.mean() - 0.5) < 0.005
    for k in (0, 1):
        assert stats.chisquare(np.bincount(drawn.codes[:, k][applied[:, k]], minlength=15)).pvalue > 1e-4
    rotated = drawn.codes == OPERATIONS["timm"].index("Rotate")
    degrees = drawn.arguments[rotated]
    assert abs((degrees > 0).mean() - 0.5) < 0.02
    magnitudes = np.abs(degrees) / 3
    # timm clips at 10, two deviations above 9.
    assert magnitudes.max() == 10 and abs((magnitudes == 10).mean() - stats.norm.sf(2)) < 0.005
    below = magnitudes[magnitudes < 10]
    assert stats.kstest(below, lambda m: stats.norm.cdf(m, 9, 0.5) / stats.norm.cdf(2)).pvalue > 1e-3
    # The first operation says nothing about the second.
    assert abs(np.corrcoef(applied.T)[0, 1]) < 0.01
    both = rotated.all(axis=1)
    assert abs(stats.spearmanr(*np.abs(drawn.arguments[both]).T).statistic) < 0.15


@pytest.mark.parametrize("probability", [0.0, 0.2, 1.0])
def test_probability_of_an_operation(probability: float) -> None:
    for variant in ("torchvision", "big-vision", "timm"):
        augment = Augment(randaugment=variant, randaugment_probability=probability)  # type: ignore[arg-type]
        drawn = draw_randaugment(augment, MEAN, (64, 64), 1, 0, 0, 20_000)
        assert abs((drawn.codes != SKIPPED).mean() - probability) < 0.01
    if probability == 0:
        batch = torch.from_numpy(images()).permute(0, 3, 1, 2)
        nothing = draw_operations(augment, MEAN, (64, 64), 1, 0, 0, len(batch))
        assert torch.equal(apply_operations(batch.clone(), nothing), batch)


def test_operations_do_not_depend_on_the_probability() -> None:
    always = draw_randaugment(dataclasses.replace(DEIT, randaugment_probability=1.0), MEAN, (64, 64), 3, 2, 17, 100)
    sometimes = draw_randaugment(DEIT, MEAN, (64, 64), 3, 2, 17, 100)
    applied = sometimes.codes != SKIPPED
    assert (always.codes[applied] == sometimes.codes[applied]).all()
    assert (always.arguments[applied] == sometimes.arguments[applied]).all()


def test_workers_and_the_device_agree() -> None:
    """The stored images have the model's size and the crop is the whole image, so that even the resize is exact."""
    preprocess = preset("imagenet", size=40)
    batches = {}
    for device in ("cpu", "gpu"):
        augment = dataclasses.replace(DEIT, crop_area=(1, 1), crop_aspect=(1, 1), device=device)  # type: ignore[arg-type]
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
    augment = dataclasses.replace(
        DEIT,
        randaugment_probability=1.0,
        randaugment_count=4,
        interpolation=interpolation,  # type: ignore[arg-type]
    )
    where = (augment, (0.5,) * channels, (height, width), seed, 0)
    together = apply_operations(batch.clone(), draw_operations(*where, 0, count))
    assert together.shape == batch.shape and together.dtype == torch.uint8
    for i in range(count):
        alone = apply_operations(batch[i : i + 1].clone(), draw_operations(*where, i, 1))
        assert torch.equal(together[i], alone[0])


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_grey_images_equal_timms(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if device == "gpu":
        warp_as_on_a_gpu(monkeypatch)
    monkeypatch.setattr(auto_augment, "_randomly_negate", lambda value: value)
    batch = np.stack([picture(i, 20, 24, 1) for i in range(3)])
    for name in OPERATIONS["timm"]:
        operation = timm_operation(name, 9, "bicubic", True)
        operation.kwargs["fillcolor"] = 128  # type: ignore[attr-defined]
        expected = np.stack([np.asarray(operation(Image.fromarray(image[..., 0]))) for image in batch]).astype(int)
        difference = np.abs(ours(DEIT, name, 9, 1, batch)[..., 0].astype(int) - expected)
        assert (difference > 0).mean() < 0.01, name
