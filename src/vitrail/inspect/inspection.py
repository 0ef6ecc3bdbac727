"""Inspect one or more checkpoints: all their figures, as one object that can be shown and saved."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from vitrail.checkpoints import Bundle
from vitrail.drawing.style import rendered
from vitrail.errors import VitrailError
from vitrail.inspect.images import PreprocessedImages, RawImages
from vitrail.inspect.inputs import Array
from vitrail.inspect.reconstruction import inspect_reconstruction
from vitrail.inspect.report import InspectOptions, Section, check_output_folder, compare, inspect_model, write_report
from vitrail.notebook import Markup, html_image, html_lines, html_text
from vitrail.version import __version__

if TYPE_CHECKING:
    from matplotlib.figure import Figure

What = Literal["figures", "reconstruction"]
_SCREEN_DPI = 80


@dataclass(frozen=True)
class Inspection:
    """The figures of an inspection with the arrays that they show."""

    sections: Sequence[Section]
    about: Mapping[str, Any]

    @property
    def figures(self) -> dict[str, Figure]:
        """Matplotlib figures by name: `rollout`; with several checkpoints `NAME/rollout`."""
        return {name: panel.figure for name, panel in self._panels()}

    @property
    def arrays(self) -> dict[str, Mapping[str, Array]]:
        """The data of each figure."""
        return {name: panel.arrays for name, panel in self._panels()}

    @property
    def notes(self) -> list[str]:
        """Why figures are missing or not meaningful, and what was assumed."""
        return [note for section in self.sections for note in section.notes]

    def _panels(self) -> list[tuple[str, Any]]:
        return [(f"{one.folder}/{panel.name}".removeprefix("./"), panel) for one in self.sections for panel in one.panels]

    def save(self, folder: str | Path, *, overwrite: bool = False) -> None:
        """Write a folder with index.html, every figure as PNG and SVG, and its data."""
        check_output_folder(Path(folder), overwrite)
        write_report(Path(folder), self.sections, self.about)

    def summary(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {one.folder: {"figures": [panel.name for panel in one.panels], "notes": one.notes} for one in self.sections}

    def __repr__(self) -> str:
        return f"Inspection({', '.join(self.figures)})"

    def _repr_html_(self) -> str:
        return Markup("".join(_section_html(section) for section in self.sections))


def _section_html(section: Section) -> str:
    parts = [f"<h3>{html_text(section.title)}</h3>", html_lines(section.notes)]
    for panel in section.panels:
        parts.append(
            f"<h4>{html_text(panel.heading)}</h4>{html_image(rendered(panel.figure, 'png', dpi=_SCREEN_DPI), panel.heading)}"
        )
        parts.append(f"<p style='max-width:50em'>{html_text(panel.caption)}</p>")
    return "".join(parts)


@dataclass(frozen=True)
class Inspected:
    """A checkpoint to inspect: its reference, its model, and the images as it takes them."""

    reference: str
    bundle: Bundle
    inputs: PreprocessedImages | None


def inspect_checkpoints(
    checkpoints: Sequence[Inspected],
    raw: RawImages | None,
    *,
    what: What = "figures",
    options: InspectOptions | None = None,
    seed: int = 0,
    data: str | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> Inspection:
    """Draw the figures of checkpoints, or the reconstructions of runs with masked pre-training; several are compared."""
    references = [one.reference for one in checkpoints]
    names = short_names(references)
    folders = ["."] if len(checkpoints) == 1 else [re.sub(r"[^A-Za-z0-9._+-]+", "-", name) for name in names]
    sections = []
    for one, name, folder in zip(checkpoints, names, folders, strict=True):
        if what == "reconstruction":
            assert one.inputs is not None  # checked by check_reconstruction
            sections.append(inspect_reconstruction(name, folder, one.reference, one.bundle, one.inputs, seed))
        else:
            show = lambda text, name=name: progress(f"{name}: {text}")  # noqa: E731
            sections.append(inspect_model(name, folder, one.bundle, one.inputs, options or InspectOptions(), show))
    for section, one in zip(sections, checkpoints, strict=True):
        section.notes += [f"assumed: {text}" for text in one.bundle.report.assumptions]
        section.notes += raw.trained_on(one.bundle) if raw is not None else []
    if what == "figures":
        progress("drawing")
        comparison = compare(sections, [one.bundle for one in checkpoints], [one.inputs for one in checkpoints])
        sections = [comparison, *sections] if comparison is not None else sections
    inputs = checkpoints[0].inputs
    shown = raw.names if raw is not None else inputs.names if inputs is not None else []
    about = {"checkpoints": references, "titles": names, "data": data, "version": __version__, "images": shown}
    return Inspection(sections, about)


def short_names(references: Sequence[str]) -> list[str]:
    """Shorten references to the shortest ends that differ: `runs/a/model` and `runs/b/model` become a and b."""
    parts = [[part for part in Path(reference).parts if part not in ("/", "model")] or [reference] for reference in references]
    if len({tuple(one) for one in parts}) < len(parts):
        raise VitrailError(f"The same checkpoint was given twice: {', '.join(references)}. Pass different checkpoints to compare.")
    length = 1
    while len({tuple(one[-length:]) for one in parts}) < len(parts):
        length += 1
    return ["/".join(one[-length:]) for one in parts]


def check_reconstruction(references: Sequence[str], *, has_images: bool, resized: bool) -> None:
    """Refuse reconstructions of what is not a run, without images, or at another size."""
    missing = next((one for one in references if not Path(one).is_dir()), None)
    if missing is not None:
        raise VitrailError(
            f"There is no folder {missing}. Reconstructions need a run with --task.kind masked-patch or masked-autoencoder."
        )
    if not has_images:
        raise VitrailError(
            "Reconstructions need images: pass image files, or a data source such as folder:DIR (--data on the command line)."
        )
    if resized:
        raise VitrailError(
            "--image-size does not work with reconstructions: the prediction head has a fixed input size. Leave it out."
        )


def check_amounts(*, count: int, show: int) -> None:
    for name, value in (("count", count), ("show", show)):
        if value < 1:
            raise VitrailError(f"{name} is {value}; use 1 or more.")
