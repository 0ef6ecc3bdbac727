"""Reassessed labels ("ImageNet ReaL", Beyer et al. 2020): every image has a set of right answers, which may be empty."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vitrail.data.types import Split
from vitrail.errors import VitrailError

_VALIDATION = re.compile(r"ILSVRC2012_val_(\d{8})")
_WORDNET = re.compile(r"n\d{8}")


def read_real(path: str | Path, split: Split, classes: Sequence[str]) -> list[frozenset[int]]:
    """For each image of a split the outputs that are right, from one of two kinds of JSON file.

    The published `real.json` is a list: entry i belongs to ILSVRC2012_val_(i+1), and its numbers count ImageNet's classes in
    the order of their WordNet numbers. A file of your own is an object: image name → class names or output numbers.
    """
    file = Path(path)
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise VitrailError(f"Cannot read the labels {file}: {error.strerror}. Check the path.") from error
    except ValueError as error:
        raise VitrailError(f"{file} is not valid JSON ({error}). The published file is called real.json.") from error
    if isinstance(content, list):
        return _published(file, content, split, classes)
    if isinstance(content, dict):
        return _by_name(file, content, split, classes)
    raise VitrailError(f"{file} holds a {type(content).__name__}; a list as in real.json, or image names with labels, is expected.")


def real_hits(predicted: npt.NDArray[Any], labels: Sequence[frozenset[int]]) -> tuple[int, int, int]:
    """(right, images that have labels, images without)."""
    known = [(int(one), right) for one, right in zip(predicted, labels, strict=True) if right]
    return sum(one in right for one, right in known), len(known), len(labels) - len(known)


def _published(file: Path, content: list[Any], split: Split, classes: Sequence[str]) -> list[frozenset[int]]:
    outputs = _output_of_class(classes)
    found = []
    for index in range(len(split)):
        name = split.image_name(index)
        match = _VALIDATION.search(name)
        if match is None or not 1 <= int(match[1]) <= len(content):
            raise VitrailError(
                f"{file} lists {len(content):,} images of ImageNet's validation set by number, but {name!r} is not called "
                "ILSVRC2012_val_ and such a number. Evaluate that set, or give an object of image names with labels."
            )
        found.append(frozenset(int(outputs[_number(file, name, one, len(outputs))]) for one in content[int(match[1]) - 1]))
    return found


def _output_of_class(classes: Sequence[str]) -> npt.NDArray[np.int64]:
    """The output for each of ImageNet's classes: by WordNet number where that is the class's name, else in the same order."""
    if all(_WORDNET.fullmatch(name) for name in classes):
        return np.argsort(np.array(classes), kind="stable").astype(np.int64)
    return np.arange(len(classes), dtype=np.int64)


def _by_name(file: Path, content: dict[str, Any], split: Split, classes: Sequence[str]) -> list[frozenset[int]]:
    index = {name: place for place, name in enumerate(classes)}
    found = []
    for row in range(len(split)):
        name = split.image_name(row)
        labels = content.get(name, content.get(Path(name).name))
        if labels is None:
            raise VitrailError(f"{file} has no entry for {name!r} or its bare file name; use [] for an image without labels.")
        found.append(frozenset(index[one] if one in index else _number(file, name, one, len(classes)) for one in labels))
    return found


def _number(file: Path, name: str, label: Any, classes: int) -> int:
    if isinstance(label, int) and not isinstance(label, bool) and 0 <= label < classes:
        return label
    raise VitrailError(
        f"{file} gives {name!r} the label {label!r}, which is neither the name of a class nor a number from 0 to {classes - 1}."
    )
