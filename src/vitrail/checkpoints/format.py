"""The description of a checkpoint format: how to detect it, its tensor names and layouts, and its numerics."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from vitrail.checkpoints.archive import Archive
from vitrail.checkpoints.infer_config import Hints, Shapes
from vitrail.checkpoints.mapping import Row
from vitrail.errors import VitrailError
from vitrail.models import BiTConfig, ModelConfig, ViTConfig

# What every format but our own assumes about a ViT.
PLAIN: Mapping[str, tuple[Any, ...]] = {"attention": ("full",), "position_at": ("input",), "qk_norm": (False,)}


@dataclass(frozen=True)
class Format:
    name: str
    title: str
    container: str  # "npz", "torch" (.safetensors or .pth) or "folder"
    matches: Callable[[Collection[str]], bool]
    infer_config: Callable[[Shapes, Hints], ModelConfig]
    rows: Callable[[ModelConfig], list[Row]]
    numerics: Callable[[ModelConfig], Mapping[str, Any]]  # config fields that its own code fixes and its files do not store
    preset: str  # the preprocessing preset its published weights expect
    families: tuple[str, ...] = ("vit",)  # of "vit", "hybrid", "bit"
    supports: Mapping[str, tuple[Any, ...]] = field(default_factory=lambda: PLAIN)  # config field → the values its files can store
    normalise_names: Callable[[Archive], None] = lambda archive: None  # renames variants of tensor names to those of `rows`
    ignored: Mapping[str, str] = field(default_factory=dict)  # regex of further tensor names → why they are not needed

    def check_writable(self, config: ModelConfig) -> None:
        """Raise an error if this format cannot store the model."""
        if family(config) not in self.families:
            raise VitrailError(
                f"{self.title} files can store {' and '.join(_FAMILIES[name] for name in self.families)}, but {config.name} is "
                f"{_FAMILIES[family(config)]}. Choose another format: `vitrail convert --help` lists them."
            )
        for name, allowed in self.supports.items():
            value = getattr(config, name, allowed[0])
            if value not in allowed:
                raise VitrailError(
                    f"{self.title} cannot store {name}={value!r} (only {' or '.join(map(repr, allowed))}), "
                    f"so the file would be another model. The vitrail format can store every model."
                )

    def unstored_numerics(self, config: ModelConfig, stored: ModelConfig | None = None) -> list[str]:
        """List the numerics of this model that a file of this format cannot store; `stored` is what a folder's config.json says."""
        notes = []
        for name, theirs in self.numerics(config).items():
            ours = _numeric(config, name, theirs)
            theirs = theirs if stored is None else _numeric(stored, name, theirs)
            if ours != theirs and name != "position_resize":
                notes.append(f"the file cannot store {name}={ours!r}: {self.title} uses {theirs!r} by default")
        return notes


def _numeric(config: ModelConfig, name: str, default: Any) -> Any:
    return getattr(config, name) if hasattr(config, name) else getattr(getattr(config, "resnet", None), name, default)


_FAMILIES = {"vit": "a ViT", "hybrid": "a hybrid", "bit": "a BiT"}


def family(config: ModelConfig) -> str:
    if isinstance(config, BiTConfig):
        return "bit"
    return "hybrid" if isinstance(config, ViTConfig) and config.resnet else "vit"
