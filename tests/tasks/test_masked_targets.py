"""Targets against a slow version in exact fractions, and losses against what a constant prediction costs."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch

from vitrail.data.preprocess import Preprocess, preset
from vitrail.errors import VitrailError
from vitrail.tasks.masked import Baseline, Masked, MaskedMeter, MaskedPrediction, compute_baseline
from vitrail.tasks.patch_targets import Colours, PixelValues

CASES = [("google-vit", 3), ("imagenet", 3), ("google-vit", 1)]


def images_of(size: tuple[int, int], channels: int, count: int = 3) -> np.ndarray:
    """Whole pixel values [image, row, column, channel], some patches on the very border between two bins."""
    random = np.random.default_rng(0)
    pixels = random.integers(0, 256, (count, *size, channels))
    pixels[:, : size[0] // 2] = pixels[:, : size[0] // 2] // 3 + 40 * np.arange(count)[:, None, None, None]
    pixels[0, :8, :8], pixels[1, :8, :8] = 0, 255
    pixels[2, :8, :8] = np.where(np.indices((8, 8)).sum(0) % 2, 255, 0)[..., None]  # a mean of exactly one half
    return pixels


def normalised(pixels: np.ndarray, preprocess: Preprocess) -> torch.Tensor:
    return preprocess.normalise(torch.from_numpy(pixels.astype(np.uint8)).permute(0, 3, 1, 2))


def slow_bins(pixels: np.ndarray, patch: int, cells: int) -> np.ndarray:
    """Patch by patch, cell by cell, pixel by pixel, in fractions: a pixel may lie in two cells by parts."""
    count, height, width, channels = pixels.shape
    side, found = Fraction(patch, cells), []

    def part(pixel: int, cell: int) -> Fraction:
        return max(Fraction(0), min(Fraction(pixel + 1), (cell + 1) * side) - max(Fraction(pixel), cell * side))

    for image in range(count):
        for top in range(0, height, patch):
            for left in range(0, width, patch):
                codes = []
                for row in range(cells):
                    for column in range(cells):
                        code = 0
                        for channel in range(channels):
                            total = sum(
                                int(pixels[image, top + y, left + x, channel]) * part(y, row) * part(x, column)
                                for y in range(patch)
                                for x in range(patch)
                            )
                            code = code * 8 + min(int(total / side**2 / 255 * 8), 7)
                        codes.append(code)
                found.append(codes)
    return np.array(found).reshape(count, -1, cells**2)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "channels"), CASES)
@pytest.mark.parametrize(("patch", "cells"), [(8, 1), (8, 4), (6, 4)])
def test_colours_are_those_of_exact_arithmetic(name: str, channels: int, patch: int, cells: int) -> None:
    size = (2 * patch + 8 - 8 % patch if patch == 8 else 12, 24)
    preprocess = preset(name, size=size, channels=channels)
    pixels = images_of(size, channels)
    target = Colours(preprocess, (patch, patch), cells)
    assert target.outputs == cells**2 * 8**channels
    found = target.of(normalised(pixels, preprocess))
    assert found.dtype == torch.int64
    np.testing.assert_array_equal(found.numpy(), slow_bins(pixels, patch, cells))


def test_black_white_and_the_middle() -> None:
    preprocess = preset("imagenet", size=8)
    target = Colours(preprocess, (8, 8))
    black, white, middle = target.of(normalised(images_of((8, 8), 3), preprocess)).flatten().tolist()
    assert (black, white, middle) == (0, 511, 4 * 64 + 4 * 8 + 4)


@pytest.mark.parametrize("normal", [False, True])
@pytest.mark.parametrize(("name", "channels"), CASES)
def test_pixels_are_those_before_normalisation(name: str, channels: int, normal: bool) -> None:
    preprocess = preset(name, size=(16, 24), channels=channels)
    pixels = images_of((16, 24), channels)
    found = PixelValues(preprocess, (8, 8), normal).of(normalised(pixels, preprocess)).numpy()
    for image, (row, column) in ((0, (0, 0)), (1, (1, 2)), (2, (0, 1))):
        patch = pixels[image, 8 * row : 8 * row + 8, 8 * column : 8 * column + 8].astype(np.float64) / 255
        wanted = patch.transpose(2, 0, 1).ravel()
        if normal:
            wanted = (wanted - wanted.mean()) / np.sqrt(wanted.var(ddof=1) + 1e-6)
        np.testing.assert_allclose(found[image, 3 * row + column], wanted, atol=2e-5)


def test_16_bits() -> None:
    preprocess = preset("google-vit", size=8, channels=1, bits=16)
    pixels = np.full((2, 8, 8, 1), 40_000)
    pixels[1] = 8191  # one below an eighth of the range
    images = preprocess.normalise(torch.from_numpy(pixels.astype(np.float32)).permute(0, 3, 1, 2))
    assert Colours(preprocess, (8, 8)).of(images).flatten().tolist() == [4, 0]


TARGETS = {
    "mean-colour": lambda p: Colours(p, (8, 8)),
    "downsized": lambda p: Colours(p, (8, 8), 4),
    "pixels": lambda p: PixelValues(p, (8, 8)),
    "normalised": lambda p: PixelValues(p, (8, 8), True),
}


@pytest.mark.parametrize("name", TARGETS)
def test_the_best_constant_prediction_has_the_logged_loss_and_no_constant_is_better(name: str) -> None:
    preprocess = preset("google-vit", size=(16, 24))
    target = TARGETS[name](preprocess)
    images = normalised(images_of((16, 24), 3, count=12), preprocess)
    wanted = target.of(images)
    if isinstance(target, Colours):
        counts = torch.from_numpy(target.histogram(wanted)).double()
        best = (counts / counts.sum(1, keepdim=True)).clamp(min=1e-30).log().flatten()
    else:
        best = wanted.double().mean(dim=(0, 1))
    constant = best.float().expand(*wanted.shape[:2], -1)
    baseline = compute_baseline(target, images.split(5))
    assert target.loss(constant, wanted).mean().item() == pytest.approx(baseline.loss, rel=1e-5)
    worse = constant + 0.1 * torch.randn(constant.shape[-1], generator=torch.Generator().manual_seed(0))
    assert target.loss(worse, wanted).mean().item() > baseline.loss
    meter = MaskedMeter(target)
    for one, two in zip(constant.split(5), images.split(5), strict=True):
        meter.update(MaskedPrediction(one, target.of(two), target.bins(two)))
    found = meter.metrics()
    assert found["relative_loss"] == pytest.approx(1.0, rel=1e-5) and found["constant_loss"] == pytest.approx(baseline.loss)
    assert found["target_entropy"] == pytest.approx(baseline.entropy) and found["images"] == 12
    halves = [MaskedMeter(target) for _ in range(2)]
    for half, one, two in zip(halves, constant.split(6), images.split(6), strict=True):
        half.update(MaskedPrediction(one, target.of(two), target.bins(two)))
    halves[0].add(halves[1].state())
    assert halves[0].metrics() == pytest.approx(found)


def test_a_perfect_prediction_becomes_the_true_pixels() -> None:
    preprocess = preset("google-vit", size=(16, 24))
    images = normalised(images_of((16, 24), 3), preprocess)
    for normal in (False, True):
        target = PixelValues(preprocess, (8, 8), normal)
        torch.testing.assert_close(
            target.to_pixels(target.of(images), target.patches(images)), target.patches(images), atol=1e-5, rtol=0
        )
    colours = Colours(preprocess, (8, 8), 4)
    bins = colours.of(images)
    logits = torch.nn.functional.one_hot(bins, 512).float().flatten(2)
    pixels = colours.to_pixels(logits, colours.patches(images))
    assert torch.equal(pixels, colours.colours(bins))
    means = colours.patches(images).reshape(3, 6, 3, 4, 2, 4, 2).mean(dim=(4, 6))
    assert (pixels.reshape(3, 6, 3, 4, 2, 4, 2)[..., 0, :, 0] - means).abs().max() <= 1 / 16 + 1e-6


def test_degenerate_targets_stop_with_a_sentence() -> None:
    preprocess = preset("google-vit", size=8)
    flat = normalised(np.full((20, 8, 8, 3), 7), preprocess)
    found = compute_baseline(Colours(preprocess, (4, 4)), [flat])
    with pytest.raises(
        VitrailError, match=r"All targets fall in 1 of 512 bins.*un-normalised or already standardised.*--data.preprocess"
    ):
        found.check(preprocess.describe())
    Baseline(10, 5, 512, 0.2, 0.1).check("")
    for bad in (Baseline(10, 4, 512, 2.0, 1.0), Baseline(10, 50, 512, 0.01, 0.01), Baseline(10, 50, 512, 3.0, 0.0)):
        with pytest.raises(VitrailError, match="nothing to predict"):
            bad.check("")


def test_colours_need_few_channels_and_patches_large_enough() -> None:
    with pytest.raises(VitrailError, match="up to 3 channels; these images have 5"):
        Colours(preset("google-vit", size=8, channels=5), (4, 4))
    with pytest.raises(VitrailError, match="cannot be downsized to 4×4"):
        Colours(preset("google-vit", size=8), (2, 2), 4)
    PixelValues(preset("google-vit", size=8, channels=5), (4, 4))


def test_validation_hides_the_same_patches_whatever_the_batches() -> None:
    preprocess = preset("google-vit", size=8)
    task = Masked("masked-patch", Colours(preprocess, (4, 4)), patches=4, draws=2)
    seen: list[torch.Tensor] = []

    def run(images: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append(noise)
        return torch.zeros(len(images), 1, 512), noise[..., 0].argsort(1)[:, :1]

    images = torch.zeros(6, 3, 8, 8)
    task.predict(run, images, torch.arange(6))
    task.predict(run, images[:2], torch.tensor([4, 5]))
    assert torch.equal(seen[0][4:], seen[1])
