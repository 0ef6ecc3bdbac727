"""`ModelWorker`: one thread that owns a model and its queue.

It never waits for a fuller batch: while it computes, images arrive, and the next batch takes them all. So one request alone is not
delayed, and batches grow with the load. On a GPU a batch that is full already is launched while the one before is computed, so that
the GPU does not wait for Python.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from vitrail.checkpoints import Bundle
from vitrail.errors import VitrailError
from vitrail.serve.engine import Analysis, Engine, Image, Kind, Launched
from vitrail.serve.errors import ServiceError, queue_full, too_many_images, unavailable
from vitrail.serve.metrics import Metrics
from vitrail.serve.settings import ServeSettings

log = logging.getLogger("vitrail.serve")
Work = Kind | Analysis
_DEADLINE_SHARE = 0.75  # of the deadline may be spent waiting; the rest is for decoding and for computation that takes longer
_CAPTURING = threading.Lock()  # to wait for the whole GPU, as a capture does first, breaks the capture of another thread
State = Literal["loading", "ready", "failed", "stopped"]


@dataclass(eq=False, slots=True)
class Job:
    """One image that waits: for the batched kinds, or for a function of its own that is called with the bundle and the image.

    `done` is called in the event loop, with the result or a `ServiceError`, unless the job is withdrawn.
    """

    work: Work
    image: Image
    deadline: float
    done: Callable[[Any], None]
    loop: asyncio.AbstractEventLoop
    arrived: float = field(default_factory=time.monotonic)
    begun: bool = False
    finished: bool = False

    def joins(self, other: Job) -> bool:
        """Whether both can be computed in one batch. Images that keep their aspect ratio have several shapes."""
        mine, others = self.image, other.image
        return not callable(self.work) and (self.work, mine.dtype, mine.shape) == (other.work, others.dtype, others.shape)


@dataclass(slots=True)
class Batch:
    """Jobs that are computed together, and their outputs or why there are none."""

    jobs: Sequence[Job]
    began: float
    outcome: Launched | Sequence[Any] | Exception


@dataclass(slots=True)
class DecodingTime:
    """How long the images that are not decoded yet would take. Used by the event loop alone.

    While several wait, the time between two of them is what one takes; of one that came when none did, it is divided by the number
    of decoders.
    """

    images: int = 0
    _seconds: float = 0.0
    _last: float = 0.0

    @property
    def wait(self) -> float:
        return self.images * self._seconds

    def ended(self, arrived: float, decoders: int) -> None:
        """Note that an image that arrived at this time is decoded, or cannot be."""
        now = time.monotonic()
        seconds = now - self._last if self._last > arrived else (now - arrived) / decoders
        self._seconds = seconds if not self._seconds else 0.8 * self._seconds + 0.2 * seconds
        self._last = now
        self.images -= 1


class ModelWorker:
    """Loads a model in its thread, then computes batches until it is stopped and its queue is empty."""

    def __init__(self, name: str, load: Callable[[], Bundle], settings: ServeSettings, metrics: Metrics) -> None:
        self.name, self.settings, self.metrics = name, settings, metrics
        self.state: State = "loading"
        self.error: BaseException | None = None
        self.bundle: Bundle | None = None
        self._head_error = ""
        self._load = load
        self._condition = threading.Condition()
        self._jobs: deque[Job] = deque()
        self._pings: list[Future[None]] = []
        self._in_flight, self._stopping = 0, False
        self._begun: list[Job] = []
        self._seconds_per_image = self._last_end = 0.0
        self.decoding = DecodingTime()
        self._thread = threading.Thread(target=self._main, name=f"model {name}", daemon=True)
        metrics.gauge("vitrail_images_in_flight", lambda: self._in_flight, model=name)
        metrics.gauge("vitrail_queue_length", lambda: len(self._jobs), model=name)

    def start(self, on_failure: Callable[[], None]) -> None:
        """Begin loading; `on_failure` is called from the thread if that fails."""
        self._on_failure = on_failure
        self._thread.start()

    def stop(self) -> None:
        """Finish what is queued, then end."""
        with self._condition:
            self._stopping = True
            self._condition.notify_all()

    def join(self, timeout: float) -> bool:
        """Wait for the thread; tells whether it has ended. A thread that still loads is not waited for."""
        if self.state == "loading":
            return False
        self._thread.join(timeout)
        return not self._thread.is_alive()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def admit(self, images: int) -> None:
        """Take places for so many images, from before their decoding until `release`; refuse if there are too few."""
        if self.state != "ready" or self._stopping:
            raise self.not_ready()
        with self._condition:
            self.check_space(images)
            self._in_flight += images

    def not_ready(self) -> ServiceError:
        """Return the answer while the model computes nothing."""
        doing = {"loading": "is loading", "failed": "could not be loaded"}.get(self.state, "has stopped")
        return unavailable(f"{self.name} {doing}.")

    def release(self, images: int) -> None:
        with self._condition:
            self._in_flight -= images

    def check_space(self, images: int = 1) -> None:
        """Refuse images that have no place, or that would not be computed before their deadline."""
        if images > self.settings.queue:  # there will never be so many places
            raise too_many_images(self.settings.queue)
        wait = max(self._in_flight * self._seconds_per_image, self.decoding.wait)
        if self._in_flight + images > self.settings.queue or (self._in_flight and wait > _DEADLINE_SHARE * self.settings.deadline):
            raise queue_full(wait)

    def check_head(self) -> None:
        """Raise an error if there is no trained head.

        That was found out at loading: to read weights of a GPU waits for the batch that it computes, and the event loop would wait.
        """
        if self._head_error:
            raise VitrailError(self._head_error)

    def submit(self, job: Job) -> None:
        """Queue an image that was admitted. Its place is free when it is computed, or withdrawn."""
        with self._condition:
            if self.state == "stopped" or not self._thread.is_alive():
                self._in_flight -= 1
                raise self.not_ready()
            self._jobs.append(job)
            self._condition.notify()

    def withdraw(self, job: Job) -> None:
        """Take an image whose client has left, or whose deadline has passed, from the queue, if it is still there."""
        with self._condition:
            if job in self._jobs:
                self._jobs.remove(job)
                self._in_flight -= 1
                self.count_given_up()

    def count_given_up(self, images: int = 1) -> None:
        self.metrics.count("vitrail_images_given_up_total", images, model=self.name)

    def ping(self) -> Future[None]:
        """Ask the thread for a sign of life, which it gives between two batches."""
        answer: Future[None] = Future()
        with self._condition:
            if self.state != "ready" or not self._thread.is_alive():
                answer.set_exception(self.not_ready())
            else:
                self._pings.append(answer)
                self._condition.notify()
        return answer

    def _main(self) -> None:
        try:
            self.bundle = self._load()
            self._head_error = _head_error(self.bundle)
            self._engine = Engine(self.bundle, self.settings)
            with _CAPTURING:
                self._seconds_per_image = self._engine.warm_up()
        except BaseException as error:
            self.error, self.state = error, "failed"
            self._on_failure()
            return
        gc.collect()
        gc.freeze()  # what is loaded stays, so no later collection need look at it: with torch that takes 0.1 s each time
        self.state = "ready"
        log.info("ready", extra={"model": self.name})
        try:
            self._serve()
        except BaseException as error:  # nothing could be computed any more, so the process has to end
            log.exception("the worker failed", extra={"model": self.name})
            self.error = error
            self._on_failure()
        finally:
            with self._condition:
                self.state = "stopped"
                left, self._jobs = self._jobs, deque()
                pings, self._pings = self._pings, []
            unfinished = [job for job in self._begun if not job.finished]
            self._finish([*unfinished, *left], [self.not_ready()] * (len(unfinished) + len(left)))
            for ping in pings:
                if ping.set_running_or_notify_cancel():
                    ping.set_exception(self.not_ready())

    def _serve(self) -> None:
        """Compute batches until the end: at most one more is begun before the one before it is finished."""
        running: Batch | None = None
        while (jobs := self._next(full=running is not None)) is not None:
            self._begun = [*(running.jobs if running is not None else ()), *jobs]
            if running is not None and (not jobs or callable(jobs[0].work)):  # an analysis would delay its answers
                self._end(running)
                running = None
            if not jobs:
                continue
            batch = self._begin(jobs)
            if running is not None:
                self._end(running)
            overlaps = self._engine.overlaps and isinstance(batch.outcome, Launched)
            running = batch if overlaps else None
            if not overlaps:
                self._end(batch)

    def _next(self, *, full: bool) -> list[Job] | None:
        """Wait for work and take a batch of one kind; None when the worker is to end.

        `full`: do not wait, and take none unless as many jobs are queued as a batch can have.
        """
        with self._condition:
            while True:
                for ping in self._pings:
                    if ping.set_running_or_notify_cancel():  # who asked may have stopped waiting
                        ping.set_result(None)
                self._pings.clear()
                if full and len(self._jobs) < self.settings.max_batch:
                    return []
                if (batch := self._take()) or full:
                    return batch
                if self._stopping:
                    return None
                self._condition.wait()

    def _take(self) -> list[Job]:
        batch: list[Job] = []
        others: deque[Job] = deque()
        late: list[Job] = []
        now = time.monotonic()
        while self._jobs and len(batch) < self.settings.max_batch:
            job = self._jobs.popleft()
            if job.deadline < now:
                late.append(job)
            elif not batch or job.joins(batch[0]):
                job.begun = True
                batch.append(job)
            else:
                others.append(job)
        self._jobs.extendleft(reversed(others))
        if late:
            self.count_given_up(len(late))
            self._finish(late, [unavailable("The image was not computed before its deadline.") for _ in late])
        return batch

    def _begin(self, jobs: Sequence[Job]) -> Batch:
        began, work = time.monotonic(), jobs[0].work
        self.metrics.observe("vitrail_queue_seconds", *(began - job.arrived for job in jobs), model=self.name)
        return Batch(jobs, began, self._outcome(work, [job.image for job in jobs]))

    def _outcome(self, work: Work, images: Sequence[Image]) -> Launched | Sequence[Any] | Exception:
        try:
            return [self._engine.analyse(work, images[0])] if callable(work) else self._engine.launch(work, images)
        except Exception as error:
            return error

    def _end(self, batch: Batch) -> None:
        """Wait for the outputs of a batch, and answer."""
        jobs, results = batch.jobs, _results(batch.outcome)
        if isinstance(results, Exception):
            batch.outcome = ()  # an error's traceback keeps all tensors of the batch, and what comes next needs memory, too
            self._engine.check()
            if len(jobs) == 1:
                self._finish(jobs, [self._as_answer(results)])
                return
            results = ()
            middle = len(jobs) // 2  # one image, or too little memory for all, must not fail the others
            for half in (jobs[:middle], jobs[middle:]):
                began = time.monotonic()
                self._end(Batch(half, began, self._outcome(jobs[0].work, [job.image for job in half])))
            return
        now = time.monotonic()
        seconds = now - max(batch.began, self._last_end)  # the batch before it may have been computed until then
        self._last_end = now
        if not callable(jobs[0].work):  # an analysis takes longer, and says nothing about predictions
            share = seconds / len(jobs)
            self._seconds_per_image = share if not self._seconds_per_image else 0.8 * self._seconds_per_image + 0.2 * share
        self.metrics.observe("vitrail_compute_seconds", seconds, model=self.name)
        self.metrics.observe("vitrail_batch_size", len(jobs), model=self.name)
        self.metrics.count("vitrail_images_total", len(jobs), model=self.name)
        self._finish(jobs, results)

    def _finish(self, jobs: Sequence[Job], results: Sequence[Any]) -> None:
        """Free the places of jobs, and tell their results: once per batch, since every call wakes the event loop."""
        with self._condition:
            self._in_flight -= len(jobs)
        told: dict[asyncio.AbstractEventLoop, list[tuple[Job, Any]]] = {}
        for job, result in zip(jobs, results, strict=True):
            job.finished = True
            told.setdefault(job.loop, []).append((job, result))
        for loop, pairs in told.items():
            with suppress(RuntimeError):  # it is closed: the service has ended
                loop.call_soon_threadsafe(_tell, pairs)

    def _as_answer(self, error: Exception) -> ServiceError:
        if isinstance(error, ServiceError):
            return error
        if isinstance(error, VitrailError):  # a model without attention, for example
            return ServiceError(422, str(error))
        log.error("computation failed", exc_info=error, extra={"model": self.name})
        if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error):  # the latter on a CPU
            return unavailable("There is not enough memory to compute the image.")
        return ServiceError(500, "The image could not be computed; the server's log says more.")


def _results(outcome: Launched | Sequence[Any] | Exception) -> Sequence[Any] | Exception:
    """Wait for outputs that a GPU still computes."""
    try:
        return outcome.rows() if isinstance(outcome, Launched) else outcome
    except Exception as error:
        return error


def _head_error(bundle: Bundle) -> str:
    try:
        bundle.check_head()
    except VitrailError as error:
        return str(error)
    return ""


def _tell(pairs: list[tuple[Job, Any]]) -> None:
    for job, result in pairs:
        job.done(result)
