"""Messages for Python users: an option of the command line that an error advises is an argument here."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from vitrail.errors import VitrailError

P = ParamSpec("P")
T = TypeVar("T")
_VALUE = re.compile(r"--(bad-images|device|match|precision) (\w+)")
_FLAG = re.compile(r"--(ignore-unknown-classes|overwrite)\b")


def for_python(text: str) -> str:
    """Write `--bad-images skip` as `bad_images='skip'`, and `--overwrite` as `overwrite=True`."""
    text = _VALUE.sub(lambda match: f"{_argument(match)}='{match[2]}'", text)
    text = _FLAG.sub(lambda match: f"{_argument(match)}=True", text)
    return text.replace("another name for --out", "another name for out")


def _argument(match: re.Match[str]) -> str:
    return match[1].replace("-", "_")


def python_errors(method: Callable[P, T]) -> Callable[P, T]:
    """Decorate a method so that its errors name arguments."""

    @wraps(method)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return method(*args, **kwargs)
        except VitrailError as error:
            error.args = (for_python(str(error)), *error.args[1:])
            raise

    return called
