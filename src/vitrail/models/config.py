"""Everything that decides the function a model computes, as frozen fields.

Published weights of the same architecture differ in their numerics: which GELU, which epsilon, which padding. None of these is
chosen silently; each is a field here, with the paper's own code as the default.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self, TypeVar, get_args, get_origin, get_type_hints

from vitrail.errors import VitrailError, did_you_mean

T = TypeVar("T")
Pair = tuple[int, int]
PositionRule = Literal["reference", "timm", "hf", "torchvision"]
Init = Literal["paper", "small"]


class _Fields:
    """Checks and JSON round trip shared by the configurations below."""

    def _check(self) -> None:
        for name, hint in get_type_hints(type(self)).items():
            if get_origin(hint) is Literal and getattr(self, name) not in get_args(hint):
                choices = ", ".join(map(repr, get_args(hint)))
                raise VitrailError(f"{name} is {getattr(self, name)!r}; it can be {choices}.")

    def _whole(self, least: int, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            for number in value if isinstance(value, tuple) else (value,):
                if not isinstance(number, int) or isinstance(number, bool) or number < least:
                    raise VitrailError(f"{name} is {value!r}; it takes whole numbers of at least {least}.")

    def _fractions(self, *names: str) -> None:
        for name in names:
            if not isinstance(getattr(self, name), int | float) or not 0.0 <= getattr(self, name) < 1.0:
                raise VitrailError(f"{name} is {getattr(self, name)!r}; choose a number from 0 up to, but not including, 1.")


@dataclass(frozen=True, kw_only=True)
class ResNetConfig(_Fields):
    """The convolutional part of a hybrid, or a whole BiT. The defaults are the hybrids' (post-activation, TF padding)."""

    layers: tuple[int, ...]  # blocks per stage; () is the stem alone
    multiplier: float = 1  # width factor: the x3 of R50x3; 0.5: the first convolution has 32 filters
    groups: int = 32
    group_norm_eps: float = 1e-6
    standardise: Literal["std+eps", "sqrt(var+eps)"] = "std+eps"
    standardise_eps: float = 1e-5
    padding: Literal["same", "symmetric"] = "same"  # "same" is TensorFlow's: more at the bottom right for an even remainder
    pool_fill: Literal["-inf", "zero"] = "-inf"  # what surrounds the map in the stem's max-pool

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers) if isinstance(self.layers, (tuple, list)) else (self.layers,))
        self._check()
        self._whole(1, "layers", "groups")
        number = isinstance(self.multiplier, (int, float)) and not isinstance(self.multiplier, bool)
        if not number or not 0 < self.multiplier < 1e6 or 64 * self.multiplier % self.groups:
            choices = f"64 · multiplier must be a multiple of {self.groups}, as with 0.5, 1 or 3"
            raise VitrailError(f"multiplier is {self.multiplier!r}; {choices}.")

    @property
    def width(self) -> int:
        """Filters of the first convolution."""
        return int(64 * self.multiplier)

    @property
    def stride(self) -> int:
        """Pixels a position of the final map stands for, along each axis: root and pool halve, and each later stage."""
        return 4 << max(len(self.layers) - 1, 0)

    @property
    def out_channels(self) -> int:
        return self.width * (4 << (len(self.layers) - 1) if self.layers else 1)


