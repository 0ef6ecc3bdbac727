"""Golden outputs: what the model computed for a fixed image when it was saved, to check that it is still the same function.

Two are stored. The full one is the output for a whole image. The quick one sends only the first few tokens through every
layer: it depends on nearly every weight and numeric setting, and costs about one pass over the weights, so that every load
can check it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from vitrail.errors import VitrailError
from vitrail.models import BiT, Model, ViT
from vitrail.models.features import evaluating

QUICK_PATCHES = 3
MAX_VALUES = 32  # stored per output
_TOLERANCE = {torch.float16: 5e-2, torch.bfloat16: 5e-2}
_ROUNDING = 8.0  # how many rounding errors of the model itself are allowed,
_MOST = 2e-2  # and at most which part of the largest value
_SKIP = "Load it with verify='none' to skip this check."
_ADVICE = f"The folder is corrupted: download or copy it again. {_SKIP}"
_Values = dict[str, list[float]]
_Compute = Callable[[Model], tuple[Tensor, Tensor]]


def golden_image(channels: int, size: tuple[int, int]) -> Tensor:
    """Return a noise image in [−1, 1) computed without a random generator, so that it never changes."""
    index = torch.arange(channels * size[0] * size[1], dtype=torch.int64, device="cpu")
    mixed = (index + 1) * 2654435761 % 2**32
    mixed = (mixed ^ (mixed >> 15)) * 2246822519 % 2**32
    return (mixed.double() / 2**31 - 1).float().reshape(1, channels, *size)


def record(model: Model) -> dict[str, Any]:
    """Compute both golden outputs on the CPU, as plain numbers for JSON."""
    outputs = {"quick": _sampled(_quick(model)), "full": _sampled(_full(model))}
    if not all(math.isfinite(value) for values in outputs.values() for some in values.values() for value in some):
        raise VitrailError(
            "The outputs of the model are not finite (NaN or infinite), though its weights are: the training diverged. Nothing was "
            "saved. Start again with a lower learning rate, or from an earlier checkpoint."
        )
    return outputs


def check(model: Model, golden: Any, source: str, *, full: bool) -> None:
    """Compare a loaded model with its golden outputs; raise an error if they differ."""
    for name, compute in (("quick", _quick), ("full", _full)):
        if name == "full" and not full:
            continue
        expected = golden.get(name) if isinstance(golden, Mapping) else None
        if not isinstance(expected, Mapping):
            raise VitrailError(f"{source}: config.json has no golden output to check the model with. {_ADVICE}")
        _compare(_sampled(compute(model)), expected, model, source, compute)


def _compare(got: _Values, expected: Mapping[str, Any], model: Model, source: str, compute: _Compute) -> None:
    relative = _TOLERANCE.get(model.norm.weight.dtype, 1e-4)
    for name, values in got.items():
        stored = expected.get(name)
        if not isinstance(stored, list) or len(stored) != len(values) or not all(isinstance(v, (int, float)) for v in stored):
            raise VitrailError(f"{source}: the golden {name} in config.json do not fit this model. {_ADVICE}")
        largest = max((abs(v) for v in stored), default=0.0)
        worst, allowed = _distance(values, stored), relative * max(largest, 1e-6)
        if not worst <= allowed and model.norm.weight.dtype is torch.float32:
            # Sharp attention amplifies rounding, which differs between CPUs: allow for this model's own rounding error.
            rounding = _distance(values, _sampled(compute(copy.deepcopy(model).double()))[name])
            allowed = max(allowed, min(_ROUNDING * rounding, _MOST * largest))
        if not worst <= allowed:
            raise VitrailError(
                f"{source} does not compute the same outputs as when it was saved: its {name} differ by {worst:.2g}, "
                f"more than {allowed:.2g}. The weights or the model in config.json were changed, or "
                f"this machine computes wrong results. {_SKIP}"
            )


def _distance(one: list[float], two: list[float]) -> float:
    """Return the largest difference; NaN if one is NaN, which `max` would skip unless it came first."""
    differences = [abs(a - b) for a, b in zip(one, two, strict=True)]
    return math.nan if any(map(math.isnan, differences)) else max(differences, default=0.0)


@torch.no_grad()
def _full(model: Model) -> tuple[Tensor, Tensor]:
    with evaluating(model):
        image = golden_image(model.config.channels, model.config.image_size).to(model.norm.weight.dtype)
        return model.features(image).pre_logits[0], model(image)[0]


@torch.no_grad()
def _quick(model: Model) -> tuple[Tensor, Tensor]:
    if isinstance(model, BiT):  # takes any image size, so a small image is enough
        side = max(64, model.config.resnet.stride)
        image = golden_image(model.config.channels, (side, side)).to(model.norm.weight.dtype)
        with evaluating(model):
            return model.features(image).pre_logits[0], model(image)[0]
    config = model.config
    if config.position_at != "input" or config.attention != "full":  # these need the whole grid
        return _full(model)
    with evaluating(model), nullcontext() if config.resnet else _one_thread():
        image = golden_image(config.channels, config.image_size).to(model.norm.weight.dtype)
        return _first_tokens(model, image)


def _first_tokens(model: ViT, image: Tensor) -> tuple[Tensor, Tensor]:
    """Run the model on the prefix tokens and the first few patches only."""
    tokens = model.add_prefix_and_positions(model.embed_patches(image))
    tokens = model.encode(tokens[:, : model.config.prefix + QUICK_PATCHES])
    return model._represent(model._pool(tokens))[0], model.logits(tokens)[0]


@contextmanager
def _one_thread() -> Iterator[None]:
    """Use one thread: with so little work, several threads are slower on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _sampled(outputs: tuple[Tensor, Tensor]) -> dict[str, list[float]]:
    """Return at most `MAX_VALUES` evenly spaced values of each output."""
    sampled = {}
    for name, values in zip(("pre_logits", "logits"), outputs, strict=True):
        picked = torch.linspace(0, len(values) - 1, min(len(values), MAX_VALUES), device="cpu").round().long()
        sampled[name] = [float(f"{value:.8g}") for value in values[picked].double().tolist()]
    return sampled
