"""A small ViT on CIFAR-10 from scratch, without any pre-training.

    vitrail train cifar10-scratch

Patches of 4×4 on 32 pixels, six layers of width 384, strong augmentation; small initial values, since the warm-up is short. A ViT
from scratch stays behind a ResNet here, and far behind a fine-tuned ViT: the paper's Fig. 3 and 4 show why. Not measured yet, so
no accuracy is promised.
"""

from __future__ import annotations

from vitrail.data.augment.spec import Augment
from vitrail.train.config import DataSpec, ModelSpec, OptimSpec, Recipe, ScheduleSpec


def cifar10_scratch() -> Recipe:
    return Recipe(
        name="cifar10-scratch",
        model=ModelSpec(name="ViT-S/4", image_size=32, depth=6, pooling="mean", init="small", stochastic_depth=0.1),
        data=DataSpec(source="torchvision:CIFAR10", preprocess="cifar"),
        augment=Augment(
            crop_area=(0.3, 1.0),
            randaugment="torchvision",
            randaugment_magnitude=9,
            mixup=0.8,
            cutmix=1.0,
            mix="per-sample",
            smoothing=0.1,
        ),
        optim=OptimSpec(name="adamw", lr=1e-3, weight_decay=0.05),
        schedule=ScheduleSpec(kind="cosine", warmup=500),
        epochs=200,
        batch=512,
        ema=0.999,
        ema_warmup=True,
        eval_every=5,
    )


RECIPES = {"cifar10-scratch": cifar10_scratch}
