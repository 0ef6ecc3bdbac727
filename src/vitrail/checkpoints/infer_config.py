"""Infer a model's config from the tensor shapes in a file."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vitrail.checkpoints.archive import Archive
from vitrail.errors import VitrailError, counted
from vitrail.models import BiTConfig, ModelConfig, ResNetConfig, ViTConfig
from vitrail.models.variants import HYBRIDS, SIZES, STAGES

Pair = tuple[int, int]
DEFAULT_SIZE = 224


@dataclass
class Hints:
    """What shapes do not show: fields and image size given by the user, and the config.json next to the weights."""

    fields: dict[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] | None = None
    notes: list[str] = field(default_factory=list)
    assumptions: list[str] = field(default_factory=list)
    image_size: int | Pair | None = None


class Shapes:
    """The shapes of a file by tensor name; raises an error if one is missing or has a wrong number of dimensions."""

    def __init__(self, archive: Archive) -> None:
        self.path: Path = archive.path
        self.variant = archive.variant
        self._shapes = {name: tensor.shape for name, tensor in archive.tensors.items()}

    def __contains__(self, name: str) -> bool:
        return name in self._shapes

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __call__(self, name: str, ndim: int) -> tuple[int, ...]:
        if name not in self._shapes:
            raise VitrailError(
                f"{self.path} has no tensor {name!r}, which is needed to infer the model. The file may be incomplete: download "
                "or copy it again."
            )
        shape = self._shapes[name]
        if len(shape) != ndim or 0 in shape:
            raise VitrailError(
                f"{self.path}: {name!r} has shape {shape}; expected {counted(ndim, 'non-empty dimension')}. The file is corrupted, "
                "or of another kind of model."
            )
        return shape

    def count(self, template: str, start: int = 0) -> int:
        """Count the tensors that `template` names with consecutive settings from `start`."""
        number = start
        while template.format(number) in self._shapes:
            number += 1
        return number - start


def vit_config(
    shapes: Shapes,
    hints: Hints,
    *,
    numerics: Mapping[str, Any],
    width: int,
    depth: int,
    mlp: int,
    kernel: tuple[int, int, int],  # channels, height, width of the patch embedding
    num_positions: int | None,  # stored positions, including the prefix; None: no position embedding
    heads: int | None = None,
    covers_prefix: bool | None = None,  # whether positions include the prefix tokens; None: infer it
    channels: int = 3,
    resnet: ResNetConfig | None = None,
    **fields: Any,
) -> ModelConfig:
    """Build the config of a ViT or hybrid; fields given by the user override inferred ones."""
    given = dict(hints.fields)
    given_heads = given.pop("heads", None)
    if heads is not None and given_heads is not None and given_heads != heads:
        raise VitrailError(f"heads={given_heads} was given, but {shapes.path} has {counted(heads, 'head')}. Leave heads out.")
    heads = given_heads or heads or _published_heads(shapes.path, width, mlp, depth)
    patch = (kernel[1], kernel[2])
    prefix = int(fields["class_token"]) + int(fields.get("distill_token", False)) + fields.get("registers", 0)
    stride = resnet.stride if resnet else 1
    if covers_prefix is not None:
        given.setdefault("position_prefix", covers_prefix)
    grid, covered = _grid(shapes.path, num_positions, prefix, given, (patch[0] * stride, patch[1] * stride), hints)
    if num_positions is None:
        covered = False
    settings = {key: value for key, value in numerics.items() if key in ViTConfig.__dataclass_fields__}
    config = ViTConfig(
        name=_vit_name(width, mlp, heads, depth, patch, resnet),
        width=width,
        depth=depth,
        mlp=mlp,
        heads=heads,
        patch=patch,
        resnet=resnet,
        channels=channels if resnet else kernel[0],
        image_size=(grid[0] * patch[0] * stride, grid[1] * patch[1] * stride),
        position_prefix=covered,
        **{**settings, **fields},
    )
    if resnet and kernel[0] != resnet.out_channels:
        raise VitrailError(
            f"{shapes.path}: the patch embedding takes {kernel[0]} channels, but the ResNet returns "
            f"{resnet.out_channels}. The tensors belong to different models, or the file is corrupted."
        )
    return config.replace(**given)


def hint_grid(hints: Hints, size: Any, patch: Pair) -> None:
    """Set the grid from the image size in config.json, a number or (height, width), unless the user gave a grid."""
    size = (size, size) if isinstance(size, int) else size
    if isinstance(size, (list, tuple)) and len(size) == 2 and all(isinstance(side, int) for side in size):
        hints.fields.setdefault("grid", (size[0] // patch[0], size[1] // patch[1]))


def resnet_config(layers: tuple[int, ...], root: int, numerics: Mapping[str, Any], path: Path) -> ResNetConfig:
    if root % 32:
        raise VitrailError(f"{path}: the ResNet's first convolution has {root} filters; expected a multiple of 32, as BiT has.")
    settings = {key: value for key, value in numerics.items() if key in ResNetConfig.__dataclass_fields__}
    return ResNetConfig(layers=layers, multiplier=root / 64 if root % 64 else root // 64, **settings)


def bit_config(hints: Hints, resnet: ResNetConfig, *, outputs: int, channels: int) -> ModelConfig:
    depth = next((depth for depth, layers in STAGES.items() if layers == resnet.layers), 3 * sum(resnet.layers) + 2)
    given = dict(hints.fields)
    grid = given.pop("grid", None)
    size = (grid[0] * resnet.stride, grid[1] * resnet.stride) if grid else (DEFAULT_SIZE, DEFAULT_SIZE)
    if not grid and hints.image_size is None:
        hints.assumptions.append(
            f"the file does not store the image size: assumed {DEFAULT_SIZE}×{DEFAULT_SIZE}; change it with image_size= "
            "(`vitrail convert --image-size`)"
        )
    name = f"BiT-R{depth}x{resnet.multiplier}"
    return BiTConfig(name=name, outputs=outputs, channels=channels, image_size=size, resnet=resnet).replace(**given)


def _published_heads(path: Path, width: int, mlp: int, depth: int) -> int:
    for size_width, size_mlp, heads, size_depth in SIZES.values():
        if (size_width, size_mlp, size_depth) == (width, mlp, depth):
            return heads
    raise VitrailError(
        f"{path} has width {width}, depth {depth} and MLP {mlp}, which is not a published size, and fused q, k, v do not show the "
        f"number of heads. Pass heads=…; often it is {max(width // 64, 1)}. "
        "`vitrail convert FILE FOLDER --heads …` writes a checkpoint that stores it."
    )


def _grid(
    path: Path, num_positions: int | None, prefix: int, given: dict[str, Any], stride: Pair, hints: Hints
) -> tuple[Pair, bool]:
    """Infer rows and columns of the position embedding, and whether it includes the prefix tokens."""
    given_grid = given.pop("grid", None)
    covers_prefix = given.pop("position_prefix", None)
    asked = _asked_grid(hints.image_size, stride)
    if num_positions is None:
        if grid := given_grid or asked:
            return (int(grid[0]), int(grid[1])), False
        hints.assumptions.append(
            f"the file does not store the image size: assumed {DEFAULT_SIZE}×{DEFAULT_SIZE}; change it with grid=(rows, columns) "
            "(`vitrail convert --grid`)"
        )
        return (max(DEFAULT_SIZE // stride[0], 1), max(DEFAULT_SIZE // stride[1], 1)), False
    options = {
        bool(value): num_positions - prefix * bool(value)
        for value in ((True, False) if covers_prefix is None else (covers_prefix,))
    }
    if prefix == 0:
        options = {True: num_positions}
    if given_grid:
        fitting = [value for value, patches in options.items() if patches == given_grid[0] * given_grid[1]]
        if fitting:
            return (int(given_grid[0]), int(given_grid[1])), fitting[0]
        raise VitrailError(
            f"{path}: grid={tuple(given_grid)} does not match {counted(num_positions, 'position')} and "
            f"{counted(prefix, 'prefix token')}: rows × columns must be {' or '.join(map(str, options.values()))}."
        )
    squares = {value: math.isqrt(n) for value, n in options.items() if n > 0 and math.isqrt(n) ** 2 == n}
    if len(squares) == 1:
        ((covered, side),) = squares.items()
        if not covered:
            hints.notes.append(
                f"position embedding with {num_positions} entries read as {side}×{side} patches without prefix tokens"
            )
        return (side, side), covered
    fitting = [value for value, patches in options.items() if asked and patches == asked[0] * asked[1]]
    if asked and fitting:
        return asked, fitting[0]
    why = "is ambiguous" if squares else "is not a square grid"
    raise VitrailError(
        f"{path}: a position embedding with {num_positions} entries and {counted(prefix, 'prefix token')} {why}. "
        f"Pass grid=(rows, columns) (--grid on the command line)."
    )


def _asked_grid(size: int | Pair | None, stride: Pair) -> Pair | None:
    if size is None:
        return None
    height, width = (size, size) if isinstance(size, int) else size
    return height // stride[0], width // stride[1]


def _vit_name(width: int, mlp: int, heads: int, depth: int, patch: Pair, resnet: ResNetConfig | None) -> str:
    size = next((name for name, dims in SIZES.items() if dims == (width, mlp, heads, depth)), None)
    sides = "x".join(str(side) for side in dict.fromkeys(patch))
    label = size or f"{width}x{depth}"
    if resnet is None:
        return f"ViT-{label}/{sides}"
    for name, (hybrid, layers, side) in HYBRIDS.items():
        if (hybrid, layers, (side, side)) == (size, resnet.layers, patch) and resnet.multiplier == 1:
            return name
    return f"R{3 * sum(resnet.layers) + 2}x{resnet.multiplier}+ViT-{label}/{patch[0] * resnet.stride}"
