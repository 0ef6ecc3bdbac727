"""Parquet tables, where pyarrow is installed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vitrail.errors import VitrailError
from vitrail.regular_files import utf8_path
from vitrail.text import to_bytes


def import_pyarrow(instead: str) -> Any:
    """Return pyarrow, or say how to install it and what to use instead."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise VitrailError(f"Parquet files need pyarrow: pip install 'vitrail[hub]'. Or use {instead}.") from error
    return pyarrow


def write_table(table: Any, path: Path) -> None:
    """Write a table to a file, whose path need not be UTF-8."""
    from pyarrow import parquet

    with utf8_path(path) as writable:
        parquet.write_table(table, writable)


@contextmanager
def opened_table(path: Path) -> Iterator[Any]:
    """Yield a Parquet file, opened for reading."""
    parquet = import_pyarrow("--format safetensors, or a file that ends in .npz").parquet
    with utf8_path(path) as readable, parquet.ParquetFile(readable) as file:
        yield file


def name_column(names: Sequence[str], *, as_bytes: bool | None = None) -> Any:
    """Return a column of text, or of bytes if a name is not valid Unicode. `as_bytes` decides for several files alike."""
    import pyarrow as arrow

    if not as_bytes:
        try:
            return arrow.array(names, type=arrow.string())
        except UnicodeEncodeError:
            if as_bytes is not None:
                raise
    return arrow.array([to_bytes(name) for name in names], type=arrow.binary())


def as_text(name: str | bytes) -> str:
    """Return a name from either kind of column."""
    return name.decode("utf-8", "surrogateescape") if isinstance(name, bytes) else name
