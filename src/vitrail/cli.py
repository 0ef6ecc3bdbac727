"""The command line: maps command names to functions.

A command's module is imported only when that command runs, so `vitrail --help` is fast.
"""

from __future__ import annotations

import errno
import importlib
import logging
import os
import sys
from collections.abc import Collection, Sequence

from vitrail.commands.table import COMMANDS
from vitrail.cpus import usable_cpus, visible_cpus
from vitrail.errors import StoppedBySignal, VitrailError, did_you_mean
from vitrail.files import disk_reason
from vitrail.text import printable

# What a path that was given can be wrong with; such an error is a message, not a traceback.
_PATH_ERRORS = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.EEXIST, errno.ELOOP)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command; a `VitrailError` or a full disk is printed as one message, with exit status 2."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    _prepare_streams()
    _limit_threads()
    try:
        status = _run(arguments)
        if sys.stdout is not None:
            sys.stdout.flush()  # here, where an error can still be reported
        sys.exit(status)
    except VitrailError as error:
        _flush_what_can_be_written()
        print(printable(f"vitrail: {error}"), file=sys.stderr)  # noqa: T201
        sys.exit(128 + error.number if isinstance(error, StoppedBySignal) else 2)
    except KeyboardInterrupt:
        sys.exit(130)
    except RuntimeError as error:
        if "home directory" not in str(error):  # of pathlib: ~ of a user that the system does not know
            raise
        text = "vitrail: There is no home folder: ~ has no meaning, and downloads have no place. Set HOME, or avoid ~."
        print(text, file=sys.stderr)  # noqa: T201
        sys.exit(2)
    except BrokenPipeError:  # the reader of our output, such as `head`, has exited
        sys.stdout = None
        sys.exit(0)
    except OSError as error:
        reason = disk_reason(error)
        if not reason and error.filename and error.errno in _PATH_ERRORS:
            text = f"vitrail: {error.filename}: {error.strerror}. Check the path, or choose another one."
            print(printable(text), file=sys.stderr)  # noqa: T201
            sys.exit(2)
        if not reason:
            raise
        sys.stdout = None  # it may be what cannot be written
        where = f"write {error.filename}" if error.filename else "write the output"
        text = f"vitrail: Cannot {where}: {reason}. Free some space, or write to another disk."
        print(printable(text), file=sys.stderr)  # noqa: T201
        sys.exit(2)


def _flush_what_can_be_written() -> None:
    """Flush stdout before an error is reported; a full disk or a closed pipe behind it must not hide that error."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        sys.stdout = None


def _prepare_streams() -> None:
    """Let no character stop the output, and escape warnings that no handler takes, which Python prints itself."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(_PrintableLog())
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it reports a read-only home, and the fonts it looks for


class _PrintableLog(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def _limit_threads() -> None:
    """Let torch, once it is imported, start no more threads than the CPU quota of a container has CPUs."""
    cpus = usable_cpus()
    if cpus < visible_cpus():
        os.environ.setdefault("OMP_NUM_THREADS", str(cpus))


def _run(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_overview())  # noqa: T201
        return 0
    if arguments[0] == "--version":
        from vitrail.version import __version__

        print(f"vitrail {__version__}")  # noqa: T201
        return 0
    name = next((" ".join(arguments[:n]) for n in (2, 1) if " ".join(arguments[:n]) in COMMANDS), None)
    if name is None:
        group = [command for command in COMMANDS if command.startswith(f"{arguments[0]} ")]
        if group and arguments[1:2] in (["-h"], ["--help"]):
            print(_overview(group))  # noqa: T201
            return 0
        if group:
            given = " ".join(arguments[:2])
            hint = did_you_mean(given, group) if len(arguments) > 1 else ""
            raise VitrailError(f"There is no command {given!r}.{hint} Use one of: {', '.join(group)}.")
        raise VitrailError(f"There is no command {arguments[0]!r}.{did_you_mean(arguments[0], COMMANDS)} See `vitrail --help`.")
    module, function = COMMANDS[name][0].split(":")
    command = getattr(importlib.import_module(module), function)
    words = arguments[len(name.split()) :]
    from vitrail.commands.arguments import call

    return call(command, name, words) or 0


def _overview(names: Collection[str] = COMMANDS) -> str:
    width = max(map(len, names))
    rows = "\n".join(f"  {name:<{width}}  {COMMANDS[name][1]}" for name in names)
    return (
        f"Vitrail: the Vision Transformer paper as working software.\n\nCommands:\n{rows}\n\nEach command has --help with examples."
    )
