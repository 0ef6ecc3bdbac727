"""`vitrail models`: list all model variants with parameters and FLOPs."""

from __future__ import annotations

import json
from typing import Annotated

import tyro
from rich import box
from rich.console import Console
from rich.table import Table

from vitrail.models import VARIANTS, canonical_name, flops, model_config, parameters
from vitrail.models.config import ModelConfig, ViTConfig


def models(
    names: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[MODEL …]")] = (),
    /,
    *,
    image_size: int = 224,
    outputs: int = 1000,
    json_: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> None:
    """List the models by the paper's names, with parameters and GFLOPs per image (a multiply-add counts as two).

    Example: vitrail models

    Example: vitrail models B/16 L/16 --image-size 384 --json

    Args:
        names: Only these models; any patch size and any width factor works: B/20, R50x5.
        image_size: Height and width of the input in pixels. Models that do not support it are left out of the full list.
        outputs: Number of classes.
        json_: Print JSON instead of a table.
    """
    chosen = [canonical_name(name) for name in names]
    rows = [_row(model_config(name, image_size=image_size, outputs=outputs)) for name in chosen or _fitting(image_size)]
    if json_:
        print(json.dumps(rows, indent=2))  # noqa: T201
        return
    Console().print(_table(rows, image_size))


def _fitting(image_size: int) -> list[str]:
    strides = {name: model_config(name).stride[0] if "ViT" in name else 1 for name in VARIANTS}  # type: ignore[attr-defined]
    return [name for name in VARIANTS if image_size % strides[name] == 0]


def _row(config: ModelConfig) -> dict[str, object]:
    row = {"name": config.name, "parameters": parameters(config), "gflops": round(flops(config) / 1e9, 3)}
    row |= {"image_size": list(config.image_size), "outputs": config.outputs}
    if isinstance(config, ViTConfig):
        row |= {"tokens": config.tokens, "width": config.width, "depth": config.depth, "heads": config.heads, "mlp": config.mlp}
    return row


def _table(rows: list[dict[str, object]], image_size: int) -> Table:
    table = Table(title=f"{len(rows)} models at {image_size}×{image_size}", box=box.SIMPLE_HEAD, title_justify="left")
    for heading in ("name", "parameters", "GFLOPs", "tokens", "width", "depth", "heads"):
        table.add_column(heading, justify="left" if heading == "name" else "right")
    for row in rows:
        sizes = [str(row.get(key, "–")) for key in ("tokens", "width", "depth", "heads")]
        table.add_row(str(row["name"]), f"{row['parameters']:,}", f"{row['gflops']:,.1f}", *sizes)
    return table
