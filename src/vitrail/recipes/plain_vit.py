"""Plain ViT-S/16 on ImageNet in 90 epochs ("Better plain ViT baselines", Beyer et al. 2022).

    torchrun --nproc-per-node 8 -m vitrail train vit-s16-imagenet --data folder:IMAGENET

76.5 % on the validation split in 6 to 7 hours of eight TPUv3 cores, say its authors. They train on 99 % of the training split
and keep the rest as a second validation set; `--data.holdout 0.01` does the same.
"""

from __future__ import annotations

from vitrail.data.augment.spec import Augment
from vitrail.train.config import DataSpec, ModelSpec, OptimSpec, Recipe, ScheduleSpec


def plain_vit() -> Recipe:
    return Recipe(
        name="vit-s16-imagenet",
        model=ModelSpec(name="ViT-S/16", image_size=224, pooling="mean", position="sincos2d", pre_logits=384),
        data=DataSpec(source="", preprocess="big-vision"),
        augment=Augment(
            crop="inception-tensorflow",
            antialias=False,
            randaugment="big-vision",
            randaugment_count=2,
            randaugment_magnitude=10,
            mixup=0.2,
        ),
        optim=OptimSpec(name="adam", lr=1e-3, weight_decay=1e-4, decay="independent-of-lr", clip=1.0),
        schedule=ScheduleSpec(kind="cosine", warmup=10_000),
        epochs=90,
        batch=1024,
        compile=True,
        log_every=50,
        expected="76.5 % on ImageNet (big_vision)",
    )


RECIPES = {"vit-s16-imagenet": plain_vit}
