"""What a study is: a grid of changes to two recipes, how it is drawn, and what the paper found."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from vitrail.errors import VitrailError, did_you_mean
from vitrail.train.config import Recipe
from vitrail.train.plain import flatten

if TYPE_CHECKING:
    from vitrail.study.ladders import Ladder
    from vitrail.study.summary import Summary

Changes = Mapping[str, Any]
"""Recipe settings by their dotted names, as on the command line: {"optim.lr": 1e-3}."""
Metric = Literal["few_shot", "finetuned", "pretrained"]
Agreement = Literal["yes", "partly", "no", "unclear"]

METRICS: dict[Metric, str] = {
    "few_shot": "few-shot accuracy on the target",
    "finetuned": "fine-tuned accuracy on the target",
    "pretrained": "accuracy on the pre-training set",
}


@dataclass(frozen=True, kw_only=True)
class Point:
    """One model of a study: pre-trained, then transferred."""

    series: str
    """Its line or group in the figure."""
    label: str
    """Its name within the series."""
    x: float | None = None
    """Its place on the axis, where that is not a column of the results."""
    pretrain: Changes | None = field(default_factory=dict)
    """Changes to the pre-training recipe; None: no pre-training."""
    finetune: Changes = field(default_factory=dict)
    """Changes to the fine-tuning recipe."""
    length: float = 1.0
    """Length of the pre-training relative to that of the other points."""
    priority: int = 0
    """The first to be left out when the budget is short are the points with the highest number; 0 is never left out."""


@dataclass(frozen=True, kw_only=True)
class Plot:
    """How a study is drawn."""

    kind: Literal["lines", "categories"]
    metrics: tuple[Metric, ...] = ("few_shot", "finetuned")
    """One panel each."""
    x: str = "x"
    """For lines: the column on the horizontal axis."""
    x_label: str = ""
    x_log: bool = False
    x_percent: bool = False
    in_every_line: str | None = None
    """The series whose point belongs to every line."""


@dataclass(frozen=True)
class Outcome:
    """What a study's results say about a finding of the paper."""

    ours: str
    agrees: Agreement
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something the paper found, and how to look for it in a study's results."""

    claim: str
    where: str
    """Figure or table of the paper."""
    paper: str
    """The paper's values."""
    judge: Callable[[Summary], Outcome]
    number: int | None = None
    """Its place among the eight claims of RESULTS.md; None: not one of them."""


@dataclass(frozen=True, kw_only=True)
class Study:
    name: str
    title: str
    mirrors: str
    """The figure or table of the paper that it repeats in small."""
    about: str
    """One or two sentences: what is varied and what is held fixed."""
    points: Callable[[Ladder], Sequence[Point]]
    plot: Plot
    findings: tuple[Finding, ...]
    few_shot: bool = True
    finetune: bool = True
    inspect: bool = False
    """Whether position embeddings and attention distances of the pre-trained models are measured too."""


def changed(recipe: Recipe, changes: Changes) -> Recipe:
    """Return the recipe with some settings changed, given by their dotted names."""
    known = flatten(recipe)
    by_part: dict[str, dict[str, Any]] = {}
    for name, value in changes.items():
        if name not in known:
            raise VitrailError(f"There is no setting {name}.{did_you_mean(name, known)}")
        part, _, inner = name.rpartition(".")
        by_part.setdefault(part, {})[inner] = value
    top = by_part.pop("", {})
    parts = {part: dataclasses.replace(getattr(recipe, part), **values) for part, values in by_part.items()}
    return recipe.replace(**parts, **top)
