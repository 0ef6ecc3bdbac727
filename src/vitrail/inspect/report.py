"""Write an inspection: a folder with figures, their data, and an HTML page that shows them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

from vitrail.checkpoints import Bundle
from vitrail.drawing.style import rendered
from vitrail.errors import VitrailError, counted
from vitrail.files import atomic_folder
from vitrail.inspect.distance import attention_distances, head_attention, uniform_distance
from vitrail.inspect.draw import draw_distance, draw_distance_comparison, draw_filters, draw_positions, draw_raw_filters
from vitrail.inspect.draw_maps import Column, draw_columns, draw_heads, draw_rollout
from vitrail.inspect.images import PreprocessedImages
from vitrail.inspect.inputs import Array, UntrainedWarning, check_patch, in_batches, untrained
from vitrail.inspect.page import NOT_IN_PAPER, page
from vitrail.inspect.rollout import gradient_rollout, rollout, token_similarity
from vitrail.inspect.weights import filters, position_similarity
from vitrail.models import ViT
from vitrail.models.features import chosen_layers, evaluating
from vitrail.text import printable, to_csv, to_json

_MAX_ROWS = 5  # images in figures with one row per image
INDEX = "index.html"


@dataclass(frozen=True)
class Panel:
    """One figure with its caption and data."""

    name: str
    heading: str
    caption: str
    figure: Figure
    arrays: Mapping[str, Array]
    table: Sequence[Sequence[Any]] | None = None
    badge: str = ""
    """The figure of the paper that it corresponds to, or `NOT_IN_PAPER`."""


@dataclass
class Section:
    """All panels of one checkpoint, or the comparison of several."""

    title: str
    folder: str
    info: dict[str, str]
    panels: list[Panel] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Why a figure is missing or not meaningful."""


@dataclass(frozen=True)
class InspectOptions:
    """Which layers and which query patch to inspect, and the batch size."""

    layers: tuple[int, ...] | None = None
    patch: tuple[int, int] | None = None
    batch: int | None = None


def inspect_model(
    title: str,
    folder: str,
    bundle: Bundle,
    inputs: PreprocessedImages | None,
    options: InspectOptions,
    progress: Callable[[str], None],
) -> Section:
    """Draw every figure that applies to the model, and note why others do not."""
    config = bundle.model.config
    info = {
        "checkpoint": bundle.report.source,
        "model": config.name,
        "input": f"{config.image_size[0]}×{config.image_size[1]} pixels, {counted(config.channels, 'channel')}",
    }
    section = Section(title, folder, info)
    message = untrained(bundle.model)
    if message:
        section.notes.append(message)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UntrainedWarning)  # already in the notes
        progress("filters")
        section.panels += _filters(bundle)
        if not isinstance(bundle.model, ViT):
            section.notes.append(
                f"{config.name} is a ResNet without attention and position embeddings. Position similarity, attention distance "
                "and rollout do not apply; only its filters are shown."
            )
            return section
        grid, prefix = bundle.model.config.grid, bundle.model.config.prefix
        info["tokens"] = f"{grid[0]}×{grid[1]} patches and {counted(prefix, 'prefix token')}"
        progress("positions")
        _positions(bundle.model, section)
        if inputs is None:
            section.notes.append("No images were given. Pass images to see attention distance, rollout and heads.")
        else:
            info["images"] = f"{len(inputs.names)}: {', '.join(inputs.names[:3])}{' …' if len(inputs.names) > 3 else ''}"
            _attention(bundle, bundle.model, inputs, options, section, progress)
    return section


def _filters(bundle: Bundle) -> list[Panel]:
    computed = filters(bundle.model)
    plain = isinstance(bundle.model, ViT) and bundle.model.resnet is None
    layer = "the patch embedding" if plain else "the ResNet's first convolution (after weight standardisation)"
    ratios = computed.explained_variance_ratio
    rows = [("component", "explained_variance_ratio"), *enumerate(ratios.tolist())]
    principal = Panel(
        "filters",
        "Filters",
        f"Principal components of the filters of {layer}, strongest first, with the explained variance of each. Mid-grey is zero. "
        "In a trained model they look like a basis for the fine structure of a patch.",
        draw_filters(computed),
        {"components": computed.components, "explained_variance_ratio": ratios},
        rows,
        "Fig. 7, left",
    )
    raw = Panel(
        "filters-raw",
        "Raw filters",
        f"All {len(computed.raw)} filters of {layer}, in the model's order, each scaled to the full range of brightness.",
        draw_raw_filters(computed),
        {"filters": computed.raw},
    )
    return [principal, raw]


def _positions(model: ViT, section: Section) -> None:
    try:
        similarity = position_similarity(model)
    except VitrailError as error:
        section.notes.append(str(error))
        return
    caption = (
        "The map in row r and column c shows the cosine similarity between the position embedding of that patch and those of all "
        "patches. In a trained model, nearby patches and patches in the same row or column are similar."
    )
    if model.positions.layers > 1:
        caption += " This model has a position embedding for every layer; layer 0 is drawn."
    figure = draw_positions(similarity)
    section.panels.append(
        Panel("positions", "Position similarity", caption, figure, {"similarity": similarity}, badge="Fig. 7, centre")
    )


