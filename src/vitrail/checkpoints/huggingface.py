"""Hugging Face's ViTForImageClassification and ViTModel: the names on the hub, and those inside transformers 5."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from vitrail.checkpoints.archive import Archive
from vitrail.checkpoints.format import PLAIN, Format
from vitrail.checkpoints.infer import Hints, Shapes, hint_rectangle, vit_config
from vitrail.checkpoints.mapping import Row, both, rename, repeated, row
from vitrail.errors import VitrailError
from vitrail.models import ModelConfig, ViTConfig

_LAYER = "encoder.layer.{i}"
_PARTS = ("query", "key", "value")
_BLOCK = [
    *both("blocks.{i}.norm1", f"{_LAYER}.layernorm_before"),
    row("blocks.{i}.attention.qkv.weight", [f"{_LAYER}.attention.attention.{part}.weight" for part in _PARTS]),
    row("blocks.{i}.attention.qkv.bias", [f"{_LAYER}.attention.attention.{part}.bias" for part in _PARTS]),
    *both("blocks.{i}.attention.out", f"{_LAYER}.attention.output.dense"),
    *both("blocks.{i}.norm2", f"{_LAYER}.layernorm_after"),
    *both("blocks.{i}.mlp.up", f"{_LAYER}.intermediate.dense"),
    *both("blocks.{i}.mlp.down", f"{_LAYER}.output.dense"),
]
_AROUND = [
    row("class_token", "embeddings.cls_token"),
    row("positions.table", "embeddings.position_embeddings"),
    *both("patches", "embeddings.patch_embeddings.projection"),
    *both("norm", "layernorm"),
    *both("pre_logits", "pooler.dense"),
    *both("head", "classifier"),
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
_EPS = 1e-12  # what transformers takes where its config.json says nothing


def _table(config: ModelConfig) -> list[Row]:
    assert isinstance(config, ViTConfig)
    return [*_AROUND, *(r for i in range(config.depth) for r in repeated(_BLOCK, i=i))]


def _recognise(names: Collection[str]) -> bool:
    return any(name.removeprefix("vit.") == "embeddings.patch_embeddings.projection.weight" for name in names)


def _respell(archive: Archive) -> None:
    rename(archive, [(r"^vit\.", "")])
    rename(archive, _NEW_NAMES, "names of transformers 5 read as those on the hub")


def _infer(shapes: Shapes, hints: Hints) -> ModelConfig:
    said = hints.config or {}
    if not said:
        hints.notes.append(f"no config.json beside the weights: GELU 'erf' and eps {_EPS:g} assumed, as transformers does")
    width, channels, height, across = shapes("embeddings.patch_embeddings.projection.weight", 4)
    hint_rectangle(hints, said.get("image_size"), (height, across))
    first = _LAYER.format(i=0)
    headed = "classifier.weight" in shapes
    config = vit_config(
        shapes,
        hints,
        numerics=numerics_of(said),
        width=width,
        depth=shapes.count("encoder.layer.{}.layernorm_before.weight"),
        mlp=shapes(f"{first}.intermediate.dense.weight", 2)[0],
        kernel=(channels, height, across),
        table=shapes("embeddings.position_embeddings", 3)[1],
        heads=said.get("num_attention_heads"),
        covers=True,
        class_token=True,
        qkv_bias=f"{first}.attention.attention.query.bias" in shapes,
        pre_logits=shapes("pooler.dense.weight", 2)[0] if "pooler.dense.weight" in shapes and not headed else None,
        outputs=shapes("classifier.weight", 2)[0] if headed else 0,
    )
    assert isinstance(config, ViTConfig)
    _check_against(config, said, shapes)
    return config


def numerics_of(said: Mapping[str, Any]) -> dict[str, Any]:
    act = said.get("hidden_act", "gelu")
    if act != "gelu" and act not in _TANH:
        raise VitrailError(
            f"config.json says hidden_act={act!r}; only GELU, exact ('gelu') or by tanh ({', '.join(_TANH)}), is known."
        )
    if said.get("pooler_act", "tanh") != "tanh":
        raise VitrailError(f"config.json says pooler_act={said['pooler_act']!r}; only tanh is known.")
    return {
        "gelu": "tanh" if act in _TANH else "erf",
        "norm_eps": float(said.get("layer_norm_eps", _EPS)),
        "position_resize": "hf",
        "dropout": float(said.get("hidden_dropout_prob", 0.0)),
        "attention_dropout": float(said.get("attention_probs_dropout_prob", 0.0)),
    }


def _check_against(config: ViTConfig, said: Mapping[str, Any], shapes: Shapes) -> None:
    """A config.json that tells another story than the weights is refused: one of the two is wrong."""
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
        claimed = said.get(key, value)
        pair = (claimed, claimed) if isinstance(value, tuple) and isinstance(claimed, int) else claimed
        pair = tuple(pair) if isinstance(pair, list) else pair
        if pair != value:
            raise VitrailError(
                f"{shapes.path}: config.json says {key}={claimed!r}, but the weights show {value!r}. One of them is wrong."
            )
    labels = said.get("id2label")
    if config.outputs and isinstance(labels, Mapping) and len(labels) != config.outputs:
        raise VitrailError(f"{shapes.path}: config.json names {len(labels)} labels, but the head has {config.outputs} outputs.")


def label_names(said: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Class names in order, unless they are only transformers' placeholders."""
    labels = said.get("id2label")
    if not isinstance(labels, Mapping) or not labels:
        return None
    numbered = {str(key): str(value) for key, value in labels.items()}
    if any(str(i) not in numbered for i in range(len(numbered))):
        raise VitrailError("config.json: id2label does not number its labels from 0 without gaps.")
    names = tuple(numbered[str(i)] for i in range(len(numbered)))
    return None if all(name == f"LABEL_{i}" for i, name in enumerate(names)) else names


def config_json(config: ViTConfig, classes: tuple[str, ...] | None, dtype: str) -> dict[str, Any]:
    """The config.json that makes transformers compute what this model computes."""

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
    recognise=_recognise,
    respell=_respell,
    infer=_infer,
    table=_table,
    numerics=lambda config: {},  # its config.json says them all
    preset="timm",  # replaced by what preprocessor_config.json says
    needs={
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
    },
)
