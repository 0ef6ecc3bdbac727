"""The same logits from our files in other libraries, and from their files in Vitrail."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
import torchvision
from PIL import Image
from safetensors.torch import load_file, save_file
from timm.layers import GELUTanh, HybridEmbed, StdConv2d, StdConv2dSame
from timm.models.deit import VisionTransformerDistilled as TimmDistilled
from timm.models.resnetv2 import ResNetV2, create_resnetv2_stem
from timm.models.vision_transformer import VisionTransformer as TimmViT
from torch import Tensor, nn
from transformers import AutoImageProcessor, ViTForImageClassification, ViTImageProcessor, ViTModel
from transformers import ViTConfig as HFConfig

from tests.checkpoints.small_models import KINDS, bundle_of, images_for, needed_fields
from vitrail.checkpoints import write
from vitrail.checkpoints.loading import load
from vitrail.checkpoints.preprocess_configs import from_timm, to_timm
from vitrail.models import ModelConfig, ViTConfig

TIMM_NUMERICS = {"gelu": "erf", "position_resize": "timm"}
TIMM_RESNET = {"group_norm_eps": 1e-5, "standardise": "sqrt(var+eps)", "standardise_eps": 1e-8}


@torch.no_grad()
def close(one: Tensor, two: Tensor, tolerance: float = 2e-5) -> None:
    assert one.abs().max() > 0.1, "logits this small would not show a difference"
    assert float((one - two).abs().max()) <= tolerance


def timm_arguments(config: ViTConfig, **more: Any) -> dict[str, Any]:
    return {
        "img_size": config.image_size,
        "patch_size": config.patch,
        "in_chans": config.channels,
        "num_classes": config.outputs,
        "embed_dim": config.width,
        "depth": config.depth,
        "num_heads": config.heads,
        "mlp_ratio": config.mlp / config.width,
        "qkv_bias": config.qkv_bias,
        "qk_norm": config.qk_norm,
        "class_token": config.class_token,
        "no_embed_class": not config.position_prefix,
        "reg_tokens": config.registers,
        "global_pool": {"class": "token", "mean": "avg", "map": "map"}[config.pooling],
        "fc_norm": config.final_norm == "after-pool",
        "init_values": config.layer_scale,
        **more,
    }


def timm_hybrid(config: ViTConfig, **more: Any) -> TimmViT:
    assert config.resnet is not None
    conv = partial(StdConv2dSame, eps=1e-8)
    layers = config.resnet.layers
    if layers:
        channels = tuple(256 * 2**i for i in range(len(layers)))
        shape = {"channels": channels, "num_classes": 0, "global_pool": "", "preact": False, "stem_type": "same"}
        backbone: nn.Module = ResNetV2(layers, conv_layer=conv, **shape)
    else:
        backbone = create_resnetv2_stem(3, stem_type="same", preact=False, conv_layer=conv)
    return TimmViT(**timm_arguments(config, embed_layer=partial(HybridEmbed, backbone=backbone), **more))


def timm_bit(config: ModelConfig) -> ResNetV2:
    layers = config.resnet.layers  # type: ignore[attr-defined]
    channels = tuple(256 * 2**i for i in range(len(layers)))
    return ResNetV2(
        layers, channels=channels, num_classes=config.outputs, stem_type="fixed", conv_layer=partial(StdConv2d, eps=1e-8)
    )


def timm_model(config: ModelConfig, **more: Any) -> nn.Module:
    if not isinstance(config, ViTConfig):
        return timm_bit(config)
    if config.resnet:
        return timm_hybrid(config, **more)
    return (TimmDistilled if config.distill_token else TimmViT)(**timm_arguments(config, **more))


def as_timm(kind: str) -> ModelConfig:
    config = KINDS[kind]
    changes: dict[str, Any] = dict(TIMM_NUMERICS) if isinstance(config, ViTConfig) else {}
    return config.replace(**changes, **(TIMM_RESNET if getattr(config, "resnet", None) else {}))


TIMM_KINDS = (
    *("plain", "gap", "no-qkv-bias", "rectangle", "grey", "free-class", "map", "distilled", "registers", "fc-norm"),
    *("layer-scale", "hybrid", "hybrid-stem", "bit"),
)


@pytest.mark.parametrize("kind", TIMM_KINDS)
def test_timm_computes_our_logits_from_our_file(kind: str, tmp_path: Path) -> None:
    config = as_timm(kind)
    bundle = bundle_of(config)
    report = write(bundle, tmp_path / "out.safetensors", "timm")
    assert report.notes == []
    theirs = timm_model(config).eval()
    theirs.load_state_dict(load_file(tmp_path / "out.safetensors"))
    images = images_for(config)
    close(bundle.model(images), theirs(images), 1e-4 if getattr(config, "resnet", None) else 2e-5)


@pytest.mark.parametrize("kind", TIMM_KINDS)
@pytest.mark.parametrize("suffix", ["pth", "safetensors"])
def test_we_compute_timms_logits_from_its_file(kind: str, suffix: str, tmp_path: Path) -> None:
    config = as_timm(kind)
    torch.manual_seed(0)
    theirs = timm_model(config).eval()
    for name, parameter in theirs.named_parameters():
        if parameter.ndim > 1 or "head" in name:
            nn.init.normal_(parameter, std=0.1)
    path = tmp_path / f"theirs.{suffix}"
    torch.save(theirs.state_dict(), path) if suffix == "pth" else save_file(theirs.state_dict(), path)
    ours = load(path, **needed_fields(config)).model
    images = images_for(config)
    close(theirs(images), ours(images), 1e-4 if getattr(config, "resnet", None) else 2e-5)


def test_heads_of_published_sizes_are_inferred(tmp_path: Path) -> None:
    torch.manual_seed(0)
    theirs = timm.create_model("vit_tiny_patch16_224", num_classes=10).eval()
    nn.init.normal_(theirs.head.weight, std=0.1)
    torch.save(theirs.state_dict(), tmp_path / "ti.pth")
    bundle = load(tmp_path / "ti.pth")
    assert (bundle.model.config.name, bundle.model.config.heads) == ("ViT-Ti/16", 3)  # type: ignore[union-attr]
    images = torch.randn(1, 3, 224, 224)
    close(theirs(images), bundle.model(images))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "theirs"), [("R+ViT-Ti/16", "vit_tiny_r_s16_p8_224"), ("BiT-R50x1", "resnetv2_50x1_bit")])
def test_hybrid_and_bit_of_timm(name: str, theirs: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = timm.create_model(theirs, num_classes=7).eval()
    for head in (getattr(model.head, "fc", None), model.head):
        if isinstance(head, nn.Module) and isinstance(getattr(head, "weight", None), Tensor):
            nn.init.normal_(head.weight, std=0.1)
    save_file(model.state_dict(), tmp_path / "theirs.safetensors")
    bundle = load(tmp_path / "theirs.safetensors")
    assert bundle.model.config.name == name
    images = torch.randn(1, 3, 224, 224)
    close(model(images), bundle.model(images), 1e-4)


@pytest.mark.parametrize("kind", ["plain", "distilled", "registers", "map", "rectangle", "qk-norm"])
def test_timm_loads_our_folder(kind: str, tmp_path: Path) -> None:
    config = KINDS[kind]  # with tanh GELU, which config.json can store
    bundle = bundle_of(config)
    write(bundle, tmp_path / "folder", "timm")
    theirs = timm.create_model(f"local-dir:{tmp_path / 'folder'}", pretrained=True).eval()
    images = images_for(config)
    close(bundle.model(images), theirs(images))
    again = load(tmp_path / "folder")
    assert again.preprocess is not None and bundle.preprocess is not None
    assert (again.preprocess.mean, again.preprocess.resize_to) == (bundle.preprocess.mean, bundle.preprocess.resize_to)
    close(bundle.model(images), again.model(images))


# Hugging Face


@pytest.mark.parametrize("kind", ["plain", "no-qkv-bias", "rectangle", "grey"])
@pytest.mark.parametrize("gelu", ["erf", "tanh"])
def test_hugging_face_computes_our_logits_from_our_folder(kind: str, gelu: str, tmp_path: Path) -> None:
    config = KINDS[kind].replace(gelu=gelu, norm_eps=1e-12)
    bundle = bundle_of(config)
    bundle.classes = tuple("abcde")
    assert write(bundle, tmp_path / "out", "hf").notes == []
    theirs = ViTForImageClassification.from_pretrained(tmp_path / "out").eval()
    images = images_for(config)
    close(bundle.model(images), theirs(images).logits)
    assert theirs.config.id2label[2] == "c"
    assert load(tmp_path / "out").classes == tuple("abcde")


def test_the_pooler_of_vitmodel_is_our_pre_logits(tmp_path: Path) -> None:
    bundle = bundle_of(KINDS["pooler"])
    write(bundle, tmp_path / "out", "hf")
    theirs = ViTModel.from_pretrained(tmp_path / "out").eval()
    images = images_for(KINDS["pooler"])
    close(bundle.model(images), theirs(images).pooler_output)


@pytest.mark.parametrize("names", ["hub", "transformers 5"])
@pytest.mark.parametrize("kind", ["classifier", "model"])
def test_we_compute_hugging_faces_logits_from_its_folder(names: str, kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    hf_config = HFConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, image_size=32, patch_size=8
    )
    hf_config.id2label = {0: "cat", 1: "dog", 2: "owl"}
    theirs = (ViTForImageClassification if kind == "classifier" else ViTModel)(hf_config).eval()
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.2)
    theirs.save_pretrained(tmp_path)
    if names != "hub":
        save_file(theirs.state_dict(), tmp_path / "model.safetensors")
    bundle = load(tmp_path)
    images = torch.randn(2, 3, 32, 32)
    out = theirs(images)
    close(out.logits if kind == "classifier" else out.pooler_output, bundle.model(images))
    assert bundle.model.config.norm_eps == 1e-12  # type: ignore[union-attr]
    assert bundle.classes == (("cat", "dog", "owl") if kind == "classifier" else None)


def test_the_preprocessing_of_hugging_face_is_read(tmp_path: Path) -> None:
    bundle = bundle_of(KINDS["plain"])
    write(bundle, tmp_path / "out", "hf")
    ViTImageProcessor(size={"height": 32, "width": 32}, image_mean=[0.1, 0.2, 0.3]).save_pretrained(tmp_path / "out")
    ours = load(tmp_path / "out").preprocess
    assert ours is not None
    assert (ours.mean, ours.resize, ours.interpolation, ours.size) == ((0.1, 0.2, 0.3), "square", "bilinear", (32, 32))
    image = np.random.default_rng(0).integers(0, 256, (48, 60, 3), dtype=np.uint8)
    theirs = ViTImageProcessor.from_pretrained(tmp_path / "out")(image, return_tensors="pt").pixel_values[0]
    assert float((theirs - ours(image)).abs().max()) <= 1.01 / 255 / 0.5  # rounding by one pixel value


@pytest.mark.parametrize("stored", [
    {"image_processor_type": "DeiTImageProcessor", "size": {"height": 36, "width": 36}, "crop_size": {"height": 32, "width": 32}},
    {"feature_extractor_type": "DeiTFeatureExtractor", "size": 36, "crop_size": 32},
    {"image_processor_type": "BitImageProcessor", "size": {"shortest_edge": 36}, "crop_size": 32},
])  # fmt: skip
def test_the_crop_of_hugging_faces_processors(stored: dict[str, Any], tmp_path: Path) -> None:
    bundle = bundle_of(KINDS["plain"])
    write(bundle, tmp_path / "out", "hf")
    content = {**stored, "do_center_crop": True, "resample": 3, "image_mean": [0.5, 0.4, 0.3], "image_std": [0.2, 0.3, 0.4]}
    (tmp_path / "out" / "preprocessor_config.json").write_text(json.dumps(content))
    image = np.random.default_rng(0).integers(0, 256, (48, 70, 3), dtype=np.uint8)
    theirs = AutoImageProcessor.from_pretrained(tmp_path / "out", backend="pil")(image, return_tensors="pt").pixel_values[0]
    ours = load(tmp_path / "out")
    assert torch.equal(theirs, ours.stored_preprocess()(image))
    write(ours, tmp_path / "again", "hf")
    assert load(tmp_path / "again").preprocess == ours.preprocess


@pytest.mark.parametrize("mode", ["center", "squash"])
@pytest.mark.parametrize("crop", [0.8, 1.0])
def test_the_crop_of_timms_config(mode: str, crop: float) -> None:
    stored = {"mean": (0.5, 0.4, 0.3), "std": (0.2, 0.3, 0.4), "interpolation": "bicubic", "crop_pct": crop, "crop_mode": mode}
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (48, 70, 3), dtype=np.uint8))
    theirs = timm.data.create_transform((3, 32, 32), **stored)(image)
    ours = from_timm(stored, (32, 32), 3)
    assert ours is not None and torch.equal(theirs, ours(image))
    assert from_timm(to_timm(ours), (32, 32), 3) == ours


# torchvision


@pytest.mark.parametrize("representation", [None, 24])
def test_torchvision_in_both_directions(representation: int | None, tmp_path: Path) -> None:
    torch.manual_seed(0)
    shape = {"image_size": 32, "patch_size": 8, "num_layers": 2, "num_heads": 4, "hidden_dim": 32, "mlp_dim": 48}
    theirs = torchvision.models.VisionTransformer(**shape, num_classes=5, representation_size=representation).eval()
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.2)
    torch.save(theirs.state_dict(), tmp_path / "theirs.pth")
    bundle = load(tmp_path / "theirs.pth", heads=4)
    images = torch.randn(2, 3, 32, 32)
    close(theirs(images), bundle.model(images))
    write(bundle, tmp_path / "ours.pth", "torchvision")
    again = torchvision.models.VisionTransformer(**shape, num_classes=5, representation_size=representation).eval()
    again.load_state_dict(torch.load(tmp_path / "ours.pth", weights_only=True))
    assert torch.equal(again(images), theirs(images))


# Google's files, compared with timm's own reader


def google_arrays(config: ViTConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """Build a file with Google's names, independently of our writer."""
    rng = np.random.default_rng(seed)
    width, heads, each = config.width, config.heads, config.width // config.heads

    def draw(*shape: int, scale: float = 0.15) -> np.ndarray:
        return (scale * rng.standard_normal(shape)).astype(np.float32)

    def scale(*shape: int) -> np.ndarray:
        return (1 + 0.1 * rng.standard_normal(shape)).astype(np.float32)

    arrays = {
        "cls": draw(1, 1, width),
        "embedding/kernel": draw(*config.patch, config.patch_channels, width),
        "embedding/bias": draw(width),
        "Transformer/posembed_input/pos_embedding": draw(1, config.tokens, width),
        "Transformer/encoder_norm/scale": scale(width),
        "Transformer/encoder_norm/bias": draw(width),
        "head/kernel": draw(width, config.outputs),
        "head/bias": draw(config.outputs),
    }
    for i in range(config.depth):
        block = f"Transformer/encoderblock_{i}"
        for number in (0, 2):
            arrays |= {f"{block}/LayerNorm_{number}/scale": scale(width), f"{block}/LayerNorm_{number}/bias": draw(width)}
        for part in ("query", "key", "value"):
            start = f"{block}/MultiHeadDotProductAttention_1/{part}"
            arrays |= {f"{start}/kernel": draw(width, heads, each), f"{start}/bias": draw(heads, each)}
        start = f"{block}/MultiHeadDotProductAttention_1/out"
        arrays |= {f"{start}/kernel": draw(heads, each, width), f"{start}/bias": draw(width)}
        arrays |= {
            f"{block}/MlpBlock_3/Dense_0/kernel": draw(width, config.mlp),
            f"{block}/MlpBlock_3/Dense_0/bias": draw(config.mlp),
        }
        arrays |= {f"{block}/MlpBlock_3/Dense_1/kernel": draw(config.mlp, width), f"{block}/MlpBlock_3/Dense_1/bias": draw(width)}
    if config.resnet:
        arrays |= {"conv_root/kernel": draw(7, 7, 3, 64), "gn_root/scale": scale(1, 1, 1, 64), "gn_root/bias": draw(1, 1, 1, 64)}
        channels = 64
        for b, count in enumerate(config.resnet.layers):
            filters = 64 * 2**b
            for u in range(count):
                unit = f"block{b + 1}/unit{u + 1}"
                shapes = {1: (1, 1, channels, filters), 2: (3, 3, filters, filters), 3: (1, 1, filters, 4 * filters)}
                for k, shape in shapes.items():
                    arrays[f"{unit}/conv{k}/kernel"] = draw(*shape)
                    arrays |= {f"{unit}/gn{k}/scale": scale(1, 1, 1, shape[3]), f"{unit}/gn{k}/bias": draw(1, 1, 1, shape[3])}
                if u == 0:
                    arrays[f"{unit}/conv_proj/kernel"] = draw(1, 1, channels, 4 * filters)
                    arrays |= {
                        f"{unit}/gn_proj/scale": scale(1, 1, 1, 4 * filters),
                        f"{unit}/gn_proj/bias": draw(1, 1, 1, 4 * filters),
                    }
                channels = 4 * filters
    return arrays


