"""Run `vitrail bench` on a machine without tyro: the same options, measurements, tables and files.

    python benchmarks/bench.py --model B/16 L/16 --task train --against timm --out benchmarks/results/bench

The options are explained in docs/bench.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import shlex
import sys
import types
import typing
import warnings
from typing import Any

from vitrail.bench import BenchPlan, run
from vitrail.bench.results import Row
from vitrail.errors import VitrailError


def main() -> int:
    warnings.simplefilter("ignore")
    logging.getLogger("vitrail").setLevel(logging.ERROR)
    try:
        plan = BenchPlan(**vars(build_parser().parse_args()))
        rows = run(plan, log=lambda message: print(message, file=sys.stderr, flush=True), command=shlex.join(["python", *sys.argv]))
    except VitrailError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    report(rows)
    return 0


def build_parser() -> argparse.ArgumentParser:
    """Build a parser with one option per field of the plan."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    hints = typing.get_type_hints(BenchPlan)
    for field in dataclasses.fields(BenchPlan):
        flag, kind = f"--{field.name.replace('_', '-')}", _without_none(hints[field.name])
        if kind is bool:
            parser.add_argument(flag, action="store_true")
        elif typing.get_origin(kind) is tuple:
            choices = typing.get_args(typing.get_args(kind)[0]) or None
            parser.add_argument(flag, nargs="*", default=field.default, action=_AsTuple, choices=choices)
        elif typing.get_origin(kind) is typing.Literal:
            parser.add_argument(flag, default=field.default, choices=typing.get_args(kind))
        else:
            parser.add_argument(flag, default=field.default, type=kind)
    return parser


class _AsTuple(argparse.Action):
    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, tuple(values))


def _without_none(hint: Any) -> Any:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return next(kind for kind in typing.get_args(hint) if kind is not type(None))
    return hint


def report(rows: list[Row]) -> None:
    try:
        from vitrail.commands.bench_table import console_for_tables, show
    except ModuleNotFoundError:  # rich may be missing too
        for row in rows:
            print({name: value for name, value in dataclasses.asdict(row).items() if value not in (None, "")})
        return
    show(rows, console_for_tables())


if __name__ == "__main__":
    sys.exit(main())
