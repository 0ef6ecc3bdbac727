"""Where commands write: checks of output files before any work, and a standard output that may be lost."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Any, TextIO

from vitrail.commands.terminal import say
from vitrail.errors import VitrailError


def check_output_file(path: Path | None, *, overwrite: bool = False) -> None:
    """Refuse, before any work is done, a file that cannot be written, or that exists and may not be replaced."""
    if path is None or str(path) == "-":
        return
    if path.is_dir():
        raise VitrailError(f"{path} is a folder, but a file is to be written. Name a file in it.")
    if path.exists() and not overwrite:
        raise VitrailError(f"{path} exists already. Choose another name, or replace it with --overwrite.")
    check_place(path)


def check_place(path: Path) -> None:
    """Refuse a path below something that is not a folder, or is not writable."""
    place = path.absolute().parent
    while not os.path.lexists(place) and place != place.parent:
        place = place.parent
    if not place.is_dir():
        raise VitrailError(f"{path} cannot be written: {place} is not a folder. Choose another name.")
    if not os.access(place, os.W_OK | os.X_OK):
        raise VitrailError(f"{path} cannot be written: there is no permission to write to {place}. Choose another place.")


class TolerantOutput:
    """A stream that can be lost: the terminal hung up, the program at the other end of the pipe ended, the disk of the log is
    full. The rest of the output is then dropped, with a message, and the command continues."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self._lose(error)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._lose(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _lose(self, error: OSError) -> None:
        # What the stream still buffers is written when Python exits, which would fail and change the exit status.
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self._stream.fileno())
        os.close(null)
        with contextlib.suppress(OSError):
            say(f"vitrail: the output is lost ({error.strerror}); the run continues", file=sys.stderr)
