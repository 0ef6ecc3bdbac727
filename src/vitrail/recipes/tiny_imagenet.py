"""ViT-S/8 on Tiny-ImageNet (200 classes, 64×64 pixels, 100,000 images) from scratch.

    vitrail train tiny-imagenet --data.source packed:TINY

Pack the set once (`vitrail data pack`): then reading costs nothing beside training. Measured once: 4 min 37 s on one H200, 30.0 %
top-1 and 56.7 % top-5 on the 10,000 validation images. The attention becomes very sharp, so a lower learning rate may do better.
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
            device="gpu",
        ),
        optim=OptimSpec(name="adamw", lr=2e-3, weight_decay=0.05),
        schedule=ScheduleSpec(kind="cosine", warmup=250),
        epochs=80,
        batch=2048,
        ema=0.999,
        ema_warmup=True,
        eval_every=16,
        compile=True,
        expected="30.0 % on Tiny-ImageNet's validation images (measured here)",
    )


RECIPES = {"tiny-imagenet": tiny_imagenet}
