"""Everything the explorer shows of one image and one model, as arrays that stay in memory and are sent in small pieces."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitrail.checkpoints import Bundle
from vitrail.data.decode import image_header
from vitrail.data.preprocess import Preprocess
from vitrail.errors import VitrailError
from vitrail.inspect import attention_distance, uniform_distance, untrained
from vitrail.inspect.images import denormalise
from vitrail.inspect.inputs import Array, config_at
from vitrail.inspect.layers import feature_colours, feature_similarity, layer_features, layer_outputs
from vitrail.inspect.rollout import Fusion, rollout
from vitrail.models import ViT, ViTConfig
from vitrail.models.features import evaluating
from vitrail.serve.byte_maps import MAX_REPLY, ByteMaps, signed_to_bytes
from vitrail.serve.images import NPY
from vitrail.serve.limits import PixelLimit

MAX_ATTENTION = 192 << 20
"""Most bytes of attention that are kept for one image; of larger models one layer is kept at a time."""
TOP = 6
PHOTO_SIDE = 720


@dataclass(eq=False)
class Exploration:
    """One analysed image. `info` is what the page gets first; the rest is asked for piece by piece."""

    image: Tensor
    """The model's input [channel, height, width], normalised."""
    info: dict[str, Any]
    features: Array
    """[layer, token, width], see `layer_features`; of a ResNet its last map alone."""
    attention: ByteMaps | None
    """[layer, head, query, key]; None if there is none or it is too large."""
    photo: bytes = b""
    """JPEG of the same crop in more pixels, for the eye; empty if the image has no more than the model's input."""
    last_layer: tuple[int, ByteMaps] | None = None
    """Of a large model: the layer that was asked for last."""
    results: dict[str, Any] = field(default_factory=dict)
    """Answers that were computed once."""

    @property
    def nbytes(self) -> int:
        attention = self.attention.nbytes if self.attention is not None else 0
        last = self.last_layer[1].nbytes if self.last_layer is not None else 0
        return attention + last + self.features.nbytes + 4 * self.image.numel() + len(self.photo)

    def similarity(self, layer: int, query: int | None = None) -> Array:
        """Cosine similarity of all tokens after a layer, as bytes [token, token], or that of one token to all."""
        return signed_to_bytes(feature_similarity(self.features[layer], query))

    def colours(self) -> Array:
        """Three principal components of the patch features after each layer, as bytes [layer, patch, 3]."""
        prefix = len(self.info["prefix"])
        found = [feature_colours(features[prefix:]) for features in self.features]
        colours: Array = np.rint(255 * np.stack(found)).astype(np.uint8)
        return colours


