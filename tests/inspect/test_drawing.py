"""Figures render as PNG and SVG, keep their aspect ratio, and change no global state."""

from __future__ import annotations

import io
import subprocess
import sys

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image
from scipy import ndimage

from tests.inspect.known_attention import images, tiny, trained
from vitrail import VitrailError, inspect
from vitrail.drawing import style
from vitrail.inspect import draw, draw_maps, pictures


def check(figure: Figure) -> Image.Image:
    before = dict(mpl.rcParams)
    png, svg = style.rendered(figure, "png"), style.rendered(figure, "svg")
    assert dict(mpl.rcParams) == before
    assert svg.lstrip().startswith(b"<?xml") and b"<svg" in svg
    assert style.rendered(figure, "svg") == svg, "the same figure gives the same file"
    picture = Image.open(io.BytesIO(png))
    picture.load()
    assert np.asarray(picture.convert("L")).std() > 1, "the figure is not empty"
    return picture


@pytest.mark.slow
@pytest.mark.parametrize("channels", [1, 3, 4])
def test_filters(channels: int) -> None:
    filters = inspect.filters(trained(tiny((2, 2), channels=channels, width=40)))
    check(draw.draw_filters(filters))
    check(draw.draw_raw_filters(filters))


@pytest.mark.slow
@pytest.mark.parametrize("grid", [(3, 7), (20, 2), (1, 1)])
def test_positions_of_rectangles(grid: tuple[int, int]) -> None:
    picture = check(draw.draw_positions(inspect.position_similarity(trained(tiny(grid)))))
    assert max(picture.size) < 2000


@pytest.mark.slow
def test_distance_and_comparison_of_distances() -> None:
    model = trained(tiny((3, 4), registers=1))
    distances = inspect.attention_distances(model, images(model))
    level = inspect.uniform_distance(model.config)
    check(draw.draw_distance(distances["patches"], uniform=level, images=2, other=distances["all"]))
    check(draw.draw_distance(distances["patches"][1:], layers=[1, 2], uniform=level, images=1))
    models = {"before": distances["patches"], "after": distances["patches"][:2] * 0.8}
    layers = {name: np.arange(len(values)) for name, values in models.items()}
    check(draw.draw_distance_comparison(models, layers=layers, uniform=[level, level], images=2))
    many = {str(number): distances["patches"] for number in range(9)}
    with pytest.raises(VitrailError, match="9 checkpoints are too many"):
        draw.draw_distance_comparison(many, layers={name: np.arange(3) for name in many}, uniform=[level] * 9, images=2)


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 5])
def test_maps_over_images(count: int) -> None:
    model = trained(tiny((3, 4)))
    random = np.random.default_rng(0)
    pictures = [random.random((24, 16, 3)) for _ in range(count)]
    maps = inspect.rollout(model, images(model, count))
    check(draw_maps.draw_rollout(pictures, maps, labels=[f"label {number}" for number in range(count)]))
    check(draw_maps.draw_rollout(pictures, maps))
    columns = [draw_maps.Column("rollout", maps, pictures), draw_maps.Column("similarity", maps, pictures, signed=True)]
    check(draw_maps.draw_columns(pictures, columns, title="side by side"))
    heads = inspect.head_attention(model, images(model, 1), (1, 2))[0]
    check(draw_maps.draw_heads(pictures[0], heads, (1, 2), layers=range(3)))


def test_the_mask_is_brightest_where_attention_is_highest() -> None:
    values = np.zeros((4, 6))
    values[3, 1] = 0.2
    mask = pictures.attention_mask(values, (64, 96), blur=16)
    assert mask.shape == (64, 96) and mask.min() == 0 and mask.max() == 1
    row, column = np.unravel_index(mask.argmax(), mask.shape)
    assert row >= 44 and 12 <= column <= 36


def test_the_mask_is_smooth() -> None:
    """It was computed in 8 bits, so that a weak map had few levels of brightness."""
    values = np.full((4, 4), 0.0625)
    values[1, 2] = 0.0635
    mask = pictures.attention_mask(values, (64, 64), blur=16)
    assert mask.min() == 0 and mask.max() == 1 and len(np.unique(mask.round(9))) > 1000
    assert max(np.abs(np.diff(mask, axis=axis)).max() for axis in (0, 1)) < 0.1  # in 8 bits: steps of a quarter


def test_the_mask_is_blurred_as_scipy_does() -> None:
    values = np.random.default_rng(0).random((40, 56))
    expected = ndimage.gaussian_filter(values, 6.0, mode="nearest", truncate=4.0)
    np.testing.assert_allclose(pictures._blurred(values, 6.0), expected, atol=1e-12)


def test_a_constant_map_is_not_rescaled() -> None:
    assert (pictures.attention_mask(np.full((3, 3), 0.1), (24, 24), blur=8) == 1).all()
    assert (pictures.attention_mask(np.zeros((3, 3)), (24, 24), blur=8) == 0).all()


def test_gaps_of_a_mosaic_are_nan() -> None:
    sheet = pictures.mosaic(np.ones((2, 3, 2, 2)), gap=1)
    assert sheet.shape == (5, 8) and np.isnan(sheet).sum() == 5 * 8 - 24
    assert pictures.even_steps(7, 16) == list(range(7)) and pictures.even_steps(37, 16) == list(range(0, 37, 3))


@pytest.mark.slow
def test_arrays_import_no_matplotlib_and_drawing_imports_no_pyplot() -> None:
    code = (
        "import sys, vitrail; vitrail.inspect.rollout; assert 'matplotlib' not in sys.modules;"
        "import vitrail.inspect.draw_maps; assert 'matplotlib.pyplot' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
