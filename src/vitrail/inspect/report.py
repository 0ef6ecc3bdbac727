"""Everything that can be shown of checkpoints, collected into one folder: figures, raw arrays, and a page that shows them."""

from __future__ import annotations

import csv
import io
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

from vitrail.checkpoints import Bundle
from vitrail.errors import VitrailError
from vitrail.files import atomic_folder
from vitrail.inspect.distance import attention_distances, head_attention, uniform_distance
from vitrail.inspect.draw import draw_distance, draw_distance_comparison, draw_filters, draw_positions, draw_raw_filters
from vitrail.inspect.draw_maps import Column, draw_columns, draw_heads, draw_rollout
from vitrail.inspect.images import PreprocessedImages
from vitrail.inspect.inputs import Array, UntrainedWarning, check_patch, in_batches, untrained
from vitrail.inspect.page import NOT_IN_PAPER, page
from vitrail.inspect.rollout import gradient_rollout, highest_outputs, rollout, token_similarity
from vitrail.inspect.style import rendered
from vitrail.inspect.weights import filters, position_similarity
from vitrail.models import ViT
from vitrail.models.features import chosen_layers

_SIDE_BY_SIDE = 5  # images in the figures that give each one a row
INDEX = "index.html"


@dataclass(frozen=True)
class Panel:
    """One figure with its raw numbers."""

    name: str
    heading: str
    caption: str
    figure: Figure
    arrays: Mapping[str, Array]
    table: Sequence[Sequence[Any]] | None = None
    badge: str = ""
    """Which figure of the paper it is, or that it is none of its methods."""


