"""Errors of the formats of other libraries: reading their files and configs, and writing them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from tests.checkpoints.small_models import KINDS
from tests.error_tour.case import at
from tests.error_tour.checkpoint_files import arrays, bundle, hf, npz, place, safe, tensors, timm
from vitrail.checkpoints import FORMATS, conversion
from vitrail.checkpoints.archive import open_archive
from vitrail.checkpoints.flax import unstack
from vitrail.checkpoints.huggingface import label_names, numerics_of
from vitrail.checkpoints.huggingface_variants import check_model_type
from vitrail.checkpoints.infer_config import Shapes, resnet_config
from vitrail.checkpoints.loading import load
from vitrail.checkpoints.preprocess_configs import from_hugging_face, from_timm
from vitrail.checkpoints.timm_architectures import find_architecture, function_of
from vitrail.checkpoints.timm_config import timm_config
from vitrail.models.lora import add_lora

ADVICE = "Replace it with preprocess= (--preprocess), such as 'imagenet'."
SAME_MODEL = "Get both files of the same model."
EVERY_MODEL = "The vitrail format can store every model."
OTHER_MODEL = "The tensors belong to different models, or the file is corrupted."
NAME = "vit_tiny_patch16_224"


def with_lora() -> None:
    made = bundle()
    add_lora(made.model, 1)  # type: ignore[arg-type]
    conversion.write(made, place("x.pth"), "timm")


def onto_a_folder() -> None:
    place("full.npz").mkdir()
    conversion.write(bundle(), "weights/full.npz", "google")


def processor(**values: object) -> object:
    return from_hugging_face(values, (4, 4), 3)


def arguments(**values: object) -> object:
    return function_of({"architecture": NAME, "model_args": values})


# fmt: off
CASES = (
    at("checkpoints/conversion.py:find_format", lambda: conversion.convert("model", "out", "goggle"),
       "There is no format 'goggle'.", "Did you mean google?",
       "Use one of vitrail, google, bit, big-vision, timm, hf, torchvision."),
    at("checkpoints/conversion.py:_tensors#1", with_lora, "timm cannot store blocks.0.attention.qkv.lora_a", EVERY_MODEL),
    at("checkpoints/conversion.py:_tensors#2", lambda: conversion.write(bundle("pre-logits"), "out", "hf"),
       "Hugging Face's ViTForImageClassification has no pre-logits layer, so its logits would differ.",
       "Convert with outputs=0 to a ViTModel, where it becomes the pooler, or fine-tune without it."),
    at("checkpoints/conversion.py:_temporary#2", onto_a_folder, "weights/full.npz is a folder;", "give a file name."),
    at("checkpoints/conversion.py:_read_back", lambda: conversion.write(bundle(), place("x.npz"), "google"),
       "weights/x.npz did not read back as written (patches.weight), so it was deleted.", "Check the disk.",
       patch=lambda patch: patch.setattr(conversion, "_same_bits", lambda one, two: one.ndim != 4)),
    at("checkpoints/flax.py:strip_prefix", lambda: load(npz({"params/img/a": np.ones(1), "params/txt/a": np.ones(1)}) + ":image"),
       "weights/x.npz has no part 'image';", "it has img, txt."),
    at("checkpoints/flax.py:unstack#1",
       lambda: unstack(open_archive(npz({f"Transformer/encoderblock/{n}": np.ones((n, 1)) for n in (2, 3)}))),
       "weights/x.npz: the stacked blocks have different numbers of layers, [2, 3].",
       "The file is corrupted: download or copy it again."),
    at("checkpoints/flax.py:unstack#2", lambda: unstack(open_archive(npz({"Transformer/encoderblock/a": np.ones(10_001)}))),
       "weights/x.npz: 10,001 stacked layers cannot be a Vision Transformer.", "The file is corrupted: download or copy it again."),
    at("checkpoints/format.py:Format.check_writable#1", lambda: FORMATS["google"].check_writable(KINDS["bit"]),
       "Google's vision_transformer files can store a ViT and a hybrid, but small is a BiT.",
       "Choose another format: `vitrail convert --help` lists them."),
    at("checkpoints/format.py:Format.check_writable#2", lambda: FORMATS["google"].check_writable(KINDS["map"]),
       "Google's vision_transformer cannot store pooling='map' (only 'class' or 'mean'), so the file would be another model.",
       EVERY_MODEL),
    at("checkpoints/huggingface.py:_infer_config", lambda: load(hf({**tensors("hf"), "classifier.weight": torch.ones(2, 8)})),
       "the classifier takes 8 values for a model of width 4,",
       "as DINOv2's over class token and patches does, which is not supported.", "Leave it out with drop=['classifier.*']."),
    at("checkpoints/huggingface.py:numerics_of#1", lambda: numerics_of({"hidden_act": "relu"}),
       "config.json has hidden_act='relu';",
       "only GELU is supported, erf ('gelu') or tanh (gelu_pytorch_tanh, gelu_new, gelu_fast)."),
    at("checkpoints/huggingface.py:numerics_of#2", lambda: numerics_of({"pooler_act": "relu"}),
       "config.json has pooler_act='relu';", "only tanh is supported."),
    at("checkpoints/huggingface.py:_check_against#1", lambda: load(hf(hidden_size=64)),
       "config.json has hidden_size=64, but the weights have 4.", SAME_MODEL),
    at("checkpoints/huggingface.py:_check_against#2", lambda: load(hf(id2label={"0": "cat"})),
       "id2label in config.json has 1 label, but the model has 2 outputs.", "Give one label per output, or remove id2label."),
    at("checkpoints/huggingface.py:label_names", lambda: label_names({"id2label": {"0": "cat", "2": "dog"}}),
       "id2label in config.json has the numbers 0, 2;", "they must run from 0 to 1.", "Number the labels so, or remove id2label."),
    at("checkpoints/huggingface_variants.py:check_model_type", lambda: check_model_type({"model_type": "beit"}),
       "config.json has model_type='beit', which is not supported (it has relative positions in every layer).",
       "Supported: vit, deit, dinov2, dinov2_with_registers, siglip_vision_model."),
    at("checkpoints/infer_config.py:Shapes.__call__#1", lambda: Shapes(open_archive(npz({"a": np.ones(3)})))("head/kernel", 2),
       "weights/x.npz has no tensor 'head/kernel', which is needed to infer the model.",
       "The file may be incomplete: download or copy it again."),
    at("checkpoints/infer_config.py:Shapes.__call__#2", lambda: Shapes(open_archive(npz({"a": np.ones(3)})))("a", 2),
       "weights/x.npz: 'a' has shape (3,); expected 2 non-empty dimensions.",
       "The file is corrupted, or of another kind of model."),
    at("checkpoints/infer_config.py:vit_config#1", lambda: load(npz(arrays()), heads=1),
       "heads=1 was given, but weights/x.npz has 2 heads.", "Leave heads out."),
    at("checkpoints/infer_config.py:vit_config#2",
       lambda: load(npz({**arrays("google", "hybrid"), "embedding/kernel": np.ones((1, 1, 7, 32))})),
       "weights/x.npz: the patch embedding takes 7 channels, but the ResNet returns 512.", OTHER_MODEL),
    at("checkpoints/infer_config.py:resnet_config", lambda: resnet_config((1,), 48, {}, Path("x.npz")),
       "x.npz: the ResNet's first convolution has 48 filters;", "expected a multiple of 32, as BiT has."),
    at("checkpoints/infer_config.py:_published_heads", lambda: load(safe(tensors("timm"))),
       "weights/x.safetensors has width 4, depth 1 and MLP 4, which is not a published size, and fused q, k, v do not show",
       "Pass heads=…; often it is 1.", "`vitrail convert FILE FOLDER --heads …` writes a checkpoint that stores it."),
    at("checkpoints/infer_config.py:_grid#1", lambda: load(npz(arrays()), grid=(3, 3)),
       "weights/x.npz: grid=(3, 3) does not match 5 positions and 1 prefix token:", "rows × columns must be 4."),
    at("checkpoints/infer_config.py:_grid#2",
       lambda: load(npz({**arrays(), "Transformer/posembed_input/pos_embedding": np.ones((1, 7, 4))})),
       "weights/x.npz: a position embedding with 7 entries and 1 prefix token is not a square grid.",
       "Pass grid=(rows, columns) (--grid on the command line)."),
    at("checkpoints/preprocess_configs.py:from_hugging_face#1", lambda: processor(resample=9),
       "preprocessor_config.json has resample=9;",
       "supported are 0 (nearest), 1 (lanczos), 2 (bilinear), 3 (bicubic).", ADVICE),
    at("checkpoints/preprocess_configs.py:from_hugging_face#2", lambda: processor(do_rescale=False),
       "preprocessor_config.json has do_rescale=False;", "only a rescaling by 1/255 is supported.", ADVICE),
    at("checkpoints/preprocess_configs.py:_geometry", lambda: processor(size=[10, 20], crop_size=8, do_center_crop=True),
       "preprocessor_config.json resizes to (10, 20) and crops (8, 8), which is not supported:",
       "the crop must have the same aspect ratio and not be larger.", ADVICE),
    at("checkpoints/preprocess_configs.py:from_timm", lambda: from_timm({"mean": [0.5], "crop_mode": "border"}, (4, 4), 3),
       "config.json has crop_mode='border';", "only 'center' and 'squash' are supported.", ADVICE),
    at("checkpoints/preprocess_configs.py:_sides", lambda: processor(crop_size={"longest_edge": 9}),
       "preprocessor_config.json has crop_size={'longest_edge': 9};",
       "expected a number, a pair, height and width, or shortest_edge.", ADVICE),
    at("checkpoints/timm.py:_infer_config", lambda: load(timm(num_classes=7)),
       "config.json has num_classes=7, but the weights have 2.", SAME_MODEL),
    at("checkpoints/timm.py:_infer_vit#1", lambda: load(timm(model_args={"global_pool": "map"})),
       "config.json means attention pooling, but the file has no tensors of attention pooling.", SAME_MODEL),
    at("checkpoints/timm.py:_infer_vit#2",
       lambda: load(timm({name.replace("norm.", "fc_norm.") if name.startswith("norm.") else name: one
                          for name, one in tensors("timm").items()})),
       "config.json means class-token pooling, but the file has tensors of fc_norm, the norm after average or maximum pooling.",
       "Write the model's pooling into config.json, such as \"global_pool\": \"avg\"."),
    at("checkpoints/timm.py:_check_pooled_tokens#1",
       lambda: load(safe({**tensors("timm", "map"), "cls_token": torch.ones(1, 1, 32)}), heads=4),
       "weights/x.safetensors has attention pooling and prefix tokens.",
       "timm does not pool over prefix tokens, Vitrail does, so its logits would differ. The file is rejected."),
    at("checkpoints/timm.py:_check_pooled_tokens#2",
       lambda: load(timm(model_args={"global_pool": "avg", "pool_include_prefix": True})),
       "config.json has pool_include_prefix=True: the mean includes the class token and registers.",
       "Vitrail's mean is over the patches only, so the file is rejected."),
    at("checkpoints/timm_architectures.py:function_of", lambda: arguments(global_pool="max"),
       "config.json has global_pool='max' for vit_tiny_patch16_224;", "only token, avg, map are supported."),
    at("checkpoints/timm_architectures.py:find_architecture#1", lambda: find_architecture("vit_base_patch16_clip_224"),
       "config.json names timm's architecture 'vit_base_patch16_clip_224', which is not supported:",
       "it normalises tokens before the first block, as CLIP does."),
    at("checkpoints/timm_architectures.py:find_architecture#2", lambda: find_architecture("vit_tiny_patch16_225"),
       "config.json names timm's architecture 'vit_tiny_patch16_225', which is not in Vitrail's list.",
       "Did you mean vit_tiny_patch16_224", "write that name in config.json."),
    at("checkpoints/timm_architectures.py:_check_arguments#1", lambda: arguments(wings=2),
       "config.json has the argument wings=2 for vit_tiny_patch16_224,", "which is not supported."),
    at("checkpoints/timm_architectures.py:_check_arguments#2", lambda: arguments(act_layer="relu"),
       "config.json has act_layer='relu' for vit_tiny_patch16_224;", "only 'gelu' or 'gelu_tanh' is supported."),
    at("checkpoints/timm_config.py:_bit", lambda: timm_config(KINDS["bit"], {}, None),
       "timm has no architecture for small, which its folder format needs.", "Write a .safetensors file instead."),
    at("checkpoints/timm_config.py:_vit", lambda: timm_config(KINDS["hybrid"], {}, None),
       "timm has no architecture for small, which its folder format needs.", "Write a .safetensors file instead."),
)
# fmt: on
