"""Show published weights: as a table, and what is known of one without its file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.table import Table

from vitrail.checkpoints.download import cached_url
from vitrail.checkpoints.published import FIGURES, PublishedWeights, default, tags
from vitrail.commands.terminal import Console, say
from vitrail.errors import VitrailError
from vitrail.text import to_json

_WIDTH = 112


def show_published(rows: Sequence[PublishedWeights], as_json: bool) -> None:
    """Print weights as a table; a star marks the default of each name."""
    if not rows:
        raise VitrailError("There are no published weights of these models. `vitrail models --pretrained` lists those there are.")
    if as_json:
        say(to_json([one.to_dict() for one in rows], indent=2))
        return
    title = f"{len(rows)} published weights; * is the default of a name, others are NAME@TAG"
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", padding=(0, 1), pad_edge=False)
    for heading in ("name", "tag", "pixels", "MB", "top-1", "paper", "licence", "source"):
        table.add_column(heading, justify="right" if heading in ("pixels", "MB", "top-1") else "left", no_wrap=True)
    for one in rows:
        star = "*" if one is default(one.name) else ""
        top1 = f"{one.top1:.1f}" if one.top1 is not None else "–"
        about = (one.paper, one.licence, "Hub" if one.repository else "Google")
        table.add_row(one.name, f"{one.tag}{star}", str(one.image_size), f"{one.megabytes:,.0f}", top1, *about)
    console = Console()
    Console(width=max(console.width, _WIDTH)).print(table)  # a narrow terminal wraps lines; cut-off names would be of no use
    console.print(f"paper: arXiv number; top-1 in % on ImageNet-1k: {FIGURES}", highlight=False, soft_wrap=True)
    console.print("`vitrail info NAME` shows the repository or URL, --json all columns", highlight=False, soft_wrap=True)


def is_downloaded(weights: PublishedWeights) -> bool:
    from vitrail.checkpoints import hub

    if weights.repository is None:
        return cached_url(weights.source).exists()
    return hub.cached(weights.repository) is not None


def describe_published(weights: PublishedWeights) -> dict[str, Any]:
    """Return what is known of published weights without their file."""
    others = [one.tag for one in tags(weights.name) if one is not weights]
    return {**weights.to_dict(), "downloaded": is_downloaded(weights), "other_tags": others}


def lines_of(weights: PublishedWeights) -> list[tuple[str, str]]:
    """Return the same as lines of a table."""
    top = f"{weights.top1} % top-1, {weights.top5} % top-5 on ImageNet-1k ({FIGURES})" if weights.top1 else "none for ImageNet-1k"
    outputs = f"{weights.outputs:,}" if weights.outputs else "none: only a backbone"
    others = ", ".join(one.tag for one in tags(weights.name) if one is not weights)
    return [
        ("weights", weights.reference),
        ("source", weights.source),
        ("paper", f"arXiv {weights.paper}"),
        ("licence", weights.licence),
        ("published", top),
        ("size", f"{weights.parameters:,} parameters, {weights.megabytes:,.0f} MB, {weights.image_size} pixels, outputs {outputs}"),
        ("other tags", others or "none"),
    ]
