"""Write an evaluation report: a folder with CSV and JSON files, and one self-contained HTML page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vitrail.data.thumbnails import jpeg_uri, split_thumbnail
from vitrail.data.types import Split
from vitrail.drawing.page import PageSection, Paragraph, Plot, Strip, Table
from vitrail.drawing.style import rendered
from vitrail.errors import VitrailError, counted
from vitrail.evaluate import plots
from vitrail.evaluate.classification import calibration, confusion_matrix, worst_confusions
from vitrail.evaluate.evaluator import EvalResult
from vitrail.evaluate.report_page import METRIC_NAMES, format_metric, page
from vitrail.evaluate.result_tables import IMAGE_HEADINGS, class_table, image_rows, result_figures
from vitrail.files import atomic_folder
from vitrail.text import to_csv, to_json

_MAX_CLASSES_CSV = 2000  # a larger confusion matrix is not readable
PLOT_DPI = 144
_THUMBNAIL = 96


def check_output_folder(folder: Path, overwrite: bool) -> None:
    """Refuse a folder that is not empty, unless it is a report and may be replaced."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise VitrailError(f"{folder} is a file, but a report is a folder. Choose another name for --out.")
    files = sorted(item.name for item in folder.iterdir())
    if files and not (overwrite and "report.html" in files):
        content = "a report" if "report.html" in files else f"other files ({', '.join(files[:3])})"
        advice = "Pass --overwrite to replace it, or choose another name" if content == "a report" else "Choose another name"
        raise VitrailError(f"{folder} already contains {content}. {advice}.")


def write_report(
    folder: Path, results: Sequence[EvalResult], split: Split, about: Mapping[str, Any], more: Sequence[PageSection] = ()
) -> None:
    """Write the folder atomically. The first result is shown in full; others (at other input sizes) are compared with it.

    `more` is added to the end of the page.
    """
    main = results[0]
    build = {"classify": _classification, "multilabel": _multilabel, "regress": _regression}[main.task]
    images, tables, sections = build(main, split)
    if len(results) > 1:
        images["sizes.png"], comparison = _sizes(results)
        sections.insert(0, comparison)
    summary = {**about, "results": [one.summary() for one in results]}
    with atomic_folder(folder) as temporary:
        (temporary / "metrics.json").write_text(to_json(summary, indent=2) + "\n", encoding="utf-8")
        for name, rows in tables.items():
            (temporary / name).write_bytes(to_csv(rows))
        for name, content in images.items():
            (temporary / name).write_bytes(content)
        (temporary / "report.html").write_text(page(main, split, about, [*sections, *more]), encoding="utf-8")


Parts = tuple[dict[str, bytes], dict[str, Iterable[Sequence[Any]]], list[PageSection]]


def _classification(result: EvalResult, split: Split) -> Parts:
    predictions, classes = result.predictions, result.classes
    assert predictions is not None
    count = len(classes)
    calibrated, images = calibration(predictions.confidence, predictions.correct), _images(result)
    headings, rows = class_table(result)
    tables: dict[str, Iterable[Sequence[Any]]] = {
        "per-class.csv": [headings, *rows],
        "predictions.csv": _predictions(result, split),
    }
    sections = list[PageSection]()
    if count <= _MAX_CLASSES_CSV:
        matrix = confusion_matrix(predictions.targets, predictions.predicted, count)
        tables["confusion.csv"] = [["true \\ predicted", *classes], *([classes[k], *matrix[k].tolist()] for k in range(count))]
        if "confusion.png" in images:
            matrix_plot = Plot(images["confusion.png"], "confusion matrix")
            sections.append(PageSection("Confusion matrix", [matrix_plot], file="confusion.csv"))
    diagram = Plot(images["reliability.png"], "reliability diagram")
    sections += [
        PageSection("Most frequent confusions", _confusions(result, split)),
        PageSection("Classes", [Table(headings, rows, sortable=True)], file="per-class.csv"),
        PageSection("Calibration", [diagram, _calibration_text(calibrated.ece, calibrated.mce)]),
    ]
    return images, tables, sections


def _images(result: EvalResult) -> dict[str, bytes]:
    return {f"{name}.png": rendered(figure, "png", dpi=PLOT_DPI) for name, figure in result_figures(result).items()}


def _predictions(result: EvalResult, split: Split) -> Iterable[Sequence[Any]]:
    yield IMAGE_HEADINGS
    for name, true, predicted, probability, correct in image_rows(result, split):
        yield [name, true, predicted, f"{probability:.6f}", int(correct)]


def _confusions(result: EvalResult, split: Split) -> list[Strip | Paragraph]:
    predictions, classes = result.predictions, result.classes
    assert predictions is not None
    worst = worst_confusions(predictions, len(classes))
    if not worst:
        return [Paragraph("All predictions are correct.")]
    blocks = list[Strip | Paragraph]()
    for one in worst:
        examples = []
        for row in one.examples:
            index = int(predictions.indices[row])
            image = split_thumbnail(split, index, _THUMBNAIL)
            caption = f"{split.image_name(index)} ({predictions.confidence[row]:.0%})"
            examples.append((jpeg_uri(image) if image is not None else "", caption))
        text = f"{counted(one.count, 'image')}, {one.fraction:.1%} of the class"
        blocks.append(Strip(classes[one.true], classes[one.predicted], text, examples))
    note = "Examples are the errors with the highest confidence. Hover over an image for name and confidence."
    return [*blocks, Paragraph(note, faint=True)]


def _calibration_text(ece: float, mce: float) -> Paragraph:
    return Paragraph(
        f"Expected calibration error: the mean gap between confidence and accuracy is {ece:.1%}. "
        f"The largest gap of the 15 bins is {mce:.1%}. Bars below the dashed line mean that the model is overconfident."
    )


def _multilabel(result: EvalResult, split: Split) -> Parts:
    headings, rows = class_table(result)
    note = Paragraph("The best threshold gives the highest F1 on these same images, so that F1 is optimistic.", faint=True)
    labels = PageSection("Labels", [Table(headings, rows, sortable=True), note], file="per-label.csv")
    return {}, {"per-label.csv": [headings, *rows]}, [labels]


def _regression(result: EvalResult, split: Split) -> Parts:
    headings, rows = class_table(result)
    images = _images(result)
    scatters = [Plot(content, "predicted against true values") for content in images.values()]
    sections = [
        PageSection("Targets", [Table(headings, rows)], file="per-target.csv"),
        PageSection("Predicted against true values", scatters),
    ]
    return images, {"per-target.csv": [headings, *rows]}, sections


def _sizes(results: Sequence[EvalResult]) -> tuple[bytes, PageSection]:
    headline = next(iter(results[0].metrics))
    sizes = [f"{one.size[0]}×{one.size[1]}" for one in results]
    values, intervals = [one.metrics[headline] for one in results], [one.intervals[headline] for one in results]
    image = rendered(plots.sizes(sizes, values, intervals, METRIC_NAMES.get(headline, headline)), "png", dpi=PLOT_DPI)
    shared = [name for name in results[0].metrics if name in METRIC_NAMES]
    rows = [[METRIC_NAMES[name], *(format_metric(name, one.metrics[name]) for one in results)] for name in shared]
    plot = Plot(image, f"{METRIC_NAMES.get(headline, headline)} at several input sizes")
    return image, PageSection("Input sizes", [Table(["metric", *sizes], rows), plot])