def _attention(
    bundle: Bundle,
    model: ViT,
    inputs: PreprocessedImages,
    options: InspectOptions,
    section: Section,
    progress: Callable[[str], None],
) -> None:
    chosen = chosen_layers(options.layers, len(model.blocks))
    shown = inputs.images[: len(inputs.pictures)]
    labels = _labels(bundle, model, inputs, shown)
    progress("attention distance")
    section.panels.append(_distance(model, inputs, chosen, options.batch))
    progress("rollout")
    maps = rollout(model, shown, batch=options.batch)
    caption = (
        "Attention averaged over heads, mixed with the identity for the residual connection (½A + ½I), and multiplied through all "
        f"layers, starting from {_start(model)}. Bright patches contribute most to the output. As in the paper, maps are smoothed "
        "over one patch and scaled to the full range of brightness; the unscaled weights are in the NPZ file."
    )
    figure = draw_rollout(inputs.pictures, maps, labels=labels)
    arrays = {"rollout": maps, "names": np.array(inputs.names[: len(shown)])}
    section.panels.append(Panel("rollout", "Attention rollout", caption, figure, arrays, badge="Fig. 6, Fig. 14"))
    progress("heads")
    section.panels.append(_heads(model, inputs, options, chosen))
    progress("comparison of maps")
    section.panels.append(_comparison(bundle, model, inputs, maps, options.batch, section, labels))


def _start(model: ViT) -> str:
    starts = {"class": "the class token", "mean": "the mean of all patches", "map": "the attention of the pooling probe"}
    return "the class and distillation tokens" if model.config.distill_token else starts[model.config.pooling]


def _labels(bundle: Bundle, model: ViT, inputs: PreprocessedImages, images: torch.Tensor) -> list[str]:
    """Return for each image what is predicted, with its probability, and the file name; only the name without a trained head."""
    names = [_shortened(Path(name).name) for name in inputs.names[: len(images)]]
    if bundle.head != "set" or bundle.task != "classify":
        return names
    with evaluating(model):
        found = [row[0] for part in in_batches(model, images) for row in bundle.decode(model(part), top=1)]
    predicted = [f"predicted: {_shortened(printable(one.label, one_line=True))} {one.score:.0%}" for one in found]
    return [f"{text}\n{name}" for text, name in zip(predicted, names, strict=True)]


def _shortened(text: str, limit: int = 26) -> str:
    """Leave out the middle of a long name: its beginning and end tell most."""
    return text if len(text) <= limit else f"{text[: limit // 2]}…{text[-(limit // 2 - 1) :]}"


def _distance(model: ViT, inputs: PreprocessedImages, chosen: tuple[int, ...], batch: int | None) -> Panel:
    both, uniform = attention_distances(model, inputs.images, layers=chosen, batch=batch), uniform_distance(model.config)
    count = len(inputs.images)
    other = both["all"] if model.config.prefix else None
    caption = (
        "The distance in pixels of the input from every query patch to all patches, averaged with the attention as weight; then "
        "the mean over query patches and images."
        + (
            " Attention to prefix tokens is ignored and the rest renormalised (grey: counted as distance 0)."
            if other is not None
            else ""
        )
        + f" Uniform attention gives {uniform:.1f} pixels."
    )
    rows: list[Sequence[Any]] = [("layer", "head", "pixels_among_patches", "pixels_prefix_as_zero")]
    for number, layer in enumerate(chosen):
        rows += [
            (layer, head, float(both["patches"][number, head]), float(both["all"][number, head]))
            for head in range(model.config.heads)
        ]
    figure = draw_distance(both["patches"], layers=chosen, uniform=uniform, images=count, other=other)
    arrays = {
        "among_patches": both["patches"],
        "prefix_as_zero": both["all"],
        "layers": np.array(chosen),
        "uniform": np.array(uniform),
    }
    return Panel("distance", "Mean attention distance", caption, figure, arrays, rows, "Fig. 7, right; Fig. 11")


