"""The table of variants, and how a name becomes a configuration."""

from __future__ import annotations

import re
from typing import Any

from vitrail.errors import VitrailError, did_you_mean
from vitrail.models.config import BiTConfig, ModelConfig, Pair, ResNetConfig, ViTConfig

#              width   mlp  heads depth
SIZES = {
    "Ti":       (192,   768,  3, 12),
    "S":        (384,  1536,  6, 12),
    "M":        (512,  2048,  8, 12),
    "B":        (768,  3072, 12, 12),
    "L":       (1024,  4096, 16, 24),
    "So400m":  (1152,  4304, 16, 27),
    "H":       (1280,  5120, 16, 32),
    "g":       (1408,  6144, 16, 40),
    "G":       (1664,  8192, 16, 48),
}  # fmt: skip
PATCHES = (8, 14, 16, 32)
STAGES = {26: (2, 2, 2, 2), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}

# size, blocks per stage, patch on the feature map. The /16 hybrids with an R50 move stage 4's blocks into stage 3 (§3.1).
# R+ViT-Ti/16 keeps only the ResNet's stem: 4 × 8, so its tokens stand for 32 pixels whatever its published name says.
HYBRIDS: dict[str, tuple[str, tuple[int, ...], int]] = {
    "R+ViT-Ti/16": ("Ti", (), 8),
    "R26+ViT-S/32": ("S", STAGES[26], 1),
    "R26+ViT-B/32": ("B", STAGES[26], 1),
    "R50+ViT-B/16": ("B", (3, 4, 9), 1),
    "R50+ViT-B/32": ("B", STAGES[50], 1),
    "R50+ViT-L/16": ("L", (3, 4, 9), 1),
    "R50+ViT-L/32": ("L", STAGES[50], 1),
}
BITS = tuple(f"BiT-{name}" for name in "R26x1 R50x1 R50x2 R50x3 R101x1 R101x3 R152x1 R152x2 R152x4".split())
VARIANTS = (*(f"ViT-{size}/{patch}" for size in SIZES for patch in PATCHES), *HYBRIDS, *BITS)

_VIT = re.compile(rf"ViT-({'|'.join(SIZES)})/([1-9]\d*)")
_BIT = re.compile(rf"BiT-R({'|'.join(map(str, STAGES))})x([1-9]\d*)")


class AmbiguousName(VitrailError):
    """Without regard to case, the name is that of several models: g and G."""


def model_config(name: str, *, outputs: int = 1000, image_size: int | Pair = 224, **changes: Any) -> ModelConfig:
    """Return the configuration a name stands for, with any field changed. See `create_model`."""
    plain = _named(canonical_name(name))
    if isinstance(plain, ViTConfig):
        changes = {**_consequences(changes), **changes}
    if "patch" in changes and isinstance(plain, ViTConfig) and plain.resnet is None:
        changes["name"] = f"{plain.name.split('/')[0]}/{_patch_text(changes['patch'])}"
    if changes.get("layers") is not None and "name" not in changes:
        changes["name"] = _renamed(plain, ResNetConfig(layers=changes["layers"]).layers, changes.get("patch"))
    return plain.replace(outputs=outputs, image_size=image_size, **changes)


def canonical_name(name: str) -> str:
    """Return the name as the paper writes it: `b/16`, `ViT-B_16` and `vit-b/16` are all `ViT-B/16`; `R50x1` is `BiT-R50x1`."""
    tried = [f"{start}{name.replace('_', '/')}" for start in ("", "ViT-", "BiT-")]
    for word in tried:
        if word in HYBRIDS or _VIT.fullmatch(word) or _BIT.fullmatch(word):
            return word
    for word in tried:  # only now without regard to case: g and G are different models
        matches = [known for known in _spellings(word) if known.casefold() == word.casefold()]
        if len(matches) == 1:
            return matches[0]
        if matches:
            raise AmbiguousName(f"{name!r} could be {' or '.join(matches)}: here capitals matter.")
    raise VitrailError(f"There is no model {name!r}.{did_you_mean(name, VARIANTS)} `vitrail models` lists them all.")


def _spellings(word: str) -> list[str]:
    """Return every name that has the numbers of `word`, so that any patch and any width factor is found whatever the case."""
    number = re.search(r"(\d+)$", word)
    last = number.group(1) if number else ""
    return [*HYBRIDS, *(f"ViT-{size}/{last}" for size in SIZES), *(f"BiT-R{depth}x{last}" for depth in STAGES)]


def _named(name: str) -> ModelConfig:
    if name in HYBRIDS:
        size, layers, patch = HYBRIDS[name]
        return _vit(name, size, patch, ResNetConfig(layers=layers))
    if match := _VIT.fullmatch(name):
        return _vit(name, match[1], int(match[2]), None)
    match = _BIT.fullmatch(name)
    assert match, name
    numerics = ResNetConfig(
        layers=STAGES[int(match[1])],
        multiplier=int(match[2]),
        group_norm_eps=1e-5,
        standardise="sqrt(var+eps)",
        standardise_eps=1e-10,
        padding="symmetric",
        pool_fill="zero",
    )
    return BiTConfig(name=name, resnet=numerics)


def _vit(name: str, size: str, patch: int, resnet: ResNetConfig | None) -> ViTConfig:
    width, mlp, heads, depth = SIZES[size]
    # The size is set by the caller; one that every patch divides keeps the table free of that question.
    square = patch * (resnet.stride if resnet else 1)
    return ViTConfig(
        name=name, width=width, mlp=mlp, heads=heads, depth=depth, patch=(patch, patch), resnet=resnet, image_size=(square, square)
    )


def _renamed(config: ModelConfig, layers: tuple[int, ...], patch: int | Pair | None) -> str:
    """Name a model with other stages as the paper does: a block has three convolutions, and root and head make two layers more."""
    depth = f"R{3 * sum(layers) + 2}" if layers else "R"
    if isinstance(config, BiTConfig):
        return f"BiT-{depth}x{config.resnet.multiplier}"
    if not isinstance(config, ViTConfig) or config.resnet is None:
        return config.name  # `replace` refuses the change
    stride = ResNetConfig(layers=layers).stride
    return f"{depth}+{config.name.split('+')[1].split('/')[0]}/{_patch_text(patch or config.patch, stride)}"


def _patch_text(patch: int | Pair, stride: int = 1) -> str:
    """Return the pixels of a patch of a map with this stride: 16, or 16x32 if its sides differ."""
    sides = patch if isinstance(patch, (tuple, list)) else (patch,)
    return "x".join(str(side * stride) for side in dict.fromkeys(sides))


def _consequences(changes: dict[str, Any]) -> dict[str, Any]:
    """Return what a change brings with it unless the caller says otherwise: mean pooling goes without a class token, and so on."""
    follows: dict[str, Any] = {}
    if changes.get("pooling") in ("mean", "map"):
        follows["class_token"] = False
    position = changes.get("position", "learned")
    if position == "relative":
        follows["position_at"] = "every-layer"
    if position in ("relative", "sincos2d", "none"):
        follows["position_prefix"] = False
    return follows
