from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from vitrail.data.augment import Augment
from vitrail.data.augment.erase import draw_erasures, erase, normal_noise
from vitrail.data.augment.mix import draw_mixing, mix_images, soft_targets
from vitrail.data.batch import Batch, HostBatch
from vitrail.data.device_transforms import DeviceTransforms
from vitrail.data.preprocess import preset
from vitrail.data.sampler import BatchSlice
from vitrail.data.types import Task
from vitrail.errors import VitrailError

SIZE = (12, 16)


def transform(augment: Augment, images: np.ndarray, targets: np.ndarray, task: Task = "classify") -> Batch:
    transforms = DeviceTransforms(preset("imagenet", size=SIZE), augment, task=task, classes=4, seed=3)
    n = len(images)
    batch_slice = BatchSlice(1, 2, 0, 1, np.arange(n), ((2 * n, n),), 0, n, n)
    return transforms(
        HostBatch(torch.from_numpy(images).permute(0, 3, 1, 2), torch.from_numpy(targets), torch.arange(n), batch_slice)
    )


def batch(n: int) -> tuple[np.ndarray, np.ndarray]:
    images = np.random.default_rng(n).integers(0, 256, (n, *SIZE, 3), dtype=np.uint8)
    return images, np.arange(n) % 4


@pytest.mark.parametrize("n", [1, 2, 7, 8])
def test_batch_mixup_is_one_weight_and_a_roll_by_one(n: int) -> None:
    images, targets = batch(n)
    plain = transform(Augment(), images, targets)
    mixed = transform(Augment(mixup=0.5), images, targets)
    weights = draw_mixing(Augment(mixup=0.5), 3, 1, 2, n, SIZE).weights  # type: ignore[union-attr]
    a = weights[0]
    assert (weights == a).all() and 0.5 <= a <= 1
    x, y = plain.images.double().numpy(), np.eye(4)[targets]
    np.testing.assert_allclose(mixed.images.numpy(), a * x + (1 - a) * np.roll(x, 1, axis=0), atol=1e-5)
    np.testing.assert_allclose(mixed.targets.numpy(), a * y + (1 - a) * np.roll(y, 1, axis=0), atol=1e-6)


@pytest.mark.parametrize("variant", ["batch", "per-sample"])
@pytest.mark.parametrize("alphas", [{"mixup": 0.8}, {"cutmix": 1.0}, {"mixup": 0.8, "cutmix": 1.0}])
@pytest.mark.parametrize("n", [1, 5, 8])
def test_targets_match_the_mixed_pixels(variant: str, alphas: dict[str, float], n: int) -> None:
    """Each image has its own colour, so its weight in a mixed image can be measured."""
    images = np.zeros((n, *SIZE, 3), dtype=np.uint8)
    images[np.arange(n), ..., 0] = (np.arange(n) * 30)[:, None, None]
    augment = Augment(mix=variant, **alphas)  # type: ignore[arg-type]
    result = transform(augment, images, np.arange(n) % 4)
    plain = transform(Augment(), images, np.arange(n) % 4).images[:, 0].mean((1, 2))
    measured = result.images[:, 0].mean((1, 2))
    mixing = draw_mixing(augment, 3, 1, 2, n, SIZE)
    assert mixing is not None
    weights = torch.from_numpy(mixing.weights).float()
    torch.testing.assert_close(measured, weights * plain + (1 - weights) * plain.roll(1), atol=1e-4, rtol=0)
    torch.testing.assert_close(result.targets.sum(1), torch.ones(n))
    own = torch.nn.functional.one_hot(torch.arange(n) % 4, 4)
    expected = weights[:, None] * own + (1 - weights[:, None]) * own.roll(1, 0)
    torch.testing.assert_close(result.targets, expected)


def test_weights_have_the_beta_distribution() -> None:
    per_sample = draw_mixing(Augment(mixup=0.4, mix="per-sample"), 0, 0, 0, 5000, SIZE)
    assert per_sample is not None
    assert stats.kstest(per_sample.weights, stats.beta(0.4, 0.4).cdf).pvalue > 1e-3
    steps = [draw_mixing(Augment(mixup=0.4), 0, 0, step, 1, SIZE) for step in range(2000)]
    weights = np.array([mixing.weights[0] for mixing in steps if mixing is not None])
    folded = lambda a: stats.beta(0.4, 0.4).cdf(a) - stats.beta(0.4, 0.4).cdf(1 - a)  # noqa: E731
    assert stats.kstest(weights, folded).pvalue > 1e-3


