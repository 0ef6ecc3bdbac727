"""timm's state dicts: ViT, DeiT (distilled), registers, mean and attention pooling, hybrids and BiT."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from vitrail.checkpoints.archive import Archive
from vitrail.checkpoints.format import PLAIN, Format
from vitrail.checkpoints.infer_config import Hints, Shapes, bit_config, hint_grid, resnet_config, vit_config
from vitrail.checkpoints.mapping import DENSE_AS_OIHW, Row, add_class_position, numbered, rename, row, weight_and_bias
from vitrail.checkpoints.timm_architectures import Function, function_of, model_arguments
from vitrail.errors import VitrailError
from vitrail.models import BiTConfig, ModelConfig, ViTConfig

NUMERICS: dict[str, Any] = {"gelu": "erf", "norm_eps": 1e-6, "position_resize": "timm"}
_STANDARDISED: dict[str, Any] = {"group_norm_eps": 1e-5, "standardise": "sqrt(var+eps)", "standardise_eps": 1e-8}
_HYBRID: dict[str, Any] = {**_STANDARDISED, "padding": "same", "pool_fill": "-inf"}
_BIT: dict[str, Any] = {**_STANDARDISED, "padding": "symmetric", "pool_fill": "zero"}

_BLOCK = [
    *weight_and_bias("blocks.{i}.norm1", "blocks.{i}.norm1"),
    *weight_and_bias("blocks.{i}.attention.qkv", "blocks.{i}.attn.qkv"),
    *weight_and_bias("blocks.{i}.attention.q_norm", "blocks.{i}.attn.q_norm"),
    *weight_and_bias("blocks.{i}.attention.k_norm", "blocks.{i}.attn.k_norm"),
    *weight_and_bias("blocks.{i}.attention.out", "blocks.{i}.attn.proj"),
    row("blocks.{i}.scale1.weight", "blocks.{i}.ls1.gamma"),
    *weight_and_bias("blocks.{i}.norm2", "blocks.{i}.norm2"),
    *weight_and_bias("blocks.{i}.mlp.up", "blocks.{i}.mlp.fc1"),
    *weight_and_bias("blocks.{i}.mlp.down", "blocks.{i}.mlp.fc2"),
    row("blocks.{i}.scale2.weight", "blocks.{i}.ls2.gamma"),
]
_OTHERS = [
    row("class_token", "cls_token"),
    row("distill_token", "dist_token"),
    row("registers", "reg_token"),
    row("positions.table", "pos_embed"),
    *weight_and_bias("patches", "patch_embed.proj"),
    row("pool.probe", "attn_pool.latent"),
    *weight_and_bias("pool.q", "attn_pool.q"),
    *weight_and_bias("pool.kv", "attn_pool.kv"),
    *weight_and_bias("pool.out", "attn_pool.proj"),
    *weight_and_bias("pool.norm", "attn_pool.norm"),
    *weight_and_bias("pool.mlp.up", "attn_pool.mlp.fc1"),
    *weight_and_bias("pool.mlp.down", "attn_pool.mlp.fc2"),
    *weight_and_bias("pre_logits", "pre_logits.fc"),
    *weight_and_bias("head", "head"),
    *weight_and_bias("distill_head", "head_dist"),
]


def _unit(ours: str, theirs: str) -> list[Row]:
    return [
        *(row(f"{ours}.conv{k}.weight", f"{theirs}.conv{k}.weight") for k in (1, 2, 3)),
        *(r for k in (1, 2, 3) for r in weight_and_bias(f"{ours}.norm{k}", f"{theirs}.norm{k}")),
        row(f"{ours}.projection.weight", f"{theirs}.downsample.conv.weight"),
        *weight_and_bias(f"{ours}.projection_norm", f"{theirs}.downsample.norm"),
    ]


def _units(layers: tuple[int, ...], ours: str, theirs: str) -> list[Row]:
    unit = _unit(f"{ours}stages.{{s}}.{{u}}", f"{theirs}stages.{{s}}.blocks.{{u}}")
    return [r for s, count in enumerate(layers) for u in range(count) for r in numbered(unit, s=s, u=u)]


def _rows(config: ModelConfig) -> list[Row]:
    if isinstance(config, BiTConfig):
        ends = [row("root.weight", "stem.conv.weight"), *weight_and_bias("norm", "norm"), row("head.bias", "head.fc.bias")]
        return [*ends, row("head.weight", "head.fc.weight", DENSE_AS_OIHW), *_units(config.resnet.layers, "", "")]
    assert isinstance(config, ViTConfig)
    blocks = [r for i in range(config.depth) for r in numbered(_BLOCK, i=i)]
    norm = weight_and_bias("norm", "fc_norm" if config.final_norm == "after-pool" else "norm")
    if config.resnet is None:
        return [*_OTHERS, *blocks, *norm]
    stem = _BACKBONE + ("stem." if config.resnet.layers else "")
    root = [row("resnet.root.weight", f"{stem}conv.weight"), *weight_and_bias("resnet.norm", f"{stem}norm")]
    return [*_OTHERS, *blocks, *norm, *root, *_units(config.resnet.layers, "resnet.", _BACKBONE)]


_BACKBONE = "patch_embed.backbone."
_POOLINGS = {"class": "class-token", "mean": "average", "map": "attention"}


def _matches(names: Collection[str]) -> bool:
    vit = "patch_embed.proj.weight" in names and bool({"blocks.0.attn.qkv.weight", "blocks.0.0.attn.qkv.weight"} & set(names))
    big_transfer = "root.conv.weight" in names and "body.block1.unit01.conv1.weight" in names
    return (
        vit
        or big_transfer
        or ("stem.conv.weight" in names and "stages.0.blocks.0.conv1.weight" in names and "norm.weight" in names)
    )


def _rename_big_transfer(archive: Archive) -> None:
    """Convert the names of big_transfer's PyTorch code, which counts blocks and units from 1."""
    changes = [
        (r"^root\.conv\.", "stem.conv."),
        *(
            (rf"^body\.block{b}\.unit{u:02d}\.{theirs}", f"stages.{b - 1}.blocks.{u - 1}.{ours}")
            for b in range(1, 5)
            for u in range(1, 1 + sum(f"body.block{b}.unit{u:02d}.conv1.weight" in archive.tensors for u in range(1, 100)))
            for theirs, ours in ((r"gn(\d)\.", r"norm\1."), (r"conv(\d)\.", r"conv\1."), (r"downsample\.", "downsample.conv."))
        ),
        (r"^head\.gn\.", "norm."),
        (r"^head\.conv\.", "head.fc."),
    ]
    rename(archive, changes, "names of big_transfer's PyTorch code converted to timm's")
    archive.variant = "big_transfer"


