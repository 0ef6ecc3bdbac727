"""ViT-S/8 on Tiny-ImageNet (200 classes, 64×64 pixels, 100,000 images) from scratch.

    vitrail train tiny-imagenet --data.source packed:TINY

Pack the set once (`vitrail data pack`): then reading costs nothing beside training. Not measured yet, so no figure is promised.
"""

from __future__ import annotations

from vitrail.data.augment.spec import Augment
from vitrail.train.config import DataSpec, ModelSpec, OptimSpec, Recipe, ScheduleSpec


def tiny_imagenet() -> Recipe:
    return Recipe(
        name="tiny-imagenet",
        model=ModelSpec(name="ViT-S/8", image_size=64, pooling="mean", stochastic_depth=0.1),
        data=DataSpec(source=""),
        augment=Augment(
            crop_area=(0.2, 1.0),
            randaugment="torchvision",
            randaugment_magnitude=9,
            mixup=0.8,
            cutmix=1.0,
            mix="per-sample",
            smoothing=0.1,
        ),
        optim=OptimSpec(name="adamw", lr=1e-3, weight_decay=0.05),
        schedule=ScheduleSpec(kind="cosine", warmup=1_000),
        epochs=100,
        batch=512,
        ema=0.999,
        ema_warmup=True,
        eval_every=5,
    )


RECIPES = {"tiny-imagenet": tiny_imagenet}
