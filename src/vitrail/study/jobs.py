"""Several processes on one machine, each training a row at a time."""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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
    """Processes that stay alive between calls, so that each imports torch and opens its GPU once."""

    def __init__(self, count: int, device: str) -> None:
        context = multiprocessing.get_context("spawn")  # a forked process cannot use the GPU
        self._tasks, self._answers = context.Queue(), context.Queue()
        self._processes = [context.Process(target=_serve, args=(self._tasks, self._answers, device)) for _ in range(count)]
        for process in self._processes:
            process.start()

    def map(self, work: Work, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        for number, one in enumerate(arguments):
            self._tasks.put((number, work, one))
        found: dict[int, Any] = {}
        while len(found) < len(arguments):
            try:
                number, answer, error = self._answers.get(timeout=1)
            except queue.Empty:
                self._check_alive()
                continue
            if error is not None:
                raise error
            found[number] = answer
        return [found[number] for number in range(len(arguments))]

    def _check_alive(self) -> None:
        dead = [process for process in self._processes if process.exitcode is not None]
        if dead:
            raise VitrailError(
                f"A process of the study ended with status {dead[0].exitcode}; perhaps the memory was too small for "
                f"{len(self._processes)} at once. Run the same command again to resume, with fewer --jobs."
            )

    def terminate(self, *_: object) -> None:
        """Ask all processes to save and stop."""
        for process in self._processes:
            if process.is_alive():
                process.terminate()

    def close(self) -> None:
        for _ in self._processes:
            self._tasks.put(None)
        for process in self._processes:
            process.join(timeout=60)
            if process.is_alive():
                process.kill()


def _serve(tasks: Any, answers: Any, device: str) -> None:
    """Run tasks until there is none; errors are sent back."""
    threads = os.environ.get("OMP_NUM_THREADS")
    if threads is None:
        import torch

        torch.set_num_threads(1)
    with joined(device) as world:
        while (task := tasks.get()) is not None:
            number, work, arguments = task
            try:
                answers.put((number, work(*arguments, world), None))
            except (VitrailError, Interrupted) as error:
                answers.put((number, None, error))
            except Exception:
                answers.put((number, None, RuntimeError(traceback.format_exc())))


@contextmanager
def pool(count: int, device: str) -> Iterator[tuple[Pool, World]]:
    """Yield a pool of processes, or this process alone if `count` is 1."""
    if count == 1:
        with joined(device) as world:
            yield InProcess(world), world
        return
    if "RANK" in os.environ:
        raise VitrailError("Under torchrun all devices train one row together; use --jobs 1.")
    from vitrail.train.parallel import choose_device

    processes = Processes(count, device)
    before = signal.getsignal(signal.SIGTERM)

    def forward(number: int, frame: FrameType | None) -> None:
        processes.terminate()

    signal.signal(signal.SIGTERM, forward)
    try:
        yield processes, World(choose_device(device))
    except BaseException:
        processes.terminate()
        raise
    finally:
        processes.close()
        signal.signal(signal.SIGTERM, before)
