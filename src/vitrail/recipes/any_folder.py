"""Fine-tuning on any images: the paper's settings, with batch and length from the number of images.

    vitrail finetune --from REF --data FOLDER

Steps follow BiT's rule: 500 below 20,000 images, 10,000 below 500,000, else 20,000; fewer where there are under 2,000 images.
"""

from __future__ import annotations

from vitrail.data.augment.spec import Augment
from vitrail.train.config import DataSpec, ModelSpec, OptimSpec, Recipe, ScheduleSpec


def any_folder(start: str, source: str, *, images: int, name: str = "finetune") -> Recipe:
    steps = 20_000 if images >= 500_000 else 10_000 if images >= 20_000 else 500 if images >= 2_000 else max(100, images // 4)
    batch = max(1, min(512, images // 3, 1 << max(images // 8, 8).bit_length()))
    per_epoch = max(images // batch, 1)
    return Recipe(
        name=name,
        model=ModelSpec(start=start, pre_logits=0),
        data=DataSpec(source=source),
        augment=Augment(),
        optim=OptimSpec(name="sgd", lr=0.01, momentum=0.9, clip=1.0),
        schedule=ScheduleSpec(kind="cosine", warmup="2.5%" if steps == 20_000 else "5%" if steps == 10_000 else "10%"),
        steps=steps,
        batch=batch,
        lr_grid=(0.001, 0.003, 0.01, 0.03),
        eval_every=max(1, round(steps / 10 / per_epoch)),
    )
