"""Hugging Face's ViTForImageClassification and ViTModel: the names on the Hub, and those of transformers 5."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vitrail.checkpoints.archive import Archive
from vitrail.checkpoints.format import PLAIN, Format
from vitrail.checkpoints.huggingface_variants import DEFAULTS, matches, normalise_variant
from vitrail.checkpoints.infer_config import Hints, Shapes, hint_grid, vit_config
from vitrail.checkpoints.mapping import Row, numbered, rename, row, weight_and_bias
from vitrail.errors import VitrailError, counted
from vitrail.models import ModelConfig, ViTConfig

_LAYER = "encoder.layer.{i}"
_PARTS = ("query", "key", "value")
_BLOCK = [
    *weight_and_bias("blocks.{i}.norm1", f"{_LAYER}.layernorm_before"),
    row("blocks.{i}.attention.qkv.weight", [f"{_LAYER}.attention.attention.{part}.weight" for part in _PARTS]),
    row("blocks.{i}.attention.qkv.bias", [f"{_LAYER}.attention.attention.{part}.bias" for part in _PARTS]),
    *weight_and_bias("blocks.{i}.attention.out", f"{_LAYER}.attention.output.dense"),
    *weight_and_bias("blocks.{i}.norm2", f"{_LAYER}.layernorm_after"),
    *weight_and_bias("blocks.{i}.mlp.up", f"{_LAYER}.intermediate.dense"),
    *weight_and_bias("blocks.{i}.mlp.down", f"{_LAYER}.output.dense"),
    row("blocks.{i}.scale1.weight", f"{_LAYER}.layer_scale1.lambda1"),
    row("blocks.{i}.scale2.weight", f"{_LAYER}.layer_scale2.lambda1"),
]
_OTHERS = [
    row("class_token", "embeddings.cls_token"),
    row("distill_token", "embeddings.distillation_token"),
    row("registers", "embeddings.register_tokens"),
    row("positions.table", "embeddings.position_embeddings"),
    *weight_and_bias("patches", "embeddings.patch_embeddings.projection"),
    *weight_and_bias("norm", "layernorm"),
    *weight_and_bias("pre_logits", "pooler.dense"),
    *weight_and_bias("head", "classifier"),
    *weight_and_bias("distill_head", "distillation_classifier"),
    row("pool.probe", "head.probe"),
    *weight_and_bias("pool.q", "head.attention.q"),
    *weight_and_bias("pool.kv", "head.attention.kv"),
    *weight_and_bias("pool.out", "head.attention.out_proj"),
    *weight_and_bias("pool.norm", "head.layernorm"),
    *weight_and_bias("pool.mlp.up", "head.mlp.fc1"),
    *weight_and_bias("pool.mlp.down", "head.mlp.fc2"),
]
_NEW_NAMES = [
    (r"^layers\.(\d+)\.attention\.q_proj\.", r"encoder.layer.\1.attention.attention.query."),
    (r"^layers\.(\d+)\.attention\.k_proj\.", r"encoder.layer.\1.attention.attention.key."),
    (r"^layers\.(\d+)\.attention\.v_proj\.", r"encoder.layer.\1.attention.attention.value."),
    (r"^layers\.(\d+)\.attention\.o_proj\.", r"encoder.layer.\1.attention.output.dense."),
    (r"^layers\.(\d+)\.mlp\.fc1\.", r"encoder.layer.\1.intermediate.dense."),
    (r"^layers\.(\d+)\.mlp\.fc2\.", r"encoder.layer.\1.output.dense."),
    (r"^layers\.(\d+)\.", r"encoder.layer.\1."),
]
_TANH = ("gelu_pytorch_tanh", "gelu_new", "gelu_fast")


def _rows(config: ModelConfig) -> list[Row]:
    assert isinstance(config, ViTConfig)
    return [*_OTHERS, *(r for i in range(config.depth) for r in numbered(_BLOCK, i=i))]


def _normalise_names(archive: Archive) -> None:
    normalise_variant(archive)
    rename(archive, _NEW_NAMES, "names of transformers 5 converted to those on the Hub")


def _infer_config(shapes: Shapes, hints: Hints) -> ModelConfig:
    hf_config = hints.config or {}
    kind = str(hf_config.get("model_type", shapes.variant or "vit"))
    if not hf_config:
        hints.assumptions.append(
            f"no config.json next to the weights: assumed the GELU and eps of transformers' defaults for {kind}"
        )
    width, channels, height, across = shapes("embeddings.patch_embeddings.projection.weight", 4)
    hint_grid(hints, hf_config.get("image_size"), (height, across))
    first = _LAYER.format(i=0)
    headed = "classifier.weight" in shapes
    tokens: dict[str, Any] = {
        "class_token": "embeddings.cls_token" in shapes,
        "distill_token": "embeddings.distillation_token" in shapes,
        "registers": shapes("embeddings.register_tokens", 3)[1] if "embeddings.register_tokens" in shapes else 0,
    }
    if headed and shapes("classifier.weight", 2)[1] != width:
        raise VitrailError(
            f"{shapes.path}: the classifier takes {shapes('classifier.weight', 2)[1]} values for a model of width {width}, as "
            f"DINOv2's over class token and patches does, which is not supported. Leave it out with drop=['classifier.*']."
        )
    config = vit_config(
        shapes,
        hints,
        numerics=numerics_of(hf_config, kind),
        width=width,
        depth=shapes.count("encoder.layer.{}.layernorm_before.weight"),
        mlp=shapes(f"{first}.intermediate.dense.weight", 2)[0],
        kernel=(channels, height, across),
        num_positions=shapes("embeddings.position_embeddings", 3)[1],
        heads=hf_config.get("num_attention_heads"),
        covers_prefix=not (shapes.variant == "dinov2" and tokens["registers"]),
        pooling="map" if "head.probe" in shapes else "class" if tokens["class_token"] else "mean",
        layer_scale=1e-5 if f"{first}.layer_scale1.lambda1" in shapes else None,
        **tokens,
        qkv_bias=f"{first}.attention.attention.query.bias" in shapes,
        pre_logits=shapes("pooler.dense.weight", 2)[0] if "pooler.dense.weight" in shapes and not headed else None,
        outputs=shapes("classifier.weight", 2)[0] if headed else 0,
    )
    assert isinstance(config, ViTConfig)
    _check_against(config, hf_config, shapes)
    return config


def numerics_of(hf_config: Mapping[str, Any], kind: str = "vit") -> dict[str, Any]:
    defaults = DEFAULTS.get(kind, DEFAULTS["vit"])
    act = hf_config.get("hidden_act", defaults["hidden_act"])
    if act != "gelu" and act not in _TANH:
        raise VitrailError(
            f"config.json has hidden_act={act!r}; only GELU is supported, erf ('gelu') or tanh ({', '.join(_TANH)})."
        )
    if hf_config.get("pooler_act", "tanh") != "tanh":
        raise VitrailError(f"config.json has pooler_act={hf_config['pooler_act']!r}; only tanh is supported.")
    return {
        "gelu": "tanh" if act in _TANH else "erf",
        "norm_eps": float(hf_config.get("layer_norm_eps", defaults["layer_norm_eps"])),
        "position_resize": "hf",
        "dropout": float(hf_config.get("hidden_dropout_prob") or 0.0),
        "attention_dropout": float(hf_config.get("attention_probs_dropout_prob", 0.0)),
    }


def _check_against(config: ViTConfig, hf_config: Mapping[str, Any], shapes: Shapes) -> None:
    """Raise an error if config.json and the weights disagree."""
    found: dict[str, Any] = {
        "hidden_size": config.width,
        "num_hidden_layers": config.depth,
        "intermediate_size": config.mlp,
        "num_channels": config.channels,
        "patch_size": config.patch,
        "image_size": config.image_size,
        "qkv_bias": config.qkv_bias,
    }
    for key, value in found.items():
        claimed = hf_config.get(key, value)
        pair = (claimed, claimed) if isinstance(value, tuple) and isinstance(claimed, int) else claimed
        pair = tuple(pair) if isinstance(pair, list) else pair
        if pair != value:
            raise VitrailError(
                f"{shapes.path}: config.json has {key}={claimed!r}, but the weights have {value!r}. Get both files of the same "
                "model."
            )
    labels = hf_config.get("id2label")
    if config.outputs and isinstance(labels, Mapping) and len(labels) != config.outputs:
        raise VitrailError(
            f"{shapes.path}: id2label in config.json has {counted(len(labels), 'label')}, but the model has "
            f"{counted(config.outputs, 'output')}. Give one label per output, or remove id2label."
        )


def label_names(hf_config: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Return the class names in order; None if they are placeholders of transformers."""
    labels = hf_config.get("id2label")
    if not isinstance(labels, Mapping) or not labels:
        return None
    numbered = {str(key): str(value) for key, value in labels.items()}
    if any(str(i) not in numbered for i in range(len(numbered))):
        raise VitrailError(
            f"id2label in config.json has the numbers {', '.join(list(numbered)[:8])}; they must run from 0 to "
            f"{len(numbered) - 1}. Number the labels so, or remove id2label."
        )
    names = tuple(numbered[str(i)] for i in range(len(numbered)))
    return None if all(name == f"LABEL_{i}" for i, name in enumerate(names)) else names


