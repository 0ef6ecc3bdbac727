"""A report of an evaluation: a folder with tables for programs, and one page for people that needs nothing beside it."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from vitrail.data.types import Split
from vitrail.errors import VitrailError
from vitrail.evaluate import drawings, labels, numbers
from vitrail.evaluate.classification import calibration, confusion_matrix, per_class, worst_confusions
from vitrail.evaluate.measuring import Measured
from vitrail.evaluate.report_page import NAMES, figure_text, page, picture, section, strip, table
from vitrail.evaluate.thumbnails import data_uri, split_thumbnail
from vitrail.files import atomic_folder

_MATRIX_MOST = 2000  # classes beyond which a square table is of no use to anyone
_DRAWN_MOST = 300
_THUMBNAIL = 96


def check_free(folder: Path, overwrite: bool) -> None:
    """Refuse a folder that holds something, unless it is a report and may be replaced."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise VitrailError(f"{folder} is a file; a report is a folder. Choose another name for --report.")
    inside = sorted(item.name for item in folder.iterdir())
    if inside and not (overwrite and "report.html" in inside):
        kind = "a report" if "report.html" in inside else f"other files ({', '.join(inside[:3])})"
        advice = "pass --overwrite to replace it, or choose another name" if kind == "a report" else "choose another name"
        raise VitrailError(f"{folder} exists and holds {kind}; {advice}.")