@dataclass(frozen=True, kw_only=True)
class ModelConfig(_Fields):
    """What every model has: a name, a number of outputs (0: no head), an input size (height, width) and channels."""

    name: str
    outputs: int = 1000
    image_size: Pair = (224, 224)
    channels: int = 3
    head_bias: float = 0.0  # initial value: −10 and −6.9 are used with sigmoid losses

    def __post_init__(self) -> None:
        object.__setattr__(self, "image_size", _pair(self.image_size, "image_size"))
        resnet = getattr(self, "resnet", None)
        if isinstance(resnet, Mapping):
            object.__setattr__(self, "resnet", _build(ResNetConfig, resnet))
        self._check()
        self._whole(0, "outputs")
        self._whole(1, "image_size", "channels")

    def replace(self, **changes: Any) -> Self:
        """Return a copy with some fields changed; fields of the ResNet part may be given directly."""
        resnet = getattr(self, "resnet", None)
        inner = {key: changes.pop(key) for key in list(changes) if key in _names(ResNetConfig) and key not in _names(type(self))}
        _refuse_unknown(changes, type(self), extra=_names(ResNetConfig) if resnet else ())
        if inner and resnet is None:
            raise VitrailError(f"{self.name} has no ResNet part, so {', '.join(inner)} cannot be set; hybrids and BiT have one.")
        if inner:
            changes["resnet"] = dataclasses.replace(resnet, **inner)  # type: ignore[type-var]
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, with the family named."""
        return {"family": FAMILIES[type(self)], **dataclasses.asdict(self)}

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> ModelConfig:
        """Invert `to_dict`. Unknown or missing fields are errors."""
        fields = dict(values)
        family = fields.pop("family", None)
        kind = next((kind for kind, name in FAMILIES.items() if name == family), None)
        if kind is None:
            raise VitrailError(f"The model family is {family!r}; known are {', '.join(FAMILIES.values())}.")
        return _build(kind, fields)


@dataclass(frozen=True, kw_only=True)
class ViTConfig(ModelConfig):
    """A Vision Transformer, or with `resnet` a hybrid whose patches come from that network's feature map."""

    width: int
    depth: int
    heads: int
    mlp: int
    patch: Pair  # on the image, or on the feature map of a hybrid
    resnet: ResNetConfig | None = None

    gelu: Literal["tanh", "erf"] = "tanh"
    norm_eps: float = 1e-6
    qkv_bias: bool = True
    qk_norm: bool = False  # a layer norm on each head's queries and keys, before the scores (ViT-22B)
    layer_scale: float | None = None  # initial value of the per-channel factors; None: no factors
    attention: Literal["full", "axial"] = "full"  # axial: each layer becomes a row block and a column block (App. D.6)

    class_token: bool = True
    distill_token: bool = False  # comes second, with a head of its own; the two heads' logits are averaged
    registers: int = 0  # come after the class and distillation tokens
    position: Literal["learned", "learned-2d", "relative", "sincos2d", "none"] = "learned"
    position_at: Literal["input", "every-layer", "shared"] = "input"
    position_prefix: bool = True  # whether the position table covers the prefix tokens
    position_resize: PositionRule = "reference"
    any_size: bool = False  # accept images of other sizes; positions are resampled for each, and the table stays as it is
    position_std: float | None = 0.02  # of the initial table; None: 1/√width, as big_vision

    pooling: Literal["class", "mean", "map"] = "class"
    final_norm: Literal["before-pool", "after-pool"] = "before-pool"
    pre_logits: int | None = None  # width of the tanh layer before the head
    init: Init = "paper"  # paper: Xavier, zero-initialised head. small: truncated normal of std .02, as timm and DeiT

    dropout: float = 0.0
    attention_dropout: float = 0.0
    stochastic_depth: float = 0.0  # rate of the last layer; it grows linearly from 0

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "patch", _pair(self.patch, "patch"))
        self._whole(1, "width", "depth", "heads", "mlp", "patch")
        self._whole(0, "registers")
        self._fractions("dropout", "attention_dropout", "stochastic_depth")
        if self.pre_logits is not None:
            self._whole(1, "pre_logits")
        self._check_widths()
        self._check_tokens()
        check_image_size(self.image_size, self.stride)

    def _check_widths(self) -> None:
        if self.width % self.heads:
            raise VitrailError(f"Width {self.width} is not a multiple of {self.heads} heads. Change one of them.")
        for kind, factor in (("learned-2d", 2), ("sincos2d", 4)):
            if self.position == kind and self.width % factor:
                raise VitrailError(f"{kind} positions need a width that is a multiple of {factor}; it is {self.width}.")
        if self.position == "sincos2d" and self.width < 8:
            raise VitrailError(f"sincos2d positions need a width of at least 8; it is {self.width}.")

    def _check_tokens(self) -> None:
        if self.pooling == "class" and not self.class_token:
            raise VitrailError("pooling='class' needs class_token=True; without one choose pooling='mean' or 'map'.")
        if self.distill_token and self.pooling != "class":
            raise VitrailError("distill_token=True needs pooling='class': the two tokens have one head each.")
        if self.distill_token and self.pre_logits is not None:
            raise VitrailError("distill_token=True and pre_logits cannot be combined (distilled models have none): leave one out.")
        if self.position == "relative" and self.position_at == "input":
            raise VitrailError("Relative positions act inside the layers: choose position_at='every-layer' or 'shared'.")
        if self.position_prefix and self.position not in ("learned", "learned-2d"):
            raise VitrailError(
                f"position_prefix=True needs a learned table; {self.position!r} positions have none: set it to False."
            )

    @property
    def stride(self) -> Pair:
        """Pixels of the input that a token stands for, (vertical, horizontal)."""
        factor = self.resnet.stride if self.resnet else 1
        return self.patch[0] * factor, self.patch[1] * factor

    @property
    def grid(self) -> Pair:
        return self.image_size[0] // self.stride[0], self.image_size[1] // self.stride[1]

    @property
    def prefix(self) -> int:
        """Tokens before the patches: class, distillation, registers."""
        return int(self.class_token) + int(self.distill_token) + self.registers

    @property
    def tokens(self) -> int:
        return self.prefix + self.grid[0] * self.grid[1]

    @property
    def blocks(self) -> int:
        """Encoder blocks: the depth, or twice that with axial attention."""
        return self.depth * (2 if self.attention == "axial" else 1)

    @property
    def patch_channels(self) -> int:
        return self.resnet.out_channels if self.resnet else self.channels