def _heads(model: ViT, inputs: PreprocessedImages, options: InspectOptions, chosen: tuple[int, ...]) -> Panel:
    rows, columns = model.config.grid
    patch = options.patch or (rows // 2, columns // 2)
    check_patch(model.config, patch)
    patch = (patch[0] % rows, patch[1] % columns)
    attention = head_attention(model, inputs.images[:1], patch, layers=chosen, batch=options.batch)[0]
    caption = (
        f"Attention of each head and layer from the framed query patch (row {patch[0]}, column {patch[1]}) of {inputs.names[0]}. "
        "Each map is scaled to its own maximum; the unscaled attention is in the NPZ file."
    )
    arrays = {"attention": attention, "layers": np.array(chosen), "patch": np.array(patch)}
    figure = draw_heads(inputs.pictures[0], attention, patch, layers=chosen)
    return Panel("heads", "Attention of each head", caption, figure, arrays)


def _comparison(
    bundle: Bundle, model: ViT, inputs: PreprocessedImages, maps: Array, batch: int | None, section: Section, labels: list[str]
) -> Panel:
    pictures = inputs.pictures[:_MAX_ROWS]
    images = inputs.images[: len(pictures)]
    columns = [Column("attention rollout\n(in the paper)", maps, pictures)]
    arrays: dict[str, Array] = {"rollout": maps[: len(pictures)], "names": np.array(inputs.names[: len(pictures)])}
    if bundle.head == "set":
        arrays["gradient_rollout"] = gradient_rollout(model, images, batch=batch)
        columns.append(Column("gradient-weighted\n(not in the paper)", arrays["gradient_rollout"], pictures))
    else:
        section.notes.append("The head is missing or zero-initialised, so gradient-weighted rollout is not available.")
    arrays["token_similarity"] = token_similarity(model, images, batch=batch)
    columns.append(Column("token similarity\n(not in the paper)", arrays["token_similarity"], pictures, signed=True))
    reference = "the class token" if model.config.pooling == "class" else "the mean of the patches"
    caption = (
        "Gradient-weighted rollout shows the attention that raises the highest output (Chefer et al. 2021). Token similarity is "
        f"the cosine similarity between each patch token after the last layer and {reference}; its range is below each map."
    )
    figure = draw_columns(pictures, columns, labels=labels)
    return Panel("comparison", "Comparison of maps", caption, figure, arrays, badge=NOT_IN_PAPER)


def compare(sections: Sequence[Section], bundles: Sequence[Bundle], inputs: Sequence[PreprocessedImages | None]) -> Section | None:
    """Compare checkpoints: mean attention distance layer by layer, and rollouts side by side."""
    rows = [(s, b, v) for s, b, v in zip(sections, bundles, inputs, strict=True) if v is not None and isinstance(b.model, ViT)]
    if len(rows) < 2:
        return None
    section = Section("Comparison", "comparison", {"checkpoints": ", ".join(one.title for one, _, _ in rows)})
    arrays = {one.title: {panel.name: panel.arrays for panel in one.panels} for one, _, _ in rows}
    distances = {name: each["distance"]["among_patches"] for name, each in arrays.items()}
    layers = {name: each["distance"]["layers"] for name, each in arrays.items()}
    uniform = [uniform_distance(bundle.model.config) for _, bundle, _ in rows]  # type: ignore[arg-type]
    count = len(rows[0][2].names)
    table: list[Sequence[Any]] = [("checkpoint", "layer", "head", "pixels_among_patches")]
    for name, values in distances.items():
        table += [(name, int(layers[name][r]), h, float(values[r, h])) for r, h in np.ndindex(*values.shape)]
    figure = draw_distance_comparison(distances, layers=layers, uniform=uniform, images=count)
    caption = "Among patches, in pixels of each checkpoint's own input."
    section.panels.append(Panel("distance", "Mean attention distance by layer", caption, figure, distances, table))
    pictures = rows[0][2].pictures[:_MAX_ROWS]
    columns = [Column(one.title, arrays[one.title]["rollout"]["rollout"], view.pictures) for one, _, view in rows]
    maps = {column.heading: column.maps for column in columns}
    caption = "The same images in each checkpoint, each with its own preprocessing."
    section.panels.append(Panel("rollout", "Attention rollout", caption, draw_columns(pictures, columns), maps))
    return section


def check_output_folder(folder: Path, overwrite: bool) -> None:
    """Refuse a folder that is not empty, unless it is an inspection and may be replaced."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise VitrailError(f"{folder} is a file, but an inspection is a folder. Choose another name for --out.")
    files = sorted(item.name for item in folder.iterdir())
    is_inspection = {INDEX, "inspection.json"} <= set(files)
    if files and not is_inspection:
        raise VitrailError(f"{folder} already contains other files ({', '.join(files[:3])}). Choose another name for --out.")
    if files and not overwrite:
        raise VitrailError(f"{folder} already contains an inspection. Pass --overwrite to replace it, or choose another name.")


def write_report(folder: Path, sections: Sequence[Section], about: Mapping[str, Any]) -> None:
    """Write the folder atomically."""
    with atomic_folder(folder) as temporary:
        for section in sections:
            target = temporary / section.folder
            target.mkdir(parents=True, exist_ok=True)
            for panel in section.panels:
                for extension in ("png", "svg"):
                    (target / f"{panel.name}.{extension}").write_bytes(rendered(panel.figure, extension))
                np.savez_compressed(target / f"{panel.name}.npz", **dict(panel.arrays))  # type: ignore[arg-type]
                if panel.table is not None:
                    (target / f"{panel.name}.csv").write_bytes(to_csv(panel.table))
        summary = {**about, "sections": [_summary(section) for section in sections]}
        (temporary / "inspection.json").write_text(to_json(summary, indent=2) + "\n", encoding="utf-8")
        (temporary / INDEX).write_text(page(sections, about), encoding="utf-8")


def _summary(section: Section) -> dict[str, Any]:
    names = [f"{section.folder}/{panel.name}".removeprefix("./") for panel in section.panels]
    return {"title": section.title, **section.info, "figures": names, "notes": section.notes}
