"""Masked autoencoding (MAE, He et al. 2021), which is not in the ViT paper: a quarter of the patches seen, the rest predicted.

    torchrun --nproc-per-node 8 -m vitrail train mae-vit-b16-imagenet --data folder:IMAGENET

AdamW with β .9 and .95, weight decay .05, learning rate 1.5e-4 · batch / 256, 40 epochs of warm-up, cosine; crops of at least a
fifth of the image, and flips. 75 % hidden, a decoder of 8 blocks of width 512, pixels normalised patch by patch. After fine-tuning
ViT-B/16 reaches 83.6 % on ImageNet with 1,600 epochs of this, say its authors; here are their 800.

`mae-tiny-imagenet` is a small one for one GPU and a packed Tiny-ImageNet, and `finetune-tiny-imagenet` trains its encoder on the
labels of the same images. Neither has been run; docs/self-supervision.md has a shorter measurement with other initial values.

    vitrail train mae-tiny-imagenet --data packed:TINY
    vitrail finetune --from runs/mae-tiny-imagenet --recipe finetune-tiny-imagenet --data packed:TINY
"""

from __future__ import annotations

import dataclasses

from vitrail.data.augment.spec import Augment
from vitrail.recipes.tiny_imagenet import tiny_imagenet
from vitrail.train.config import DataSpec, ModelSpec, OptimSpec, Recipe, ScheduleSpec, TaskSpec


def imagenet() -> Recipe:
    return Recipe(
        name="mae-vit-b16-imagenet",
        model=ModelSpec(name="ViT-B/16", image_size=224, position="sincos2d"),
        data=DataSpec(source="", preprocess="imagenet"),
        augment=Augment(crop_area=(0.2, 1.0), interpolation="bicubic"),
        task=TaskSpec(kind="masked-autoencoder", mask_rate=0.75, decoder_width=512, decoder_depth=8),
        optim=OptimSpec(name="adamw", lr=2.4e-3, weight_decay=0.05, beta2=0.95, clip=None),
        schedule=ScheduleSpec(kind="cosine", warmup=12_500),
        epochs=800,
        batch=4096,
        log_every=50,
        eval_every=20,
    )


def tiny() -> Recipe:
    return Recipe(
        name="mae-tiny-imagenet",
        model=ModelSpec(name="ViT-S/8", image_size=64, pooling="mean", init="small", qk_norm=True),
        data=DataSpec(source="", preprocess="timm"),  # that of fine-tuning
        augment=Augment(crop_area=(0.2, 1.0), device="gpu"),
        task=TaskSpec(kind="masked-autoencoder", mask_rate=0.75, decoder_width=192, decoder_depth=4),
        optim=OptimSpec(name="adamw", lr=1e-3, weight_decay=0.05, beta2=0.95),
        schedule=ScheduleSpec(kind="cosine", warmup="20ep"),
        epochs=400,
        batch=1024,
        log_every=50,
        eval_every=40,
    )


def finetune_tiny() -> Recipe:
    """Supervised training from the encoder of `tiny`; more regularised than from scratch, since it overfits sooner."""
    recipe = tiny_imagenet()
    return recipe.replace(
        name="finetune-tiny-imagenet",
        model=ModelSpec(image_size=64, stochastic_depth=0.2),
        data=DataSpec(source=""),
        augment=dataclasses.replace(recipe.augment, erase=0.25),
        optim=dataclasses.replace(recipe.optim, layer_decay=0.8),
        epochs=150,
        eval_every=10,
        expected="",
    )


RECIPES = {"mae-vit-b16-imagenet": imagenet, "mae-tiny-imagenet": tiny, "finetune-tiny-imagenet": finetune_tiny}
