"""`Augment`: all augmentation settings, in one frozen dataclass."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from vitrail.errors import VitrailError, did_you_mean

Crop = Literal["inception", "inception-tensorflow", "same-aspect", "none"]
RandAugmentVariant = Literal["none", "torchvision", "big-vision", "timm"]
MixVariant = Literal["batch", "per-sample"]
EraseFill = Literal["mean", "noise"]
CropInterpolation = Literal["bilinear", "bicubic"]
AugmentDevice = Literal["cpu", "gpu"]


@dataclass(frozen=True, kw_only=True)
class Augment:
    """Augmentation of training images and labels. Default: the paper's, inception crop and flip."""

    crop: Crop = "inception"
    """`inception`: uniform area, as in torchvision and timm. `inception-tensorflow`: uniform height, as TensorFlow draws
    it for the paper's code. `same-aspect`: uniform area and the image's own aspect ratio; (384 / 448)² is a resize to 448×448
    and a random crop of 384×384, as for VTAB. `none`: preprocessed as in evaluation."""
    crop_area: tuple[float, float] = (0.05, 1.0)
    """Smallest and largest fraction of the image's area; torchvision and timm start at 0.08."""
    crop_aspect: tuple[float, float] = (3 / 4, 4 / 3)
    """Smallest and largest width / height."""
    interpolation: CropInterpolation = "bilinear"
    """Interpolation of crops."""
    antialias: bool = True
    """Widen the filter when downscaling. The paper's code does not."""
    flip: float = 0.5
    """Probability of a left-right flip."""
    randaugment: RandAugmentVariant = "none"
    """RandAugment, as that library has it."""
    randaugment_count: int = 2
    """Operations of RandAugment per image."""
    randaugment_magnitude: float = 10.0
    """torchvision: an integer from 0 to 30. big-vision: 10 is full strength; the recipes go up to 20. timm: from 0 to 10."""
    randaugment_probability: float | None = None
    """Probability that a drawn operation is applied. Default: 0.5 for timm, 1 for the others."""
    randaugment_deviation: float = 0.0
    """timm: standard deviation of the magnitude, which is drawn for each operation and image (`mstd`)."""
    randaugment_increasing: bool = False
    """timm: all operations become stronger as the magnitude increases (`inc1`); otherwise Posterize and Solarize become
    weaker, and the enhancing operations go from too little to too much."""
    trivialaugment: bool = False
    """TrivialAugment (wide): one operation per image, of torchvision's, with a random magnitude."""
    three_augment: bool = False
    """3-Augment of DeiT III: each image becomes grey, solarised or blurred. DeiT III adds colour jitter of 0.3."""
    brightness: float = 0.0
    """Colour jitter as in torchvision: brightness, contrast and saturation are multiplied by up to 1 ± this; 0 is off."""
    contrast: float = 0.0
    """Colour jitter: largest change of the contrast; 0 is off."""
    saturation: float = 0.0
    """Colour jitter: largest change of the saturation; 0 is off."""
    hue: float = 0.0
    """Colour jitter: largest shift of the hue, as a part of the colour circle, up to 0.5."""
    erase: float = 0.0
    """Probability of erasing a rectangle."""
    erase_area: tuple[float, float] = (0.02, 1 / 3)
    """Smallest and largest fraction of the image's area that is erased."""
    erase_aspect: tuple[float, float] = (0.3, 10 / 3)
    """Smallest and largest height / width of the rectangle."""
    erase_fill: EraseFill = "noise"
    """What fills the rectangle."""
    mixup: float = 0.0
    """Alpha of the Beta distribution; 0 is off."""
    cutmix: float = 0.0
    """Alpha of the Beta distribution; 0 is off."""
    cutmix_probability: float = 0.5
    """Probability of cutmix instead of mixup if both are on."""
    mix: MixVariant = "batch"
    """`batch`: one weight per step, at least one half, as in big_vision. `per-sample`: one weight per image."""
    mix_probability: float = 1.0
    """Probability that a step (or an image) is mixed at all."""
    mix_until: float = 1.0
    """Fraction of the run after which images are not mixed any more."""
    smoothing: float = 0.0
    """Label smoothing: this fraction of the target is spread over all classes."""
    repeats: int = 1
    """Repeated augmentation: number of differently augmented copies of an image in a batch."""
    device: AugmentDevice = "cpu"
    """Where images are cropped, flipped, and changed by RandAugment and the like: `cpu` in the loader's workers, `gpu` batched
    on the device."""

    def __post_init__(self) -> None:
        for name in ("crop_area", "crop_aspect", "erase_area", "erase_aspect"):
            low_high = _floats(getattr(self, name))
            object.__setattr__(self, name, low_high or getattr(self, name))  # JSON gives lists
            top = 1.0 if name.endswith("area") else float("inf")
            if len(low_high) != 2 or not 0 < low_high[0] <= low_high[1] <= top:
                raise VitrailError(
                    f"Augment.{name} is {getattr(self, name)}; it must be (smallest, largest) above 0"
                    f"{' and at most 1' if top == 1.0 else ''}."
                )
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise VitrailError(f"Augment.{name} is {getattr(self, name)!r}; it must be one of {', '.join(choices)}.")
        for name in ("flip", "randaugment_probability", "erase", "cutmix_probability", "mix_probability", "mix_until", "smoothing"):
            if getattr(self, name) is not None and not 0 <= getattr(self, name) <= 1:
                raise VitrailError(f"Augment.{name} is {getattr(self, name)}; it must be between 0 and 1.")
        for name in ("mixup", "cutmix", "randaugment_magnitude", "randaugment_deviation", *_JITTER):
            if not 0 <= getattr(self, name) < float("inf"):
                raise VitrailError(f"Augment.{name} is {getattr(self, name)}; it must be a finite number, 0 or more.")
        if self.hue > 0.5:
            raise VitrailError(f"Augment.hue is {self.hue}; it must be at most 0.5, half of the colour circle.")
        policies = [name for name in ("trivialaugment", "three_augment") if getattr(self, name)]
        policies += ["randaugment"] * (self.randaugment != "none")
        if len(policies) > 1:
            raise VitrailError(f"{', '.join(sorted(policies))} are on together. Choose one of them.")
        for name, least in (("repeats", 1), ("randaugment_count", 0)):
            if getattr(self, name) < least:
                raise VitrailError(f"Augment.{name} is {getattr(self, name)}; it must be at least {least}.")
        if self.interpolation == "bicubic" and not self.antialias:
            raise VitrailError("antialias is off; bicubic crops always have it. Use interpolation='bilinear', or antialias=True.")
        if self.randaugment == "torchvision" and self.randaugment_magnitude not in range(31):
            raise VitrailError(
                f"torchvision's RandAugment has integer magnitudes from 0 to 30, not {self.randaugment_magnitude:g}. "
                "The big-vision variant has any magnitude."
            )
        if self.randaugment == "timm" and self.randaugment_magnitude > 10:
            raise VitrailError(f"timm's RandAugment has magnitudes from 0 to 10, not {self.randaugment_magnitude:g}.")
        for name in ("randaugment_deviation", "randaugment_increasing"):
            if getattr(self, name) and self.randaugment != "timm":
                raise VitrailError(
                    f"Augment.{name} is {getattr(self, name)}, but only timm's RandAugment has it. Set randaugment to 'timm'."
                )

    @property
    def operation_probability(self) -> float:
        """Probability that a drawn RandAugment operation is applied: as given, or the variant's own."""
        if self.randaugment_probability is not None:
            return self.randaugment_probability
        return 0.5 if self.randaugment == "timm" else 1.0

    @property
    def jitters(self) -> bool:
        """Whether colours are jittered."""
        return any(getattr(self, name) > 0 for name in _JITTER)

    @property
    def changes_pixels(self) -> bool:
        """Whether operations are applied between the crop and normalisation."""
        return self.randaugment != "none" or self.trivialaugment or self.three_augment or self.jitters

    @property
    def mixes(self) -> bool:
        """Whether images are mixed, so that targets become class probabilities."""
        return (self.mixup > 0 or self.cutmix > 0) and self.mix_probability > 0 and self.mix_until > 0

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in dataclasses.asdict(self).items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Augment:
        """Invert `to_dict`; an unknown key is an error."""
        known = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            expected = did_you_mean(unknown[0], known) or f" The keys are {', '.join(sorted(known))}."
            raise VitrailError(f"Unknown augmentation key {unknown[0]!r}.{expected}")
        return cls(**values)


# "How to train your ViT": magnitude of RandAugment (always two operations) and alpha of mixup.
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
    """Return an augmentation level of "How to train your ViT" by name; `changes` override fields."""
    if name not in LEVELS:
        raise VitrailError(f"There is no augmentation level {name!r}.{did_you_mean(name, LEVELS)} There are {', '.join(LEVELS)}.")
    level = LEVELS[name]
    fields: dict[str, Any] = {}
    if level is not None:
        fields = {"randaugment": "big-vision", "randaugment_magnitude": level[0], "mixup": level[1]}
    return Augment(**{**fields, **changes})


def _floats(values: Any) -> tuple[float, ...]:
    """Return numbers as a tuple; an empty one if they are not a list of numbers."""
    try:
        return tuple(float(value) for value in values)
    except (TypeError, ValueError):
        return ()


_JITTER = ("brightness", "contrast", "saturation", "hue")
_CHOICES: dict[str, tuple[str, ...]] = {
    "crop": get_args(Crop),
    "interpolation": get_args(CropInterpolation),
    "randaugment": get_args(RandAugmentVariant),
    "mix": get_args(MixVariant),
    "erase_fill": get_args(EraseFill),
    "device": get_args(AugmentDevice),
}
