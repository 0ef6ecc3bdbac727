"""BiT, the paper's ResNet baseline, with its own recipe: SGD with momentum, learning rate and decay scaled by the batch.

    torchrun --nproc-per-node 8 -m vitrail train bit-r50x1-imagenet-sgd --data folder:IMAGENET

Learning rate .1 and weight decay 1e-4 at a batch of 256, both times 16 for 4096; the decay is times the schedule, as in
big_vision. On ImageNet-21k .03, 3e-5, and a sigmoid for each class with a head bias of −10. R50x1 on ImageNet: about 32 minutes
on 128 TPUv3 cores, say its authors.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from vitrail.recipes.paper_pretrain import CROP_AND_FLIP
from vitrail.train.config import DataSpec, ModelSpec, OptimSpec, Recipe, ScheduleSpec, TaskSpec

_BATCH = 4096


def bit(model: str, data: str) -> Recipe:
    lr, decay, warmup = (0.1, 1e-4, 1000) if data == "imagenet" else (0.03, 3e-5, 5000)
    return Recipe(
        name=f"{model.lower()}-{data}-sgd",
        model=ModelSpec(name=model, image_size=224, head_bias=None if data == "imagenet" else -10.0),
        data=DataSpec(source="", preprocess="big-vision"),
        augment=CROP_AND_FLIP,
        task=TaskSpec(loss="softmax" if data == "imagenet" else "sigmoid"),
        optim=OptimSpec(
            name="sgd", lr=lr * _BATCH / 256, momentum=0.9, weight_decay=decay * _BATCH / 256, decay="independent-of-lr", clip=1.0
        ),
        schedule=ScheduleSpec(kind="cosine", warmup=warmup),
        epochs=90,
        batch=_BATCH,
        compile=True,
        log_every=50,
    )


RECIPES: dict[str, Callable[[], Recipe]] = {
    bit(model, data).name: partial(bit, model, data)
    for data in ("imagenet", "imagenet21k")
    for model in ("BiT-R50x1", "BiT-R101x1", "BiT-R152x2")
}
