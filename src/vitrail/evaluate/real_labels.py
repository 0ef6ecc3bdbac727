"""Read reassessed labels ("ImageNet ReaL", Beyer et al. 2020): every image has a set of correct labels, which may be empty."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vitrail.data.types import Split
from vitrail.errors import VitrailError, counted
from vitrail.regular_files import parse_json, read_bytes

_VALIDATION = re.compile(r"ILSVRC2012_val_(\d{8})")
_WORDNET = re.compile(r"n\d{8}")
_FIRST_WORDS = ("tench", "goldfish", "great white shark")  # the classes with the smallest WordNet IDs


def read_real(path: str | Path, split: Split, classes: Sequence[str]) -> list[frozenset[int]]:
    """Read the correct outputs of each image of a split from a JSON file.

    The published `real.json` is a list: entry i belongs to ILSVRC2012_val_(i+1), and its numbers are ImageNet classes sorted
    by WordNet ID, so the classes must be WordNet IDs, numbers, or words in that order. Your own file is an object: image name →
    class names or output indices.
    """
    file = Path(path)
    try:
        content = parse_json(read_bytes(file))
    except OSError as error:
        raise VitrailError(f"Cannot read the labels {file}: {error.strerror}. Check the path.") from error
    except ValueError as error:
        raise VitrailError(f"{file} is not valid JSON ({error}). The published file is real.json.") from error
    if isinstance(content, list):
        return _published(file, content, split, classes)
    if isinstance(content, dict):
        return _by_name(file, content, split, classes)
    raise VitrailError(
        f"{file} contains only {repr(content)[:40]}; expected a list as in real.json, or an object that maps image names to labels."
    )


def real_hits(predicted: npt.NDArray[Any], labels: Sequence[frozenset[int]]) -> tuple[int, int, int]:
    """Return (correct predictions, images with labels, images without labels)."""
    labelled = [(int(one), correct) for one, correct in zip(predicted, labels, strict=True) if correct]
    return sum(one in correct for one, correct in labelled), len(labelled), len(labels) - len(labelled)


def _published(file: Path, content: list[Any], split: Split, classes: Sequence[str]) -> list[frozenset[int]]:
    outputs = _output_of_class(file, classes)
    labels = []
    for index in range(len(split)):
        name = split.image_name(index)
        match = _VALIDATION.search(name)
        if match is None or not 1 <= int(match[1]) <= len(content):
            raise VitrailError(
                f"{file} lists {counted(len(content), 'image')} of ImageNet's validation set by number, but the name {name!r} has "
                "no ILSVRC2012_val_ with such a number. Use that set, or a JSON object that maps image names to labels."
            )
        numbers = _labels(file, name, content[int(match[1]) - 1])
        labels.append(frozenset(int(outputs[_check_index(file, name, one, len(outputs))]) for one in numbers))
    return labels


def _output_of_class(file: Path, classes: Sequence[str]) -> npt.NDArray[np.int64]:
    """Map ImageNet classes to outputs by WordNet ID, or in the same order if the classes are numbers or words in that order."""
    if all(_WORDNET.fullmatch(name) for name in classes):
        return np.argsort(np.array(classes), kind="stable").astype(np.int64)
    numbers = [str(number) for number in range(len(classes))]
    words = [name.casefold().replace("_", " ").replace("-", " ") for name in classes[: len(_FIRST_WORDS)]]
    in_order = len(words) == len(_FIRST_WORDS) and all(map(str.startswith, words, _FIRST_WORDS))
    if list(classes) != numbers and not in_order:
        raise VitrailError(
            f"{file} numbers ImageNet's classes in the order of their WordNet IDs, but the classes here are names in another order "
            f"({', '.join(classes[:3])}, …). Name the class folders by WordNet IDs (n01440764, …) and pass --match order, or use a "
            "JSON object that maps image names to class names."
        )
    return np.arange(len(classes), dtype=np.int64)


def _by_name(file: Path, content: dict[str, Any], split: Split, classes: Sequence[str]) -> list[frozenset[int]]:
    output = {name: index for index, name in enumerate(classes)}
    labels = []
    for row in range(len(split)):
        name = split.image_name(row)
        entry = content.get(name, content.get(Path(name).name))
        if entry is None:
            raise VitrailError(f"{file} has no entry for {name!r} or its file name; use [] for an image without labels.")
        found = (
            output[one] if one in output else _check_index(file, name, one, len(classes)) for one in _labels(file, name, entry)
        )
        labels.append(frozenset(found))
    return labels


def _labels(file: Path, name: str, entry: Any) -> list[int | str]:
    if isinstance(entry, list) and all(isinstance(one, int | str) for one in entry):
        return entry
    raise VitrailError(
        f"{file} has {str(entry)[:40]!r} for {name!r}; expected a list of class names or integers, such as [3, 7], or [] for an "
        "image without labels."
    )


def _check_index(file: Path, name: str, label: Any, classes: int) -> int:
    if isinstance(label, int) and not isinstance(label, bool) and 0 <= label < classes:
        return label
    raise VitrailError(f"{file} has the label {label!r} for {name!r}; expected a class name or an integer from 0 to {classes - 1}.")
