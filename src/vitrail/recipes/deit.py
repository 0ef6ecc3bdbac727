"""DeiT (Touvron et al. 2021): a ViT-S/16 on ImageNet alone, and the same with a token that learns from a teacher.

    torchrun --nproc-per-node 8 -m vitrail train deit-s16-imagenet --data folder:IMAGENET
    torchrun --nproc-per-node 8 -m vitrail train deit-s16-imagenet-distilled --task.teacher TEACHER --data folder:IMAGENET

The settings are those of the released training code for DeiT-S. What differs: a mixing weight is drawn per step, not per step
and GPU; the warm-up begins at a learning rate of 0, not 1e-6; the learning rate changes every step, not every epoch; and the cosine
begins after the warm-up, not with it, which changes the rate by at most 1.6 % of its peak.
Neither recipe has been run here. The teacher is any checkpoint with the same classes; it keeps its own preprocessing. DeiT's
is a RegNetY-16GF with 82.9 %, which cannot be loaded here, so no accuracy is promised with another one.
"""

from __future__ import annotations

from vitrail.data.augment.spec import Augment
from vitrail.train.config import DataSpec, ModelSpec, OptimSpec, Recipe, ScheduleSpec, TaskSpec


def deit() -> Recipe:
    return Recipe(
        name="deit-s16-imagenet",
        model=ModelSpec(name="ViT-S/16", image_size=224, init="small", gelu="erf", stochastic_depth=0.1),
        data=DataSpec(source="", preprocess="deit"),
        augment=Augment(
            crop_area=(0.08, 1.0),
            interpolation="bicubic",
            # rand-m9-mstd0.5-inc1. timm's colour jitter (.3) is off where there is RandAugment.
            randaugment="timm",
            randaugment_magnitude=9,
            randaugment_deviation=0.5,
            randaugment_increasing=True,
            erase=0.25,
            mixup=0.8,
            cutmix=1.0,
            mix="batch",
            smoothing=0.1,
            repeats=3,
        ),
        # 5e-4 · batch / 512
        optim=OptimSpec(name="adamw", lr=1e-3, weight_decay=0.05, clip=None),
        schedule=ScheduleSpec(kind="cosine", warmup="5ep", end=1e-5),
        ema=0.99996,
        epochs=300,
        batch=1024,
        log_every=50,
        expected="79.9 % on ImageNet (DeiT; its weights without averaging)",
    )


def deit_distilled() -> Recipe:
    recipe = deit()
    return recipe.replace(
        name="deit-s16-imagenet-distilled",
        model=ModelSpec(name="ViT-S/16", image_size=224, init="small", gelu="erf", stochastic_depth=0.1, distill_token=True),
        task=TaskSpec(distill="hard", teacher="TEACHER", distill_weight=0.5),
        compile=True,
        expected="81.2 % on ImageNet with DeiT's own teacher, a RegNetY-16GF (DeiT); depends on the teacher",
    )


RECIPES = {"deit-s16-imagenet": deit, "deit-s16-imagenet-distilled": deit_distilled}
