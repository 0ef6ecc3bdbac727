"""ViT-S/8 on Tiny-ImageNet (200 classes, 64×64 pixels, 100,000 images) from scratch.

    vitrail data pack folder:TINY-IMAGENET TINY
    vitrail train tiny-imagenet --data packed:TINY
    vitrail train tiny-imagenet-short --data packed:TINY
    vitrail train tiny-imagenet-distilled --data packed:TINY --task.teacher runs/tiny-imagenet

Measured once each, with 97,500 of the training images, on the 10,000 validation images. `tiny-imagenet`: 57.1 % top-1 with averaged
weights (55.6 % when images are not cropped for validation, 55.8 % then with raw weights), 9 min 38 s on an H200 that tests shared
for 90 s (9 min 50 s on the clock of the run's curve, docs/evidence.md); the run itself validated without the crop that the recipe
has now. It needs `qk_norm`: without it attention collapses at learning rates from 1e-3 on (docs/log.md). `tiny-imagenet-short`:
33.0 %, 118 s on an H200 that two other runs shared; timm's model with the same settings 32.7 %; our model with the paper's
initial values 24.1 %. `tiny-imagenet-distilled`, a ViT-Ti/8 with a larger ViT of ours as teacher: 57.2 % with averaged and 57.0 %
with raw weights, 9 min 44 s on an H200.
"""

from __future__ import annotations

import dataclasses

from vitrail.data.augment.spec import Augment
from vitrail.train.config import DataSpec, ModelSpec, OptimSpec, Recipe, ScheduleSpec, TaskSpec


def tiny_imagenet() -> Recipe:
    return Recipe(
        name="tiny-imagenet",
        model=ModelSpec(name="ViT-S/8", image_size=64, pooling="mean", init="small", qk_norm=True, stochastic_depth=0.1),
        data=DataSpec(source="", preprocess="timm"),  # a centre crop for validation: random crops made objects larger in training
        augment=Augment(
            crop_area=(0.25, 1.0),
            randaugment="timm",
            randaugment_count=2,
            randaugment_magnitude=9,
            randaugment_probability=0.5,
            randaugment_deviation=0.5,
            randaugment_increasing=True,
            erase=0.1,
            mixup=0.8,
            cutmix=1.0,
            mix_probability=0.8,
            smoothing=0.1,
            device="gpu",
        ),
        optim=OptimSpec(name="adamw", lr=1.5e-3, weight_decay=0.05, beta2=0.98),
        schedule=ScheduleSpec(kind="cosine", warmup="10ep", end=1e-6),
        epochs=165,
        batch=512,
        ema=0.9998,
        ema_warmup=True,
        eval_every=5,
        log_every=50,
        expected="57.1 % on Tiny-ImageNet's validation images (measured here, one seed)",
    )


def tiny_imagenet_short() -> Recipe:
    return Recipe(
        name="tiny-imagenet-short",
        model=ModelSpec(name="ViT-S/8", image_size=64, pooling="mean", init="small", stochastic_depth=0.1),
        data=DataSpec(source=""),
        augment=Augment(crop_area=(0.35, 1.0), smoothing=0.1, device="gpu"),
        optim=OptimSpec(name="adamw", lr=5e-4, weight_decay=0.05),
        schedule=ScheduleSpec(kind="cosine", warmup=500),
        epochs=10,
        batch=256,
        eval_every=2,
        expected="33.0 % on Tiny-ImageNet's validation images (measured here, one seed)",
    )


def tiny_imagenet_distilled() -> Recipe:
    recipe = tiny_imagenet()
    return recipe.replace(
        name="tiny-imagenet-distilled",
        model=ModelSpec(name="ViT-Ti/8", image_size=64, pooling="mean", init="small", qk_norm=True, stochastic_depth=0.0),
        augment=dataclasses.replace(recipe.augment, erase=0.0, mix_until=0.9),
        task=TaskSpec(distill="soft", teacher="TEACHER", distill_weight=0.9, temperature=1.0),
        optim=dataclasses.replace(recipe.optim, lr=2e-3),
        epochs=272,
        batch=1024,
        ema=0.9996,
        eval_every=16,
        expected="57.2 % on Tiny-ImageNet's validation images (measured here, one seed, the teacher a larger ViT of ours)",
    )


RECIPES = {
    "tiny-imagenet": tiny_imagenet,
    "tiny-imagenet-short": tiny_imagenet_short,
    "tiny-imagenet-distilled": tiny_imagenet_distilled,
}
