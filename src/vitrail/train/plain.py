"""Settings as plain values: what JSON has, flat names such as `optim.lr`, and what differs between two of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from vitrail.errors import VitrailError, did_you_mean

T = TypeVar("T")


def to_plain(value: Any) -> Any:
    """Dataclasses, tuples and the like as JSON has them."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, tuple | list):
        return [to_plain(one) for one in value]
    return value


def from_plain(kind: type[T], values: Mapping[str, Any], path: str = "") -> T:
    """Invert `to_plain`; unknown names, and values of other types, are refused."""
    if not isinstance(values, Mapping):
        raise TypeError(f"{path.rstrip('.') or 'the recipe'} is not an object of settings")
    hints = get_type_hints(kind)
    unknown = sorted(set(values) - set(hints))
    if unknown:
        raise VitrailError(f"There is no setting {path}{unknown[0]}.{did_you_mean(unknown[0], hints)}")
    given = {name: _fitted(hints[name], value, f"{path}{name}.") for name, value in values.items()}
    return kind(**given)


def _fitted(hint: Any, value: Any, path: str) -> Any:
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return from_plain(hint, value, path)
    if not _has_type(value, hint):
        raise TypeError(f"{path.rstrip('.')} is {str(value)[:40]!r}")
    if isinstance(value, list):
        return tuple(value)
    return value


def _has_type(value: Any, hint: Any) -> bool:
    """Tell whether a value of JSON can be that of a setting with this type."""
    kind, inner = get_origin(hint), get_args(hint)
    if kind in (Union, UnionType):
        return any(_has_type(value, one) for one in inner)
    if kind is Literal:
        return type(value) in {type(one) for one in inner}
    if kind is tuple:
        return isinstance(value, list) and all(any(_has_type(one, each) for each in inner if each is not ...) for one in value)
    if hint in (int, float):  # 64.0 is a whole number, as Python's users may write it
        return isinstance(value, int | float) and not isinstance(value, bool) and (hint is float or value % 1 == 0)
    return isinstance(value, hint)


def flatten(values: Any, path: str = "") -> dict[str, Any]:
    """Nested settings as `optim.lr` and the like."""
    values = to_plain(values)
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat.update(flatten(value, f"{path}{name}.") if isinstance(value, dict) else {f"{path}{name}": value})
    return flat


def differences(one: Any, two: Any) -> dict[str, tuple[Any, Any]]:
    """Settings that differ, each with both values."""
    first, second = flatten(one), flatten(two)
    return {key: (first.get(key), second.get(key)) for key in {**first, **second} if first.get(key) != second.get(key)}
