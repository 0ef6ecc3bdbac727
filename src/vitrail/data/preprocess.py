"""`Preprocess`: everything that happens to an image between its file and the model, in one frozen dataclass.

It is stored in the checkpoint and used by every command that reads images. Everything in which published weights differ
is a field, because a wrong choice costs accuracy and raises no error.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
from PIL import Image

from vitrail.data.resize import Interpolation, Rounding, resize
from vitrail.data.types import Array, BadImage
from vitrail.errors import VitrailError, counted, did_you_mean
from vitrail.regular_files import read_bytes

if TYPE_CHECKING:  # a process that only decodes images need not import torch
    import torch

Resize = Literal["square", "short-side", "none", "keep-aspect"]
Geometry = Literal["torchvision", "tensorflow"]


@dataclass(frozen=True, kw_only=True)
class Preprocess:
    """How an image becomes the input of the model: decode, resize, crop, normalise."""

    size: tuple[int, int] = (224, 224)
    """(height, width) of the model's input."""
    resize: Resize = "square"
    """`square` stretches to `size`; `short-side` keeps the aspect ratio, then crops the centre; `none` only crops; `keep-aspect`
    (see `keep_aspect`) keeps the aspect ratio and the whole image, so that images differ in size."""
    resize_to: int | None = None
    """With `short-side`: the length of the short side before the centre crop. With `square`, if set: the image is stretched to this
    short side, and the centre is cropped. With `keep-aspect`: the short side in the model's input."""
    max_size: int | None = None
    """With `keep-aspect`: the longest the long side may be; where it would be longer, the whole image is smaller."""
    multiple: tuple[int, int] | None = None
    """With `keep-aspect`: height and width are rounded to the nearest multiples of these."""
    interpolation: Interpolation = "bilinear"
    antialias: bool = True
    """Whether the filter is widened when downscaling, as in Pillow; by default TensorFlow does not."""
    rounding: Rounding = "nearest"
    """How resized pixel values become integers: `nearest` as in Pillow, `truncate` as in a TensorFlow cast, or `none`."""
    geometry: Geometry = "torchvision"
    """How the long side and the crop offset become integers. `torchvision` truncates the side and rounds the offset;
    `tensorflow` rounds the side and truncates the offset."""
    pad: bool = False
    """Pad with the mean colour instead of stretching (`square`) or refusing a small image (`none`)."""
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    """Per channel, for pixel values from 0 to 1."""
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    channels: int = 3
    bits: int = 8
    exif: bool = True
    """Apply the EXIF orientation. Training does; the presets do what their libraries do, and most ignore it."""
    name: str = "custom"
    """The preset it came from."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", _numbers_of(self.size, int, "Preprocess.size", "(height, width)"))  # JSON gives lists
        for field in ("mean", "std"):
            value = _numbers_of(getattr(self, field), float, f"Preprocess.{field}", "one number per channel")
            object.__setattr__(self, field, value)
        for field, choices in _CHOICES.items():
            if getattr(self, field) not in choices:
                allowed = ", ".join(map(str, choices))
                raise VitrailError(f"Preprocess.{field} is {getattr(self, field)!r}; it must be one of {allowed}.")
        if len(self.size) != 2 or min(self.size) < 1:
            raise VitrailError(f"Preprocess.size is {self.size}; it must be (height, width), both at least 1.")
        needs = self.resize in ("short-side", "keep-aspect")
        if (self.resize_to is None and needs) or (self.resize_to is not None and not needs and self.resize != "square"):
            advice = "Give the length of the short side" if needs else "Leave it out, or use resize='short-side'"
            raise VitrailError(f"resize is {self.resize!r} and resize_to is {self.resize_to}. {advice}.")
        if self.resize != "keep-aspect" and self.resize_to is not None and self.resize_to < min(self.size):
            least = min(self.size)
            raise VitrailError(f"resize_to={self.resize_to} is smaller than the {_times(self.size)} crop. Use {least} or more.")
        if self.pad and self.resize_to is not None:
            raise VitrailError(
                f"pad has no effect with resize={self.resize!r} and resize_to. Use resize='square' without resize_to, or 'none'."
            )
        self._check_keep_aspect()
        for field in ("mean", "std"):
            if len(getattr(self, field)) != self.channels:
                values = counted(len(getattr(self, field)), "value")
                raise VitrailError(
                    f"Preprocess.{field} has {values} for {counted(self.channels, 'channel')}. Give one value per channel."
                )
        if min(self.std) <= 0:
            raise VitrailError(f"Preprocess.std is {self.std}; every value must be above 0.")

    def _check_keep_aspect(self) -> None:
        if self.multiple is not None:
            object.__setattr__(self, "multiple", _numbers_of(self.multiple, int, "multiple", "(height, width)"))
        keeps = self.resize == "keep-aspect"
        if keeps != (self.max_size is not None) or keeps != (self.multiple is not None):
            raise VitrailError(
                f"max_size and multiple go with resize='keep-aspect', but resize is {self.resize!r}, max_size is {self.max_size} "
                f"and multiple is {self.multiple}."
            )
        if self.max_size is None or self.multiple is None or self.resize_to is None:
            return
        if len(self.multiple) != 2 or min(self.multiple) < 1 or self.resize_to < 1:
            raise VitrailError(
                f"multiple is {self.multiple} and resize_to is {self.resize_to}; "
                "expected (height, width) and a length, all at least 1."
            )
        if self.max_size < max(self.multiple):
            raise VitrailError(
                f"The longest side is limited to {self.max_size} pixels, but the model's patches have {max(self.multiple)}: "
                f"allow {max(self.multiple)} or more."
            )

    @property
    def max_value(self) -> int:
        """The largest pixel value: 255 or 65535."""
        return (1 << self.bits) - 1

    def __call__(self, image: bytes | Array | Image.Image | str | os.PathLike[str], *, name: str = "image") -> torch.Tensor:
        """Preprocess one image (bytes of a file, path, Pillow image or array [H, W(, C)]) to float32 [C, H, W]."""
        import torch

        return torch.from_numpy(self.array(image, name=name))

    def array(self, image: bytes | Array | Image.Image | str | os.PathLike[str], *, name: str = "image") -> Array:
        """Preprocess one image as a call does, but to an array, and without threads that compete with those of other images."""
        planes = np.array(self.pixels(image, name=name).transpose(2, 0, 1), np.float32, order="C")
        mean, std = (np.array(values, np.float32)[:, None, None] for values in (self.mean, self.std))
        planes /= np.float32(self.max_value)
        planes -= mean
        planes /= std
        return planes

    def pixels(self, image: bytes | Array | Image.Image | str | os.PathLike[str], *, name: str = "image") -> Array:
        """Return the image resized and cropped but not normalised: [height, width, channels], 0 to `max_value`."""
        from vitrail.data.decode import MAX_PIXELS

        full = self.decoded(image, name=name)
        name = str(image) if isinstance(image, str | os.PathLike) else name
        height, width = self._resized(full.shape[0], full.shape[1])
        if self.peak_pixels(full.shape[0], full.shape[1]) > MAX_PIXELS:
            raise BadImage(
                name,
                f"{_times(full.shape)} pixels: resizing to {_times((height, width))} would exceed the limit of "
                f"{MAX_PIXELS:,} pixels; crop or resize it first",
            )
        if self.resize == "none":  # before a float copy is made of pixels that are cropped away
            full = self._crop(full)
        scaled = resize(
            full,
            full.shape[:2] if self.resize == "none" else (height, width),
            interpolation=self.interpolation,
            antialias=self.antialias,
            rounding=self.rounding,
        )
        if self.resize == "keep-aspect":
            return scaled
        if min(height - self.size[0], width - self.size[1]) < 0 and not self.pad:
            raise VitrailError(
                f"{name} is {_times((height, width))}, but the model expects {_times(self.size)} and resize is 'none'. "
                "Resize the image, or use a preprocessing with pad=True or another resize."
            )
        return self._pad(self._crop(scaled))

    def peak_pixels(self, height: int, width: int) -> int:
        """Return the pixels of the largest image that resizing one of this size makes, before its centre is cropped."""
        rows, columns = self._resized(height, width)
        return max(rows, height) * columns  # Pillow resizes along the rows first

    def decoded(self, image: bytes | Array | Image.Image | str | os.PathLike[str], *, name: str = "image") -> Array:
        """Return the image in its own size, upright where `exif` says so: [height, width, channels]."""
        from vitrail.data.decode import decode

        if isinstance(image, str | os.PathLike):
            name, image = str(image), read_file(image)
        return decode(image, channels=self.channels, bits=self.bits, exif=self.exif, name=name)

    def leaves_rotated(self, image: object) -> bool:
        """Whether this is an encoded image with an EXIF orientation that is ignored here, so that the model sees it rotated."""
        if self.exif or not isinstance(image, bytes) or not any(mark in image for mark in _EXIF_MARKS):
            return False
        from vitrail.data.decode import image_header

        try:
            return image_header(image).orientation != 1
        except BadImage:
            return False

    def rotated_note(self, name: str) -> str:
        """Return a warning that names the first image for which `leaves_rotated` is true."""
        return (
            f"{name} is stored rotated (EXIF orientation), and the preprocessing {self.name!r} ignores that, as its library does: "
            f"the model sees it rotated. For upright photos use --preprocess stored+exif."
        )

    def normalise(self, images: torch.Tensor) -> torch.Tensor:
        """Normalise pixel values [..., C, H, W] from 0 to `max_value`, on any device."""
        if images.shape[-3] != self.channels:
            raise VitrailError(
                f"Images {tuple(images.shape)} have {counted(images.shape[-3], 'channel')}, but this preprocessing has "
                f"{self.channels}. The expected order is [..., channels, height, width]."
            )
        import torch

        # A tensor divides as IEEE 754 says on a GPU, too; by a number, torch multiplies by its reciprocal there.
        constant = _on_device.__wrapped__ if _is_traced(images) else _on_device
        most, mean, std = (constant(values, images.device) for values in ((float(self.max_value),), self.mean, self.std))
        return images.to(torch.float32, copy=True).div_(most).sub_(mean).div_(std)  # in place: large memory is slow to get

    def with_size(self, size: int | tuple[int, int]) -> Preprocess:
        """Return the same preprocessing for another input size, with `resize_to` scaled in proportion."""
        new = (size, size) if isinstance(size, int) else size
        scale = min(new) / min(self.size)
        resize_to, max_size = (None if side is None else round(side * scale) for side in (self.resize_to, self.max_size))
        return dataclasses.replace(self, size=new, resize_to=resize_to, max_size=max_size)

    def keep_aspect(self, multiple: tuple[int, int], max_size: int | None = None) -> Preprocess:
        """Return the same preprocessing for a model that accepts any size: no image is cropped, padded or stretched to a square.

        The short side gets the length that it has in `size`, or less where the long side would be longer than `max_size`
        (default: twice that length). Then both are rounded to multiples of `multiple`, which is at most half a patch of stretching.
        """
        side = min(self.size)
        limit = max(2 * side, *multiple) if max_size is None else max_size
        fields: dict[str, Any] = {"resize_to": side, "max_size": limit, "multiple": multiple, "pad": False}
        return dataclasses.replace(self, resize="keep-aspect", **fields)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON. Fields of `keep-aspect` are there only with it."""
        values = dataclasses.asdict(self).items()
        return {
            key: list(value) if isinstance(value, tuple) else value
            for key, value in values
            if value is not None or key not in ("max_size", "multiple")
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Preprocess:
        """Invert `to_dict`. An unknown key is an error, because it may change the result."""
        known = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            expected = did_you_mean(unknown[0], known) or f" The keys are {', '.join(sorted(known))}."
            raise VitrailError(f"Unknown preprocessing key {unknown[0]!r}.{expected}")
        return cls(**values)

    def fingerprint(self) -> str:
        """Return 16 hex digits that differ whenever two preprocessings could give different numbers."""
        fields = {key: value for key, value in self.to_dict().items() if key != "name"}
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:16]

    def describe(self) -> str:
        """Return one line for the log."""
        crop = f"{self.resize} {_times(self.size)}"
        if self.resize == "keep-aspect":
            crop = f"aspect ratio kept, short side {self.resize_to}, long side up to {self.max_size}"
        elif self.resize_to:
            how = "short side" if self.resize == "short-side" else "square"
            crop = f"{how} {self.resize_to}, centre crop {_times(self.size)}"
        filters = f"{self.interpolation}{'' if self.antialias else ' without antialias'}"
        orientation = "" if self.exif else ", EXIF orientation ignored"
        scale = f"mean {_numbers(self.mean)}, std {_numbers(self.std)}"
        return f"{self.name}: {crop}, {filters}, {scale}, {counted(self.channels, 'channel')} of {self.bits} bits{orientation}"

    def _resized(self, height: int, width: int) -> tuple[int, int]:
        if self.resize == "none":
            return height, width
        if self.resize == "square" and self.resize_to is not None:
            rows, columns = (round(self.resize_to * side / min(self.size)) for side in self.size)
            return rows, columns
        if self.resize == "square":
            fit = min(self.size[0] / height, self.size[1] / width)
            letterbox = (max(1, round(height * fit)), max(1, round(width * fit)))
            return letterbox if self.pad else self.size
        if self.resize == "keep-aspect":
            return self._keeping_aspect(height, width)
        assert self.resize_to is not None
        sides, box = (height, width), tuple(self.resize_to * side / min(self.size) for side in self.size)
        tight = 0 if box[0] * width >= box[1] * height else 1  # the side along which the image exactly fills the box
        exact = round(box[tight])
        if self.geometry == "tensorflow":
            factor = np.float32(exact) / np.float32(sides[tight])
            other = int(np.rint(np.float32(sides[1 - tight]) * factor))
        else:
            other = int(exact * sides[1 - tight] / sides[tight])
        other = max(other, self.size[1 - tight])
        return (exact, other) if tight == 0 else (other, exact)

    def _keeping_aspect(self, height: int, width: int) -> tuple[int, int]:
        """In whole numbers, so that no platform rounds another way; halves are rounded up."""
        assert self.resize_to is not None and self.max_size is not None and self.multiple is not None
        short, long = min(height, width), max(height, width)
        new, old = (self.resize_to, short) if self.resize_to * long <= self.max_size * short else (self.max_size, long)
        sides = []
        for side, multiple in zip((height, width), self.multiple, strict=True):
            nearest = (2 * side * new + old * multiple) // (2 * old * multiple)
            sides.append(max(1, min(nearest, self.max_size // multiple)) * multiple)
        return sides[0], sides[1]

    def _crop(self, image: Array) -> Array:
        rows, columns = self.size
        spare = [max(0, image.shape[0] - rows), max(0, image.shape[1] - columns)]
        top, left = (side // 2 if self.geometry == "tensorflow" else round(side / 2.0) for side in spare)
        return image[top : top + rows, left : left + columns]

    def _pad(self, image: Array) -> Array:
        if image.shape[:2] == self.size:
            return image
        canvas = np.empty((*self.size, self.channels), np.float32)
        canvas[:] = np.asarray(self.mean, np.float32) * self.max_value
        top, left = (self.size[0] - image.shape[0]) // 2, (self.size[1] - image.shape[1]) // 2
        canvas[top : top + image.shape[0], left : left + image.shape[1]] = image
        return canvas


_CHOICES: dict[str, tuple[Any, ...]] = {
    "resize": get_args(Resize),
    "interpolation": get_args(Interpolation),
    "rounding": get_args(Rounding),
    "geometry": get_args(Geometry),
    "bits": (8, 16),
}

_EXIF_MARKS = (b"Exif", b"eXIf", b"EXIF", b"exif")  # in JPEG, PNG, WebP, and PNG as ImageMagick writes it
_TENSORFLOW: dict[str, Any] = {"antialias": False, "geometry": "tensorflow", "exif": False}
_PRESETS: dict[str, dict[str, Any]] = {
    # Google's release of the paper's weights: stretch to a square, TensorFlow's bilinear, no rounding.
    "google-vit": {"resize": "square", "interpolation": "bilinear", "rounding": "none", **_TENSORFLOW},
    # big_vision: resize_small(256) | central_crop(224) | value_range(-1, 1), truncated to integers in between.
    "big-vision": {"resize": "short-side", "interpolation": "area", "rounding": "truncate", **_TENSORFLOW},
    # timm's ViTs: crop_pct 0.9, bicubic.
    "timm": {"resize": "short-side", "interpolation": "bicubic", "exif": False},
    # torchvision's classification weights: 256 to 224.
    "imagenet": {
        "resize": "short-side",
        "interpolation": "bilinear",
        "mean": (0.485, 0.456, 0.406),
        "std": (0.229, 0.224, 0.225),
        "exif": False,
    },
    # DeiT: the same with bicubic interpolation, and crop_pct 0.875.
    "deit": {
        "resize": "short-side",
        "interpolation": "bicubic",
        "mean": (0.485, 0.456, 0.406),
        "std": (0.229, 0.224, 0.225),
        "exif": False,
    },
    # Mean and std of the training set; at 32 pixels its images are not resized.
    "cifar": {
        "resize": "square",
        "interpolation": "bicubic",
        "mean": (0.4914, 0.4822, 0.4465),
        "std": (0.2470, 0.2435, 0.2616),
    },
}
PRESETS = tuple(_PRESETS)
APPLY_EXIF = "+exif"


def preset(name: str, *, size: int | tuple[int, int] | None = None, channels: int = 3, bits: int = 8) -> Preprocess:
    """Return a published preprocessing by name. Default size: 224, or 32 for `cifar`.

    As in the library it comes from, the EXIF orientation is ignored (except for `cifar`); `timm+exif` applies it.
    """
    plus, name = name.endswith(APPLY_EXIF), name.removesuffix(APPLY_EXIF)
    if name not in _PRESETS:
        raise VitrailError(f"There is no preprocessing {name!r}.{did_you_mean(name, PRESETS)} There are {', '.join(PRESETS)}.")
    if size is None:
        size = 32 if name == "cifar" else 224
    rows, columns = (size, size) if isinstance(size, int) else size
    values = {"mean": (0.5,) * 3, "std": (0.5,) * 3, **_PRESETS[name]}
    if channels != 3:  # no statistics are known for other channels: use the mean over RGB
        values["mean"], values["std"] = ((round(sum(values[key]) / 3, 6),) * channels for key in ("mean", "std"))
    if values["resize"] == "short-side":
        values["resize_to"] = _short_side(name, min(rows, columns))
    if plus:
        values["exif"] = True
    return Preprocess(size=(rows, columns), channels=channels, bits=bits, name=name, **values)


def _short_side(name: str, crop: int) -> int:
    if name in ("timm", "deit"):
        return int(crop / (0.9 if name == "timm" else 0.875))
    if name == "big-vision" and crop == 384:
        return 448  # its transfer recipes: resize_small(448) | central_crop(384)
    return round(crop * 256 / 224)


def read_file(path: str | os.PathLike[str]) -> bytes:
    try:
        return read_bytes(path)
    except OSError as error:
        raise VitrailError(f"Cannot read the image {path}: {error.strerror}. Check the path and its permissions.") from error


def _is_traced(images: torch.Tensor) -> bool:
    """Tell whether what is computed is recorded, or has no values: constants of then must not be kept, nor kept ones be used."""
    import torch

    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        return True
    return type(images) is not torch.Tensor or torch._C._len_torch_dispatch_stack() > 0


@functools.lru_cache(64)
def _on_device(values: tuple[float, ...], device: torch.device) -> torch.Tensor:
    """Return values as [channel, 1, 1]. They are kept: to copy them to a GPU waits for all that was launched there before."""
    import torch

    with torch.inference_mode(False):  # what is made in inference mode could not be used in training later
        return torch.tensor(values, dtype=torch.float32, device=device)[:, None, None]


def _numbers_of(values: Any, kind: type[int] | type[float], name: str, expected: str) -> tuple[float, ...]:
    try:
        return tuple(kind(value) for value in values)
    except (TypeError, ValueError):
        raise VitrailError(f"{name} is {values!r}; it must be {expected}.") from None


def _times(size: tuple[int, ...]) -> str:
    return f"{size[0]}×{size[1]}"


def _numbers(values: tuple[float, ...]) -> str:
    return f"{values[0]:g}" if len(set(values)) == 1 else "/".join(f"{value:g}" for value in values)
