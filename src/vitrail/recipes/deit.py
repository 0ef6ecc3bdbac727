"""DeiT-style distillation (Touvron et al. 2021): a ViT-S/16 that learns from labels and, by a token of its own, from a teacher.

    torchrun --nproc-per-node 8 -m vitrail train deit-s16-imagenet --task.teacher TEACHER --data.source folder:IMAGENET

The teacher is any checkpoint with the same classes; it keeps its own preprocessing. The DeiT paper's 81.2 % came from a
RegNetY-16GF with 82.9 %; a BiT-R152x2 is the nearest there is here.
"""

from __future__ import annotations

from vitrail.data.augment.spec import Augment
from vitrail.train.config import DataSpec, ModelSpec, OptimSpec, Recipe, ScheduleSpec, TaskSpec


def deit() -> Recipe:
    return Recipe(
        name="deit-s16-imagenet",
        model=ModelSpec(name="ViT-S/16", image_size=224, distill_token=True, stochastic_depth=0.1),
        data=DataSpec(source="", preprocess="imagenet"),
        augment=Augment(
            crop_area=(0.08, 1.0),
            interpolation="bicubic",
            randaugment="torchvision",
            randaugment_count=2,
            randaugment_magnitude=9,
            erase=0.25,
            mixup=0.8,
            cutmix=1.0,
            mix="per-sample",
            smoothing=0.1,
            repeats=3,
        ),
        task=TaskSpec(distil="hard", teacher="TEACHER", distil_weight=0.5),
        optim=OptimSpec(name="adamw", lr=1e-3, weight_decay=0.05, clip=None),
        schedule=ScheduleSpec(kind="cosine", warmup=6_255, end=1e-5),
        epochs=300,
        batch=1024,
        compile=True,
        log_every=50,
        expected="81.2 % on ImageNet with a RegNetY-16GF teacher (DeiT)",
    )


RECIPES = {"deit-s16-imagenet": deit}