@dataclass
class Section:
    """All figures of one checkpoint, or the comparison of several."""

    title: str
    folder: str
    facts: dict[str, str]
    figures: list[Panel] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Why a figure is missing, or means nothing yet."""


@dataclass(frozen=True)
class InspectOptions:
    """What to look at."""

    layers: tuple[int, ...] | None = None
    patch: tuple[int, int] | None = None
    batch: int | None = None


def examine(
    title: str, folder: str, bundle: Bundle, seen: PreprocessedImages | None, options: InspectOptions, progress: Callable[[str], None]
) -> Section:
    """Every figure that fits the model; a note for each that does not."""
    config = bundle.model.config
    facts = {
        "checkpoint": bundle.report.source,
        "model": config.name,
        "input": f"{config.image_size[0]}×{config.image_size[1]} pixels, {config.channels} channels",
    }
    section = Section(title, folder, facts)
    sentence = untrained(bundle.model)
    if sentence:
        section.notes.append(sentence)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UntrainedWarning)  # said once, above
        progress("filters")
        section.figures += _filters(bundle)
        if not isinstance(bundle.model, ViT):
            section.notes.append(
                f"{config.name} is a ResNet. Position similarity, attention distance and rollout do not apply to it: it has no "
                "tokens, no position embeddings and no attention. Its filters are shown."
            )
            return section
        grid, prefix = bundle.model.config.grid, bundle.model.config.prefix
        facts["tokens"] = f"{grid[0]}×{grid[1]} patches and {prefix} prefix token{'' if prefix == 1 else 's'}"
        progress("positions")
        _positions(bundle.model, section)
        if seen is None:
            section.notes.append(
                "No images were given, so attention was not looked at: pass images or --data for distance, rollout and heads."
            )
        else:
            facts["images"] = f"{len(seen.names)}: {', '.join(seen.names[:3])}{' …' if len(seen.names) > 3 else ''}"
            _attention(bundle, bundle.model, seen, options, section, progress)
    return section


def _filters(bundle: Bundle) -> list[Panel]:
    found = filters(bundle.model)
    hybrid = isinstance(bundle.model, ViT) and bundle.model.resnet is None
    what = "the patch embedding" if hybrid else "the ResNet's first convolution, standardised as it is applied"
    rows = [("component", "share_of_variance"), *enumerate(found.explained.tolist())]
    principal = Panel(
        "filters",
        "Filters",
        f"The first {len(found.components)} principal components of the filters of {what}, strongest first, with the share of "
        "the filters' variance each accounts for. Mid-grey is zero. After training they look like a basis for fine structure.",
        draw_filters(found),
        {"components": found.components, "explained": found.explained},
        rows,
        "Fig. 7, left",
    )
    raw = Panel(
        "filters-raw",
        "Raw filters",
        f"The {len(found.raw)} filters of {what} themselves, in the model's order, each from its most negative to its most "
        "positive value.",
        draw_raw_filters(found),
        {"filters": found.raw},
    )
    return [principal, raw]


def _positions(model: ViT, section: Section) -> None:
    try:
        similarity = position_similarity(model)
    except VitrailError as error:
        section.notes.append(str(error))
        return
    caption = (
        "The small map in row r and column c shows the cosine similarity of that patch's position embedding to those of all "
        "patches. Prefix tokens are left out. A trained model shows rows, columns and nearness."
    )
    if model.positions.layers > 1:
        caption += " This model adds positions before every layer; layer 0 is drawn."
    drawn = draw_positions(similarity)
    section.figures.append(
        Panel("positions", "Position similarity", caption, drawn, {"similarity": similarity}, badge="Fig. 7, centre")
    )


def _attention(bundle: Bundle, model: ViT, seen: PreprocessedImages, options: InspectOptions, section: Section, progress: Callable[[str], None]) -> None:
    chosen = chosen_layers(options.layers, len(model.blocks))
    shown = seen.images[: len(seen.pictures)]
    labels = _answers(bundle, model, shown)
    progress("attention distance")
    section.figures.append(_distance(model, seen, chosen, options.batch))
    progress("rollout")
    maps = rollout(model, shown, batch=options.batch)
    caption = (
        "Head mean, half of it replaced by the identity for the residual connection, rows that sum to one, multiplied through "
        f"all layers from {_start(model)}. Bright is what reaches the output; drawn smoothly over one patch and stretched "
        "to the full range of brightness, as the authors did. The raw shares are in the file."
    )
    drawn = draw_rollout(seen.pictures, maps, labels=labels)
    raw = {"rollout": maps, "names": np.array(seen.names[: len(shown)])}
    section.figures.append(Panel("rollout", "Attention rollout", caption, drawn, raw, badge="Fig. 6, Fig. 14"))
    progress("heads")
    section.figures.append(_heads(model, seen, options, chosen))
    progress("other maps")
    section.figures.append(_beside(bundle, model, seen, maps, options.batch, section, labels))


def _start(model: ViT) -> str:
    starts = {"class": "the class token", "mean": "the mean of all patches", "map": "the pooling probe's attention"}
    return "the class and distillation tokens" if model.config.distill_token else starts[model.config.pooling]


def _answers(bundle: Bundle, model: ViT, images: torch.Tensor) -> list[str]:
    """The highest output of each shown image by name, where the head says anything."""
    if bundle.head != "set" or bundle.task != "classify":
        return []
    return [bundle.label(int(index))[:28] for part in in_batches(model, images) for index in highest_outputs(model, part)]


def _distance(model: ViT, seen: PreprocessedImages, chosen: tuple[int, ...], batch: int | None) -> Panel:
    both, uniform = attention_distances(model, seen.images, layers=chosen, batch=batch), uniform_distance(model.config)
    count = len(seen.images)
    other = both["all"] if model.config.prefix else None
    caption = (
        "For every patch, the distance to every other patch in pixels of the input, averaged with the attention as weight; then "
        "the mean over patches and images. What goes to prefix tokens is left out, so that weights sum to one"
        + (" (grey: kept, and counted as distance 0)." if other is not None else ".")
        + f" A head that looked everywhere alike would stand at {uniform:.1f} pixels."
    )
    rows: list[Sequence[Any]] = [("layer", "head", "pixels_among_patches", "pixels_prefix_as_zero")]
    for number, layer in enumerate(chosen):
        rows += [
            (layer, head, float(both["patches"][number, head]), float(both["all"][number, head]))
            for head in range(model.config.heads)
        ]
    drawn = draw_distance(both["patches"], layers=chosen, uniform=uniform, images=count, other=other)
    raw = {"among_patches": both["patches"], "prefix_as_zero": both["all"], "layers": np.array(chosen)}
    return Panel(
        "distance", "Attention distance", caption, drawn, {**raw, "uniform": np.array(uniform)}, rows, "Fig. 7, right; Fig. 11"
    )


def _heads(model: ViT, seen: PreprocessedImages, options: InspectOptions, chosen: tuple[int, ...]) -> Panel:
    rows, columns = model.config.grid
    patch = options.patch or (rows // 2, columns // 2)
    check_patch(model, patch)
    patch = (patch[0] % rows, patch[1] % columns)
    found = head_attention(model, seen.images[:1], patch, layers=chosen, batch=options.batch)[0]
    caption = (
        f"Where each head of each layer looks from the framed patch (row {patch[0]}, column {patch[1]}) of {seen.names[0]}. Each "
        "map is drawn from 0 to its own maximum; the file holds the shares."
    )
    raw = {"attention": found, "layers": np.array(chosen), "patch": np.array(patch)}
    return Panel("heads", "Heads", caption, draw_heads(seen.pictures[0], found, patch, layers=chosen), raw)


def _beside(bundle: Bundle, model: ViT, seen: PreprocessedImages, maps: Array, batch: int | None, section: Section, labels: list[str]) -> Panel:
    pictures = seen.pictures[:_SIDE_BY_SIDE]
    images = seen.images[: len(pictures)]
    columns = [Column("rollout (the paper's)", maps, pictures)]
    raw: dict[str, Array] = {"rollout": maps[: len(pictures)], "names": np.array(seen.names[: len(pictures)])}
    if bundle.head == "set":
        raw["gradient_rollout"] = gradient_rollout(model, images, batch=batch)
        columns.append(Column("gradient-weighted\n(not in the paper)", raw["gradient_rollout"], pictures))
    else:
        section.notes.append("The head is missing or all zeros, so there is no output to weight attention by: no gradient rollout.")
    raw["token_similarity"] = token_similarity(model, images, batch=batch)
    columns.append(Column("token similarity\n(not in the paper)", raw["token_similarity"], pictures, signed=True))
    to = "the class token" if model.config.pooling == "class" else "the mean of the patches"
    caption = (
        "For comparison. Gradient-weighted rollout keeps the attention that raises the highest output (Chefer et al. 2021). Token "
        f"similarity is the cosine of each patch's final token with {to}, over the range written beneath."
    )
    return Panel("beside", "Other maps", caption, draw_columns(pictures, columns, labels=labels), raw, badge=NOT_IN_PAPER)


def compare(sections: Sequence[Section], bundles: Sequence[Bundle], seen: Sequence[PreprocessedImages | None]) -> Section | None:
    """Several checkpoints in one figure: how far heads look, depth by depth, and rollouts side by side."""
    rows = [(s, b, v) for s, b, v in zip(sections, bundles, seen, strict=True) if v is not None and isinstance(b.model, ViT)]
    if len(rows) < 2:
        return None
    section = Section("Comparison", "comparison", {"checkpoints": ", ".join(one.title for one, _, _ in rows)})
    raw = {one.title: {shown.name: shown.arrays for shown in one.figures} for one, _, _ in rows}
    distances = {name: arrays["distance"]["among_patches"] for name, arrays in raw.items()}
    layers = {name: arrays["distance"]["layers"] for name, arrays in raw.items()}
    uniform = [uniform_distance(bundle.model.config) for _, bundle, _ in rows]  # type: ignore[arg-type]
    count = len(rows[0][2].names)
    table: list[Sequence[Any]] = [("checkpoint", "layer", "head", "pixels_among_patches")]
    for name, values in distances.items():
        table += [(name, int(layers[name][r]), h, float(values[r, h])) for r, h in np.ndindex(*values.shape)]
    drawn = draw_distance_comparison(distances, layers=layers, uniform=uniform, images=count)
    caption = "Among patches, in pixels of each checkpoint's own input."
    section.figures.append(Panel("distance", "Attention distance, depth by depth", caption, drawn, distances, table))
    pictures = rows[0][2].pictures[:_SIDE_BY_SIDE]
    columns = [Column(one.title, raw[one.title]["rollout"]["rollout"], view.pictures) for one, _, view in rows]
    maps = {column.heading: column.maps for column in columns}
    caption = "The same images through each checkpoint, as each one's preprocessing cuts them."
    section.figures.append(Panel("rollout", "Attention rollout, side by side", caption, draw_columns(pictures, columns), maps))
    return section


def check_output_folder(folder: Path, overwrite: bool) -> None:
    """Refuse a folder that holds something, unless it is an inspection and may be replaced."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise VitrailError(f"{folder} is a file; an inspection is a folder. Choose another name for --out.")
    inside = sorted(item.name for item in folder.iterdir())
    ours = {INDEX, "inspection.json"} <= set(inside)
    if inside and not ours:
        raise VitrailError(f"{folder} exists and holds other files ({', '.join(inside[:3])}); choose another name for --out.")
    if inside and not overwrite:
        raise VitrailError(f"{folder} holds an inspection already; pass --overwrite to replace it, or choose another name.")


def write_report(folder: Path, sections: Sequence[Section], about: Mapping[str, Any]) -> None:
    """Write the folder, wholly or not at all."""
    with atomic_folder(folder) as temporary:
        for section in sections:
            place = temporary / section.folder
            place.mkdir(parents=True, exist_ok=True)
            for shown in section.figures:
                for form in ("png", "svg"):
                    (place / f"{shown.name}.{form}").write_bytes(rendered(shown.figure, form))
                np.savez_compressed(place / f"{shown.name}.npz", **dict(shown.arrays))  # type: ignore[arg-type]
                if shown.table is not None:
                    (place / f"{shown.name}.csv").write_text(_csv(shown.table), encoding="utf-8")
        summary = {**about, "sections": [_summary(section) for section in sections]}
        (temporary / "inspection.json").write_text(json.dumps(summary, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        (temporary / INDEX).write_text(page(sections, about), encoding="utf-8")


def _summary(section: Section) -> dict[str, Any]:
    names = [f"{section.folder}/{shown.name}".removeprefix("./") for shown in section.figures]
    return {"title": section.title, **section.facts, "figures": names, "notes": section.notes}


def _csv(rows: Sequence[Sequence[Any]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()
