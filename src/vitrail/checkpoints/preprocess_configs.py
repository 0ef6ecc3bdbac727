"""Convert the preprocessing configs of Hugging Face and timm to `Preprocess` and back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from vitrail.data.preprocess import Preprocess
from vitrail.errors import VitrailError

# Pillow's filter numbers, which preprocessor_config.json stores.
_FILTERS = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}
_ADVICE = "Replace it with preprocess= (--preprocess), such as 'imagenet'."


def from_hugging_face(stored: Mapping[str, Any], size: tuple[int, int], channels: int) -> Preprocess:
    """Convert a preprocessor_config.json; missing values are ViTImageProcessor's defaults."""
    filter_number = stored.get("resample", 2)
    if filter_number not in _FILTERS:
        known = ", ".join(f"{number} ({name})" for number, name in _FILTERS.items())
        raise VitrailError(f"preprocessor_config.json has resample={filter_number!r}; supported are {known}. {_ADVICE}")
    rescales, factor = stored.get("do_rescale", True), stored.get("rescale_factor", 1 / 255)
    if rescales is not True or not math.isclose(factor, 1 / 255, rel_tol=1e-6):
        found = f"rescale_factor={factor!r}" if rescales is True else f"do_rescale={rescales!r}"
        raise VitrailError(f"preprocessor_config.json has {found}; only a rescaling by 1/255 is supported. {_ADVICE}")
    normalise = stored.get("do_normalize", True)
    mean = stored.get("image_mean", [0.5] * channels) if normalise else [0.0] * channels
    std = stored.get("image_std", [0.5] * channels) if normalise else [1.0] * channels
    values = _geometry(stored, size)
    return Preprocess(
        **values,
        interpolation=_FILTERS[filter_number],  # type: ignore[arg-type]
        mean=tuple(mean),
        std=tuple(std),
        channels=channels,
        exif=True,  # as load_image of transformers does
        name="hf",
    )


def _geometry(stored: Mapping[str, Any], size: tuple[int, int]) -> dict[str, Any]:
    resized, crop = _sides(stored, "size", size), _sides(stored, "crop_size", size)
    crop = (crop, crop) if isinstance(crop, int) else crop
    kind = str(stored.get("image_processor_type", stored.get("feature_extractor_type", "")))
    if not stored.get("do_resize", True):
        return {"resize": "none", "size": crop}
    crops = bool(stored.get("do_center_crop", False))
    if isinstance(resized, int) and crops and not kind.startswith("DeiT"):
        return {"resize": "short-side", "resize_to": resized, "size": crop}
    if isinstance(resized, int):
        resized = (resized, resized)  # in older files, and in all of DeiT, a single number means a square
    if not crops or resized == crop:
        return {"resize": "square", "size": resized}
    if resized[0] * crop[1] != resized[1] * crop[0] or resized[0] < crop[0]:
        raise VitrailError(
            f"preprocessor_config.json resizes to {resized} and crops {crop}, which is not supported: the crop must have the same "
            f"aspect ratio and not be larger. {_ADVICE}"
        )
    return {"resize": "square", "resize_to": min(resized), "size": crop}


def to_hugging_face(preprocess: Preprocess) -> dict[str, Any]:
    """Return the closest preprocessor_config.json."""
    height, width = preprocess.size
    number = next((number for number, name in _FILTERS.items() if name == preprocess.interpolation), 2)
    stored: dict[str, Any] = {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": preprocess.resize != "none",
        "size": {"height": height, "width": width},
        "resample": number,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(preprocess.mean),
        "image_std": list(preprocess.std),
    }
    if preprocess.resize_to is not None and preprocess.resize != "keep-aspect":
        scale, crop = preprocess.resize_to / min(height, width), {"height": height, "width": width}
        box = {"height": round(height * scale), "width": round(width * scale)}
        short = preprocess.resize == "short-side"
        stored |= {
            "image_processor_type": "ViTImageProcessor" if short else "DeiTImageProcessor",
            "size": {"shortest_edge": preprocess.resize_to} if short else box,
            "do_center_crop": True,
            "crop_size": crop,
        }
    return stored


def from_timm(stored: Mapping[str, Any], size: tuple[int, int], channels: int) -> Preprocess | None:
    """Convert the `pretrained_cfg` of a timm repository; None if it has no preprocessing."""
    stored = stored.get("pretrained_cfg", stored)
    if not isinstance(stored, Mapping) or "mean" not in stored:
        return None
    crop = float(stored.get("crop_pct") or 0.875)
    mode = stored.get("crop_mode", "center")
    if mode not in ("center", "squash"):
        raise VitrailError(f"config.json has crop_mode={mode!r}; only 'center' and 'squash' are supported. {_ADVICE}")
    side = math.floor(min(size) / crop)
    values: dict[str, Any] = {"resize": "short-side", "resize_to": side}
    if mode == "squash":  # the crop follows in this mode, too
        values = {"resize": "square", "resize_to": side if side != min(size) else None}
    return Preprocess(
        size=size,
        interpolation=stored.get("interpolation", "bicubic"),
        mean=tuple(stored["mean"]),
        std=tuple(stored["std"]),
        channels=channels,
        exif=False,  # as timm's loaders
        name="timm config.json",
        **values,
    )


def to_timm(preprocess: Preprocess) -> dict[str, Any]:
    crop = min(preprocess.size) / preprocess.resize_to if preprocess.resize_to else 1.0
    return {
        "input_size": [preprocess.channels, *preprocess.size],
        "interpolation": preprocess.interpolation,
        "crop_pct": crop,
        "crop_mode": "center" if preprocess.resize == "short-side" else "squash",
        "mean": list(preprocess.mean),
        "std": list(preprocess.std),
    }


def _sides(values: Mapping[str, Any], name: str, default: tuple[int, int]) -> Any:
    """Parse a size in any form transformers has used: a number, a pair, {height, width} or {shortest_edge}."""
    stored = values.get(name, default)
    if isinstance(stored, Mapping):
        if "shortest_edge" in stored:
            return int(stored["shortest_edge"])
        if "height" in stored and "width" in stored:
            return int(stored["height"]), int(stored["width"])
    elif isinstance(stored, int):
        return stored
    elif isinstance(stored, (list, tuple)) and len(stored) == 2:
        return int(stored[0]), int(stored[1])
    raise VitrailError(
        f"preprocessor_config.json has {name}={stored!r}; expected a number, a pair, height and width, or shortest_edge. {_ADVICE}"
    )
