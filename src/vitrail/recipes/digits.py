"""A tiny ViT on the embedded handwritten digits, to see everything work.

    vitrail train

1,438 training images of 8×8 pixels as four patches of 4×4; 359 others are validated on. Half a minute on one core.
"""

from __future__ import annotations

from vitrail.data.augment.spec import Augment
from vitrail.train.config import DataSpec, ModelSpec, OptimSpec, Recipe, ScheduleSpec


def digits() -> Recipe:
    return Recipe(
        name="digits",
        model=ModelSpec(name="ViT-Ti/4", image_size=8, channels=1, width=96, depth=4, heads=3, mlp=192),
        data=DataSpec(source="digits", workers=0),
        augment=Augment(crop="inception", crop_area=(0.8, 1.0), crop_aspect=(0.9, 1.1), flip=0.0),
        optim=OptimSpec(name="adamw", lr=2e-3, weight_decay=0.05),
        schedule=ScheduleSpec(kind="cosine", warmup=50),
        epochs=40,
        batch=64,
        threads=1,
        eval_every=5,
        log_every=10,
        expected="98.6 % of the held-out digits (measured, mean of seeds 0 to 4: 97.8 to 99.2)",
    )


RECIPES = {"digits": digits}
