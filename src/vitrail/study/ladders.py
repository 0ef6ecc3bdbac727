"""The models of a study, from small to large, and the recipes they are trained with, for images of any size.

Three ladders: `tiny` for images of up to 16 pixels on a CPU, `small` for up to 128 pixels on one GPU, `paper` with the paper's own
models. A point of a study takes a rung of a family; all families are trained with the same settings, as in the paper (§4.3).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from vitrail.data.augment.spec import Augment
from vitrail.errors import VitrailError
from vitrail.models import ViTConfig, model_config
from vitrail.study.definition import Changes
from vitrail.study.settings import LadderName
from vitrail.train.config import DataSpec, ModelSpec, OptimSpec, Recipe, ScheduleSpec

if TYPE_CHECKING:
    from vitrail.data.types import Split


Family = Literal["ViT", "hybrid", "BiT"]
FAMILIES: tuple[Family, ...] = ("ViT", "hybrid", "BiT")
RUNGS = 3

_STAGES = {4: 1, 8: 2, 16: 3, 32: 4}
"""ResNet stages by stride."""


@dataclass(frozen=True, kw_only=True)
class Ladder:
    """Models and training settings for one size of images."""

    name: LadderName
    image_size: int
    channels: int
    flip: float
    device: str
    epochs: float
    """Passes over the pre-training set, when no budget is given."""
    finetune_epochs: float

    @property
    def patch(self) -> int:
        """The patch of the ViTs: a 4×4 grid for tiny images, 8×8 for small ones, the paper's 16 and 32 otherwise."""
        if self.name == "paper":
            return 16
        return _power_below(self.image_size / {"tiny": 4, "small": 8}[self.name])

    @property
    def stride(self) -> int:
        """The largest patch or stride of its models: image sizes must be multiples of it."""
        return max(self.patch, 32 if self.name == "paper" else 4)

    def model(self, family: Family = "ViT", rung: int = 1) -> dict[str, Any]:
        """Return the settings of a family's model, `rung` from 0 (the smallest); 1 is the study's usual size."""
        fields = {"ViT": self._vit, "hybrid": self._hybrid, "BiT": self._bit}[family](rung)
        if family != "BiT" and self.name != "paper":
            fields["model.init"] = "small"  # the paper's initial values need its long warm-up
        return {**fields, "model.image_size": self.image_size, "model.channels": self.channels}

    def _vit(self, rung: int) -> dict[str, Any]:
        if self.name == "paper":
            return {"model.name": ("ViT-B/32", "ViT-B/16", "ViT-L/16")[rung]}
        return {"model.name": f"ViT-{self._letters(rung)}/{self.patch}", **self._encoder(rung)}

    def _hybrid(self, rung: int) -> dict[str, Any]:
        if self.name == "paper":
            return {"model.name": ("R50+ViT-B/32", "R50+ViT-B/16", "R50+ViT-L/16")[rung]}
        stages = _STAGES[max(self.patch, 4)]
        layers = (1 if self.name == "tiny" else 2,) * stages
        name = {"Ti": "R+ViT-Ti/16", "S": "R26+ViT-S/32"}[self._letters(rung)]
        return {"model.name": name, "model.layers": layers, "model.patch": 1, **self._encoder(rung)}

    def _letters(self, rung: int) -> str:
        return "S" if self.name == "small" and rung == 2 else "Ti"

    def _encoder(self, rung: int) -> dict[str, Any]:
        width, depth, heads, mlp = {
            "tiny": ((32, 3, 1, 64), (64, 4, 2, 128), (96, 6, 3, 192)),
            "small": ((96, 8, 3, 384), (192, 12, 3, 768), (384, 12, 6, 1536)),
        }[self.name][rung]
        return {"model.width": width, "model.depth": depth, "model.heads": heads, "model.mlp": mlp}

    def _bit(self, rung: int) -> dict[str, Any]:
        if self.name == "paper":
            return {"model.name": ("BiT-R50x1", "BiT-R101x1", "BiT-R152x2")[rung]}
        if self.name == "tiny":
            return {"model.name": "BiT-R26x1", "model.layers": ((1,), (1, 1), (2, 2))[rung]}
        if self.image_size < 32:
            return {"model.name": "BiT-R26x1", "model.layers": ((1, 1), (2, 2), (2, 2, 2))[rung]}
        return {"model.name": ("BiT-R26x1", "BiT-R50x1", "BiT-R50x2")[rung]}

    def shape(self) -> dict[str, int]:
        """Return width, depth, heads, MLP and patch of the usual ViT."""
        config = model_config(self.model()["model.name"], image_size=self.image_size, **self.fields())
        assert isinstance(config, ViTConfig)
        return {"width": config.width, "depth": config.depth, "heads": config.heads, "mlp": config.mlp, "patch": config.patch[0]}

    def fields(self, family: Family = "ViT", rung: int = 1) -> dict[str, Any]:
        """Return what differs from the named model, as `create_model` takes it."""
        named = {"model.name", "model.image_size"}
        return {name.removeprefix("model."): value for name, value in self.model(family, rung).items() if name not in named}

    def pretrain(self) -> Recipe:
        """Return the pre-training recipe; the study sets model, data and length."""
        return Recipe(
            name="pretrain",
            model=ModelSpec(),
            augment=self._augment(),
            optim=OptimSpec(name="adamw", **_PRETRAIN[self.name]),
            schedule=ScheduleSpec(kind="cosine", warmup="10%"),
            batch=self.batch,
            **self._common(),
        )

    def finetune(self) -> Recipe:
        """Return the fine-tuning recipe. The paper's is SGD; the other ladders use AdamW, with which a few epochs achieve more."""
        paper = self.name == "paper"
        return Recipe(
            name="finetune",
            model=ModelSpec(pre_logits=0),
            augment=self._augment(),
            optim=OptimSpec(name="sgd", lr=0.01) if paper else OptimSpec(name="adamw", **_FINETUNE[self.name]),
            schedule=ScheduleSpec(kind="cosine", warmup="10%"),
            batch=min(self.batch, 512),
            **self._common(),
        )

    @property
    def batch(self) -> int:
        return {"tiny": 64, "small": 512, "paper": 1024}[self.name]

    @property
    def crop(self) -> tuple[float, float]:
        return {"tiny": (0.8, 1.0), "small": (0.25, 1.0), "paper": (0.05, 1.0)}[self.name]

    def _augment(self) -> Augment:
        aspect = (0.9, 1.1) if self.name == "tiny" else (3 / 4, 4 / 3)
        return Augment(crop_area=self.crop, crop_aspect=aspect, flip=self.flip, device="gpu" if self.device == "cuda" else "cpu")

    def _common(self) -> dict[str, Any]:
        return {
            "data": DataSpec(workers=0 if self.name == "tiny" else None),
            "threads": 1 if self.name == "tiny" and self.device == "cpu" else None,
            "eval_every": 0.0,
            "keep": 1,
        }


