"""A small ViT of Tiny-ImageNet on CIFAR-10 and Imagenette: AdamW, strong augmentation, minutes on one GPU.

    vitrail finetune --from runs/finetune-tiny-imagenet --recipe finetune-cifar10-64 --data packed:CIFAR
    vitrail finetune --from runs/finetune-tiny-imagenet --recipe finetune-imagenette-160-gpu --data packed:IMAGENETTE
    vitrail train imagenette-160-scratch --data packed:IMAGENETTE

CIFAR-10's images are enlarged to the 64×64 pixels of the model. Imagenette keeps its 160×160: the paper's higher resolution, with
resized position embeddings (§3.2). The paper fine-tunes with SGD and without augmentation but crops and flips; small models of so
few images gain from more. `imagenette-160-scratch` is the same without pre-training.

Measured with the included model, so with a ViT-Ti/8, and without stochastic depth:

    vitrail finetune --from vitrail-ti8-tiny-imagenet --recipe finetune-imagenette-160-gpu --data packed:IMAGENETTE \\
      --data.holdout 0.03 --model.stochastic-depth 0
    vitrail train imagenette-160-scratch --data packed:IMAGENETTE --data.holdout 0.03 --model.name ViT-Ti/8 \\
      --model.stochastic-depth 0

95.1 % of Imagenette's validation images, and 68.7 % from scratch; one seed, 149 s each on an H200 that both shared with tests.
CIFAR-10 has not been run.
"""

from __future__ import annotations

import dataclasses

from vitrail.recipes.tiny_imagenet import tiny_imagenet
from vitrail.train.config import DataSpec, ModelSpec, OptimSpec, Recipe, ScheduleSpec


def cifar10() -> Recipe:
    return Recipe(
        name="finetune-cifar10-64",
        model=ModelSpec(image_size=64, pre_logits=0, stochastic_depth=0.1),
        data=DataSpec(source="torchvision:CIFAR10"),
        augment=dataclasses.replace(tiny_imagenet().augment, crop_area=(0.3, 1.0), mix_until=0.9),
        optim=OptimSpec(name="adamw", lr=1e-3, weight_decay=0.05, beta2=0.98, layer_decay=0.75),
        schedule=ScheduleSpec(kind="cosine", warmup="5ep", end=1e-6),
        epochs=50,
        batch=512,
        ema=0.9995,
        ema_warmup=True,
        log_every=50,
        eval_every=10,
    )


def imagenette() -> Recipe:
    recipe = cifar10()
    return recipe.replace(
        name="finetune-imagenette-160-gpu",
        model=ModelSpec(image_size=160, pre_logits=0, stochastic_depth=0.1),
        data=DataSpec(source=""),
        augment=dataclasses.replace(recipe.augment, crop_area=(0.25, 1.0)),
        batch=256,
        ema=0.998,
        log_every=20,
    )


def imagenette_scratch() -> Recipe:
    recipe = imagenette()
    return recipe.replace(
        name="imagenette-160-scratch",
        model=ModelSpec(name="ViT-S/8", image_size=160, pooling="mean", init="small", qk_norm=True, stochastic_depth=0.1),
        data=DataSpec(source="", preprocess="timm"),
        optim=dataclasses.replace(recipe.optim, layer_decay=1.0),
    )


RECIPES = {
    "finetune-cifar10-64": cifar10,
    "finetune-imagenette-160-gpu": imagenette,
    "imagenette-160-scratch": imagenette_scratch,
}
