"""AugReg ("How to train your ViT?", Steiner et al. 2021): augmentation and regularisation by model and data.

    torchrun --nproc-per-node 8 -m vitrail train augreg-vit-s16-imagenet --data folder:IMAGENET

300 epochs at batch 4096 with a sigmoid for each class; each model has the level of RandAugment and mixup that served it best.
For ImageNet the head has the tanh layer, as in big_vision's configuration; for 21k it has none, neither there nor in the released
weights. These read the class token, as here; big_vision's configuration for 21k takes the mean over patches.
Weight decay is in big_vision's convention: 1e-4 times the schedule, 0.1 in torch's AdamW at this learning rate.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from vitrail.data.augment.spec import augment_level
from vitrail.models import ViTConfig, model_config
from vitrail.recipes.names import slug
from vitrail.train.config import DataSpec, ModelSpec, OptimSpec, Recipe, ScheduleSpec, TaskSpec

IMAGENET = {"ViT-Ti/16": "light1", "ViT-S/32": "medium1", "ViT-S/16": "medium2", "ViT-B/32": "medium2", "ViT-B/16": "medium2",
            "ViT-L/16": "medium2"}  # fmt: skip
IMAGENET21K = {"ViT-Ti/16": "none", "ViT-S/32": "none", "ViT-S/16": "light1", "ViT-B/32": "light2", "ViT-B/16": "light2",
               "ViT-L/16": "medium2"}  # fmt: skip
# ImageNet accuracy at 384 pixels after pre-training on 21k, from the study's table of released weights.
_ACCURACY = {"ViT-L/16": 85.59, "ViT-B/16": 85.49, "ViT-S/16": 83.73, "ViT-Ti/16": 78.22}


def imagenet(model: str) -> Recipe:
    config = model_config(model)
    assert isinstance(config, ViTConfig)
    return _augreg(model, "imagenet", IMAGENET[model], head_bias=-6.9, pre_logits=config.width)


def imagenet21k(model: str) -> Recipe:
    expected = f"{_ACCURACY[model]} % on ImageNet after fine-tuning at 384 pixels" if model in _ACCURACY else ""
    return _augreg(model, "imagenet21k", IMAGENET21K[model], head_bias=-10.0, expected=expected)


def _augreg(model: str, data: str, level: str, *, head_bias: float, pre_logits: int | None = None, expected: str = "") -> Recipe:
    return Recipe(
        name=f"augreg-{slug(model)}-{data}",
        model=ModelSpec(name=model, image_size=224, pre_logits=pre_logits, head_bias=head_bias),
        data=DataSpec(source="", preprocess="big-vision"),
        augment=augment_level(level, crop="inception-tensorflow", antialias=False),
        task=TaskSpec(loss="sigmoid"),
        optim=OptimSpec(name="adam", lr=1e-3, weight_decay=1e-4, decay="independent-of-lr", clip=1.0),
        schedule=ScheduleSpec(kind="cosine", warmup=10_000),
        epochs=300,
        batch=4096,
        compile=True,
        log_every=50,
        expected=expected,
    )


RECIPES: dict[str, Callable[[], Recipe]] = {
    recipe(model).name: partial(recipe, model)
    for recipe, models in ((imagenet, IMAGENET), (imagenet21k, IMAGENET21K))
    for model in models
}