def _normalise_names(archive: Archive) -> None:
    if "root.conv.weight" in archive.tensors:
        _rename_big_transfer(archive)
    changes = [(r"\.gamma_1$", ".ls1.gamma"), (r"\.gamma_2$", ".ls2.gamma")]
    rename(archive, changes, "layer scale found under an older name")
    rename(archive, [(r"^blocks\.\d+\.(\d+)\.", r"blocks.\1.")], "blocks in chunks, as DINOv2 trains them, were numbered through")
    if rename(archive, [(r"^register_tokens$", "reg_token")]):
        add_class_position(archive, "cls_token", "pos_embed")


def _infer_config(shapes: Shapes, hints: Hints) -> ModelConfig:
    config = _infer_bit(shapes, hints) if "stem.conv.weight" in shapes else _infer_vit(shapes, hints)
    arguments = model_arguments(hints.config)
    claimed = {
        "num_classes": (arguments.get("num_classes", (hints.config or {}).get("num_classes")), config.outputs),
        "embed_dim": (arguments.get("embed_dim"), getattr(config, "width", None)),
        "depth": (arguments.get("depth"), getattr(config, "depth", None)),
    }
    for name, (value, found) in claimed.items():
        if None not in (value, found) and value != found:
            raise VitrailError(
                f"{shapes.path}: config.json has {name}={value!r}, but the weights have {found}. Get both files of the same model."
            )
    return config


def _infer_vit(shapes: Shapes, hints: Hints) -> ModelConfig:
    width, *kernel = shapes("patch_embed.proj.weight", 4)
    pooled = "attn_pool.latent" in shapes
    after = "fc_norm.weight" in shapes
    function = function_of(hints.config) if hints.config is not None else None
    arguments = model_arguments(hints.config)
    tokens: dict[str, Any] = {
        "class_token": "cls_token" in shapes,
        "distill_token": "dist_token" in shapes,
        "registers": shapes("reg_token", 3)[1] if "reg_token" in shapes else 0,
    }
    shown = "map" if pooled else "class" if tokens["class_token"] and not after else "mean"
    pooling = function.pooling if function else shown
    if (pooling == "map") != pooled:
        raise VitrailError(
            f"{shapes.path}: config.json means {_POOLINGS[pooling]} pooling, but the file has {'' if pooled else 'no '}tensors of "
            "attention pooling. Get both files of the same model."
        )
    if function and after and pooling == "class" and not arguments.get("fc_norm"):
        raise VitrailError(
            f"{shapes.path}: config.json means class-token pooling, but the file has tensors of fc_norm, the norm after average or "
            'maximum pooling. Write the model\'s pooling into config.json, such as "global_pool": "avg".'
        )
    if any(tokens.values()):
        _check_pooled_tokens(shapes.path, pooling, function)
    if function is None:
        hints.assumptions.append(_assumed(shown, hints))
    numerics = NUMERICS | ({"gelu": function.gelu} if function else {})
    resnet, channels = _infer_resnet(shapes)
    stride = resnet.stride if resnet else 1
    hint_grid(hints, arguments.get("img_size"), (kernel[1] * stride, kernel[2] * stride))
    return vit_config(
        shapes,
        hints,
        numerics=numerics,
        width=width,
        depth=shapes.count("blocks.{}.norm1.weight"),
        mlp=shapes("blocks.0.mlp.fc1.weight", 2)[0],
        kernel=(kernel[0], kernel[1], kernel[2]),
        num_positions=shapes("pos_embed", 3)[1] if "pos_embed" in shapes else None,
        heads=function.heads if function else None,
        covers_prefix=not arguments["no_embed_class"] if "no_embed_class" in arguments else None,
        resnet=resnet,
        channels=channels,
        position="learned" if "pos_embed" in shapes else "none",
        pooling=pooling,
        final_norm="after-pool" if after else "before-pool",
        qkv_bias="blocks.0.attn.qkv.bias" in shapes,
        qk_norm="blocks.0.attn.q_norm.weight" in shapes,
        layer_scale=1e-5 if "blocks.0.ls1.gamma" in shapes else None,
        pre_logits=shapes("pre_logits.fc.weight", 2)[0] if "pre_logits.fc.weight" in shapes else None,
        outputs=shapes("head.weight", 2)[0] if "head.weight" in shapes else 0,
        **tokens,
    )


