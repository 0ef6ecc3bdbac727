"""Running a model over a split: every image once over all ranks, whatever the batch, the workers or the ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal, TypeVar

import torch
from torch import Tensor

from vitrail.data.batch import Batch, HostBatch
from vitrail.data.eval_read import eval_slices
from vitrail.data.loader import EvalLoader
from vitrail.data.preprocess import Preprocess
from vitrail.data.sampler import Slice
from vitrail.data.types import BadImage, Split
from vitrail.data.waiting import most_workers
from vitrail.errors import VitrailError
from vitrail.models import Model
from vitrail.models.features import evaluating
from vitrail.models.inference import InferenceModel, choose, for_inference
from vitrail.train.parallel import World
from vitrail.train.step import autocast

Precision = Literal["auto", "fp32", "bf16", "fp16", "int8"]
BadImages = Literal["error", "skip"]
T = TypeVar("T")


def no_progress(images: int) -> None:
    """Tells no one."""


@dataclass(frozen=True, kw_only=True)
class Running:
    """How images are brought through a model. None of it changes what is measured, but for the rounding of `precision`."""

    world: World = field(default_factory=lambda: World(torch.device("cpu")))
    batch: int | None = None
    """Images at once; None: 8 on a processor, whose caches are small, 128 elsewhere."""
    workers: int | None = None
    """Processes that read images for a GPU; on a processor, threads that read and compute. None: as many as processors."""
    precision: Precision = "fp32"
    bad_images: BadImages = "error"
    progress: Callable[[int], None] = no_progress
    """Told how many images are done since it was last told."""

    def ready(self, model: Model) -> Model | InferenceModel:
        """The model on its device, in the form that computes fastest in this precision; the one given may be the same."""
        device = self.world.device
        if self._copies:
            return for_inference(model, self.precision, device)  # type: ignore[arg-type]
        if self.precision == "int8":
            raise VitrailError(f"--precision int8 is for processors; on {device.type} take fp32, bf16 or fp16.")
        return model.to(device)

    def remark(self, model: Model) -> str | None:
        """Says what is computed in, and why, where that is not float32 or not what was asked for."""
        if not self._copies:
            return None
        chosen = choose(model.config, self.precision, self.world.device)  # type: ignore[arg-type]
        if chosen.precision == "fp32" and self.precision in ("fp32", "auto"):
            return None
        exact = "" if chosen.precision == "fp32" else "; --precision fp32 computes exactly"
        return f"computed in {chosen.precision}: {chosen.why}{exact}"

    @property
    def _copies(self) -> bool:
        """Whether a copy made for inference computes: always on a processor, on a GPU where it may choose its arithmetic.

        A precision that was asked for on a GPU is autocast's there, with a float32 residual stream, as in training.
        """
        kind = self.world.device.type
        return self.precision != "fp16" if kind == "cpu" else kind == "cuda" and self.precision == "auto"

    def over(self, split: Split, preprocess: Preprocess, model: Model | InferenceModel, compute: Callable[[Tensor], T]) -> Pass[T]:
        """A pass of `compute`, which is the model or a part of it, over this rank's images."""
        return Pass(self, split, preprocess, model, compute)


def on_own_device(model: Model, *, bad_images: BadImages = "error") -> Running:
    """How to run a model where it is, for callers who did not say."""
    return Running(world=World(model.norm.weight.device), bad_images=bad_images)


