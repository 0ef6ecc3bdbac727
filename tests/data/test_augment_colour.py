"""Compare TrivialAugment and colour jitter with torchvision's, and 3-Augment with Pillow's functions."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageFilter, ImageOps
from scipy import stats
from torchvision.transforms import functional as pil_functional
from torchvision.transforms.v2 import TrivialAugmentWide
from torchvision.transforms.v2 import functional as TF

from tests.data.memory_splits import picture, stored
from tests.data.test_augment_ops import H, W, images
from vitrail.data.augment import Augment
from vitrail.data.augment.apply import apply_operations, draw_operations
from vitrail.data.augment.colour import JITTER, THREE_AUGMENT, draw_jitter, draw_three_augment
from vitrail.data.augment.operations import SKIPPED, Operations, Style
from vitrail.data.augment.randaugment import OPERATIONS, draw_trivialaugment, trivialaugment_arguments
from vitrail.data.loader import TrainLoader
from vitrail.data.preprocess import preset
from vitrail.data.types import Array

MEAN = (0.485, 0.456, 0.406)
JITTERED = Augment(brightness=0.3, contrast=0.4, saturation=0.5, hue=0.1)
POLICIES = [Augment(trivialaugment=True), Augment(three_augment=True, brightness=0.3, contrast=0.3, saturation=0.3), JITTERED]


def apply_one(name: str, argument: float, batch: Array, arithmetic: str = "pillow") -> Array:
    style = Style(arithmetic, (0,) * batch.shape[3])  # type: ignore[arg-type]
    operations = Operations((name,), np.zeros((len(batch), 1), int), np.full((len(batch), 1), argument), style)
    result = apply_operations(torch.from_numpy(batch.copy()).permute(0, 3, 1, 2), [operations])
    return result.permute(0, 2, 3, 1).numpy()


@pytest.mark.parametrize("sign", [-1.0, 1.0])
@pytest.mark.parametrize("magnitude", [0, 1, 15, 24, 30])
@pytest.mark.parametrize("name", OPERATIONS["torchvision"])
def test_trivialaugment_equals_torchvisions(name: str, magnitude: int, sign: float) -> None:
    batch = images()
    levels, signed = TrivialAugmentWide._AUGMENTATION_SPACE[name]
    table = levels(31, H, W)
    # In float32, torchvision's middle translation is 15.999999 pixels, which it truncates to 15. Ours is 16.
    level = 0.0 if table is None else round(float(table[magnitude]), 5) * (sign if signed else 1.0)
    operate = TrivialAugmentWide()._apply_image_or_video_transform
    expected = np.stack(
        [
            operate(torch.from_numpy(image).permute(2, 0, 1), name, level, TF.InterpolationMode.NEAREST, {})  # type: ignore[arg-type]
            .permute(1, 2, 0)
            .numpy()
            for image in batch
        ]
    ).astype(int)
    argument = trivialaugment_arguments(name, np.array([magnitude]), np.array([sign]))[0]
    difference = np.abs(apply_one(name, argument, batch, "torchvision").astype(int) - expected)
    if name in ("Rotate", "ShearX", "ShearY"):
        assert (difference > 0).mean() < 0.01  # ties between two pixels
    else:
        # torchvision's float32 rounds some exact integers down by one; ours does not.
        assert difference.max() <= 1 and (difference > 0).mean() < 0.15


def test_trivialaugment_draws_one_operation_and_any_of_31_magnitudes() -> None:
    drawn = draw_trivialaugment(MEAN, 0, 0, 0, 60_000)
    assert drawn.codes.shape == (60_000, 1)
    assert stats.chisquare(np.bincount(drawn.codes[:, 0], minlength=14)).pvalue > 1e-4
    degrees = drawn.arguments[drawn.codes == drawn.names.index("Rotate")]
    assert abs((degrees > 0).mean() - 0.5) < 0.03
    values, counts = np.unique(np.abs(degrees).round(6), return_counts=True)
    assert np.allclose(values, np.arange(31) * 4.5) and stats.chisquare(counts).pvalue > 1e-4


@pytest.mark.parametrize("radius", [0.1, 0.43, 0.96, 1.37, 1.7, 1.99])  # not 0.5, 1 and 2: their sums often end in exactly .5
def test_blur_equals_pillows(radius: float) -> None:
    batch = images()
    expected = np.stack([np.asarray(Image.fromarray(image).filter(ImageFilter.GaussianBlur(radius))) for image in batch])
    difference = np.abs(apply_one("GaussianBlur", radius, batch).astype(int) - expected)
    assert difference.max() <= 1 and (difference > 0).mean() < 0.005


def test_grey_and_solarised_equal_pillows() -> None:
    batch = images()
    grey = np.stack([np.asarray(Image.fromarray(image).convert("L").convert("RGB")) for image in batch])
    assert (apply_one("Grayscale", 128, batch) == grey).all()
    solarised = np.stack([np.asarray(ImageOps.solarize(Image.fromarray(image))) for image in batch])
    assert (apply_one("Solarize", 128, batch) == solarised).all()


def test_three_augment_draws_one_of_three() -> None:
    drawn = draw_three_augment(MEAN, 0, 0, 0, 30_000)
    assert drawn.codes.shape == (30_000, 1)
    assert stats.chisquare(np.bincount(drawn.codes[:, 0], minlength=3)).pvalue > 1e-4
    radius = drawn.arguments[drawn.codes == THREE_AUGMENT.index("GaussianBlur")]
    assert stats.kstest(radius, stats.uniform(0.1, 1.9).cdf).pvalue > 1e-3
    assert (drawn.arguments[drawn.codes == THREE_AUGMENT.index("Solarize")] == 128).all()


_TORCHVISION = {
    "Brightness": pil_functional.adjust_brightness,
    "Contrast": pil_functional.adjust_contrast,
    "Color": pil_functional.adjust_saturation,
    "Hue": pil_functional.adjust_hue,
}


@pytest.mark.parametrize(
    ("name", "argument"),
    [(name, value) for name in ("Brightness", "Contrast", "Color") for value in (0.0, 0.6, 1.0, 1.31, 2.0)]
    + [("Hue", value) for value in (-0.5, -0.1, 0.0, 0.002, 0.1, 0.37, 0.5)],
)
def test_colour_jitter_equals_torchvisions_on_pillow_images(name: str, argument: float) -> None:
    batch = images()
    expected = np.stack([np.asarray(_TORCHVISION[name](Image.fromarray(image), argument)) for image in batch]).astype(int)
    difference = np.abs(apply_one(name, argument, batch).astype(int) - expected)
    if name != "Hue":
        assert (difference > 0).mean() < 1e-3
    else:  # hue and saturation are rounded down to 8 bits, so that a rounding error may be a step of either
        assert difference.max() <= 7 and (difference > 0).mean() < 0.01


def test_colour_jitter_draws_factors_and_the_order() -> None:
    drawn = draw_jitter(JITTERED, MEAN, 0, 0, 0, 24_000)
    assert (np.sort(drawn.codes, axis=1) == np.arange(4)).all()
    orders = np.unique(drawn.codes, axis=0, return_counts=True)[1]
    assert len(orders) == 24 and stats.chisquare(orders).pvalue > 1e-4
    for code, (low, high) in enumerate([(0.7, 1.3), (0.6, 1.4), (0.5, 1.5), (-0.1, 0.1)]):
        values = drawn.arguments[drawn.codes == code]
        assert len(values) == 24_000 and stats.kstest(values, stats.uniform(low, high - low).cdf).pvalue > 1e-3


def test_strong_colour_jitter_never_inverts_and_zero_is_off() -> None:
    drawn = draw_jitter(Augment(contrast=2.0), MEAN, 0, 0, 0, 1000)
    assert ((drawn.codes == SKIPPED).sum(axis=1) == 3).all()
    factors = drawn.arguments[drawn.codes == JITTER.index("Contrast")]
    assert 0 <= factors.min() < 0.1 and 2.9 < factors.max() <= 3  # from max(0, 1 − 2) to 1 + 2, as in torchvision


@pytest.mark.parametrize("augment", POLICIES, ids=["trivial", "three", "jitter"])
def test_workers_and_the_device_agree(augment: Augment) -> None:
    batches = []
    for device in ("cpu", "gpu"):
        own = dataclasses.replace(augment, crop_area=(1, 1), crop_aspect=(1, 1), device=device)  # type: ignore[arg-type]
        loader = TrainLoader(stored(30), preprocess=preset("imagenet", size=40), augment=own, batch=30, seed=2, workers=0)
        batches.append(next(iter(loader)))
    assert torch.equal(batches[0].images, batches[1].images)


@settings(max_examples=60, deadline=None)
@given(
    augment=st.sampled_from(POLICIES),
    height=st.integers(1, 33),
    width=st.integers(1, 33),
    channels=st.sampled_from([1, 3, 4]),
    count=st.integers(1, 5),
    seed=st.integers(0, 1000),
)
def test_any_size_and_number_of_channels(augment: Augment, height: int, width: int, channels: int, count: int, seed: int) -> None:
    batch = torch.from_numpy(np.stack([picture(seed + i, height, width, channels) for i in range(count)])).permute(0, 3, 1, 2)
    where = (augment, (0.5,) * channels, (height, width), seed, 0)
    together = apply_operations(batch.clone(), draw_operations(*where, 0, count))
    assert together.shape == batch.shape and together.dtype == torch.uint8
    for i in range(count):
        alone = apply_operations(batch[i : i + 1].clone(), draw_operations(*where, i, 1))
        assert (together[i].int() - alone[0].int()).abs().max() <= 1


def test_grey_images_keep_one_channel_and_equal_pillows() -> None:
    batch = np.stack([picture(i, 20, 24, 1) for i in range(3)])
    for name in ("Grayscale", "Color", "Hue"):
        assert (apply_one(name, 0.3, batch) == batch).all()
    expected = np.stack([np.asarray(Image.fromarray(image[..., 0]).filter(ImageFilter.GaussianBlur(1.5))) for image in batch])
    assert np.abs(apply_one("GaussianBlur", 1.5, batch)[..., 0].astype(int) - expected).max() <= 1