def _infer_resnet(shapes: Shapes) -> tuple[Any, int]:
    for stem in (f"{_BACKBONE}stem.", _BACKBONE):
        if f"{stem}conv.weight" in shapes:
            root, channels, _, _ = shapes(f"{stem}conv.weight", 4)
            return resnet_config(_layers(shapes, _BACKBONE), root, _HYBRID, shapes.path), channels
    return None, 3


def _infer_bit(shapes: Shapes, hints: Hints) -> ModelConfig:
    root, channels, _, _ = shapes("stem.conv.weight", 4)
    if hints.config is not None:
        function_of(hints.config)
    numerics = {**_BIT, "standardise_eps": 1e-10} if shapes.variant == "big_transfer" else _BIT
    outputs = shapes("head.fc.weight", 4)[0] if "head.fc.weight" in shapes else 0
    return bit_config(hints, resnet_config(_layers(shapes, ""), root, numerics, shapes.path), outputs=outputs, channels=channels)


def _layers(shapes: Shapes, start: str) -> tuple[int, ...]:
    stages = shapes.count(f"{start}stages.{{}}.blocks.0.conv1.weight")
    return tuple(shapes.count(f"{start}stages.{s}.blocks.{{}}.conv1.weight") for s in range(stages))


def _check_pooled_tokens(path: Path, pooling: str, function: Function | None) -> None:
    """Refuse pooling over other tokens than ours: our attention pooling reads all tokens, our mean only the patches."""
    over_prefix = function is not None and function.pool_include_prefix
    if pooling == "map" and not over_prefix:
        raise VitrailError(
            f"{path} has attention pooling and prefix tokens. timm does not pool over prefix tokens, Vitrail does, "
            f"so its logits would differ. The file is rejected."
        )
    if pooling == "mean" and over_prefix:
        raise VitrailError(
            f"{path}: config.json has pool_include_prefix=True: the mean includes the class token and registers. "
            f"Vitrail's mean is over the patches only, so the file is rejected."
        )


def _assumed(pooling: str, hints: Hints) -> str:
    given = {key: hints.fields[key] for key in ("gelu", "norm_eps", "pooling") if key in hints.fields}
    assumed = {"gelu": NUMERICS["gelu"], "norm_eps": NUMERICS["norm_eps"], "pooling": pooling}
    values = ", ".join(f"{key}={value!r}" for key, value in assumed.items() if key not in given)
    return (
        f"a single file in timm's names does not show its architecture: assumed a plain ViT with norms before attention and MLP"
        f"{', ' + values if values else ''}; change them by these names in vitrail.load, or once with `vitrail convert`"
    )


def _numerics(config: ModelConfig) -> Mapping[str, Any]:
    if isinstance(config, BiTConfig):
        return _BIT
    assert isinstance(config, ViTConfig)
    shown = "map" if config.pooling == "map" else "class" if config.class_token and config.final_norm == "before-pool" else "mean"
    return {**NUMERICS, "pooling": shown, **(_HYBRID if config.resnet else {})}


TIMM = Format(
    name="timm",
    title="timm",
    container="torch",
    matches=_matches,
    normalise_names=_normalise_names,
    infer_config=_infer_config,
    rows=_rows,
    numerics=_numerics,
    preset="timm",
    families=("vit", "hybrid", "bit"),
    ignored={
        r"mask_token|masked_embed": "only masked-image modelling uses it",
        r"decoder_.*": "the decoder of a masked autoencoder",
        r"head\.(mlp|last_layer)\..*|(dino|ibot)_head\..*": "the projection head of DINO",
    },
    supports={**PLAIN, "qk_norm": (False, True), "position": ("learned", "none"), "pre_logits": (None,)},
)