@pytest.mark.parametrize("kind", ["plain", "hybrid", "hybrid-stem"])
def test_googles_npz_with_timms_reader_and_ours(kind: str, tmp_path: Path) -> None:
    config = KINDS[kind]
    assert isinstance(config, ViTConfig)
    np.savez(tmp_path / "google.npz", **google_arrays(config))
    theirs = timm_model(config, act_layer=GELUTanh).eval()
    theirs.load_pretrained(str(tmp_path / "google.npz"))
    # timm uses other epsilons in GroupNorm and weight standardisation, so ours are set to the same values
    same = TIMM_RESNET if config.resnet else {}
    ours = load(tmp_path / "google.npz", **same).model
    images = images_for(config)
    close(theirs(images), ours(images), 1e-4 if config.resnet else 2e-5)


@pytest.mark.slow
def test_a_full_s16_with_timms_reader_and_ours(tmp_path: Path) -> None:
    from vitrail.models import model_config

    config = model_config("S/16", outputs=50)
    assert isinstance(config, ViTConfig)
    arrays = {name: array * 0.3 if name.endswith("kernel") else array for name, array in google_arrays(config).items()}
    np.savez(tmp_path / "google.npz", **arrays)
    theirs = timm.create_model("vit_small_patch16_224", num_classes=50, act_layer=GELUTanh).eval()
    theirs.load_pretrained(str(tmp_path / "google.npz"))
    bundle = load(tmp_path / "google.npz")
    assert bundle.model.config.name == "ViT-S/16"
    images = torch.randn(1, 3, 224, 224)
    close(theirs(images), bundle.model(images))


