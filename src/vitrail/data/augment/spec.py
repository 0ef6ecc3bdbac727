"""`Augment`: everything that is done to a training image by chance, as one frozen value."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from vitrail.errors import VitrailError, nearest

Crop = Literal["inception", "inception-reference", "none"]
RandAugmentVariant = Literal["none", "torchvision", "big-vision"]
MixVariant = Literal["reference", "per-sample"]
EraseFill = Literal["mean", "noise"]
CropInterpolation = Literal["bilinear", "bicubic"]
Place = Literal["cpu", "gpu"]


@dataclass(frozen=True, kw_only=True)
class Augment:
    """What training does to images and labels; the defaults are the paper's: inception crop and flip."""

    crop: Crop = "inception"
    """`inception` draws the area evenly (torchvision, timm); `inception-reference` draws as TensorFlow does for the
    paper's code; `none` treats training images as evaluation would."""
    crop_area: tuple[float, float] = (0.05, 1.0)
    """Smallest and largest share of the image's area; torchvision and timm start at 0.08."""
    crop_aspect: tuple[float, float] = (3 / 4, 4 / 3)
    """Smallest and largest width / height."""
    interpolation: CropInterpolation = "bilinear"
    antialias: bool = True
    """Widen the filter where the crop shrinks. The reference does not."""
    flip: float = 0.5
    """Probability of a left-right flip."""
    randaugment: RandAugmentVariant = "none"
    randaugment_count: int = 2
    randaugment_magnitude: float = 10.0
    """torchvision: a whole number 0 to 30. big-vision: 10 is full strength, and the recipes go to 20."""
    erase: float = 0.0
    """Probability of erasing a rectangle."""
    erase_area: tuple[float, float] = (0.02, 1 / 3)
    erase_aspect: tuple[float, float] = (0.3, 10 / 3)
    erase_fill: EraseFill = "noise"
    mixup: float = 0.0
    """Alpha of the Beta distribution; 0 is off."""
    cutmix: float = 0.0
    """Alpha of the Beta distribution; 0 is off. With mixup on as well, `cutmix_share` decides between them."""
    cutmix_share: float = 0.5
    mix: MixVariant = "reference"
    """`reference`: one weight a step, at least one half. `per-sample`: a weight for every image."""
    mix_probability: float = 1.0
    smoothing: float = 0.0
    """Label smoothing: this much of the target is spread over all classes."""
    repeats: int = 1
    """Repeated augmentation: how often an image appears, differently augmented, in one batch."""
    device: Place = "cpu"
    """Where images are changed: `cpu` in the loader's workers, `gpu` batch by batch on the device."""

    def __post_init__(self) -> None:
        for name in ("crop_area", "crop_aspect", "erase_area", "erase_aspect"):
            low_high = tuple(float(value) for value in getattr(self, name))
            object.__setattr__(self, name, low_high)  # lists come from JSON
            top = 1.0 if name.endswith("area") else float("inf")
            if len(low_high) != 2 or not 0 < low_high[0] <= low_high[1] <= top:
                raise VitrailError(
                    f"Augment.{name} is {getattr(self, name)}; it must be (smallest, largest) above 0"
                    f"{' and at most 1' if top == 1.0 else ''}."
                )
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise VitrailError(f"Augment.{name} is {getattr(self, name)!r}; it must be one of {', '.join(choices)}.")
        for name in ("flip", "erase", "cutmix_share", "mix_probability", "smoothing"):
            if not 0 <= getattr(self, name) <= 1:
                raise VitrailError(f"Augment.{name} is {getattr(self, name)}; it must lie between 0 and 1.")
        for name in ("mixup", "cutmix", "randaugment_magnitude"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise VitrailError(f"Augment.{name} is {getattr(self, name)}; it must be 0 or more.")
        for name, least in (("repeats", 1), ("randaugment_count", 0)):
            if getattr(self, name) < least:
                raise VitrailError(f"Augment.{name} is {getattr(self, name)}; it must be at least {least}.")
        if self.interpolation == "bicubic" and not self.antialias:
            raise VitrailError("Bicubic crops are always antialiased; use interpolation='bilinear' without antialias.")
        if self.randaugment == "torchvision" and self.randaugment_magnitude not in range(31):
            raise VitrailError(
                f"torchvision's RandAugment has magnitudes 0 to 30 in whole steps, not {self.randaugment_magnitude:g}. "
                "The big-vision variant takes any."
            )

    @property
    def mixes(self) -> bool:
        """Whether images are mixed with others, so that targets become shares of classes."""
        return (self.mixup > 0 or self.cutmix > 0) and self.mix_probability > 0

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in dataclasses.asdict(self).items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Augment:
        """The inverse of `to_dict`; a key it does not know is refused."""
        known = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise VitrailError(f"Unknown augmentation key {unknown[0]!r}.{nearest(unknown[0], known)}")
        return cls(**values)


# "How to train your ViT": RandAugment's magnitude (always two operations) and mixup's alpha.
LEVELS: dict[str, tuple[float, float] | None] = {
    "none": None,
    "light1": (0.0, 0.0),
    "light2": (10.0, 0.2),
    "medium1": (15.0, 0.2),
    "medium2": (15.0, 0.5),
    "strong1": (20.0, 0.5),
    "strong2": (20.0, 0.8),
}


def augment_level(name: str, **changes: Any) -> Augment:
    """One of the augmentation levels of the AugReg study, by its name; `changes` override fields."""
    if name not in LEVELS:
        raise VitrailError(f"There is no augmentation level {name!r}.{nearest(name, LEVELS)} There are {', '.join(LEVELS)}.")
    level = LEVELS[name]
    fields: dict[str, Any] = {}
    if level is not None:
        fields = {"randaugment": "big-vision", "randaugment_magnitude": level[0], "mixup": level[1]}
    return Augment(**{**fields, **changes})


_CHOICES: dict[str, tuple[str, ...]] = {
    "crop": get_args(Crop),
    "interpolation": get_args(CropInterpolation),
    "randaugment": get_args(RandAugmentVariant),
    "mix": get_args(MixVariant),
    "erase_fill": get_args(EraseFill),
    "device": get_args(Place),
}
