"""BiT's .npz files: TensorFlow's names, with or without numbered convolutions, and big_vision's names."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from vitrail.checkpoints.archive import Archive, StoredTensor
from vitrail.checkpoints.format import Format
from vitrail.checkpoints.google import flatten_group_norms
from vitrail.checkpoints.infer_config import Hints, Shapes, bit_config, resnet_config
from vitrail.checkpoints.mapping import CONVOLUTION, DENSE_AS_HWIO, SAME, Row, numbered, rename, row
from vitrail.models import BiTConfig, ModelConfig

NUMERICS: dict[str, Any] = {
    "group_norm_eps": 1e-5,
    "standardise": "sqrt(var+eps)",
    "standardise_eps": 1e-10,
    "padding": "symmetric",
    "pool_fill": "zero",
}
_BIG_VISION_NUMERICS = {**NUMERICS, "pool_fill": "-inf"}  # Flax's max-pool, where big_transfer pads with zeros
_CONV = "standardized_conv2d/kernel"
_UNIT = [
    row(f"stages.{{s}}.{{u}}.{ours}", f"resnet/block{{b}}/unit{{v:02d}}/{letter}/{theirs}", rule)
    for k, letter in ((1, "a"), (2, "b"), (3, "c"))
    for ours, theirs, rule in (
        (f"conv{k}.weight", _CONV, CONVOLUTION),
        (f"norm{k}.weight", "group_norm/gamma", SAME),
        (f"norm{k}.bias", "group_norm/beta", SAME),
    )
] + [row("stages.{s}.{u}.projection.weight", f"resnet/block{{b}}/unit{{v:02d}}/a/proj/{_CONV}", CONVOLUTION)]

# big_vision's names → TensorFlow's.
_BIG_VISION = [
    (r"^root_block/conv_root/kernel$", rf"resnet/root_block/{_CONV}"),
    *((rf"^(block\d+/unit\d+)/conv{k}/kernel$", rf"resnet/\g<1>/{letter}/{_CONV}") for k, letter in enumerate("abc", 1)),
    *((rf"^(block\d+/unit\d+)/gn{k}/scale$", rf"resnet/\g<1>/{letter}/group_norm/gamma") for k, letter in enumerate("abc", 1)),
    *((rf"^(block\d+/unit\d+)/gn{k}/bias$", rf"resnet/\g<1>/{letter}/group_norm/beta") for k, letter in enumerate("abc", 1)),
    (r"^(block\d+/unit\d+)/conv_proj/kernel$", rf"resnet/\g<1>/a/proj/{_CONV}"),
    (r"^norm-pre-head/scale$", "resnet/group_norm/gamma"),
    (r"^norm-pre-head/bias$", "resnet/group_norm/beta"),
    (r"^head/(kernel|bias)$", r"resnet/head/conv2d/\g<1>"),
]


def _matches(names: Collection[str]) -> bool:
    return any(name.startswith(("resnet/root_block/", "root_block/conv_root/")) for name in names)


def _normalise_names(archive: Archive) -> None:
    flatten_group_norms(archive)
    rename(archive, [(r"/standardized_conv2d_\d+/", "/standardized_conv2d/")], "numbers removed from convolution names")
    if rename(archive, _BIG_VISION, "big_vision's BiT names converted to the original ones"):
        archive.variant = "big_vision"
        head = archive.tensors.get("resnet/head/conv2d/kernel")
        if head is not None and len(head.shape) == 2:  # a matrix in big_vision, a 1×1 convolution in BiT
            archive.tensors["resnet/head/conv2d/kernel"] = StoredTensor(
                (1, 1, *head.shape), head.dtype, lambda: head.read()[None, None]
            )


def _infer_config(shapes: Shapes, hints: Hints) -> ModelConfig:
    _, _, channels, root = shapes(f"resnet/root_block/{_CONV}", 4)
    blocks = shapes.count(f"resnet/block{{}}/unit01/a/{_CONV}", start=1)
    layers = tuple(shapes.count(f"resnet/block{b}/unit{{:02d}}/a/{_CONV}", start=1) for b in range(1, blocks + 1))
    head = "resnet/head/conv2d/kernel"
    outputs = shapes(head, 4)[3] if head in shapes else 0
    numerics = _BIG_VISION_NUMERICS if shapes.variant == "big_vision" else NUMERICS
    return bit_config(hints, resnet_config(layers, root, numerics, shapes.path), outputs=outputs, channels=channels)


def _rows(config: ModelConfig) -> list[Row]:
    assert isinstance(config, BiTConfig)
    layers = config.resnet.layers
    units = [numbered(_UNIT, s=s, u=u, b=s + 1, v=u + 1) for s, count in enumerate(layers) for u in range(count)]
    return [
        row("root.weight", f"resnet/root_block/{_CONV}", CONVOLUTION),
        *(r for unit in units for r in unit),
        row("norm.weight", "resnet/group_norm/gamma"),
        row("norm.bias", "resnet/group_norm/beta"),
        row("head.weight", "resnet/head/conv2d/kernel", DENSE_AS_HWIO),
        row("head.bias", "resnet/head/conv2d/bias"),
    ]


BIT = Format(
    name="bit",
    title="Google's big_transfer",
    container="npz",
    matches=_matches,
    normalise_names=_normalise_names,
    infer_config=_infer_config,
    rows=_rows,
    numerics=lambda config: NUMERICS,
    preset="google-vit",
    families=("bit",),
    supports={},
)
