"""Change values in the JSON of a file: of the whole file, of one line, or of a safetensors header. The result is valid JSON."""

from __future__ import annotations

import copy
import json
import random
import struct
from collections.abc import Iterator
from typing import Any

VALUES: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 3, 10**5, 10**9, 10**18, 10**30, 0.5, 1e-320, 1e308, -1e308, float("nan"), float("inf"),
    "", "x", "1", "\ud800", "\0", "../../other", "/dev/zero", "float32", "F64", "9" * 5000,
    [], [1], [[]], [0, 0], [-1, 16], [1.5], ["x"], [None], [10**9, 10**9], [1] * 1000, {}, {"a": 1}, {"x": {"y": []}},
)  # fmt: skip


def mutate_json(content: bytes, rng: random.Random) -> bytes | None:
    """Replace, remove, rename or repeat values at any depth; None if the content has no JSON."""
    if content[8:9] == b"{" and (size := struct.unpack("<Q", content[:8])[0]) < len(content):
        header = _mutated(content[8 : 8 + size], rng)
        return header and struct.pack("<Q", len(header)) + header + content[8 + size :]
    if content[:1] not in (b"{", b"["):
        return None
    whole = _mutated(content, rng)
    if whole is not None:
        return whole
    lines = content.splitlines()
    number = rng.randrange(len(lines))
    line = _mutated(lines[number], rng)
    return line and b"".join(one + b"\n" for one in (*lines[:number], line, *lines[number + 1 :]))


def _mutated(text: bytes, rng: random.Random) -> bytes | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        places = list(_places(value))
        if not places or rng.random() < 0.02:
            value = copy.deepcopy(rng.choice(VALUES))
        else:
            _change(*rng.choice(places), rng)
    return json.dumps(value).encode()


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield (container, key) of all values; only the first of a long list."""
    if isinstance(value, dict | list):
        for key in list(value) if isinstance(value, dict) else range(min(len(value), 6)):
            yield value, key
            yield from _places(value[key])


def _change(container: Any, key: Any, rng: random.Random) -> None:
    value, choice = container[key], rng.random()
    if choice < 0.12:
        del container[key]
    elif choice < 0.2 and isinstance(container, dict):
        container[rng.choice(("x", "", "\ud800", f"{key}x"))] = container.pop(key)
    elif choice < 0.3 and isinstance(value, int | float):
        container[key] = value * rng.choice((-1, 0, 2, 0.5, 1000))
    elif choice < 0.35 and isinstance(value, list):
        container[key] = rng.choice((value[::-1], value * 2, value[1:]))
    else:
        container[key] = copy.deepcopy(rng.choice(VALUES))
