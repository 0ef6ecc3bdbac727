"""Class names of ImageNet-1k and ImageNet-21k: WordNet IDs and words, in the order of the outputs of published weights.

ImageNet-1k is sorted by WordNet ID. ImageNet-21k is in the order of Google's weights (21,843 classes), which timm keeps.
`benchmarks/make_imagenet_classes.py` writes the file with the names.
"""

from __future__ import annotations

import gzip
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

ClassSet = Literal["1k", "21k"]
SETS: dict[int, ClassSet] = {1000: "1k", 21843: "21k"}
"""The set of classes that a published model with this number of outputs has."""
_FILE = Path(__file__).with_name("imagenet_classes.tsv.gz")
_AGREEMENT = 0.95  # published lists of words differ in a few spellings


@dataclass(frozen=True)
class ImageNetClass:
    """One class: `label` is short and unique in its set, `words` are all words of WordNet, separated by commas."""

    wordnet_id: str
    label: str
    words: str


@lru_cache
def classes(which: ClassSet) -> tuple[ImageNetClass, ...]:
    """Return the classes of a set in the order of the outputs."""
    rows = _rows()[: 21843 if which == "21k" else None]
    chosen = [(wordnet_id, words) for flags, wordnet_id, words in rows if which == "21k" or "k" in flags]
    if which == "1k":
        chosen.sort()
    labels = _labels(chosen)
    return tuple(ImageNetClass(wordnet_id, label, words) for (wordnet_id, words), label in zip(chosen, labels, strict=True))


def labels(which: ClassSet) -> tuple[str, ...]:
    """Return a short, unique name of each class: `tench`; `maillot, tank suit` where the first word is not unique."""
    return tuple(one.label for one in classes(which))


def wordnet_ids(which: ClassSet) -> tuple[str, ...]:
    return tuple(one.wordnet_id for one in classes(which))


@lru_cache
def subset(name: Literal["a", "r"]) -> tuple[int, ...]:
    """Return the 200 outputs of an ImageNet-1k model that are classes of ImageNet-A or ImageNet-R, in ascending order."""
    flagged = {wordnet_id for flags, wordnet_id, _ in _rows() if name in flags}
    return tuple(k for k, one in enumerate(wordnet_ids("1k")) if one in flagged)


@lru_cache(maxsize=8)
def recognise(names: tuple[str, ...]) -> tuple[str, ...] | None:
    """Return the WordNet ID of each class name, if the names are a whole set of ImageNet in its order; otherwise None.

    A name may be the WordNet ID, the label, any of the words or all of them: other libraries' lists are recognised, too. A few
    unknown spellings are accepted, but not the name of another class: then the order is another one.
    """
    which = SETS.get(len(names))
    if which is None:
        return None
    unknown = _unrecognised(names, which)
    if len(unknown) > (1 - _AGREEMENT) * len(names):
        return None
    every = _all_spellings(which)
    return None if any(_plain(names[k]) in every for k in unknown) else wordnet_ids(which)


def same_classes(one: Sequence[str] | None, other: Sequence[str] | None) -> bool:
    """Tell whether two lists name the same classes in the same order; WordNet IDs and words of ImageNet are the same."""
    if one is None or other is None or len(one) != len(other):
        return False
    first, second = tuple(one), tuple(other)
    if first == second:
        return True
    if recognise(first) is None or recognise(second) is None:
        return False
    which = SETS[len(first)]
    return all(first[k] == second[k] for k in set(_unrecognised(first, which)) & set(_unrecognised(second, which)))


def unique_names(names: Sequence[str]) -> tuple[str, ...]:
    """Replace names that occur twice in a list of ImageNet's classes (`crane`, in several published lists) by our labels."""
    which = SETS.get(len(names))
    if which is None or recognise(tuple(names)) is None:
        return tuple(names)
    counts = Counter(names)
    return tuple(one.label if counts[name] > 1 else name for name, one in zip(names, classes(which), strict=True))


@lru_cache(maxsize=8)
def _unrecognised(names: tuple[str, ...], which: ClassSet) -> tuple[int, ...]:
    """Return the positions whose name is no spelling of the class there."""
    pairs = zip(names, classes(which), strict=True)
    return tuple(k for k, (name, one) in enumerate(pairs) if _plain(name) not in _spellings(one))


@lru_cache
def _all_spellings(which: ClassSet) -> frozenset[str]:
    return frozenset(word for one in classes(which) for word in _spellings(one))


def _spellings(one: ImageNetClass) -> set[str]:
    return {_plain(name) for name in (one.wordnet_id, one.label, one.words, *one.words.split(", "))}


def _plain(name: str) -> str:
    """Return a name without what published lists write differently: `crane (bird)` is `crane bird` in torchvision's."""
    return " ".join(re.sub(r"[_,()]", " ", name).casefold().split())


def _labels(chosen: Sequence[tuple[str, str]]) -> list[str]:
    """Use the first word; all words where it is not unique; and the WordNet ID with them where these are not unique either."""
    first = Counter(words.split(", ")[0] for _, words in chosen)
    all_words = Counter(words for _, words in chosen)
    found = []
    for wordnet_id, words in chosen:
        short = words.split(", ")[0]
        found.append(short if first[short] == 1 else words if all_words[words] == 1 else f"{words} ({wordnet_id})")
    return found


@lru_cache
def _rows() -> tuple[tuple[str, str, str], ...]:
    lines = gzip.decompress(_FILE.read_bytes()).decode().splitlines()
    rows = []
    for line in lines:
        if not line.startswith("#"):
            flags, wordnet_id, words = line.split("\t")
            rows.append((flags, wordnet_id, words))
    return tuple(rows)
