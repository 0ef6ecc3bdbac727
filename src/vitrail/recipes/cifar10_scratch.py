"""A small ViT on CIFAR-10 from scratch, without any pre-training.

    vitrail train cifar10-scratch

ViT-S with patches of 4×4 on 32 pixels, so 64 tokens as `tiny-imagenet` has, and that recipe's settings: small initial values, since
the warm-up is short, `qk_norm` and strong augmentation, on the GPU. A ViT from scratch stays behind a ResNet here, and far behind a
fine-tuned ViT: the paper's Fig. 3 and 4 show why. Not measured yet, so no accuracy is promised.
"""

from __future__ import annotations

import dataclasses

from vitrail.recipes.tiny_imagenet import tiny_imagenet
from vitrail.train.config import DataSpec, ModelSpec, Recipe


def cifar10_scratch() -> Recipe:
    recipe = tiny_imagenet()
    return recipe.replace(
        name="cifar10-scratch",
        model=ModelSpec(name="ViT-S/4", image_size=32, pooling="mean", init="small", qk_norm=True, stochastic_depth=0.1),
        data=DataSpec(source="torchvision:CIFAR10", preprocess="cifar"),
        augment=dataclasses.replace(recipe.augment, mix_until=0.95),
        optim=dataclasses.replace(recipe.optim, lr=1e-3),
        schedule=dataclasses.replace(recipe.schedule, warmup="20ep"),
        epochs=400,
        eval_every=20,
        expected="",
    )


RECIPES = {"cifar10-scratch": cifar10_scratch}