@dataclass(frozen=True, kw_only=True)
class BiTConfig(ModelConfig):
    """The paper's ResNet baseline: pre-activation, GroupNorm, standardised convolutions."""

    resnet: ResNetConfig

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.resnet.layers:
            raise VitrailError("A BiT needs at least one stage: layers=(3, 4, 6, 3) is the R50.")
        if min(self.image_size) < self.resnet.stride:
            raise VitrailError(
                f"Image {_size(self.image_size)} is smaller than the network's stride of {self.resnet.stride} pixels; "
                f"use image_size={self.resnet.stride} or more."
            )

    @property
    def grid(self) -> Pair:
        """Positions of the final map; each halving rounds up, with either padding."""
        stride = self.resnet.stride
        return -(-self.image_size[0] // stride), -(-self.image_size[1] // stride)


FAMILIES: dict[type[ModelConfig], str] = {ViTConfig: "vit", BiTConfig: "bit"}


def check_image_size(size: Pair, stride: Pair) -> None:
    """Refuse a size that does not divide into tokens, naming the nearest ones that do."""
    if size[0] % stride[0] == 0 and size[1] % stride[1] == 0:
        return
    below = tuple(max(n // s, 1) * s for n, s in zip(size, stride, strict=True))
    above = tuple(-(-n // s) * s for n, s in zip(size, stride, strict=True))
    choices = dict.fromkeys((_size(below), _size(above)))
    patch = stride[0] if stride[0] == stride[1] else _size(stride)
    raise VitrailError(
        f"Image {_size(size)} is not a multiple of patch {patch}. Nearest: {', '.join(choices)}. "
        f"Resize or pad the images to one of these, or change the patch."
    )


def _size(size: tuple[int, ...]) -> str:
    return f"{size[0]}×{size[1]}"


def _pair(value: Any, name: str) -> Pair:
    if isinstance(value, int):
        return value, value
    pair = tuple(value) if isinstance(value, (tuple, list)) else ()
    if len(pair) != 2 or not all(isinstance(number, int) for number in pair):
        raise VitrailError(f"{name} is {value!r}; it takes a whole number, or a pair (height, width).")
    return pair[0], pair[1]


def _names(kind: type[Any]) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))


def _refuse_unknown(values: Mapping[str, Any], kind: type[Any], extra: tuple[str, ...] = ()) -> None:
    known = (*_names(kind), *extra)
    for key in values:
        if key not in known:
            raise VitrailError(f"{kind.__name__} has no field {key!r}.{did_you_mean(key, known)} Its fields: {', '.join(known)}.")


def _build(kind: type[T], values: Mapping[str, Any]) -> T:
    _refuse_unknown(values, kind)
    required = (f.name for f in dataclasses.fields(kind) if f.default is dataclasses.MISSING)  # type: ignore[arg-type]
    missing = [name for name in required if name not in values]
    if missing:
        raise VitrailError(f"{kind.__name__} needs {', '.join(missing)}. Give a value for each.")
    try:
        return kind(**values)
    except (TypeError, AttributeError) as error:
        raise VitrailError(f"{kind.__name__} cannot be built from these values: {error}.") from error
