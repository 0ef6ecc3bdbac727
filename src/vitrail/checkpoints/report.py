"""A report on how each tensor was mapped between a file and a model."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from vitrail.errors import counted

Shape = tuple[int, ...]


@dataclass(frozen=True)
class MappedTensor:
    """One tensor of the model, and the tensor or tensors of the file it corresponds to."""

    ours: str
    theirs: tuple[str, ...]
    ours_shape: Shape
    theirs_shape: Shape
    rule: str  # how the values were rearranged; "same": not at all

    @property
    def parameters(self) -> int:
        return math.prod(self.ours_shape)


@dataclass
class Report:
    """All tensors: mapped, or dropped with a reason.

    `assumptions` are sentences on what the file does not show and was guessed; `notes` say what was done.
    """

    source: str
    format: str
    mapped: list[MappedTensor] = field(default_factory=list)
    dropped: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    assumptions: list[str] = field(default_factory=list)
    parameters: int = 0  # of the model in the file

    @property
    def loaded(self) -> int:
        return sum(row.parameters for row in self.mapped)

    @property
    def reshaped(self) -> list[MappedTensor]:
        return [row for row in self.mapped if row.rule != "same"]

    @property
    def percent(self) -> float:
        return 100.0 * self.loaded / self.parameters if self.parameters else 100.0

    def summary(self) -> str:
        parts = [f"{counted(len(self.mapped), 'tensor')} mapped", f"{len(self.reshaped)} of them rearranged"]
        parts += [f"{len(self.dropped)} dropped"] if self.dropped else []
        return f"{self.source}: {self.format}, {', '.join(parts)}, {self.percent:.1f} % of {self.parameters:,} parameters loaded"


def shape_text(shape: Shape) -> str:
    return "×".join(map(str, shape)) if shape else "scalar"
