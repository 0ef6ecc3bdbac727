"""Errors of models: configurations, images, adapters, copies for inference."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from tests.error_tour.case import Case, at
from vitrail.models import BiT, ModelConfig, ViT, create_model, empty_model, model_config, resize_grid
from vitrail.models.autoencoder import MaskedAutoencoder, check_droppable, decoder_config
from vitrail.models.features import in_precision_of
from vitrail.models.inference import InferenceModel, choose, for_inference
from vitrail.models.lora import add_lora
from vitrail.models.masked import MaskedPatches, num_masked_of

SMALL = {"outputs": 3, "width": 32, "depth": 2, "heads": 2, "mlp": 64, "patch": 8, "image_size": 32}
CPU = torch.device("cpu")


def new_vit(**changes: Any) -> ViT:
    model = create_model("ViT-Ti/16", seed=0, **{**SMALL, **changes})
    assert isinstance(model, ViT)
    return model


vit = cache(new_vit)


@cache
def resnet() -> BiT:
    model = create_model("BiT-R26x1", outputs=3, image_size=32, layers=(1,), seed=0)
    assert isinstance(model, BiT)
    return model


@cache
def fast() -> InferenceModel:
    return for_inference(vit(), "fp32")


def images(size: int = 32) -> Tensor:
    return torch.zeros(1, 3, size, size)


def mixed_precision() -> object:
    with torch.autocast("cpu", torch.bfloat16):
        return in_precision_of(images(), torch.zeros(1, dtype=torch.float16))


def lora_twice() -> object:
    model = new_vit()
    add_lora(model, 2)
    return add_lora(model, 2)


def misspelled_kernels() -> object:
    model = new_vit()
    model.kernels = "Plain"  # type: ignore[assignment]
    return model(images())


def attention_of_another_module() -> object:
    model = vit()
    model.blocks[0] = torch.nn.Identity()
    return next(model.attention(images()))


def attention_of_a_patched_forward() -> object:
    model = new_vit()
    model.blocks[0].attention.forward = lambda x, *rest: x
    return next(model.attention(images()))


CASES: tuple[Case, ...] = (
    at("models/config.py:_Fields._whole", lambda: vit(depth=0), "depth is 0;", "it takes whole numbers of at least 1."),
    at("models/config.py:_Fields._whole", lambda: model_config("BiT-R50x1", layers="3"), "layers is ('3',);",
       "it takes whole numbers of at least 1."),
    at("models/config.py:_Fields._fractions", lambda: vit(dropout=1.0), "dropout is 1.0;",
       "choose a number from 0 up to, but not including, 1."),
    at("models/config.py:_Fields._fractions", lambda: vit(dropout="high"), "dropout is 'high';", "choose a number from 0"),
    at("models/config.py:ResNetConfig.__post_init__", lambda: model_config("BiT-R50x1", multiplier=0.3), "multiplier is 0.3;",
       "64 · multiplier must be a multiple of 32, as with 0.5, 1 or 3."),
    at("models/config.py:ModelConfig.replace", lambda: model_config("ViT-B/16", groups=8),
       "ViT-B/16 has no ResNet part, so groups cannot be set;", "hybrids and BiT have one."),
    at("models/config.py:ModelConfig.from_dict", lambda: ModelConfig.from_dict({"family": "swin"}),
       "The model family is 'swin';", "known are vit, bit."),
    at("models/config.py:ViTConfig._check_widths#2", lambda: vit(position="learned-2d", width=33, heads=1), "it is 33.",
       "learned-2d positions need a width that is a multiple of 2;"),
    at("models/config.py:ViTConfig._check_widths#3", lambda: vit(position="sincos2d", width=4, heads=1), "it is 4.",
       "sincos2d positions need a width of at least 8;"),
    at("models/config.py:ViTConfig._check_tokens#1", lambda: vit(class_token=False), "pooling='class' needs class_token=True;",
       "without one choose pooling='mean' or 'map'."),
    at("models/config.py:ViTConfig._check_tokens#2", lambda: vit(distill_token=True, pooling="mean"), "distill_token=True",
       "needs pooling='class': the two tokens have one head each."),
    at("models/config.py:ViTConfig._check_tokens#3", lambda: vit(distill_token=True, pre_logits=8), "distill_token=True",
       "and pre_logits cannot be combined", "leave one out."),
    at("models/config.py:ViTConfig._check_tokens#4", lambda: vit().config.replace(position="relative"),
       "Relative positions act inside the layers:", "choose position_at='every-layer' or 'shared'."),
    at("models/config.py:ViTConfig._check_tokens#5", lambda: vit().config.replace(position="sincos2d"),
       "'sincos2d' positions have none:", "position_prefix=True needs a learned table;", "set it to False."),
    at("models/config.py:BiTConfig.__post_init__#1", lambda: model_config("BiT-R50x1", layers=()),
       "A BiT needs at least one stage:", "layers=(3, 4, 6, 3) is the R50."),
    at("models/config.py:BiTConfig.__post_init__#2", lambda: model_config("BiT-R50x1", image_size=16),
       "Image 16×16 is smaller than the network's stride of 32 pixels;", "use image_size=32 or more."),
    at("models/config.py:_pair", lambda: vit(image_size="big"), "image_size is 'big';",
       "it takes a whole number, or a pair (height, width)."),
    at("models/config.py:_build#1", lambda: ModelConfig.from_dict({"family": "vit", "name": "x", "width": 64}),
       "ViTConfig needs depth, heads, mlp, patch.", "Give a value for each."),
    at("models/config.py:_build#2", lambda: ModelConfig.from_dict({"family": "bit", "name": "x", "resnet": 5}),
       "BiTConfig cannot be built from these values:", "'int' object has no attribute 'layers'"),
    at("models/variants.py:canonical_name#1", lambda: model_config("vit-g/14"), "'vit-g/14' could be ViT-g/14 or ViT-G/14:",
       "here capitals matter."),
    at("models/build.py:empty_model", lambda: empty_model({"width": 64}),  # type: ignore[arg-type]
       "not from dict.", "A model is built from a ViTConfig or a BiTConfig"),
    at("models/features.py:chosen_layers#1", lambda: vit().attention(images(), []), "`layers` is empty.",
       "Leave it out for all 2 layers, or pass some of 0 to 1."),
    at("models/features.py:in_precision_of", mixed_precision,
       "The model's weights are torch.float16, but autocast computes in torch.bfloat16;", "Leave autocast off"),
    at("models/features.py:check_images#1", lambda: vit()(images()[0]), "this tensor is [3, 32, 32].",
       "takes a batch [images, channels, height, width];", "Add the batch axis with images[None]."),
    at("models/features.py:check_images#2", lambda: vit()(images().byte()), "these are torch.uint8.",
       "takes floating-point images, normalised by its preprocessing;"),
    at("models/vit.py:ViT.distilled_logits", lambda: vit().distilled_logits(images()), "has no distillation token;",
       "build it with distill_token=True."),
    at("models/bit.py:BiT.attention", lambda: resnet().attention(images()),
       "BiT-R5x1 is a ResNet: it has no attention to look at.", "ViTs and hybrids have."),
    at("models/attention_maps.py:attention_gradients#1", lambda: vit(outputs=0).attention_gradients(images(), torch.tensor([0])),
       "has no head, so it has no output to take gradients of.", "Use attention, which needs none."),
    at("models/attention_maps.py:attention_gradients#2", lambda: vit().attention_gradients(images(), torch.tensor([7])),
       "`outputs` is [7];", "it takes one number from 0 to 2 for each of 1 image."),
    at("models/attention_maps.py:_with_attention#1", attention_of_another_module,
       "Block 0 (Identity) does not say what it attends to.",
       "Choose other layers, or give its class a method `with_attention(x, bias)`"),
    at("models/attention_maps.py:_with_attention#2", attention_of_a_patched_forward,
       "A method of this model's attention was replaced by one that does not say what it attends to.",
       "Put the method back, or define `with_weights` in a subclass."),
    at("models/surgery.py:checkpoint_activations", lambda: vit().checkpoint_activations(-3),
       "checkpoint_activations(-3)", "a number of blocks from 0, or None for all 2"),
    at("models/recompute.py:Recompute.__post_init__", lambda: vit().checkpoint_activations(1, "norms"),  # type: ignore[arg-type]
       "keep is 'norms';", "recomputed blocks can keep nothing or matmuls."),
    at("models/fused/dispatch.py:ResidualStream.__init__", misspelled_kernels, "model.kernels is 'Plain';",
       "it can be auto, plain, fp8."),
    at("models/resample.py:resize_grid#1", lambda: resize_grid(torch.zeros(1, 2, 2, 4), (3, 3), "linear"),  # type: ignore[arg-type]
       "There is no position rule 'linear';", "known are reference, timm, hf, torchvision."),
    at("models/resample.py:resize_grid#2", lambda: resize_grid(torch.zeros(1, 2, 2, 4), (0, 3)),
       "A grid of 0×3 has no positions;", "both sides must be at least 1."),
    at("models/lora.py:add_lora#1", lambda: add_lora(resnet(), 4),  # type: ignore[arg-type]
       "a ResNet has none.", "LoRA adapts the linear layers of a Vision Transformer's blocks;"),
    at("models/lora.py:add_lora#2", lambda: add_lora(vit(), 0, matrices=()), "The rank of LoRA is 0 on no matrix;",
       "use 1 or more, on at least one matrix."),
    at("models/lora.py:add_lora#3", lora_twice, "qkv is a LoraLinear, not a plain linear layer:", "LoRA cannot be added to it."),
    at("models/masked.py:num_masked_of", lambda: num_masked_of(0.01, vit().config), "A mask rate of 0.01 masks 0 of the 16 patches",
       "Choose a rate above 0 and at most 1 that masks at least one patch."),
    at("models/masked.py:Pretraining._embed", lambda: MaskedPatches(vit(any_size=True), 8)(images(40), torch.rand(1, 25, 2)),
       "is pre-trained on 32×32 images, these are 40×40.", "Resize the images."),
    at("models/autoencoder.py:MaskedAutoencoder.__init__", lambda: MaskedAutoencoder(vit(), 8, 1.0),
       "A mask rate of 1 leaves none of the 16 patches to see;", "lower it."),
    at("models/autoencoder.py:check_droppable", lambda: check_droppable(vit(attention="axial").config),
       "does not allow: axial attention needs whole rows and columns of patches.", "or the task masked-patch"),
    at("models/autoencoder.py:decoder_config", lambda: decoder_config(vit().config, 100, 1),
       "The decoder has 1 block of width 100;", "it needs at least 1 block, and a width that is a multiple of 32."),
    at("models/inference/__init__.py:for_inference", lambda: for_inference(fast()),  # type: ignore[arg-type]
       "This is a copy made for inference already.", "Call for_inference with the model it was made from."),
    at("models/inference/precision.py:choose", lambda: choose(vit().config, "fp8", CPU),  # type: ignore[arg-type]
       "The precision is 'fp8';", "it can be auto, fp32, bf16 or int8."),
    at("models/inference/cpu.py:CpuModel._apply", lambda: fast().double(), "This copy's layers are packed for the CPU;",
       "Call for_inference(model, precision, device) with the model it was made from."),
    at("models/inference/model.py:InferenceModel.distilled_logits",
       lambda: for_inference(resnet(), "fp32").distilled_logits(images()),
       "BiT-R5x1 is a ResNet: it has no distillation token.", "Distilled ViTs have one."),
    at("models/inference/model.py:InferenceModel.load_state_dict", lambda: fast().load_state_dict({}),
       "holds packed and folded weights.", "Load the weights into the model it was made from"),
    at("models/inference/model.py:_refuse", lambda: fast().train(), "This copy was made for inference and cannot be trained.",
       "Use the model it was made from."),
)  # fmt: skip
