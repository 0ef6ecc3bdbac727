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
_CHANGES = re.compile(r"add --allow-change ([\w. ]*\w)")
_FLAG = re.compile(r"--(ignore-unknown-classes|overwrite)\b")


def for_python(text: str) -> str:
    """Write `--bad-images skip` as `bad_images='skip'`, and `--overwrite` as `overwrite=True`."""
    text = _VALUE.sub(lambda match: f"{_argument(match)}='{match[2]}'", text)
    text = _FLAG.sub(lambda match: f"{_argument(match)}=True", text)
    text = _CHANGES.sub(lambda match: f"pass allow_change={match[1].split()}", text)
    text = text.replace("--allow-change names", "allow_change names")
    return text.replace("another name for --out", "another name for out").replace("another --out", "another out")


def for_finetune(text: str) -> str:
    """As `for_python`, where options of the data are settings of the recipe: `**{'data.bad_images': 'skip'}`."""
    text = text.replace("--bad-images skip", "**{'data.bad_images': 'skip'}")
    return for_python(text.replace("--ignore-unknown-classes", "**{'data.ignore_unknown_classes': True}"))


def _argument(match: re.Match[str]) -> str:
    return match[1].replace("-", "_")


def python_errors(method: Callable[P, T], wording: Callable[[str], str] = for_python) -> Callable[P, T]:
    """Decorate a method so that its errors name arguments."""

    @wraps(method)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return method(*args, **kwargs)
        except VitrailError as error:
            error.args = (wording(str(error)), *error.args[1:])
            raise

    return called