def test_probability_of_mixing_and_of_cutmix() -> None:
    augment = Augment(mixup=1.0, cutmix=1.0, cutmix_probability=0.25, mix_probability=0.6, mix="per-sample")
    mixing = draw_mixing(augment, 0, 0, 0, 8000, (100, 100))
    assert mixing is not None
    pasted = mixing.boxes[:, 2] > mixing.boxes[:, 0]
    assert abs((mixing.weights < 1).mean() - 0.6) < 0.03
    assert abs(pasted.mean() - 0.15) < 0.02


def test_smoothing() -> None:
    images, targets = batch(5)
    result = transform(Augment(smoothing=0.1), images, targets)
    expected = np.eye(4)[targets] * 0.9 + 0.025
    np.testing.assert_allclose(result.targets.numpy(), expected, atol=1e-6)
    assert transform(Augment(), images, targets).targets.dtype == torch.int64


def test_other_tasks_mix_their_own_targets() -> None:
    images, _ = batch(3)
    labels = np.array([[1, 0, 0, 1], [0, 1, 0, 0], [0, 0, 1, 0]], dtype=np.float32)
    result = transform(Augment(mixup=1.0), images, labels, "multilabel")
    a = draw_mixing(Augment(mixup=1.0), 3, 1, 2, 3, SIZE).weights[0]  # type: ignore[union-attr]
    np.testing.assert_allclose(result.targets.numpy(), a * labels + (1 - a) * np.roll(labels, 1, 0), atol=1e-6)
    with pytest.raises(VitrailError, match="smoothing"):
        transform(Augment(smoothing=0.1), images, labels, "multilabel")


def test_soft_targets_keep_numbers() -> None:
    values = torch.tensor([[1.5], [2.5]])
    assert torch.equal(soft_targets(values, "regress", 1, 0.0), values)


def test_cutmix_copies_pixels() -> None:
    images, partners = torch.zeros(2, 3, 6, 6), torch.ones(2, 3, 6, 6)
    mixed = mix_images(images, partners, torch.tensor([0.5, 0.75]), torch.tensor([[0, 0, 0, 0], [1, 2, 4, 5]]))
    assert (mixed[0] == 0.5).all()
    assert mixed[1].sum() == 3 * 9 and (mixed[1, :, 1:4, 2:5] == 1).all()


def test_normalisation_is_the_same_as_in_evaluation() -> None:
    images, targets = batch(4)
    expected = preset("imagenet", size=SIZE).normalise(torch.from_numpy(images).permute(0, 3, 1, 2))
    torch.testing.assert_close(transform(Augment(), images, targets).images, expected, atol=1e-5, rtol=1e-5)


def test_erased_rectangles() -> None:
    augment = Augment(erase=0.4)
    rectangles = draw_erasures(augment, 0, 0, 0, 6000, (64, 64))
    top, left, bottom, right = rectangles[:, :4].T
    erased = bottom > top
    assert abs(erased.mean() - 0.4) < 0.02
    area = ((bottom - top) * (right - left) / 64**2)[erased]
    assert area.min() > 0.015 and area.max() < 0.36
    assert (bottom <= 64).all() and (right <= 64).all()
    alone = draw_erasures(augment, 0, 0, 77, 1, (64, 64))
    assert (alone[0] == rectangles[77]).all()


def test_erasing_fills_the_rectangle_and_nothing_else() -> None:
    images = torch.full((2, 3, 8, 8), 5.0)
    rectangles = torch.tensor([[1.0, 2, 4, 6, 9], [0, 0, 0, 0, 9]])
    mean = erase(images, rectangles, noise=False)
    assert (mean[0, :, 1:4, 2:6] == 0).all() and (mean == 0).sum() == 3 * 12
    noise = erase(images, rectangles, noise=True)
    assert (noise[1] == 5).all() and (noise[0] != 5).sum() == 3 * 12


def test_noise_is_normal_and_a_function_of_its_key() -> None:
    noise = normal_noise(torch.tensor([5, 6, 5]), torch.Size([3, 40, 40]))
    assert torch.equal(noise[0], noise[2])
    assert stats.kstest(noise[:2].flatten().numpy(), "norm").pvalue > 1e-3
    flat = noise.flatten(1).numpy()
    assert abs(np.corrcoef(flat[0], flat[1])[0, 1]) < 0.05
    assert abs(np.corrcoef(flat[0, :-1], flat[0, 1:])[0, 1]) < 0.05
    assert np.abs(np.corrcoef(noise[0].flatten(1).numpy()) - np.eye(3)).max() < 0.08
    many = normal_noise(torch.arange(4000) * 4099 % 2**24, torch.Size([1, 2, 2])).numpy().reshape(4000, 4)
    assert stats.kstest(many[:, 0], "norm").pvalue > 1e-3
