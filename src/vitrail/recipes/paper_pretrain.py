"""The paper's pre-training, Table 3: every model on ImageNet, ImageNet-21k or JFT-300M.

    torchrun --nproc-per-node 8 -m vitrail train vit-b16-imagenet --data folder:IMAGENET

Adam with β .9 and .999, batch 4096, 224 pixels, warm-up of 10,000 steps, then linear decay (cosine on ImageNet). ImageNet-21k
and JFT are trained with a sigmoid for each class and a head bias of −10, as the authors report for 21k. Weight decay is in the
paper's convention, times the learning rate. The head has the tanh layer of pre-training; fine-tuning leaves it out.

Times, from Table 2: L/16 on ImageNet-21k 230 TPUv3-core-days, L/16 on JFT 680, H/14 on JFT 2,500. JFT is not public.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from vitrail.data.augment.spec import Augment
from vitrail.models import ViTConfig, model_config
from vitrail.recipes.names import slug
from vitrail.train.config import DataSpec, ModelSpec, OptimSpec, Recipe, ScheduleSpec, TaskSpec

CROP_AND_FLIP = Augment(crop="inception-tensorflow", antialias=False)

# Model: epochs, peak learning rate.
JFT: dict[str, tuple[int, float]] = {
    "ViT-B/32": (7, 8e-4),
    "ViT-B/16": (7, 8e-4),
    "ViT-L/32": (7, 6e-4),
    "ViT-L/16": (14, 4e-4),
    "ViT-H/14": (14, 3e-4),
    "BiT-R50x1": (7, 1e-3),
    "BiT-R50x2": (7, 1e-3),
    "BiT-R101x1": (7, 8e-4),
    "BiT-R152x1": (7, 6e-4),
    "BiT-R152x2": (7, 6e-4),
    "R50+ViT-B/32": (7, 8e-4),
    "R50+ViT-B/16": (7, 8e-4),
    "R50+ViT-L/32": (7, 2e-4),
    "R50+ViT-L/16": (14, 4e-4),
}
IMAGENET21K = ("ViT-B/32", "ViT-B/16", "ViT-L/32", "ViT-L/16")
IMAGENET = ("ViT-B/32", "ViT-B/16", "ViT-L/32", "ViT-L/16")
# Accuracy after fine-tuning at 384 pixels, Table 5, for those trained on ImageNet alone.
_IMAGENET_ACCURACY = {"ViT-B/32": 73.38, "ViT-B/16": 77.91, "ViT-L/32": 71.16, "ViT-L/16": 76.53}


def jft(model: str) -> Recipe:
    epochs, lr = JFT[model]
    return _pretraining(model, "jft", epochs=epochs, lr=lr, decay=0.1, dropout=0.0, schedule="linear", clip=None, sigmoid=True)


def imagenet21k(model: str) -> Recipe:
    return _pretraining(
        model, "imagenet21k", epochs=90, lr=1e-3, decay=0.03, dropout=0.1, schedule="linear", clip=None, sigmoid=True, end=1e-5
    )


def imagenet(model: str) -> Recipe:
    expected = f"{_IMAGENET_ACCURACY[model]} % on ImageNet after fine-tuning at 384 pixels (Table 5)"
    return _pretraining(
        model,
        "imagenet",
        epochs=300,
        lr=3e-3,
        decay=0.3,
        dropout=0.1,
        schedule="cosine",
        clip=1.0,
        sigmoid=False,
        expected=expected,
    )


def _pretraining(
    model: str,
    data: str,
    *,
    epochs: int,
    lr: float,
    decay: float,
    dropout: float,
    schedule: str,
    clip: float | None,
    sigmoid: bool,
    end: float = 0.0,
    expected: str = "",
) -> Recipe:
    config = model_config(model)
    is_vit = isinstance(config, ViTConfig)
    return Recipe(
        name=f"{slug(model)}-{data}",
        model=ModelSpec(
            name=model,
            image_size=224,
            pre_logits=config.width if isinstance(config, ViTConfig) else None,
            head_bias=-10.0 if sigmoid else None,
            dropout=dropout if is_vit else None,
        ),
        data=DataSpec(source=""),
        augment=CROP_AND_FLIP,
        task=TaskSpec(loss="sigmoid" if sigmoid else "softmax"),
        optim=OptimSpec(name="adam", lr=lr, weight_decay=decay, decay="scaled-by-lr", clip=clip),
        schedule=ScheduleSpec(kind=schedule, warmup=10_000, end=end),  # type: ignore[arg-type]
        epochs=epochs,
        batch=4096,
        compile=True,
        log_every=50,
        expected=expected,
    )


RECIPES: dict[str, Callable[[], Recipe]] = {
    recipe(model).name: partial(recipe, model)
    for recipe, models in ((imagenet, IMAGENET), (imagenet21k, IMAGENET21K), (jft, tuple(JFT)))
    for model in models
}
