"""`vitrail info`: describe a checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import tyro
from rich import box
from rich.table import Table

from vitrail.checkpoints import published
from vitrail.checkpoints.published import PublishedWeights
from vitrail.commands.options import Json
from vitrail.commands.terminal import Console, say
from vitrail.errors import counted
from vitrail.models import BiTConfig, ModelConfig, ViTConfig
from vitrail.text import plain, to_json

if TYPE_CHECKING:
    from vitrail.checkpoints import Bundle


_HEADS = {
    "set": "trained",
    "zero": "all zeros: only a backbone, cannot predict; use finetune, fewshot or embed",
    "none": "none: only a backbone",
}
_RESNET = ("group_norm_eps", "standardise", "standardise_eps", "padding", "pool_fill")


def info(
    ref: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="CHECKPOINT")],
    *,
    verify: bool = False,
    card: bool = False,
    heads: int | None = None,
    grid: tuple[int, int] | None = None,
    drop: tuple[str, ...] = (),
    json_: Json = False,
) -> None:
    """Describe a checkpoint: its variant, sizes, numerics, preprocessing, classes, provenance and head.

    Example: vitrail info ViT-B_16.npz

    Example: vitrail info ViT-B/16

    Example: vitrail info vit-b16 --verify --json

    Example: vitrail info runs/pets --card > README.md

    Args:
        ref: A folder, an .npz, .pth or .safetensors file, hf:owner/name, the included model vitrail-ti8-tiny-imagenet, or published
            weights (ViT-B/16, ViT-B/16@mae), of which only the table's facts are shown until they are downloaded.
        verify: For a Vitrail checkpoint, also check SHA-256 and the golden output of a whole image.
        card: Print a model card in Markdown instead, as `vitrail push` uploads it.
        heads: Number of attention heads. Needed if the file does not show it and the model has no published size.
        grid: Rows and columns of the position embedding. Needed if it is not square.
        drop: Patterns of tensor names to leave out, such as "decoder.*".
        json_: Print JSON instead of a table.
    """
    from vitrail.checkpoints import load
    from vitrail.checkpoints.model_card import model_card
    from vitrail.checkpoints.references import is_name
    from vitrail.commands.published import describe_published, is_downloaded, lines_of

    weights = published.find(ref) if is_name(ref) else None
    if weights is not None and not is_downloaded(weights) and not card:
        _show_published(weights, json_)
        return
    fields: dict[str, Any] = {key: value for key, value in {"heads": heads, "grid": grid}.items() if value is not None}
    bundle = load(ref, verify="full" if verify else "quick", drop=drop, **fields)
    if card:
        say(model_card(bundle).removesuffix("\n"))
        return
    found = describe(bundle, verified="full" if verify else "quick")
    found |= {"published": describe_published(weights)} if weights is not None else {}
    if json_:
        say(to_json(found, indent=2))
        return
    table = Table(box=box.SIMPLE_HEAD, show_header=False)
    for name, text in [*(lines_of(weights) if weights is not None else ()), *_lines(bundle, found)]:
        table.add_row(name, text)
    Console().print(table)


def _show_published(weights: PublishedWeights, as_json: bool) -> None:
    """Show what the table has: a description should not download gigabytes."""
    from vitrail.commands.published import describe_published, lines_of

    if as_json:
        say(to_json({"published": describe_published(weights)}, indent=2))
        return
    table = Table(box=box.SIMPLE_HEAD, show_header=False)
    for name, text in [*lines_of(weights), ("downloaded", "no: the first command that uses it downloads it")]:
        table.add_row(name, text)
    Console().print(table)


def describe(bundle: Bundle, *, verified: str) -> dict[str, Any]:
    """Return everything `info` reports, as plain values."""
    config = bundle.model.config
    return {
        "source": bundle.report.source,
        "format": bundle.report.format,
        "name": config.name,
        "parameters": bundle.report.parameters,
        "dtype": str(bundle.model.norm.weight.dtype).removeprefix("torch."),
        "head": bundle.head,
        "task": bundle.task,
        "classes": list(bundle.classes) if bundle.classes else None,
        "model": config.to_dict(),
        "preprocess": bundle.preprocess.to_dict() if bundle.preprocess else None,
        "provenance": bundle.provenance,
        "dropped": [name for name, _ in bundle.report.dropped],
        "verified": verified if bundle.report.format == "vitrail" else None,
        "notes": bundle.report.notes,
        "assumptions": bundle.report.assumptions,
    }


def _lines(bundle: Bundle, found: dict[str, Any]) -> list[tuple[str, str]]:
    config = bundle.model.config
    lines = [
        ("model", f"{config.name}, {found['parameters']:,} parameters, {found['dtype']}"),
        ("format", found["format"]),
        ("sizes", _sizes(config)),
        ("numerics", _numerics(config)),
        (
            "preprocessing",
            bundle.preprocess.describe() if bundle.preprocess else "not stored",
        ),
        ("outputs", f"{config.outputs}, {_classes(bundle)}, task {bundle.task}"),
        ("head", _HEADS[bundle.head]),
    ]
    known = {key: value for key, value in bundle.provenance.items() if value is not None}
    if "checkpoint" in known and "weights" in known:  # the second is the first in words
        known = {key: value for key, value in known.items() if key not in ("checkpoint", "steps")}
    known.pop("trained_on", None)
    lines += [("provenance", f"{key}: {plain(value)}") for key, value in known.items()]
    lines += [("trained on", f"{one.source}, {counted(one.images, 'image')}") for one in bundle.trained_on]
    if found["verified"]:
        full = found["verified"] == "full"
        lines.append(("verified", "SHA-256, checksum and golden outputs" if full else "checksum and golden output of a few tokens"))
    if bundle.report.dropped:
        name, reason = bundle.report.dropped[0]
        lines.append(("dropped", f"{counted(len(bundle.report.dropped), 'tensor')}, such as {name}: {reason}"))
    told = (("assumed", bundle.report.assumptions), ("note", bundle.report.notes))
    return lines + [(kind, text) for kind, texts in told for text in texts]


def _sizes(config: ModelConfig) -> str:
    any_size = " (accepts any size)" if isinstance(config, ViTConfig) and config.any_size else ""
    image = f"image {config.image_size[0]}×{config.image_size[1]}×{config.channels}{any_size}"
    if isinstance(config, BiTConfig):
        return f"{image}, blocks {config.resnet.layers}, width ×{config.resnet.multiplier}"
    assert isinstance(config, ViTConfig)
    prefix = {"class": config.class_token, "distillation": config.distill_token, "register": config.registers}
    tokens = ", ".join(counted(int(count), f"{name} token") for name, count in prefix.items() if count) or "no prefix tokens"
    return (
        f"{image}, patch {config.patch[0]}×{config.patch[1]}, grid {config.grid[0]}×{config.grid[1]}, {tokens}, "
        f"width {config.width}, depth {config.depth}, {config.heads} heads, MLP {config.mlp}"
    )


def _numerics(config: ModelConfig) -> str:
    parts = []
    if isinstance(config, ViTConfig):
        pool = f"pooling {config.pooling} (norm {config.final_norm})"
        parts = [f"GELU {config.gelu}", f"norm eps {config.norm_eps:g}", f"position embedding {config.position}", pool]
        parts.append(f"position resize rule {config.position_resize}")
        parts += [f"pre-logits {config.pre_logits}"] if config.pre_logits else []
        parts += ["qk norm"] if config.qk_norm else []
    resnet = getattr(config, "resnet", None)
    return ", ".join(parts + [f"{name} {getattr(resnet, name)}" for name in _RESNET if resnet])


def _classes(bundle: Bundle) -> str:
    if not bundle.classes:
        return "no class names"
    shown = ", ".join(bundle.classes[:4])
    return f"classes {shown}{' …' if len(bundle.classes) > 4 else ''}"