def config_json(config: ViTConfig, classes: tuple[str, ...] | None, dtype: str) -> dict[str, Any]:
    """Return the config.json with which transformers computes the same function."""

    def size(pair: tuple[int, int]) -> int | list[int]:
        return pair[0] if pair[0] == pair[1] else list(pair)

    names = classes or tuple(f"LABEL_{i}" for i in range(config.outputs))
    labels = {str(i): name for i, name in enumerate(names)}
    return {
        "architectures": ["ViTForImageClassification" if config.outputs else "ViTModel"],
        "model_type": "vit",
        "hidden_size": config.width,
        "num_hidden_layers": config.depth,
        "num_attention_heads": config.heads,
        "intermediate_size": config.mlp,
        "hidden_act": "gelu" if config.gelu == "erf" else "gelu_pytorch_tanh",
        "hidden_dropout_prob": config.dropout,
        "attention_probs_dropout_prob": config.attention_dropout,
        "layer_norm_eps": config.norm_eps,
        "image_size": size(config.image_size),
        "patch_size": size(config.patch),
        "num_channels": config.channels,
        "qkv_bias": config.qkv_bias,
        "pooler_output_size": config.pre_logits or config.width,
        "pooler_act": "tanh",
        "dtype": dtype,
        **({"id2label": labels, "label2id": {name: int(i) for i, name in labels.items()}} if config.outputs else {}),
    }


HUGGING_FACE = Format(
    name="hf",
    title="Hugging Face transformers",
    container="folder",
    matches=matches,
    normalise_names=_normalise_names,
    infer_config=_infer_config,
    rows=_rows,
    numerics=lambda config: {},  # config.json stores them all
    preset="timm",  # replaced by preprocessor_config.json
    supports={
        **PLAIN,
        "position": ("learned",),
        "position_prefix": (True,),
        "class_token": (True,),
        "distill_token": (False,),
        "registers": (0,),
        "pooling": ("class",),
        "final_norm": ("before-pool",),
        "layer_scale": (None,),
    },
    ignored={
        r"pooler\.dense\.(weight|bias)": "ViTForImageClassification does not use a pooler",
        r"embeddings\.mask_token": "only masked-image modelling uses it",
        r"embeddings\.position_ids": "it only counts",
    },
)