_PRETRAIN: Mapping[str, Any] = {
    "tiny": {"lr": 2e-3, "weight_decay": 0.05},
    "small": {"lr": 5e-4, "weight_decay": 0.05},
    "paper": {"lr": 8e-4, "weight_decay": 0.1},
}
_FINETUNE: Mapping[str, Any] = {"tiny": {"lr": 1e-3, "weight_decay": 0.05}, "small": {"lr": 3e-4, "weight_decay": 0.05}}
_EPOCHS = {"tiny": (60.0, 20.0), "small": (40.0, 10.0), "paper": (90.0, 8.0)}


def ladder_for(
    split: Split,
    *,
    source: str,
    image_size: int | None = None,
    channels: int | None = None,
    name: LadderName | None = None,
    device: str = "cpu",
    epochs: float | None = None,
    finetune_epochs: float | None = None,
) -> Ladder:
    """Choose a ladder by the size of the images, which is that of the first one unless it is given."""
    height, width, found_channels = _shape(split)
    if image_size is None:
        image_size = _usual_size(min(height, width))
    name = name or ("tiny" if image_size <= 16 else "small" if image_size <= 128 else "paper")
    ladder = Ladder(
        name=name,
        image_size=image_size,
        channels=channels or found_channels,
        flip=0.0 if source.startswith("digits") else 0.5,
        device=device,
        epochs=epochs or _EPOCHS[name][0],
        finetune_epochs=finetune_epochs or _EPOCHS[name][1],
    )
    stride = ladder.stride
    if image_size % stride:
        nearest = dict.fromkeys((max(image_size // stride, 1) * stride, -(-image_size // stride) * stride))
        raise VitrailError(
            f"--image-size {image_size} is not a multiple of {stride}, the largest patch of the {name} models. "
            f"Use {' or '.join(map(str, nearest))}."
        )
    return ladder


def _shape(split: Split) -> tuple[int, int, int]:
    payload = split.payload(0)
    if isinstance(payload, bytes):
        from vitrail.data.decode import image_header

        header = image_header(payload, name=split.image_name(0))
        return header.height, header.width, 3
    return payload.shape[0], payload.shape[1], payload.shape[2]


def _usual_size(side: int) -> int:
    """Return the size to train at: tiny images doubled to 16, up to 128 pixels as they are, rounded, and 224 beyond."""
    if side <= 16:
        return 16
    return 224 if side > 128 else max(32, round(side / 16) * 16)


def _power_below(value: float) -> int:
    power = 1
    while 2 * power <= value:
        power *= 2
    return power


def with_model(changes: Changes, **more: Any) -> dict[str, Any]:
    """Return model settings with some fields changed: `with_model(ladder.model(), depth=8)`."""
    return {**changes, **{f"model.{name}": value for name, value in more.items()}}
