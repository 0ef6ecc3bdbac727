"""Several processes on one machine, each training a row at a time."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from types import FrameType
from typing import Any, Protocol

from vitrail.errors import VitrailError
from vitrail.study.run import Interrupted
from vitrail.train.parallel import World, joined

Work = Callable[..., Any]
"""Called as work(*arguments, world)."""


class Pool(Protocol):
    """Runs functions, in this process or in others."""

    def map(self, work: Work, arguments: Sequence[tuple[Any, ...]]) -> list[Any]: ...


@dataclass(frozen=True)
class InProcess:
    """Runs everything here; under torchrun on every rank."""

    world: World

    def map(self, work: Work, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        return [work(*one, self.world) for one in arguments]


class Processes:
    """This process and others, which stay alive between calls, so that each imports torch and opens its GPU once.

    Each has a pipe of its own: with a shared queue, one that is killed while it reads would block the others.
    """

    def __init__(self, count: int, device: str, world: World) -> None:
        self.world = world
        context = multiprocessing.get_context("spawn")  # a forked process cannot use the GPU
        self._workers: dict[Connection, Any] = {}
        self._stopping = False
        for _ in range(count - 1):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, device))
            process.start()
            theirs.close()
            self._workers[ours] = process

    def map(self, work: Work, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        remaining = list(enumerate(arguments))[::-1]
        idle, busy = list(self._workers), dict[Connection, int]()
        found: dict[int, Any] = {}
        while len(found) < len(arguments):
            while idle and remaining:
                number, one = remaining.pop()
                worker = idle.pop(0)
                worker.send((work, one))
                busy[worker] = number
            if remaining:
                number, one = remaining.pop()
                found[number] = work(*one, self.world)
            for ready in wait(list(busy), timeout=0 if remaining else None):
                assert isinstance(ready, Connection)
                found[busy.pop(ready)] = self._answer(ready)
                idle.append(ready)
        return [found[number] for number in range(len(arguments))]

    def _answer(self, worker: Connection) -> Any:
        try:
            answer, error = worker.recv()
        except (EOFError, ConnectionResetError):
            process = self._workers[worker]
            process.join(timeout=10)
            if self._stopping:
                raise Interrupted(signal.SIGTERM) from None
            raise VitrailError(
                f"A process of the study ended with status {process.exitcode}; perhaps the memory was too small for "
                f"{len(self._workers) + 1} at once. Run the same command again to resume, with fewer --jobs."
            ) from None
        if error is not None:
            raise error
        return answer

    def terminate(self) -> None:
        """Ask all processes to save and stop."""
        self._stopping = True
        for process in self._workers.values():
            if process.is_alive():
                process.terminate()

    def close(self) -> None:
        for worker in self._workers:
            with contextlib.suppress(OSError):
                worker.send(None)
        for process in self._workers.values():
            process.join(timeout=60)
            if process.is_alive():
                process.kill()


def _serve(parent: Connection, device: str) -> None:
    """Run what arrives until there is nothing more; errors are sent back."""
    with joined(device) as world, contextlib.suppress(EOFError, KeyboardInterrupt):
        while (task := parent.recv()) is not None:
            work, arguments = task
            try:
                parent.send((work(*arguments, world), None))
            except (VitrailError, Interrupted) as error:
                parent.send((None, error))
            except Exception:
                parent.send((None, RuntimeError(traceback.format_exc())))


@contextmanager
def pool(count: int, device: str) -> Iterator[tuple[Pool, World]]:
    """Yield a pool of `count` processes, of which this is one."""
    if count > 1 and "RANK" in os.environ:
        raise VitrailError(f"--jobs is {count}, but under torchrun all devices train one row together; use --jobs 1.")
    with joined(device) as world:
        if count == 1:
            yield InProcess(world), world
            return
        processes = Processes(count, device, world)
        before = signal.signal(signal.SIGTERM, _interrupt)
        try:
            yield processes, world
        except BaseException:
            processes.terminate()
            raise
        finally:
            processes.close()
            signal.signal(signal.SIGTERM, before)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """End on SIGTERM while no run is in progress; a run saves and ends by itself."""
    raise Interrupted(number)