def analyse(bundle: Bundle, image: Tensor) -> Exploration:
    """Compute what the page shows first. Runs in the thread that owns the model."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of untrained weights: the page says so itself
        return _analyse(bundle, image)


def _analyse(bundle: Bundle, image: Tensor) -> Exploration:
    model, batch, attention = bundle.model, _batch(bundle, image), None
    config: ViTConfig | None = None
    if isinstance(model, ViT):
        config = config_at(model, batch)
        features, grid = layer_features(model, batch), config.grid
        outputs = layer_outputs(model, features)[0] if bundle.head == "set" else None
        attention = _attention(model, config, batch)
    else:
        with evaluating(model), torch.no_grad():
            found = model.features(batch)
            grid = found.grid
            features = found.tokens[None].float().cpu().numpy()
            outputs = _finite(model.head(found.pooled)) if bundle.head == "set" else None
    info = _describe(bundle) | {"grid": list(grid), "image_size": list(image.shape[1:])}
    info |= _attention_info(config, attention) | _predictions(bundle, outputs) | _notes(bundle)
    return Exploration(image.cpu(), info, features[0], attention)


def _batch(bundle: Bundle, image: Tensor) -> Tensor:
    weight = bundle.model.norm.weight
    return image[None].to(weight.device, weight.dtype)


def _attention(model: ViT, config: ViTConfig, batch: Tensor) -> ByteMaps | None:
    if config.blocks * config.heads * config.tokens**2 > MAX_ATTENTION:
        return None
    layers = [ByteMaps.of(weights[0].float().cpu().numpy()) for _, weights in model.attention(batch)]
    return ByteMaps(np.stack([one.values for one in layers]), np.stack([one.scales for one in layers]))


def attention_of_layer(exploration: Exploration, layer: int, bundle: Bundle, image: Tensor) -> ByteMaps:
    """Compute one layer of a model whose attention is too large to be kept. Runs in the thread that owns the model."""
    if exploration.last_layer is None or exploration.last_layer[0] != layer:
        ((_, weights),) = bundle.model.attention(_batch(bundle, image), [layer])
        exploration.last_layer = layer, ByteMaps.of(weights[0].float().cpu().numpy())
    return exploration.last_layer[1]


def _describe(bundle: Bundle) -> dict[str, Any]:
    model = bundle.model
    found: dict[str, Any] = {
        "name": model.config.name,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "preprocess": bundle.stored_preprocess().describe(),
    }
    if not isinstance(model, ViT):
        return found | {"kind": "ResNet", "prefix": [], "pooling": "mean", "layers": 0, "heads": 0, "positions": False}
    config = model.config
    prefix = [*["class"] * config.class_token, *["distillation"] * config.distill_token]
    return found | {
        "kind": "ViT" if config.resnet is None else "hybrid",
        "prefix": prefix + [f"register {number}" for number in range(1, 1 + config.registers)],
        "pooling": config.pooling,
        "layers": config.blocks,
        "heads": config.heads,
        "positions": model.positions.of_patches(0) is not None,
    }


def _attention_info(config: ViTConfig | None, attention: ByteMaps | None) -> dict[str, Any]:
    if config is None:
        return {"attention": None}
    per_layer = config.heads * config.tokens * (config.tokens + 4)
    if attention is None:
        return {"attention": {"send": "query of a layer", "bytes_per_layer": per_layer, "max_error": 1 / 510}}
    send = "layer" if per_layer <= MAX_REPLY else "query"
    return {"attention": {"send": send, "bytes_per_layer": per_layer, "max_error": attention.max_error}}


def _predictions(bundle: Bundle, outputs: Array | None) -> dict[str, Any]:
    """Describe the outputs after the last layer, and how those of its best labels came about layer by layer."""
    base = {"task": bundle.task, "score": "value" if bundle.task == "regress" else "probability"}
    if outputs is None:
        return base | {"predictions": [], "read_out": None}
    best = predictions(bundle, outputs[-1])
    scores = bundle.scores(torch.from_numpy(outputs))
    tops = scores.argmax(dim=1).tolist()
    read_out = {
        "labels": [one["label"] for one in best],
        "scores": scores[:, [one["index"] for one in best]].tolist(),
        "top": [{"label": bundle.label(index), "score": float(scores[layer, index])} for layer, index in enumerate(tops)],
    }
    return base | {"predictions": best, "read_out": read_out}


def predictions(bundle: Bundle, outputs: Array, also: list[int] | None = None) -> list[dict[str, Any]]:
    """Return the best labels with their scores, and the score of each output in `also`."""
    logits = torch.from_numpy(outputs)[None]
    best = [
        {"label": one.label, "index": one.index, "score": one.score, "chosen": one.chosen}
        for one in bundle.decode(logits, TOP)[0][: TOP if bundle.task != "regress" else 24]
    ]
    scores = bundle.scores(logits)[0]
    known = {one["index"] for one in best}
    return best + [
        {"label": bundle.label(index), "index": index, "score": float(scores[index]), "chosen": False}
        for index in also or []
        if index not in known
    ]


def _notes(bundle: Bundle) -> dict[str, Any]:
    notes = []
    if not isinstance(bundle.model, ViT):
        notes.append(
            f"{bundle.model.config.name} is a ResNet: it has no attention and no layers of tokens. "
            "Predictions, and the similarity and colours of its last feature map, are shown."
        )
    elif bundle.model.config.resnet is not None:
        notes.append(
            "A hybrid: its patches are positions of a ResNet's feature map, which see more of the image than their square."
        )
    if bundle.head != "set":
        notes.append(f"This checkpoint has {'no' if bundle.head == 'none' else 'an untrained'} head, so there are no predictions.")
    elif (message := untrained(bundle.model)) is not None:
        notes.append(message)
    return {"notes": notes}


def distances(bundle: Bundle, image: Tensor) -> dict[str, Any]:
    """Mean attention distance by layer and head for this image, in pixels, and that of uniform attention."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = attention_distance(bundle.model, batch := _batch(bundle, image))
    return {"distance": found.tolist(), "uniform": uniform_distance(config_at(bundle.model, batch))}  # type: ignore[arg-type]


