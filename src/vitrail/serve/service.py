"""`Service`: the models of a server, and the way of an image through them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from torch import Tensor

from vitrail.checkpoints import Bundle, load
from vitrail.errors import VitrailError
from vitrail.serve.errors import ServiceError, unavailable
from vitrail.serve.explorations import NamedImage
from vitrail.serve.images import decode, decoding_pool
from vitrail.serve.metrics import Metrics
from vitrail.serve.settings import ServeSettings
from vitrail.serve.worker import ModelWorker, Work

if TYPE_CHECKING:  # a saved page names models as the service does, without the HTTP libraries
    from starlette.requests import Request

PING_SECONDS = 10.0


class ClientLeft(Exception):
    """The client closed its connection before the answer."""


class Service:
    """Models by name, one worker each, and a pool of threads that decode images."""

    def __init__(self, models: Mapping[str, Callable[[], Bundle]], settings: ServeSettings) -> None:
        self.settings, self.metrics = settings, Metrics()
        self.workers = {name: ModelWorker(name, load, settings, self.metrics) for name, load in models.items()}
        self.pool = decoding_pool(settings)
        self.draining = False
        self.explorer_images: tuple[NamedImage, ...] = ()  # offered by the explorer; empty: its examples

    def start(self, on_failure: Callable[[], None]) -> None:
        for worker in self.workers.values():
            worker.start(on_failure)

    def close(self) -> None:
        """Compute what is queued, then end the threads."""
        self.draining = True
        for worker in self.workers.values():
            worker.stop()
        for worker in self.workers.values():
            worker.join(self.settings.deadline)
        self.pool.shutdown(wait=False, cancel_futures=True)

    @property
    def failure(self) -> BaseException | None:
        return next((worker.error for worker in self.workers.values() if worker.error is not None), None)

    def worker(self, name: str | None) -> ModelWorker:
        """Find a model by name; None: the first."""
        if name is None:
            return next(iter(self.workers.values()))
        if name not in self.workers:
            raise ServiceError(404, f"There is no model {name!r}; there are {', '.join(self.workers)}.")
        return self.workers[name]

    def bundle(self, worker: ModelWorker) -> Bundle:
        if worker.bundle is None or worker.state != "ready":
            raise unavailable(f"{worker.name} is {worker.state}.")
        return worker.bundle

    async def ready(self, name: str | None = None) -> None:
        """Raise an error unless the workers answer."""
        if self.draining:
            raise unavailable("The service is shutting down.")
        for worker in self.workers.values() if name is None else [self.worker(name)]:
            try:
                await asyncio.wait_for(asyncio.wrap_future(worker.ping()), PING_SECONDS)
            except TimeoutError:
                raise unavailable(f"{worker.name} has not answered for {PING_SECONDS:.0f} s.") from None

    async def compute(self, request: Request, worker: ModelWorker, work: Work, images: Sequence[bytes | Tensor]) -> list[Any]:
        """Decode and compute images; each has a result or a `ServiceError` of its own. Ends early if the client leaves."""
        if not images:
            raise ServiceError(400, "The request has no image.")
        if len(images) > self.settings.max_images:
            raise ServiceError(413, f"The request has {len(images)} images; at most {self.settings.max_images} are taken at once.")
        bundle = self.bundle(worker)
        worker.admit(len(images))
        tasks = [asyncio.ensure_future(self._one(worker, bundle, work, image)) for image in images]
        try:
            while True:
                _, waiting = await asyncio.wait(tasks, timeout=0.25)
                if not waiting:
                    return [_result(task) for task in tasks]
                if await request.is_disconnected():
                    raise ClientLeft
        finally:
            for task in tasks:
                task.cancel()

    async def _one(self, worker: ModelWorker, bundle: Bundle, work: Work, image: bytes | Tensor) -> Any:
        held = True
        try:
            if isinstance(image, bytes):
                decoding = self.pool.submit(decode, image, bundle.stored_preprocess(), self.settings)
                try:
                    image = await asyncio.wrap_future(decoding)
                except asyncio.CancelledError:
                    if not decoding.cancel():  # its place is free only when the thread has finished
                        held = False
                        decoding.add_done_callback(lambda _: worker.release(1))
                    raise
            job = worker.submit(work, image)
            try:
                return await asyncio.wrap_future(job.result)
            except asyncio.CancelledError:
                worker.withdraw(job)
                raise
        finally:
            if held:
                worker.release(1)


def _result(task: asyncio.Future[Any]) -> Any:
    error = task.exception()
    if error is None:
        return task.result()
    if isinstance(error, ServiceError):
        return error
    raise error


def models_of(references: Sequence[str], preprocess: str | None) -> dict[str, Callable[[], Bundle]]:
    """Map names to functions that load: NAME=REFERENCE, or a reference whose last part is the name."""
    models: dict[str, Callable[[], Bundle]] = {}
    for given in references:
        name, equals, reference = given.partition("=")
        if not equals:
            name, reference = PurePath(given.rpartition(":")[2]).stem or given, given
        if name in models:
            raise VitrailError(f"Two models have the name {name!r}; give one another, as in other={reference}.")
        models[name] = _loader(reference, preprocess)
    return models


def _loader(reference: str, preprocess: str | None) -> Callable[[], Bundle]:
    def read() -> Bundle:
        bundle = load(reference, preprocess=preprocess)
        bundle.stored_preprocess()
        return bundle

    return read
