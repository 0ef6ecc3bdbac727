"""Preprocessing as Hugging Face and timm write it down, read into `Preprocess` and back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from vitrail.data.preprocess import Preprocess
from vitrail.errors import VitrailError

# Pillow's numbers for its filters, which preprocessor_config.json stores.
_FILTERS = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}


def from_hugging_face(said: Mapping[str, Any], size: tuple[int, int], channels: int) -> Preprocess:
    """What a preprocessor_config.json says; where it is silent, ViTImageProcessor's own defaults."""
    filter_number = said.get("resample", 2)
    if filter_number not in _FILTERS:
        raise VitrailError(f"preprocessor_config.json says resample={filter_number!r}; {_FILTERS} are known.")
    if said.get("do_rescale", True) is not True or not math.isclose(said.get("rescale_factor", 1 / 255), 1 / 255, rel_tol=1e-6):
        raise VitrailError(
            "preprocessor_config.json rescales by something else than 1/255, which is not known here. Give preprocess=…"
        )
    normalise = said.get("do_normalize", True)
    mean = said.get("image_mean", [0.5] * channels) if normalise else [0.0] * channels
    std = said.get("image_std", [0.5] * channels) if normalise else [1.0] * channels
    resized, crop = _sides(said.get("size", list(size))), _sides(said.get("crop_size", list(size)))
    values: dict[str, Any] = {"resize": "square", "size": resized}
    if not said.get("do_resize", True):
        values = {"resize": "none", "size": crop}
    elif isinstance(resized, int) and said.get("do_center_crop", False):
        values = {"resize": "short-side", "resize_to": resized, "size": crop}
    elif isinstance(resized, int):
        values["size"] = (resized, resized)  # a bare number was a square in the older files
    return Preprocess(
        **values,
        interpolation=_FILTERS[filter_number],  # type: ignore[arg-type]
        mean=tuple(mean),
        std=tuple(std),
        channels=channels,
        name="hf",
    )


def to_hugging_face(preprocess: Preprocess) -> dict[str, Any]:
    """The preprocessor_config.json for a preprocessing, as nearly as it can be said there."""
    height, width = preprocess.size
    number = next((number for number, name in _FILTERS.items() if name == preprocess.interpolation), 2)
    said: dict[str, Any] = {
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
    if preprocess.resize == "short-side":
        said |= {
            "size": {"shortest_edge": preprocess.resize_to},
            "do_center_crop": True,
            "crop_size": {"height": height, "width": width},
        }
    return said


def from_timm(said: Mapping[str, Any], size: tuple[int, int], channels: int) -> Preprocess | None:
    """What the `pretrained_cfg` of a timm repository says, or None where it says nothing."""
    said = said.get("pretrained_cfg", said)
    if not isinstance(said, Mapping) or "mean" not in said:
        return None
    crop = float(said.get("crop_pct") or 0.875)
    mode = said.get("crop_mode", "center")
    if mode not in ("center", "squash"):
        raise VitrailError(f"config.json says crop_mode={mode!r}; 'center' and 'squash' are known. Give preprocess=…")
    values: dict[str, Any] = (
        {"resize": "square"} if mode == "squash" else {"resize": "short-side", "resize_to": math.floor(min(size) / crop)}
    )
    return Preprocess(
        size=size,
        interpolation=said.get("interpolation", "bicubic"),
        mean=tuple(said["mean"]),
        std=tuple(said["std"]),
        channels=channels,
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


def _sides(said: Any) -> Any:
    """A size as transformers has written it over the years: a number, a pair, {height, width} or {shortest_edge}."""
    if isinstance(said, Mapping):
        if "shortest_edge" in said:
            return int(said["shortest_edge"])
        if "height" in said and "width" in said:
            return int(said["height"]), int(said["width"])
    elif isinstance(said, int):
        return said
    elif isinstance(said, (list, tuple)) and len(said) == 2:
        return int(said[0]), int(said[1])
    raise VitrailError(f"preprocessor_config.json has a size of {said!r}, which is not known here. Give preprocess=…")
