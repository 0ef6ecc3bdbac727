"""The style of figures: characters without a font are mentioned, other warnings are not lost."""

from __future__ import annotations

import logging
import warnings

import pytest
from matplotlib.figure import Figure

from vitrail.drawing.style import rendered, styled


@styled
def titled(text: str) -> Figure:
    figure = Figure(figsize=(2, 1), layout="constrained")
    figure.subplots().set_title(text)
    return figure


def test_characters_without_a_font_are_mentioned_once(caplog: pytest.LogCaptureFixture) -> None:
    with warnings.catch_warnings(), caplog.at_level(logging.WARNING, "vitrail.drawing"):
        warnings.simplefilter("error")
        rendered(titled("\U00012345 and \U00012345 and ê"), "png")  # a cuneiform sign, which no usual font has
    assert [record.getMessage() for record in caplog.records] == [
        "No installed font has \U00012345, which a figure shows as boxes. Install a font for this script, such as Noto Sans."
    ]


def test_other_warnings_are_passed_on(caplog: pytest.LogCaptureFixture) -> None:
    figure = titled("x")
    figure.axes[0].set_xscale("log")
    figure.axes[0].plot([1, 10], [1, 2])
    figure.draw_without_rendering = lambda: warnings.warn("a question of layout", UserWarning, stacklevel=1)  # type: ignore[method-assign]
    with pytest.warns(UserWarning, match="a question of layout"):
        rendered(figure, "png")
    assert not caplog.records


def test_a_dollar_sign_is_not_a_formula() -> None:
    assert rendered(titled("$1 and $2"), "svg")