def test_big_vision_attention_pooling_with_timms_reader(tmp_path: Path) -> None:
    config = KINDS["map"]
    bundle = bundle_of(config)
    write(bundle, tmp_path / "map.npz", "big-vision")
    theirs = timm_model(config, act_layer=GELUTanh).eval()
    theirs.load_pretrained(str(tmp_path / "map.npz"))
    images = images_for(config)
    close(theirs(images), bundle.model(images))


def test_bit_with_timms_reader(tmp_path: Path) -> None:
    config = KINDS["bit"]
    bundle = bundle_of(config)
    write(bundle, tmp_path / "bit.npz", "bit")
    theirs = timm_bit(config).eval()
    theirs.load_pretrained(str(tmp_path / "bit.npz"))
    ours = load(tmp_path / "bit.npz", grid=config.grid, standardise_eps=1e-8).model
    images = images_for(config)
    close(theirs(images), ours(images), 1e-4)


def test_timms_numerics_have_not_changed() -> None:
    """Check the installed timm, so that a change there is noticed here."""
    vit = timm.create_model("vit_tiny_patch16_224", num_classes=0)
    assert vit.norm.eps == 1e-6 and isinstance(vit.blocks[0].mlp.act, nn.GELU) and vit.blocks[0].mlp.act.approximate == "none"
    hybrid = timm.create_model("vit_tiny_r_s16_p8_224", num_classes=0).patch_embed.backbone
    assert (hybrid.conv.eps, hybrid.norm.eps) == (1e-8, 1e-5)
    bit = timm.create_model("resnetv2_50x1_bit", num_classes=0)
    assert (bit.stem.conv.eps, bit.norm.eps, bit.stem.pad.value) == (1e-8, 1e-5, 0.0)
    assert math.isclose(json.loads("1e-12"), HFConfig().layer_norm_eps)
