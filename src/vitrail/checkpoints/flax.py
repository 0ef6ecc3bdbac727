"""Shared by the .npz files of vision_transformer and big_vision: prefixes, module numbers, encoder names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from vitrail.checkpoints.archive import Archive, StoredTensor
from vitrail.checkpoints.infer_config import Hints, Shapes, vit_config
from vitrail.checkpoints.mapping import CONVOLUTION, TRANSPOSED, Row, head_rules, numbered, row
from vitrail.checkpoints.report import Report
from vitrail.errors import VitrailError
from vitrail.models import ModelConfig, ResNetConfig, ViTConfig

NUMERICS: Mapping[str, Any] = {"gelu": "tanh", "norm_eps": 1e-6, "position_resize": "reference"}
PREFIXES = ("opt/target/", "params/")

# Flax before Linen numbered all modules of a block together; Linen numbers each kind from 0.
_SECOND_NORM = ("LayerNorm_2", "LayerNorm_1")
_ATTENTION = ("MultiHeadDotProductAttention_1", "MultiHeadDotProductAttention_0")
_MLP = ("MlpBlock_3", "MlpBlock_0")


def strip_prefix(archive: Archive, part: str | None, report: Report) -> None:
    """Keep only the model's parameters of a training checkpoint, or one tower (`part`) of a two-tower file."""
    names = archive.tensors
    prefix = next((start for start in PREFIXES if any(name.startswith(start) for name in names)), "")
    if part is not None:
        prefix = f"{prefix}{part}/"
        if not any(name.startswith(prefix) for name in names):
            tops = sorted({name.removeprefix(prefix.removesuffix(f"{part}/")).split("/")[0] for name in names})
            raise VitrailError(f"{archive.path} has no part {part!r}; it has {', '.join(tops[:12])}.")
    if not prefix:
        return
    report.notes.append(f"prefix {prefix!r} stripped")
    kept = {}
    for name, tensor in names.items():
        if name.startswith(prefix):
            kept[name.removeprefix(prefix)] = tensor
        else:
            report.dropped.append((name, f"outside {prefix!r}: optimizer state or another part of the checkpoint"))
    archive.tensors = kept


def numbering(*, linen: bool) -> list[tuple[str, str]]:
    """Return renames of the encoder's modules to one of the two numberings."""
    old, new = (0, 1) if linen else (1, 0)
    return [(rf"^(Transformer/encoderblock_\d+/){pair[old]}/", rf"\g<1>{pair[new]}/") for pair in (_SECOND_NORM, _ATTENTION, _MLP)]


def unstack(archive: Archive) -> None:
    """Split blocks trained with `scan`, which are stored as one tensor with a leading layer axis."""
    start = "Transformer/encoderblock/"
    stacked = {name: tensor for name, tensor in archive.tensors.items() if name.startswith(start)}
    if not stacked:
        return
    depths = {tensor.shape[0] if tensor.shape else 0 for tensor in stacked.values()}
    if len(depths) != 1 or 0 in depths:
        raise VitrailError(
            f"{archive.path}: the stacked blocks have different numbers of layers, {sorted(depths)}. The file is corrupted: "
            "download or copy it again."
        )
    depth = depths.pop()
    if depth > 10_000:
        raise VitrailError(
            f"{archive.path}: {depth:,} stacked layers cannot be a Vision Transformer. The file is corrupted: download or copy it "
            "again."
        )
    archive.notes.append(f"{depth} blocks stacked by scan were split")
    for name, tensor in stacked.items():
        del archive.tensors[name]
        whole = _CachedRead(tensor)
        for layer in range(depth):
            single = StoredTensor(tensor.shape[1:], tensor.dtype, lambda whole=whole, layer=layer: whole()[layer])  # type: ignore[misc]
            archive.tensors[f"Transformer/encoderblock_{layer}/{name.removeprefix(start)}"] = single


