from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torchvision.transforms import RandomResizedCrop

from tests.data.memory_splits import picture
from vitrail.data.augment import Augment
from vitrail.data.augment.crop import draw_boxes, draw_flips
from vitrail.data.augment.resample import crop_resize

TENSORFLOW = Augment(crop="inception-tensorflow")


@settings(max_examples=80, deadline=None)
@given(
    height=st.integers(1, 700),
    width=st.integers(1, 700),
    crop=st.sampled_from(["inception", "inception-tensorflow", "same-aspect"]),
    low=st.floats(0.01, 1.0),
    seed=st.integers(0, 1000),
)
def test_boxes_lie_within_the_image(height: int, width: int, crop: str, low: float, seed: int) -> None:
    augment = Augment(crop=crop, crop_area=(low, 1.0))  # type: ignore[arg-type]
    boxes = draw_boxes(augment, seed, 0, 0, np.full(40, height), np.full(40, width))
    top, left, tall, wide = boxes.T
    assert (boxes[:, :2] >= 0).all() and (boxes[:, 2:] >= 1).all()
    assert (top + tall <= height).all() and (left + wide <= width).all()


def test_same_distribution_as_torchvision() -> None:
    augment = Augment(crop_area=(0.08, 1.0))
    height, width, count = 375, 500, 4000
    ours = draw_boxes(augment, 0, 0, 0, np.full(count, height), np.full(count, width))
    torch.manual_seed(0)
    image = torch.empty(3, height, width)
    theirs = np.array([RandomResizedCrop.get_params(image, [0.08, 1.0], [3 / 4, 4 / 3]) for _ in range(count)])
    for feature in (
        lambda box: box[:, 2] * box[:, 3],
        lambda box: box[:, 3] / box[:, 2],
        lambda box: box[:, 0],
        lambda box: box[:, 1],
    ):
        assert stats.ks_2samp(feature(ours), feature(theirs)).pvalue > 1e-3


def test_a_same_aspect_crop_is_a_square_resize_and_a_random_crop() -> None:
    area = (384 / 448) ** 2
    augment = Augment(crop="same-aspect", crop_area=(area, area))
    boxes = draw_boxes(augment, 0, 0, 0, np.full(4000, 700), np.full(4000, 448))
    assert (boxes[:, 2] == 600).all() and (boxes[:, 3] == 384).all()  # 384 / 448 of each side
    assert stats.kstest(boxes[:, 0], stats.randint(0, 101).cdf).statistic < 0.03
    assert stats.kstest(boxes[:, 1], stats.randint(0, 65).cdf).statistic < 0.03
    assert set(boxes[:, 0]) == set(range(101)) and set(boxes[:, 1]) == set(range(65))


def test_tensorflow_crop_has_uniform_heights_within_the_limits() -> None:
    count, side = 8000, 400
    _, _, tall, wide = draw_boxes(TENSORFLOW, 0, 0, 0, np.full(count, side), np.full(count, side)).T
    share = tall * wide / side**2
    assert share.min() >= 0.05 and share.max() <= 1.0
    aspect = wide / tall
    assert aspect.min() > 0.74 and aspect.max() < 1.35
    # For crops near square the height is uniform between √0.05 and 1 of the side: larger than an even area would give.
    near = tall[(aspect > 0.98) & (aspect < 1.02)] / side
    assert stats.kstest(near, stats.uniform(np.sqrt(0.05), 1 - np.sqrt(0.05)).cdf).pvalue > 1e-3


@pytest.mark.parametrize(("height", "width"), [(10, 400), (400, 10), (7, 90)])
def test_a_panorama_falls_back_as_in_torchvision(height: int, width: int) -> None:
    augment = Augment(crop_area=(0.9, 1.0))
    ours = draw_boxes(augment, 0, 0, 0, np.array([height]), np.array([width]))[0]
    theirs = RandomResizedCrop.get_params(torch.empty(3, height, width), [0.9, 1.0], [3 / 4, 4 / 3])
    assert tuple(ours) == tuple(theirs)


def test_flips_follow_their_probability() -> None:
    assert draw_flips(Augment(flip=0), 0, 0, 0, 500).sum() == 0
    assert draw_flips(Augment(flip=1), 0, 0, 0, 500).sum() == 500
    assert abs(draw_flips(Augment(flip=0.3), 0, 0, 0, 20_000).mean() - 0.3) < 0.02


@pytest.mark.parametrize(("interpolation", "antialias"), [("bilinear", True), ("bilinear", False), ("bicubic", True)])
@pytest.mark.parametrize("size", [(24, 24), (50, 33)])
def test_batched_crop_equals_cropping_and_resizing_each_image(interpolation: str, antialias: bool, size: tuple[int, int]) -> None:
    images = torch.from_numpy(np.stack([picture(i, 64, 72) for i in range(12)]))
    boxes = draw_boxes(Augment(), 3, 0, 0, np.full(12, 64), np.full(12, 72))
    boxes[0] = (0, 0, 64, 72)
    boxes[1] = (5, 9, 3, 4)
    flips = draw_flips(Augment(), 3, 0, 0, 12)
    assert flips.any() and not flips.all()
    batched = crop_resize(
        images,
        torch.from_numpy(boxes),
        torch.from_numpy(flips),
        size,
        interpolation=interpolation,  # type: ignore[arg-type]
        antialias=antialias,
    )
    for row, (top, left, tall, wide) in enumerate(boxes):
        cut = images[row, top : top + tall, left : left + wide].permute(2, 0, 1)[None]
        # Without antialiasing torch's byte path rounds its weights coarsely; its float path is the exact one.
        expected = F.interpolate(cut.float(), size, mode=interpolation, antialias=antialias).round().clamp(0, 255)
        expected = expected.flip(3) if flips[row] else expected
        assert (batched[row].int() - expected[0].int()).abs().max() <= 1
        assert (batched[row].int() != expected[0].int()).float().mean() < 0.01
