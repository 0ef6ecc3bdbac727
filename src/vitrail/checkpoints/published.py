"""Published weights by the paper's names: `ViT-B/16`, or `ViT-B/16@mae` where a tag chooses among several.

`published.csv` is the table. The first row of a name is its default: weights that classify ImageNet-1k where there are any, and of
these `augreg-in21k-ft-in1k` where it exists. Accuracies are those of timm's `results-imagenet.csv` (commit 0173a13), with timm's
preprocessing on ImageNet's 50,000 validation images.
"""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from vitrail.checkpoints.download import is_url
from vitrail.data.imagenet import SETS, ClassSet
from vitrail.errors import VitrailError, counted, did_you_mean
from vitrail.models.variants import AmbiguousName, canonical_name

SEPARATOR = "@"
FIGURES = "timm's results-imagenet.csv (commit 0173a13)"
_LIKE_A_NAME = re.compile(r"(R\d*\+)?ViT-\w+([/_]\d+)?|(BiT-)?R\d+x\d+|\w{1,6}[/_]\d+", re.IGNORECASE)
_FILE = Path(__file__).with_name("published.csv")


@dataclass(frozen=True)
class PublishedWeights:
    """One row of the table."""

    name: str
    tag: str
    source: str
    """`hf:owner/name`, or the URL of a file of Google's."""
    image_size: int
    outputs: int
    """0: a backbone without a head."""
    parameters: int
    top1: float | None
    """Published top-1 and top-5 accuracy on ImageNet-1k in percent; None if there is none."""
    top5: float | None
    paper: str
    """arXiv number."""
    licence: str

    @property
    def reference(self) -> str:
        return f"{self.name}{SEPARATOR}{self.tag}"

    @property
    def repository(self) -> str | None:
        """`owner/name` on the Hub; None if the weights are not there."""
        return self.source.removeprefix("hf:") if self.source.startswith("hf:") else None

    @property
    def megabytes(self) -> float:
        """Size of the download: float32 weights; the rest is a few kilobytes."""
        return self.parameters * 4 / 1e6

    @property
    def class_set(self) -> ClassSet | None:
        """The ImageNet classes of the outputs."""
        return SETS.get(self.outputs)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        values = {key: getattr(self, key) for key in self.__dataclass_fields__}
        return {"reference": self.reference, **values, "megabytes": round(self.megabytes, 1), "default": self is default(self.name)}


@lru_cache
def published_weights() -> tuple[PublishedWeights, ...]:
    """Return all rows of the table, the default of each name first."""
    with _FILE.open(newline="", encoding="utf-8") as handle:
        return tuple(_row(values) for values in csv.DictReader(handle))


def names() -> tuple[str, ...]:
    """Return the names with published weights."""
    return tuple(dict.fromkeys(one.name for one in published_weights()))


def tags(name: str) -> tuple[PublishedWeights, ...]:
    """Return all weights of a canonical name, the default first."""
    return tuple(one for one in published_weights() if one.name == name)


def default(name: str) -> PublishedWeights:
    return tags(name)[0]


def find(reference: str) -> PublishedWeights | None:
    """Return the weights that `NAME`, `NAME@TAG` or timm's own name (`vit_base_patch16_224.mae`) stands for.

    None if it is not the name of a model, such as a path, a URL or hf:owner/name. A model without published weights, or without
    that tag, is an error that lists them.
    """
    if reference.startswith("hf:") or is_url(reference):
        return None
    by_timm_name = {_timm_name(one): one for one in published_weights() if one.repository}
    if reference.removeprefix("timm/") in by_timm_name:
        return by_timm_name[reference.removeprefix("timm/")]
    word, separator, tag = reference.partition(SEPARATOR)
    try:
        name = canonical_name(word)
    except AmbiguousName:
        raise
    except VitrailError:
        if separator and _LIKE_A_NAME.fullmatch(word):
            raise
        return None  # a path may have an @, too: photo@2x.jpg
    known = tags(name)
    if not known:
        raise VitrailError(_no_weights(name))
    if not separator:
        return known[0]
    wanted = tag.replace("_", "-").casefold()
    chosen = next((one for one in known if one.tag == wanted), None)
    if chosen is None:
        raise VitrailError(_no_tag(name, tag, wanted, known))
    return chosen


def did_you_mean_published(reference: str) -> str:
    """Return a hint for timm's name without its tag, and for the Hub's owner/name without hf:; otherwise nothing."""
    full = [_timm_name(one) for one in published_weights() if one.repository]
    if (found := next((name for name in full if name.startswith(f"{reference.removeprefix('timm/')}.")), None)) is not None:
        return f" Did you mean {found}?"
    on_the_hub = re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", reference) and not Path(reference).parent.exists()
    return f" On the Hub it would be hf:{reference}." if on_the_hub else ""


def of_timm_config(architecture: str, tag: str) -> PublishedWeights | None:
    """Return the weights of an architecture and tag of timm's config.json, if they are in the table."""
    return next((one for one in published_weights() if _timm_name(one) == f"{architecture}.{tag}"), None)


def _no_weights(name: str) -> str:
    family, _, _ = name.partition("/")
    same = [one for one in names() if one.partition("/")[0] == family]
    others = f"There are weights of {_listed(same)}." if same else f"There are weights of {_listed(list(names()))}."
    return (
        f"There are no published weights of {name}. {others} `vitrail models --pretrained` lists them all; "
        f"`vitrail.create_model({name!r})` makes an untrained model."
    )


def _no_tag(name: str, tag: str, wanted: str, known: tuple[PublishedWeights, ...]) -> str:
    every = [one.tag for one in known]
    begin = [one for one in every if wanted and one.startswith(wanted)]
    if not tag:
        return f"The tag after {name}{SEPARATOR} is missing. {name} has {_listed(every)}; without {SEPARATOR} it is {every[0]}."
    if len(begin) > 1:
        return f"{name}{SEPARATOR}{tag} could be {counted(len(begin), 'tag')}: {_listed(begin)}. Write one of them in full."
    return f"{name} has no published weights tagged {tag!r}.{did_you_mean(wanted, every)} Its tags are {_listed(every)}."


def _listed(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def _timm_name(one: PublishedWeights) -> str:
    return (one.repository or "").partition("/")[2]


def _row(values: dict[str, str]) -> PublishedWeights:
    numbers: dict[str, Any] = {key: int(values[key]) for key in ("image_size", "outputs", "parameters")}
    shares = {key: float(values[key]) if values[key] else None for key in ("top1", "top5")}
    return PublishedWeights(**{**values, **numbers, **shares})