class Pass(Iterator[tuple[T, Batch]]):
    """An iterator over batches with what was computed of them, in order. Afterwards `bad` says what could not be read."""

    def __init__(
        self, running: Running, split: Split, preprocess: Preprocess, model: Model | InferenceModel, compute: Callable[[Tensor], T]
    ) -> None:
        world = running.world
        self._running, self._model, self._compute = running, model, compute
        self._on_cpu = world.device.type == "cpu"
        self._batch = running.batch or (8 if self._on_cpu else 128)
        self._loader = EvalLoader(
            split,
            preprocess=preprocess,
            batch=self._batch,
            rank=world.rank,
            ranks=world.ranks,
            ranks_here=world.ranks_here,
            # A few images are read sooner than a worker has started.
            workers=0 if len(split) <= self._batch else running.workers,
            bad_images=running.bad_images,
            device=world.device,
        )
        self._steps = self._in_lanes() if self._on_cpu else self._one_by_one()

    @property
    def bad(self) -> dict[str, BadImage]:
        return self._loader.bad

    def __next__(self) -> tuple[T, Batch]:
        return next(self._steps)

    def _one_by_one(self) -> Iterator[tuple[T, Batch]]:
        """Processes read ahead while the device computes."""
        for batch in self._loader:
            # Entered anew for every batch, so that a caller who stops half-way finds the model as it was.
            with evaluating(self._model):
                computed = self._computed(batch)
            yield computed, batch
            self._running.progress(len(batch))

    def _in_lanes(self) -> Iterator[tuple[T, Batch]]:
        """Each thread reads a batch and computes it alone.

        Threads that share the operations of one batch wait for each other after every one of them; threads with a batch of
        their own never do, and reading fills the gaps. Only the order of the results is kept.
        """
        loader, world = self._loader, self._running.world
        slices = eval_slices(len(loader.split), self._batch, world.rank, world.ranks)
        wanted = most_workers(world.ranks_here) if self._running.workers is None else loader.workers
        lanes, threads, waiting = max(1, min(wanted, len(slices))), torch.get_num_threads(), iter(slices)
        share = max(1, threads // lanes)  # one image alone still has all of them
        with evaluating(self._model), ThreadPoolExecutor(lanes, initializer=torch.set_num_threads, initargs=(share,)) as pool:
            ahead = deque(pool.submit(self._lane, where) for where in islice(waiting, 2 * lanes))
            try:
                while ahead:
                    host, result = ahead.popleft().result()
                    ahead.extend(pool.submit(self._lane, where) for where in islice(waiting, 1))
                    loader.bad.update({bad.name: bad for bad in host.bad if bad.name not in loader.bad})
                    if result is not None:
                        yield result
                        self._running.progress(len(result[1]))
            finally:
                for future in ahead:
                    future.cancel()
                torch.set_num_threads(threads)  # the lanes' setting is otherwise taken over by every thread to come

    def _lane(self, where: Slice) -> tuple[HostBatch, tuple[T, Batch] | None]:
        host = self._loader.reader[where]
        if len(host.indices) == 0:
            return host, None  # every image of it was bad
        images = self._loader.preprocess.normalise(host.images)
        batch = Batch(images, host.targets, host.indices, 0, where.step, 0, 1, where.total)
        return host, (self._computed(batch), batch)

    def _computed(self, batch: Batch) -> T:
        # A processor's bf16 is in the layers that `ready` made.
        precision = "fp32" if self._on_cpu and self._running.precision != "fp16" else self._running.precision
        with torch.no_grad(), autocast(precision, self._running.world.device):
            return self._compute(batch.images.to(self._model.norm.weight.dtype))


def all_bad(running: Running, bad: dict[str, BadImage]) -> list[BadImage]:
    """The bad images of all ranks, by name."""
    found = {one.name: one for part in running.world.gather(list(bad.values())) for one in part}
    return [found[name] for name in sorted(found)]


def check_finite(outputs: Tensor, batch: Batch, split: Split) -> None:
    """An output that is not a number would count as a wrong answer and hide what went wrong."""
    rows = torch.nonzero(~outputs.isfinite().flatten(1).all(1))[:, 0]
    if len(rows):
        name = split.image_name(int(batch.indices[rows[0].cpu()]))
        raise VitrailError(
            f"The model's output for {name} holds NaN or infinity. Check the weights (`vitrail info`); "
            "if they are sound, --precision bf16 or fp32 has the range that fp16 lacks."
        )
