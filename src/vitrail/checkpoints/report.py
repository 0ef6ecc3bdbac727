"""What happened to each tensor on its way into a model or out of one."""

from __future__ import annotations

from dataclasses import dataclass, field

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Mapped:
    """One tensor of the model, and the tensor or tensors of the file it is made of."""

    ours: str
    theirs: tuple[str, ...]
    ours_shape: Shape
    theirs_shape: Shape
    rule: str  # how the values were rearranged; "same" where they were not

    @property
    def parameters(self) -> int:
        count = 1
        for side in self.ours_shape:
            count *= side
        return count


@dataclass
class Report:
    """Every tensor accounted for: mapped, or dropped and why. `notes` are sentences a user should see."""

    source: str
    format: str
    mapped: list[Mapped] = field(default_factory=list)
    dropped: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    parameters: int = 0  # of the model the file describes

    @property
    def loaded(self) -> int:
        return sum(row.parameters for row in self.mapped)

    @property
    def reshaped(self) -> list[Mapped]:
        return [row for row in self.mapped if row.rule != "same"]

    @property
    def percent(self) -> float:
        return 100.0 * self.loaded / self.parameters if self.parameters else 100.0

    def summary(self) -> str:
        parts = [f"{len(self.mapped)} tensors mapped", f"{len(self.reshaped)} of them rearranged"]
        parts += [f"{len(self.dropped)} dropped"] if self.dropped else []
        return f"{self.source}: {self.format}, {', '.join(parts)}, {self.percent:.1f} % of {self.parameters:,} parameters loaded"


def size_text(shape: Shape) -> str:
    return "×".join(map(str, shape)) if shape else "scalar"
