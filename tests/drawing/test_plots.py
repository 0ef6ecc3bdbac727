"""Plots of evaluation reports and labels of inspections: everything that a reader needs is there, at any size."""

from __future__ import annotations

import numpy as np
import pytest

from tests.inspect.known_attention import images, tiny, trained
from vitrail.checkpoints import Bundle, Report
from vitrail.evaluate import plots
from vitrail.evaluate.classification import calibration
from vitrail.inspect.images import PreprocessedImages
from vitrail.inspect.report import InspectOptions, inspect_model


@pytest.mark.parametrize("count", [2, 25, 300])
def test_a_confusion_matrix_names_all_classes_and_its_axes(count: int) -> None:
    names = [f"class {number}" for number in range(count)]
    axes = plots.confusion(np.eye(count), names).axes[0]
    assert [tick.get_text() for tick in axes.get_xticklabels()] == names == [tick.get_text() for tick in axes.get_yticklabels()]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("predicted class", "true class")
    rows_per_inch = count / axes.get_figure().get_figheight()  # type: ignore[union-attr]
    assert axes.get_yticklabels()[0].get_fontsize() / 72 < 1 / rows_per_inch, "names do not overlap"


def test_a_reliability_diagram_explains_both_kinds_of_gap() -> None:
    result = calibration(np.array([0.95, 0.9, 0.3, 0.2]), np.array([False, True, True, True]))
    legend = plots.reliability(result).legends[0]
    texts = " ".join(text.get_text() for text in legend.get_texts())
    assert "overconfident" in texts and "underconfident" in texts and "perfect calibration" in texts


def test_labels_show_what_is_predicted_how_surely_and_which_file() -> None:
    model = trained(tiny((3, 4), outputs=3))
    batch = images(model, 2)
    names = ["folder/short.png", "a-photo-with-a-name-of-more-than-26-characters.jpeg"]
    classes = ("ant", "bee", "cat")
    bundle = Bundle(model, None, classes, "classify", Report("here", "vitrail"))
    inputs = PreprocessedImages(names, batch, [np.zeros((24, 16, 3))] * 2)
    section = inspect_model("title", ".", bundle, inputs, InspectOptions(), lambda _: None)
    figure = next(panel.figure for panel in section.panels if panel.name == "rollout")
    expected = [bundle.decode(model(one[None]), top=1)[0][0] for one in batch]
    assert [axes.get_title(loc="left") for axes in figure.axes] == [
        f"predicted: {expected[0].label} {expected[0].score:.0%}\nshort.png",
        f"predicted: {expected[1].label} {expected[1].score:.0%}\na-photo-with-…racters.jpeg",
    ]
