"""Messages for Python users: an option of the command line that an error advises is an argument here."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from vitrail.errors import VitrailError

P = ParamSpec("P")
T = TypeVar("T")
_OPTION = re.compile(r"--(bad-images|device|precision) (\w+)")


def for_python(text: str) -> str:
    """Write `--bad-images skip` as `bad_images='skip'`."""
    return _OPTION.sub(lambda match: f"{match[1].replace('-', '_')}='{match[2]}'", text)


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