def rolled_out(bundle: Bundle, image: Tensor, fusion: Fusion, residual: bool) -> list[float]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = rollout(bundle.model, _batch(bundle, image), fusion=fusion, residual=residual)
    weights: list[float] = found[0].flatten().tolist()
    return weights


def masked(image: Tensor, grid: Sequence[int], off: Collection[int]) -> Tensor:
    """Replace patches by the mean colour of the preprocessing, which is 0 after normalisation."""
    hidden = np.zeros(grid[0] * grid[1], bool)
    hidden[list(off)] = True
    rows, columns = (
        np.repeat(np.arange(count), np.diff(np.linspace(0, length, count + 1).round().astype(int)))
        for length, count in zip(image.shape[1:], grid, strict=True)
    )
    pixels = hidden.reshape(tuple(grid))[rows[:, None], columns]
    return image.masked_fill(torch.from_numpy(pixels), 0.0)


def masked_outputs(grid: Sequence[int], off: Collection[int], bundle: Bundle, image: Tensor) -> Array:
    """Return the outputs with patches switched off, of the same model that `analyse` uses, whatever the service's precision."""
    batch = _batch(bundle, masked(image, grid, off))
    with evaluating(bundle.model), torch.no_grad():
        return _finite(bundle.model(batch)[0])


def _finite(outputs: Tensor) -> Array:
    """Return an array; JSON has no NaN, and would show null as 0."""
    if not outputs.isfinite().all():
        raise VitrailError("The model's outputs for this image are not finite. Check the image and the weights.")
    found: Array = outputs.float().cpu().numpy()
    return found


def picture(exploration: Exploration, preprocess: Preprocess) -> bytes:
    """Return the model's input as PNG, pixel by pixel."""
    pixels = np.rint(denormalise(exploration.image, preprocess) * 255).astype(np.uint8)
    return _encoded(pixels, "PNG")


def photo(data: bytes, preprocess: Preprocess, limit: PixelLimit) -> bytes:
    """Return the same crop of the file in up to about 720 pixels as JPEG; empty if it has no more pixels than the model's input.

    Empty also if the limit is exceeded on the way, as by a narrow image: its predictions and maps need no photo.
    """
    if preprocess.resize == "none" or preprocess.pad or preprocess.channels != 3 or preprocess.bits != 8:
        return b""
    sides = _sides(data)
    factor = int(min(PHOTO_SIDE, *sides) / max(preprocess.size))
    if factor < 2:
        return b""
    larger = preprocess.with_size((preprocess.size[0] * factor, preprocess.size[1] * factor))
    most = max(math.prod(sides), larger.peak_pixels(*sides), larger.peak_pixels(*sides[::-1]))  # upright or not
    if most > limit.most:
        return b""
    with limit.hold(most):
        pixels = larger.pixels(data, name="the image")
    return _encoded(np.rint(np.clip(pixels, 0, 255)).astype(np.uint8), "JPEG")


def _sides(data: bytes) -> tuple[int, int]:
    """Return the sides of an image, of which no pixel is decoded."""
    if data.startswith(NPY):
        header = image_header(data)
        return header.height, header.width
    with Image.open(io.BytesIO(data)) as source:
        return source.size


def _encoded(pixels: Array, format_: str) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, format_, **({"quality": 86} if format_ == "JPEG" else {}))
    return stream.getvalue()
