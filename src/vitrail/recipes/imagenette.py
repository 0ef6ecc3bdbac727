"""The included model on real photos: Imagenette, ten classes at 160×160 pixels, on one CPU core.

    vitrail data pack folder:IMAGENETTE PACKED
    vitrail finetune --from vitrail-ti8-tiny-imagenet --recipe finetune-imagenette --data packed:PACKED
    vitrail finetune --from runs/finetune-imagenette --recipe finetune-imagenette-160 --data packed:PACKED
    vitrail train imagenette-scratch --data packed:PACKED

First 96 pixels, where a step costs a quarter, then 160 for an epoch and a half: position embeddings are resampled twice (§3.2).
AdamW with a learning rate that falls by layer. `imagenette-scratch` is the first run without pre-training, for comparison.
"""

from __future__ import annotations

import dataclasses

from vitrail.data.augment.spec import Augment
from vitrail.train.config import DataSpec, ModelSpec, OptimSpec, Recipe, ScheduleSpec


def at_96() -> Recipe:
    return Recipe(
        name="finetune-imagenette",
        model=ModelSpec(image_size=96, pre_logits=0),
        data=DataSpec(source="", holdout=0.03),
        augment=Augment(crop_area=(0.25, 1.0), erase=0.1, smoothing=0.1),
        optim=OptimSpec(name="adamw", lr=1e-3, weight_decay=0.05, beta2=0.98, layer_decay=0.75, clip=1.0),
        schedule=ScheduleSpec(kind="cosine", warmup="10%"),
        epochs=8,
        batch=128,
        precision="bf16",
        threads=1,
        eval_every=1,
    )


def at_160() -> Recipe:
    recipe = at_96()
    return recipe.replace(
        name="finetune-imagenette-160",
        model=dataclasses.replace(recipe.model, image_size=160),
        augment=Augment(crop_area=(0.35, 1.0), smoothing=0.1),
        optim=dataclasses.replace(recipe.optim, lr=3e-4),
        epochs=1.5,
        eval_every=0.5,
    )


def scratch() -> Recipe:
    recipe = at_96()
    return recipe.replace(
        name="imagenette-scratch",
        model=ModelSpec(name="ViT-Ti/8", image_size=96, pooling="mean", init="small", qk_norm=True),
        data=dataclasses.replace(recipe.data, preprocess="timm"),
        optim=dataclasses.replace(recipe.optim, layer_decay=1.0),
    )


RECIPES = {"finetune-imagenette": at_96, "finetune-imagenette-160": at_160, "imagenette-scratch": scratch}
