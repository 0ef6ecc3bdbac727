"""`vitrail neighbours`: what is near what among embedded images."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro
from rich import box
from rich.console import Console
from rich.table import Table

from vitrail.commands.options import Json
from vitrail.errors import VitrailError
from vitrail.evaluate.embeddings import Metric, contact_sheet, load_embeddings, short_name


def neighbours(
    embeddings: Annotated[Path, tyro.conf.Positional],
    images: Annotated[tuple[str, ...], tyro.conf.Positional] = (),
    /,
    *,
    count: int = 8,
    metric: Metric = "cosine",
    sheet: Path | None = Path("neighbours.png"),
    examples: int = 8,
    seed: int = 0,
    json_: Json = False,
) -> None:
    """Find the images nearest to some image, among those of a file written by `vitrail embed`, and show them on a sheet.

    Example: vitrail neighbours photos.npz

    Example: vitrail neighbours photos.npz holiday/cat.jpg --count 12 --sheet cats.png

    Args:
        embeddings: The file with features and names.
        images: Names of images in it; if none is given, some are drawn.
        count: How many neighbours of each.
        metric: Cosine similarity, or Euclidean distance.
        sheet: Where to write the contact sheet, a PNG; None: nowhere.
        examples: How many images to draw where none is named.
        seed: Decides which are drawn.
        json_: Print JSON for a program instead of a table.
    """
    found = load_embeddings(embeddings)
    if count < 1 or len(found.names) < 2:
        raise VitrailError(
            f"There are {len(found.names)} images and {count} neighbours were asked for; at least 2 and 1 are needed."
        )
    if images:
        queries = [found.find(name) for name in images]
    else:
        drawn = np.random.default_rng(seed).permutation(len(found.names))[:examples]
        queries = sorted(drawn.tolist())
    order, values = found.nearest(queries, count, metric)
    missing = contact_sheet(sheet, found, queries, order, values) if sheet is not None else []
    rows = [
        {
            "image": found.names[query],
            "neighbours": [{"image": found.names[int(k)], metric: round(float(v), 6)} for k, v in zip(*pair, strict=True)],
        }
        for query, *pair in zip(queries, order, values, strict=True)
    ]
    if json_:
        print(json.dumps({"metric": metric, "sheet": str(sheet) if sheet else None, "queries": rows}, indent=2))  # noqa: T201
        return
    console = Console()
    table = Table("image", f"nearest ({metric})", box=box.SIMPLE_HEAD)
    for query, near, value in zip(queries, order, values, strict=True):
        shown = ", ".join(f"{short_name(found.names[int(k)])} {v:.3f}" for k, v in zip(near[:3], value[:3], strict=True))
        table.add_row(short_name(found.names[query]), shown + (" …" if len(near) > 3 else ""))
    console.print(table)
    if sheet is not None:
        console.print(f"contact sheet: {sheet}", highlight=False, soft_wrap=True)
    if missing:
        names = sorted(set(missing))
        words = (
            f"{len(names)} images are not where they were when they were embedded, such as {names[0]}; the sheet shows red frames."
        )
        console.print(words, highlight=False, soft_wrap=True)
