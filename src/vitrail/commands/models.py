"""`vitrail models`: list all model variants with parameters and FLOPs."""

from __future__ import annotations

from typing import Annotated

import tyro
from rich import box
from rich.table import Table

from vitrail.checkpoints.pretrained import pretrained_models
from vitrail.checkpoints.published import published_weights
from vitrail.commands.options import Json
from vitrail.commands.terminal import Console, say
from vitrail.models import VARIANTS, canonical_name, flops, model_config, parameters
from vitrail.models.config import ModelConfig, ViTConfig
from vitrail.text import to_json


def models(
    names: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[MODEL …]")] = (),
    /,
    *,
    image_size: int = 224,
    outputs: int = 1000,
    pretrained: bool = False,
    json_: Json = False,
) -> None:
    """List the models by the paper's names, with parameters and GFLOPs per image (a multiply-add counts as two).

    Below are the trained models that are included: each is a checkpoint for every command, by its name. With --pretrained, the
    published weights are listed instead, which every command downloads by their names.

    Example: vitrail models

    Example: vitrail models B/16 L/16 --image-size 384 --json

    Example: vitrail models --pretrained

    Args:
        names: Only these models; any patch size and any width factor works: B/20, R50x5.
        image_size: Height and width of the input in pixels. Models that do not support it are left out of the full list.
        outputs: Number of classes.
        pretrained: List published weights: name, tag, paper, source, size, top-1 accuracy on ImageNet-1k and licence.
        json_: Print JSON instead of a table.
    """
    from vitrail.commands.published import show_published

    chosen = [canonical_name(name) for name in names]
    if pretrained:
        show_published([one for one in published_weights() if not chosen or one.name in chosen], json_)
        return
    rows = [_row(model_config(name, image_size=image_size, outputs=outputs)) for name in chosen or _fitting(image_size)]
    included = [] if names else _included()
    if json_:
        rows += [row for row, _ in included]
        say(to_json(rows, indent=2))
        return
    console = Console()
    console.print(_table(rows, image_size))
    for row, about in included:
        console.print(f"included, trained: {row['name']}: {about}", highlight=False, soft_wrap=True)


def _included() -> list[tuple[dict[str, object], str]]:
    """Return a row and a line for each trained model in this package, from its config.json."""
    from vitrail.checkpoints.native import read_description

    found = []
    for name, folder in pretrained_models().items():
        config, provenance = read_description(folder)
        row = {**_row(config), "name": name, "model": config.name, "pretrained": True}
        size = "×".join(map(str, config.image_size))
        about = f"{config.name}, {parameters(config):,} parameters, {size} pixels, {config.outputs} classes, {provenance['result']}"
        found.append((row, about))
    return found


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
