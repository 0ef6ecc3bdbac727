"""The images that `predict`, `embed` and `inspect` take: files, folders, sources, and images in memory."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitrail.checkpoints import Bundle
from vitrail.data.settings import BadImages
from vitrail.data.sources.chain import Chain
from vitrail.data.trained_on import evaluation_split, open_for
from vitrail.data.types import Array, Payload, Source, Split
from vitrail.errors import VitrailError
from vitrail.evaluate.predictor import find_images
from vitrail.evaluate.predictor import is_source as names_source

log = logging.getLogger("vitrail.api")
EXPECTED = (
    "paths of images, folders or .txt lists, open files or their bytes, Pillow images, uint8 arrays [height, width, channels], "
    "float tensors [images, channels, height, width] that are already preprocessed, or data sources such as digits"
)


@dataclass(frozen=True)
class Images:
    """Images to read and preprocess, or a tensor of preprocessed ones; and how many things were given for them."""

    split: Split | None
    tensor: Tensor | None
    given: int

    def __len__(self) -> int:
        return len(self.split) if self.split is not None else len(cast(Tensor, self.tensor))

    @property
    def all_named(self) -> bool:
        """Whether each image was given by itself, not with others in a folder, list or source."""
        return len(self) == self.given


def open_images(bundle: Bundle, images: Any, *, split: str | None = None, bad_images: BadImages = "error") -> Images:
    """Find out what was given: one of `EXPECTED`, or several.

    Of a data source given by its name, all images are taken, as the commands do; `split` chooses one split of it.
    """
    items = [images] if _is_single(images) else list(images)
    channels = bundle.model.config.channels
    tensors = [item for item in items if isinstance(item, Tensor) and item.is_floating_point()]
    if tensors and len(tensors) < len(items):
        raise VitrailError("Preprocessed tensors and other images were given together. Give them in two calls.")
    if tensors and split is not None:
        raise VitrailError(f"split={split!r} selects a split of a data source, but tensors were given. Leave it out.")
    if tensors:
        stacked = _stacked(tensors)
        _warn_of_pixels(bundle, stacked)
        return Images(None, stacked, len(items))
    parts: list[Split] = []
    paths: list[str] = []
    loose: list[Any] = []
    sources = 0

    def close() -> None:  # files that follow each other form one part, and so do images in memory
        if paths:
            parts.append(find_images(paths))
        if loose:
            parts.append(MemorySplit(loose, first=sum(map(len, parts))))
        paths.clear()
        loose.clear()

    for item in items:
        if isinstance(item, Split | Source) or (split is not None and is_source(item)):
            close()
            sources += 1
            parts.append(_of_source(bundle, item, split, bad_images))
        elif isinstance(item, str | os.PathLike):
            if loose:
                close()
            paths.append(os.fspath(item))
        else:
            if paths:
                close()
            loose.extend(_in_memory(item, channels))
    close()
    if split is not None and not sources:
        raise VitrailError(f"split={split!r} selects a split of a data source, such as 'folder:photos', but none was given.")
    together = Chain(parts) if len(parts) > 1 else parts[0] if parts else MemorySplit([])
    return Images(together, None, len(items) + _hidden(items))


def _warn_of_pixels(bundle: Bundle, images: Tensor) -> None:
    """Warn if the values of float images go far beyond preprocessed ones, as pixels from 0 to 255 do."""
    if bundle.preprocess is None or not len(images):
        return
    limits = bundle.preprocess.normalise(torch.tensor([0.0, bundle.preprocess.max_value]).expand(bundle.preprocess.channels, 1, 2))
    low, high = float(limits.min()), float(limits.max())
    largest = max(abs(float(value)) for value in images.detach().aminmax())  # not `abs` of all, which would be a copy of them
    if 10 * max(-low, high) < largest < math.inf:
        log.warning(
            "The values of the tensor go up to %.4g, those of preprocessed images from %.3g to %.3g. Pass pixels as uint8.",
            largest,
            low,
            high,
        )


def _is_single(images: Any) -> bool:
    if isinstance(images, np.ndarray) and images.dtype.kind in "OSU":  # an array of paths
        return False
    if isinstance(images, np.ndarray | Tensor | Split | Source | str | bytes | bytearray | memoryview | os.PathLike | Image.Image):
        return True
    if hasattr(images, "read"):  # an open file
        return True
    if not isinstance(images, Iterable) or isinstance(images, Mapping):
        raise VitrailError(f"A value of type {type(images).__name__} is not an image. Pass {EXPECTED}.")
    return False


def _hidden(items: Sequence[Any]) -> int:
    """Count the images of stacked arrays, each of which was given by itself."""
    return sum(len(item) - 1 for item in items if isinstance(item, np.ndarray | Tensor) and item.ndim == 4)


def _stacked(tensors: Sequence[Tensor]) -> Tensor:
    batches = [one if one.ndim == 4 else one[None] for one in tensors]
    if any(one.ndim != 4 for one in batches):
        shape = next(tuple(one.shape) for one in tensors if one.ndim not in (3, 4))
        raise VitrailError(f"A float tensor of shape {shape} was given; [images, channels, height, width] is expected.")
    if len({one.shape[1:] for one in batches}) > 1:
        shapes = sorted({tuple(one.shape[1:]) for one in batches})
        raise VitrailError(f"The tensors have several shapes, such as {shapes[0]} and {shapes[1]}. Use one call for each shape.")
    return batches[0] if len(batches) == 1 else torch.cat(batches)


def is_source(item: Any) -> bool:
    """Whether this names a data source: `digits`, `folder:photos`, `photos.csv`. A path to a folder means its images."""
    return isinstance(item, str | os.PathLike) and names_source(os.fspath(item))


def _of_source(bundle: Bundle, item: Any, name: str | None, bad_images: BadImages) -> Split:
    if isinstance(item, Split):
        return item
    source = item if isinstance(item, Source) else open_for(bundle.trained_on, os.fspath(item), bad_images=bad_images)
    return evaluation_split(bundle.trained_on, source, name)


def _in_memory(item: Any, channels: int) -> list[Any]:
    """Return what the decoder takes. `channels` are those of the model."""
    if isinstance(item, bytes | bytearray | memoryview):
        return [bytes(item)]
    if isinstance(item, Image.Image):
        return [item]
    if hasattr(item, "read"):
        content = item.read()
        if not isinstance(content, bytes):
            raise VitrailError("A file that was opened as text is not an image. Open it with mode 'rb', or pass its path.")
        return [content]
    array = item
    if isinstance(item, Tensor):  # as torchvision reads images: uint8 [channels, height, width]
        array = (item.movedim(-3, -1) if item.ndim in (3, 4) else item).cpu().numpy()
    if not isinstance(array, np.ndarray):
        raise VitrailError(f"A value of type {type(item).__name__} is not an image. Pass {EXPECTED}.")
    if array.dtype not in (np.uint8, np.uint16) or array.ndim not in (2, 3, 4):
        kind = "A tensor" if isinstance(item, Tensor) else "An array"
        advice = "Pass pixel values from 0 to 255 as uint8; or, preprocessed already, a float tensor."
        raise VitrailError(f"{kind} {tuple(item.shape)} of {item.dtype} is not an image. {advice}")
    _check_layout(item, channels)
    return list(array) if array.ndim == 4 else [array]


def _check_layout(item: Any, channels: int) -> None:
    """Refuse an array whose channels come first, and a tensor whose channels come last."""
    if item.ndim < 3:
        return
    first, last = item.shape[-3], item.shape[-1]
    taken, other = (first, last) if isinstance(item, Tensor) else (last, first)
    if taken in (1, 2, 3, 4, channels) or other not in (1, 3, 4, channels):
        return
    if isinstance(item, Tensor):
        kind, expected, change = "A uint8 tensor", "[channels, height, width]", "tensor.movedim(-1, -3)"
    else:
        kind, expected, change = "An array", "[height, width, channels]", "numpy.moveaxis(array, -3, -1)"
    shape = tuple(item.shape)
    raise VitrailError(f"{kind} of shape {shape} was given; {expected} is expected. Move its channels: {change}.")


def _unlabelled(length: int) -> Array:
    return np.empty((length, 0), np.float32)


class MemorySplit(Split):
    """Images in memory: contents of files, arrays and Pillow images. They are named by their position."""

    def __init__(self, images: Sequence[Any], *, first: int = 0) -> None:
        self.name, self.task, self.classes, self.targets = "images", "unlabelled", (), _unlabelled(len(images))
        self._images, self._first = list(images), first

    def image_name(self, index: int) -> str:
        return f"image {self._first + index}"

    def payload(self, index: int) -> Payload:
        return cast(Payload, self._images[index])  # the decoder takes Pillow images, too
