"""Standard output of a command that must not end when its output can no longer be written."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any, TextIO

from vitrail.commands.terminal import say


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
