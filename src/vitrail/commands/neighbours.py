"""`vitrail neighbours`: find the nearest images in an embeddings file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from rich import box
from rich.table import Table

from vitrail.commands.options import Json
from vitrail.commands.output import check_output_file
from vitrail.commands.terminal import Console, say
from vitrail.errors import VitrailError, counted
from vitrail.evaluate.settings import Metric
from vitrail.text import to_json

if TYPE_CHECKING:
    from vitrail.evaluate.embeddings import Embeddings, ShardedEmbeddings

    AnyEmbeddings = Embeddings | ShardedEmbeddings

Neighbours = list[tuple[str, list[tuple[str, float]]]]
"""Each query with its nearest images, and their similarity or distance."""


def neighbours(
    embeddings: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="EMBEDDINGS")],
    images: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[IMAGE …]")] = (),
    /,
    *,
    count: int = 8,
    metric: Metric = "cosine",
    sheet: Path | None = None,
    overwrite: bool = False,
    examples: int = 8,
    seed: int = 0,
    json_: Json = False,
) -> None:
    """Find the nearest images in a file or folder written by `vitrail embed`; --sheet draws them on a contact sheet.

    The search is exact. A folder of shards is read block by block, so it may be larger than memory; faiss is used if installed.

    Example: vitrail neighbours photos.npz

    Example: vitrail neighbours photos.npz holiday/cat.jpg --count 12 --sheet cats.png

    Args:
        embeddings: A file or a folder of shards written by `vitrail embed`.
        images: Query images: names in the file, or other image files, which are embedded with the same checkpoint and settings.
            Default: random images of the file.
        count: How many neighbours per query.
        metric: Cosine similarity, or Euclidean distance.
        sheet: Write a contact sheet of the queries and their neighbours to this PNG file.
        overwrite: Replace an existing file.
        examples: How many random queries, if no image is named.
        seed: Seed of the random queries.
        json_: Print JSON instead of a table.
    """
    import numpy as np

    from vitrail.evaluate.embeddings import contact_sheet, open_embeddings

    check_output_file(sheet, overwrite=overwrite)
    loaded = open_embeddings(embeddings)
    names = loaded.names
    if count < 1:
        raise VitrailError(f"--count is {count}; use 1 or more.")
    if len(names) < 2:
        raise VitrailError(f"{embeddings} has {counted(len(names), 'image')}; neighbours need at least 2.")
    among = len(names)
    if images:
        loaded, queries = _with_queries(loaded, images)
        names = loaded.names
    else:
        queries = sorted(np.random.default_rng(seed).permutation(len(names))[:examples].tolist())
    order, values = loaded.nearest(queries, count, metric, among=among)
    missing = contact_sheet(sheet, loaded, queries, order, values) if sheet is not None else []
    found = [
        (names[query], [(names[int(k)], float(value)) for k, value in zip(*nearest, strict=True)])
        for query, *nearest in zip(queries, order, values, strict=True)
    ]
    if json_:
        _print_json(found, metric, sheet)
    else:
        _show(found, metric, sheet, missing)


def _with_queries(loaded: AnyEmbeddings, images: tuple[str, ...]) -> tuple[AnyEmbeddings, list[int]]:
    """Return the rows of the queries; files that are not in the embeddings are embedded and added behind them.

    A file that exists is this file, not another of the same name in the embeddings.
    """
    found = {name: loaded.row_of_file(name) if Path(name).is_file() else loaded.find(name) for name in images}
    rows = {name: row for name, row in found.items() if row is not None}
    outside = [name for name in found if name not in rows]
    rows |= {name: len(loaded.names) + k for k, name in enumerate(outside)}
    return loaded.with_images(outside) if outside else loaded, [rows[name] for name in images]


def _print_json(found: Neighbours, metric: str, sheet: Path | None) -> None:
    rows = [
        {"image": name, "neighbours": [{"image": near, metric: round(value, 6)} for near, value in nearest]}
        for name, nearest in found
    ]
    say(to_json({"metric": metric, "sheet": str(sheet) if sheet else None, "queries": rows}, indent=2))


def _show(found: Neighbours, metric: str, sheet: Path | None, missing: list[str]) -> None:
    from vitrail.evaluate.embeddings import short_name

    console = Console()
    table = Table("image", f"nearest ({metric})", box=box.SIMPLE_HEAD)
    for name, nearest in found:
        text = ", ".join(f"{short_name(near)} {value:.3f}" for near, value in nearest[:3])
        table.add_row(short_name(name), text + (" …" if len(nearest) > 3 else ""))
    console.print(table)
    if sheet is not None:
        console.print(f"contact sheet: {sheet}", highlight=False, soft_wrap=True)
    if missing:
        files = sorted(set(missing))
        text = f"{counted(len(files), 'image file')} could not be read, such as {files[0]}; the contact sheet shows red frames."
        console.print(text, highlight=False, soft_wrap=True)
