"""What a foreign format has to tell: how it is recognised, named, laid out and computed with."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from vitrail.checkpoints.archive import Archive
from vitrail.checkpoints.infer import Hints, Shapes
from vitrail.checkpoints.mapping import Row
from vitrail.errors import VitrailError
from vitrail.models import BiTConfig, ModelConfig, ViTConfig

# What every format but our own takes for granted about a ViT.
PLAIN: Mapping[str, tuple[Any, ...]] = {"attention": ("full",), "position_at": ("input",)}


@dataclass(frozen=True)
class Format:
    name: str
    title: str
    container: str  # what it is written as: "npz", "torch" (.safetensors or .pth) or "folder"
    recognise: Callable[[Collection[str]], bool]
    infer: Callable[[Shapes, Hints], ModelConfig]
    table: Callable[[ModelConfig], list[Row]]
    numerics: Callable[[ModelConfig], Mapping[str, Any]]  # fields that its own code fixes and its files do not say
    preset: str  # the preprocessing its published weights expect
    families: tuple[str, ...] = ("vit",)  # of "vit", "hybrid", "bit"
    needs: Mapping[str, tuple[Any, ...]] = field(default_factory=lambda: PLAIN)  # field → the values its files can hold
    respell: Callable[[Archive], None] = lambda archive: None  # other spellings of its names → the table's
    ignored: Mapping[str, str] = field(default_factory=dict)  # names its files may hold besides → why they are not needed

    def check_writable(self, config: ModelConfig) -> None:
        """Refuse a model this format has no words for."""
        if family(config) not in self.families:
            raise VitrailError(
                f"{self.title} files hold {' and '.join(_FAMILIES[name] for name in self.families)}; {config.name} is "
                f"{_FAMILIES[family(config)]}. Choose another format: `vitrail convert --help` lists them."
            )
        for name, allowed in self.needs.items():
            value = getattr(config, name, allowed[0])
            if value not in allowed:
                raise VitrailError(
                    f"{self.title} has no words for {name}={value!r} (only {' or '.join(map(repr, allowed))}), "
                    f"so the file would compute something else. The vitrail format holds every model."
                )

    def unsaid(self, config: ModelConfig) -> list[str]:
        """Sentences on numerics of this model that a file of this format cannot carry."""
        notes = []
        for name, theirs in self.numerics(config).items():
            ours = getattr(config, name, None) if hasattr(config, name) else getattr(getattr(config, "resnet", None), name, theirs)
            if ours != theirs and name != "position_resize":
                notes.append(
                    f"the file cannot say {name}={ours!r}: {self.title} computes with {theirs!r} unless it is told otherwise"
                )
        return notes


_FAMILIES = {"vit": "a ViT", "hybrid": "a hybrid", "bit": "a BiT"}


def family(config: ModelConfig) -> str:
    if isinstance(config, BiTConfig):
        return "bit"
    return "hybrid" if isinstance(config, ViTConfig) and config.resnet else "vit"
