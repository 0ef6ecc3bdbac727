"""Write names that others chose (of files and classes) to terminals, JSON, CSV, Markdown and HTML.

A file name on Linux is any bytes; Python holds those that are not UTF-8 as lone surrogates, which no UTF-8 stream accepts. And
a name may contain control characters, which a terminal would obey.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

# Control characters except tab and newline, marks that reorder text, and lone surrogates.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_OTHER_SURROGATES = re.compile("([\ud800-\udc7f\udd00-\udfff]+)")  # not an undecodable byte of a file name
_UNSAFE_IN_JSON = re.compile("[\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str, *, one_line: bool = False) -> str:
    r"""Return the text with control characters and lone surrogates escaped, as in `\x1b`. A second call changes nothing."""
    text = _UNSAFE.sub(_escape, text)
    return text.replace("\n", "\\n").replace("\t", "\\t") if one_line else text


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    byte = code - 0xDC00 if 0xDC80 <= code <= 0xDCFF else code  # an undecodable byte of a file name
    return f"\\x{byte:02x}" if byte < 0x100 else f"\\u{byte:04x}"


def has_surrogates(text: str) -> bool:
    """Tell whether a name is not valid Unicode: it has bytes of a file name that are not UTF-8."""
    return not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text)


def to_json(value: Any, **options: Any) -> str:
    r"""Return JSON in readable Unicode, with what a terminal or UTF-8 could not take as `\u…`, so that it reads back equal."""
    text = json.dumps(value, ensure_ascii=False, **options)
    return _UNSAFE_IN_JSON.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def to_bytes(text: str) -> bytes:
    """Encode as UTF-8. Bytes of file names that were not UTF-8 are restored; any other lone surrogate is kept as its code."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        parts = _OTHER_SURROGATES.split(text)
        return b"".join(part.encode("utf-8", "surrogatepass" if k % 2 else "surrogateescape") for k, part in enumerate(parts))


def csv_line(cells: Iterable[Any]) -> str:
    r"""Return one row of a CSV file. `csv.writer` quotes a carriage return only if it is in its line terminator."""
    line = io.StringIO()
    csv.writer(line, lineterminator="\r\n").writerow(cells)
    return line.getvalue().removesuffix("\r\n") + "\n"


def to_csv(rows: Iterable[Sequence[Any]]) -> bytes:
    """Return a CSV file; names that are not UTF-8 keep their bytes."""
    return to_bytes("".join(map(csv_line, rows)))


def markdown(value: Any) -> str:
    """Return a value as Markdown text that is neither markup nor a second line."""
    text = printable(f"{value:,.4g}" if isinstance(value, float) else str(value), one_line=True)
    return re.sub(r"([\\`*_\[\]|#])", r"\\\1", text).replace("&", "&amp;").replace("<", "&lt;")


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return a table in Markdown; cells are escaped."""
    lines = [header, ["---"] * len(header), *([markdown(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def plain(value: Any) -> str:
    """Return a value of JSON in words, without quotes and braces."""
    if isinstance(value, Mapping):
        return ", ".join(f"{str(key).replace('_', ' ')} {plain(one)}" for key, one in value.items())
    if isinstance(value, list | tuple):
        return " ".join(plain(one) for one in value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)