class _CachedRead:
    """Read a stacked tensor on first use and share it between the layers."""

    def __init__(self, tensor: StoredTensor) -> None:
        self._tensor, self._value = tensor, None

    def __call__(self) -> Tensor:
        if self._value is None:
            self._value = self._tensor.read()  # type: ignore[assignment]
        return self._value  # type: ignore[return-value]


def dense(ours: str, theirs: str) -> list[Row]:
    return [row(f"{ours}.weight", f"{theirs}/kernel", TRANSPOSED), row(f"{ours}.bias", f"{theirs}/bias")]


def norm(ours: str, theirs: str) -> list[Row]:
    return [row(f"{ours}.weight", f"{theirs}/scale"), row(f"{ours}.bias", f"{theirs}/bias")]


def vit_rows(config: ViTConfig, *, linen: bool, positions: str) -> list[Row]:
    """Return the rows of a ViT in these files, without a ResNet and an attention-pooling head."""
    style = int(linen)
    block = "Transformer/encoderblock_{i}"
    layer = [
        *norm("blocks.{i}.norm1", f"{block}/LayerNorm_0"),
        *attention_rows("blocks.{i}.attention", f"{block}/{_ATTENTION[style]}", config.heads, fused=("query", "key", "value")),
        *norm("blocks.{i}.norm2", f"{block}/{_SECOND_NORM[style]}"),
        *dense("blocks.{i}.mlp.up", f"{block}/{_MLP[style]}/Dense_0"),
        *dense("blocks.{i}.mlp.down", f"{block}/{_MLP[style]}/Dense_1"),
    ]
    return [
        row("patches.weight", "embedding/kernel", CONVOLUTION),
        row("patches.bias", "embedding/bias"),
        row("class_token", "cls"),
        row("positions.table", positions),
        *(r for i in range(config.depth) for r in numbered(layer, i=i)),
        *norm("norm", "Transformer/encoder_norm"),
        *dense("pre_logits", "pre_logits"),
        *dense("head", "head"),
    ]


def attention_rows(ours: str, theirs: str, heads: int, *, fused: tuple[str, ...], name: str = "qkv") -> list[Row]:
    into, bias, out = head_rules(heads)
    return [
        row(f"{ours}.{name}.weight", [f"{theirs}/{part}/kernel" for part in fused], into),
        row(f"{ours}.{name}.bias", [f"{theirs}/{part}/bias" for part in fused], bias),
        row(f"{ours}.out.weight", f"{theirs}/out/kernel", out),
        row(f"{ours}.out.bias", f"{theirs}/out/bias"),
    ]


def infer_vit(
    shapes: Shapes, hints: Hints, *, linen: bool, positions: str, resnet: ResNetConfig | None = None, **fields: Any
) -> ModelConfig:
    style = int(linen)
    first = f"Transformer/encoderblock_0/{_ATTENTION[style]}"
    height, across, channels, width = shapes("embedding/kernel", 4)
    _, heads, _ = shapes(f"{first}/query/kernel", 3)
    pooling = fields.pop("pooling", "class" if "cls" in shapes else "mean")
    return vit_config(
        shapes,
        hints,
        numerics=NUMERICS,
        width=width,
        depth=shapes.count("Transformer/encoderblock_{}/LayerNorm_0/scale"),
        mlp=shapes(f"Transformer/encoderblock_0/{_MLP[style]}/Dense_0/kernel", 2)[1],
        kernel=(channels, height, across),
        num_positions=shapes(positions, 3)[1] if positions in shapes else None,
        heads=heads,
        resnet=resnet,
        class_token="cls" in shapes,
        pooling=pooling,
        qkv_bias=f"{first}/query/bias" in shapes,
        pre_logits=shapes("pre_logits/kernel", 2)[1] if "pre_logits/kernel" in shapes else None,
        outputs=shapes("head/kernel", 2)[1] if "head/kernel" in shapes else 0,
        **fields,
    )