def write_report(folder: Path, results: Sequence[Measured], split: Split, about: dict[str, str]) -> None:
    """Write the folder, wholly or not at all. The first of `results` is shown in full, others (sizes) are compared with it."""
    main = results[0]
    parts = {"classify": _classified, "multilabel": _multilabel, "regress": _regressed}[main.task](main, split)
    drawn, tables, sections = parts
    if len(results) > 1:
        drawn["sizes.png"], comparison = _sizes(results)
        sections.insert(0, comparison)
    summary = {**about, "results": [one.summary() for one in results]}
    with atomic_folder(folder) as temporary:
        (temporary / "metrics.json").write_text(json.dumps(summary, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        for name, rows in tables.items():
            (temporary / name).write_text(_csv(rows), encoding="utf-8")
        for name, content in drawn.items():
            (temporary / name).write_bytes(content)
        (temporary / "report.html").write_text(page(main, split, about, sections), encoding="utf-8")


Parts = tuple[dict[str, bytes], dict[str, Iterable[Sequence[Any]]], list[str]]


def _classified(result: Measured, split: Split) -> Parts:
    answers, classes = result.answers, result.classes
    assert answers is not None
    count = len(classes)
    each = per_class(answers.targets, answers.predicted, count)
    found = calibration(answers.probability[:, 0], answers.correct)
    drawn = {"reliability.png": drawings.reliability(found)}
    rows = [
        [
            classes[k],
            int(each.support[k]),
            int(each.predicted[k]),
            *(float(one[k]) for one in (each.precision, each.recall, each.f1)),
        ]
        for k in range(count)
    ]
    headings = ["class", "images", "predicted", "precision", "recall", "f1"]
    tables: dict[str, Iterable[Sequence[Any]]] = {
        "per-class.csv": [headings, *rows],
        "predictions.csv": _predictions(result, split),
    }
    sections = []
    if count <= _MATRIX_MOST:
        matrix = confusion_matrix(answers.targets, answers.predicted, count)
        tables["confusion.csv"] = [["true \\ predicted", *classes], *([classes[k], *matrix[k].tolist()] for k in range(count))]
        if count <= _DRAWN_MOST:
            drawn["confusion.png"] = drawings.confusion(matrix, classes)
            sections.append(section("Confusion matrix", picture(drawn["confusion.png"], "confusion matrix"), "confusion.csv"))
    sections += [
        section("Worst confusions", _confusions(result, split)),
        section("Classes", table(headings, rows, sortable=True), "per-class.csv"),
        section(
            "Calibration", picture(drawn["reliability.png"], "reliability diagram") + _calibration_words(found.error, found.largest)
        ),
    ]
    return drawn, tables, sections


def _predictions(result: Measured, split: Split) -> Iterable[Sequence[Any]]:
    answers, classes = result.answers, result.classes
    assert answers is not None
    yield ["image", "true", "predicted", "probability", "correct"]
    for row in range(len(answers)):
        true, predicted = int(answers.targets[row]), int(answers.predicted[row])
        name, probability = split.image_name(int(answers.indices[row])), f"{answers.probability[row, 0]:.6f}"
        yield [name, classes[true], classes[predicted], probability, int(true == predicted)]


def _confusions(result: Measured, split: Split) -> str:
    answers, classes = result.answers, result.classes
    assert answers is not None
    worst = worst_confusions(answers, len(classes))
    if not worst:
        return "<p>Not one image was mistaken.</p>"
    shown = []
    for one in worst:
        examples = []
        for row in one.examples:
            index = int(answers.indices[row])
            image = split_thumbnail(split, index, _THUMBNAIL)
            caption = f"{split.image_name(index)} ({answers.probability[row, 0]:.0%})"
            examples.append((data_uri(image) if image is not None else "", caption))
        words = (
            f"<b>{escape(classes[one.true])}</b> taken for <b>{escape(classes[one.predicted])}</b>: "
            f"{one.count} images, {one.share:.1%} of the class"
        )
        shown.append(strip(words, examples))
    return "".join(shown) + "<p class='faint'>For each pair the mistakes the model was surest of, with its confidence.</p>"


def _calibration_words(error: float, largest: float) -> str:
    return (
        f"<p>On average the model's confidence is {error:.1%} away from its accuracy; in the worst of the 15 bins, {largest:.1%}. "
        "Bars below the dashed line mean that it is too sure of itself.</p>"
    )


def _multilabel(result: Measured, split: Split) -> Parts:
    assert result.outputs is not None and result.truth is not None
    found = labels.per_label(result.outputs, result.truth, result.thresholds)
    headings = ["label", "images", "average precision", "precision", "recall", "f1", "threshold", "best threshold"]
    columns = (found.average_precision, found.precision, found.recall, found.f1, found.threshold, found.best_threshold)
    rows = [[name, int(found.support[k]), *(float(one[k]) for one in columns)] for k, name in enumerate(result.classes)]
    words = (
        "<p class='faint'>The best threshold is the one with the highest F1 on these very images: a hint, not a measurement.</p>"
    )
    return (
        {},
        {"per-label.csv": [headings, *rows]},
        [section("Labels", table(headings, rows, sortable=True) + words, "per-label.csv")],
    )


def _regressed(result: Measured, split: Split) -> Parts:
    assert result.outputs is not None and result.truth is not None
    found = numbers.per_target(result.outputs, result.truth)
    headings = ["target", "mean absolute error", "root mean squared error", "R²", "mean of the truth"]
    columns = (found.mae, found.rmse, found.r2, found.mean)
    rows = [[name, *(float(one[k]) for one in columns)] for k, name in enumerate(result.classes)]
    drawn = {
        f"scatter-{k}.png": drawings.scatter(result.outputs[:, k], result.truth[:, k], name)
        for k, name in enumerate(result.classes[:12])
    }
    pictures = "".join(picture(content, "predicted against true") for content in drawn.values())
    shown = [section("Targets", table(headings, rows), "per-target.csv"), section("Predicted against true", pictures)]
    return drawn, {"per-target.csv": [headings, *rows]}, shown


def _sizes(results: Sequence[Measured]) -> tuple[bytes, str]:
    headline = next(iter(results[0].figures))
    names = [f"{one.size[0]}×{one.size[1]}" for one in results]
    chosen = [(one.figures[headline], one.intervals[headline]) for one in results]
    drawn = drawings.sizes(names, [value for value, _ in chosen], [both for _, both in chosen], NAMES.get(headline, headline))
    shared = [name for name in results[0].figures if name in NAMES]
    rows = [[NAMES[name], *(figure_text(name, one.figures[name]) for one in results)] for name in shared]
    body = table(["figure", *names], rows) + picture(drawn, "figures at several sizes")
    return drawn, section("Input sizes", body)


def _csv(rows: Iterable[Sequence[Any]]) -> str:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerows(rows)
    return buffer.getvalue()
