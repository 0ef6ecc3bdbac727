"""`Service`: the models of a server, and the way of an image through them."""

from __future__ import annotations

import asyncio
import gc
import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from vitrail.checkpoints import Bundle, load
from vitrail.errors import VitrailError
from vitrail.serve.decoders import Decoders
from vitrail.serve.engine import Image
from vitrail.serve.errors import ClientLeft, ServiceError, too_many_images, unavailable
from vitrail.serve.explorations import NamedImage
from vitrail.serve.flight import Flight
from vitrail.serve.json_process import JsonProcess
from vitrail.serve.limits import ByteLimit, PixelLimit
from vitrail.serve.metrics import Metrics
from vitrail.serve.settings import ServeSettings
from vitrail.serve.worker import ModelWorker, Work

if TYPE_CHECKING:  # a saved page names models as the service does, without the HTTP libraries
    from starlette.requests import Request

PING_SECONDS = 10.0
_TICK_SECONDS = 0.25  # between two looks whether the client is still there
log = logging.getLogger("vitrail.serve")
Found = TypeVar("Found")


class Service:
    """Models by name, one worker each, and what decodes images."""

    def __init__(self, models: Mapping[str, Callable[[], Bundle]], settings: ServeSettings) -> None:
        self.settings, self.metrics = settings, Metrics()
        self.bytes, self.pixels = ByteLimit(settings.max_upload), PixelLimit(settings.max_pixels)
        self.decoders = Decoders(settings, self.pixels)
        self.workers = {name: ModelWorker(name, self._prepared(load), settings, self.metrics) for name, load in models.items()}
        self.json = JsonProcess(settings.max_bytes)
        self.draining = False
        self.explorer_images: tuple[NamedImage, ...] = ()  # offered by the explorer; empty: its examples

    def _prepared(self, load: Callable[[], Bundle]) -> Callable[[], Bundle]:
        def load_and_prepare() -> Bundle:
            bundle = load()
            if bundle.preprocess is not None:
                self.decoders.prepare()
            return bundle

        return load_and_prepare

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
        self.decoders.close()
        self.json.close()
        gc.unfreeze()  # what the workers froze would not be collected any more, and be reported as a leak at the end

    @property
    def has_threads(self) -> bool:
        """Whether a thread has not ended: neither one that loads nor one that decodes can be stopped."""
        return self.pixels.held > 0 or any(worker.is_alive for worker in self.workers.values())

    @property
    def failure(self) -> BaseException | None:
        return next((worker.error for worker in self.workers.values() if worker.error is not None), None)

    def worker(self, name: str | None) -> ModelWorker:
        """Find a model by name; None: the first."""
        if name is None:
            return next(iter(self.workers.values()))
        if name not in self.workers:
            raise ServiceError(404, f"There is no model {name!r}. Use one of: {', '.join(self.workers)}.")
        return self.workers[name]

    def bundle(self, worker: ModelWorker) -> Bundle:
        if worker.bundle is None or worker.state != "ready":
            raise worker.not_ready()
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

    async def in_pool(self, function: Callable[..., Found], *arguments: Any) -> Found:
        """Call a function in one of the threads that decode: what takes milliseconds must not keep the event loop."""
        return await asyncio.wrap_future(self.decoders.threads.submit(function, *arguments))

    def deadline(self) -> float:
        """Return the deadline of a request that has just been uploaded, a time of `time.monotonic`."""
        return time.monotonic() + self.settings.deadline

    async def compute(
        self,
        request: Request,
        worker: ModelWorker,
        work: Work,
        images: Sequence[bytes | Image],
        deadline: float | None = None,
    ) -> Flight:
        """Decode and compute images; each has a result or a `ServiceError` of its own. Ends early if the client leaves."""
        if not images:
            raise ServiceError(400, "The request has no image; send at least one.")
        if len(images) > self.settings.max_images:
            raise too_many_images(self.settings.max_images)
        preprocess = self.bundle(worker).stored_preprocess() if any(isinstance(image, bytes) for image in images) else None
        worker.admit(len(images))
        flight = Flight(worker, work, self.deadline() if deadline is None else deadline, len(images))
        try:
            flight.begin(images, self.decoders, preprocess)
            while not await flight.wait(_TICK_SECONDS):
                if await request.is_disconnected():
                    raise ClientLeft
        finally:
            flight.cancel()
        for result in flight.results:
            if isinstance(result, BaseException) and not isinstance(result, ServiceError):
                raise result
        return flight


_NAME = re.compile(r"[\w.+-]{1,100}")
_SUFFIXES = (".npz", ".pth", ".pt", ".bin", ".safetensors")


def models_of(references: Sequence[str], preprocess: str | None) -> dict[str, Callable[[], Bundle]]:
    """Map names to functions that load: NAME=REFERENCE, or a reference that gives the name, such as the folder's."""
    models: dict[str, Callable[[], Bundle]] = {}
    for given in references:
        name, equals, reference = given.partition("=")
        if not equals or "/" in name or Path(given).exists():  # a path may contain =
            name, reference = _name_of(given), given
        if not _NAME.fullmatch(name) or name in (".", ".."):
            raise VitrailError(
                f"{name!r} cannot be the name of a model in URLs: use letters, digits and - _ . +, as in model={reference}."
            )
        if name in models:
            raise VitrailError(f"Two models have the name {name!r}; give one of them another name, as in other={reference}.")
        models[name] = _loader(reference, preprocess)
    return models


def _name_of(reference: str) -> str:
    path = Path(reference)
    if path.exists():
        path = path.resolve()
        return path.stem if path.suffix in _SUFFIXES else path.name
    name = reference.rpartition(":")[2]
    for suffix in _SUFFIXES:
        name = name.removesuffix(suffix)
    if reference.startswith("hf:"):  # owner/name
        name = name.rpartition("/")[2]
    return re.sub(r"[/@]", "-", name)  # published weights, such as ViT-B/16


def _loader(reference: str, preprocess: str | None) -> Callable[[], Bundle]:
    def read() -> Bundle:
        bundle = load(reference, preprocess=preprocess)
        bundle.stored_preprocess()
        for assumption in bundle.report.assumptions:
            log.warning("%s: %s", reference, assumption)
        return bundle

    return read
