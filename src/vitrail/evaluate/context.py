"""Run a model over a split: every image exactly once over all ranks, for any batch size and number of workers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vitrail.data.batch import Batch, HostBatch
from vitrail.data.data_wait import max_workers
from vitrail.data.loader import EvalLoader
from vitrail.data.preprocess import Preprocess
from vitrail.data.sampler import BatchSlice
from vitrail.data.settings import BadImages
from vitrail.data.types import BadImage, Split
from vitrail.errors import VitrailError
from vitrail.evaluate.settings import Precision, check_choice, no_progress
from vitrail.models import Model
from vitrail.models.features import evaluating, stride_of
from vitrail.models.inference import InferenceModel, choose, for_inference
from vitrail.models.surgery import accepting_any_size
from vitrail.train.parallel import World
from vitrail.train.precision import autocast

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class EvalContext:
    """Where and how a model runs over images. Only `any_size` affects the results and, by rounding, `precision`."""

    world: World = field(default_factory=lambda: World(torch.device("cpu")))
    batch: int | None = None
    """Images per batch; None: 8 on a CPU, whose caches are small, 128 elsewhere."""
    workers: int | None = None
    """Processes that read images for a GPU; on a CPU, threads that read and compute. None: one per CPU core."""
    precision: Precision = "fp32"
    bad_images: BadImages = "error"
    any_size: bool = False
    """Let each image keep its aspect ratio: see `Preprocess.keep_aspect`. Images of one size are computed together."""
    max_size: int | None = None
    """With `any_size`: the longest side in pixels. None: twice the short side."""
    progress: Callable[[int], None] = no_progress
    """Called with the number of images finished since the last call."""

    def __post_init__(self) -> None:
        check_choice("precision", self.precision, Precision)
        check_choice("bad_images", self.bad_images, BadImages)
        if self.batch is not None and self.batch < 1:
            raise VitrailError(f"The batch size is {self.batch}; it must be at least 1.")
        if self.workers is not None and self.workers < 0:
            raise VitrailError(f"The number of workers is {self.workers}; it must be at least 0.")
        if self.max_size is not None and not self.any_size:
            raise VitrailError(
                f"max_size is {self.max_size}: it limits the long side of images that keep their aspect ratio. Add any_size."
            )

    def prepare(self, model: Model) -> Model | InferenceModel:
        """Move the model to the device, as an inference copy where one is faster; otherwise returns the model itself."""
        device, model = self.world.device, accepting_any_size(model) if self.any_size else model
        if self._uses_inference_copy:
            return for_inference(model, self.precision, device)  # type: ignore[arg-type]
        if self.precision == "int8":
            raise VitrailError(f"int8 needs a CPU; on {device.type} use fp32, bf16 or fp16.")
        return model.to(device)

    def precision_note(self, model: Model) -> str | None:
        """Describe the precision in use and the reason, if it is not float32 or not the requested one."""
        if not self._uses_inference_copy:
            return None
        chosen = choose(model.config, self.precision, self.world.device)  # type: ignore[arg-type]
        if chosen.precision == "fp32" and self.precision in ("fp32", "auto"):
            return None
        exact = "" if chosen.precision == "fp32" else "; fp32 computes exactly"
        return f"computed in {chosen.precision}: {chosen.why}{exact}"

    @property
    def _uses_inference_copy(self) -> bool:
        """Tell whether an inference copy is used: on a CPU (except fp16), and on a GPU with precision "auto".

        Any other precision on a GPU means autocast with a float32 residual stream, as in training.
        """
        kind = self.world.device.type
        return self.precision != "fp16" if kind == "cpu" else kind == "cuda" and self.precision == "auto"

    def apply(self, model: Model | InferenceModel, compute: Callable[[Tensor], T], images: Tensor) -> T:
        """Apply `compute` to preprocessed images, without gradients and in this precision."""
        device = self.world.device
        # On a CPU, bf16 is built into the layers of the inference copy.
        precision = "fp32" if device.type == "cpu" and self.precision != "fp16" else self.precision
        with torch.no_grad(), autocast(precision, device):
            return compute(images.to(next(model.parameters()).dtype))

    def run_tensor(self, images: Tensor, model: Model | InferenceModel, compute: Callable[[Tensor], T]) -> Iterator[T]:
        """Apply `compute` to each batch of images that are preprocessed already, [images, channels, height, width]."""
        for part in images.split(self.batch_size):
            with evaluating(model):
                result = self.apply(model, compute, part.to(self.world.device))
            yield result
            self.progress(len(part))

    def run(
        self,
        split: Split,
        preprocess: Preprocess,
        model: Model | InferenceModel,
        compute: Callable[[Tensor], T],
        slices: Iterable[BatchSlice] | None = None,
    ) -> Pass[T]:
        """Iterate over this rank's images, or over `slices`, and apply `compute`, the model or a part of it, to each batch."""
        return Pass(self, split, self.preprocess_for(preprocess, model), model, compute, slices)

    def preprocess_for(self, preprocess: Preprocess, model: Model | InferenceModel) -> Preprocess:
        """Return the preprocessing that images get: the model's own, or with `any_size` one that keeps the aspect ratio."""
        if not self.any_size or preprocess.resize == "keep-aspect":
            return preprocess
        return preprocess.keep_aspect(stride_of(model.config), self.max_size)

    @property
    def batch_size(self) -> int:
        return self.batch or (8 if self.world.device.type == "cpu" else 128)

    def chosen_precision(self, model: Model) -> str:
        """Return the precision that the model is computed in; `auto` depends on the machine."""
        if not self._uses_inference_copy:
            return "fp32" if self.precision == "auto" else self.precision
        return choose(model.config, self.precision, self.world.device).precision  # type: ignore[arg-type]

    def read_size(self, preprocess: Preprocess) -> int:
        """Return how many images are read together. They are grouped by size: of too few, none has the size of another."""
        return max(self.batch_size, 32) if preprocess.resize == "keep-aspect" else self.batch_size


def default_context(model: Model, *, bad_images: BadImages = "error") -> EvalContext:
    """Build the default context: the model stays on its device."""
    return EvalContext(world=World(next(model.parameters()).device), bad_images=bad_images)


class Pass(Iterator[tuple[T, Batch]]):
    """An iterator over (result, batch) in the order of the split. Afterwards `bad` holds the images that could not be read."""

    def __init__(
        self,
        context: EvalContext,
        split: Split,
        preprocess: Preprocess,
        model: Model | InferenceModel,
        compute: Callable[[Tensor], T],
        slices: Iterable[BatchSlice] | None = None,
    ) -> None:
        world = context.world
        self._context, self._model, self._compute = context, model, compute
        self._on_cpu = world.device.type == "cpu"
        self._batch, self._read = context.batch_size, context.read_size(preprocess)
        self._loader = EvalLoader(
            split,
            preprocess=preprocess,
            batch=self._read,
            rank=world.rank,
            ranks=world.ranks,
            local_ranks=world.local_ranks,
            # Reading one batch takes less time than starting a worker.
            workers=0 if len(split) <= self._read else context.workers,
            bad_images=context.bad_images,
            device=world.device,
            slices=slices,
        )
        self._results = self._threaded() if self._on_cpu else self._sequential()

    @property
    def bad(self) -> dict[str, BadImage]:
        return self._loader.bad

    @property
    def bad_at(self) -> dict[int, BadImage]:
        return self._loader.bad_at

    def __next__(self) -> tuple[T, Batch]:
        return next(self._results)

    def _sequential(self) -> Iterator[tuple[T, Batch]]:
        """Compute batch by batch, while worker processes read ahead."""
        for host in self._loader.host_batches():
            # Entered again for every batch, so that a caller who stops early gets the model back in its old mode.
            with evaluating(self._model):
                result = self._apply_to(host)
            if result is not None:
                yield result
                self._context.progress(len(result[1]))

    def _threaded(self) -> Iterator[tuple[T, Batch]]:
        """Let each thread read and compute whole batches; yield the results in order.

        Threads that share one batch synchronise after every operation. Threads with a batch of their own never do, and
        one can read while the others compute.
        """
        loader, world, slices = self._loader, self._context.world, self._loader.slices()
        workers = max_workers(world.local_ranks) if self._context.workers is None else loader.workers
        workers = min(workers, len(slices)) if isinstance(slices, list) else workers
        workers, torch_threads, remaining = max(1, workers), torch.get_num_threads(), iter(slices)
        per_worker = max(1, torch_threads // workers)  # a single batch still gets all of them
        with (
            evaluating(self._model),
            ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(per_worker,)) as pool,
        ):
            pending = deque(self._submit(pool, part) for part in islice(remaining, 2 * workers))
            try:
                while pending:
                    host, result = pending.popleft().result()
                    pending.extend(self._submit(pool, part) for part in islice(remaining, 1))
                    loader.record(host)
                    if result is not None:
                        yield result
                        self._context.progress(len(result[1]))
            finally:
                for future in pending:
                    future.cancel()
                torch.set_num_threads(torch_threads)  # new threads would inherit the workers' setting

    def _submit(self, pool: ThreadPoolExecutor, part: BatchSlice) -> Future[tuple[HostBatch, tuple[T, Batch] | None]]:
        self._loader.split.read_ahead(part.indices)
        return pool.submit(self._read_and_apply, part)

    def _read_and_apply(self, part: BatchSlice) -> tuple[HostBatch, tuple[T, Batch] | None]:
        host = self._loader.reader[part]
        return host, self._apply_to(host)

    def _apply_to(self, host: HostBatch) -> tuple[T, Batch] | None:
        """Compute the images that were read together; None if all of them were bad."""
        if not host.groups:
            return next(((self._apply(batch), batch) for batch in self._loader.batches_of(host)), None)
        parts = [part for batch in self._loader.batches_of(host) for part in _split(batch, self._batch)]
        return _in_order([self._apply(part) for part in parts], parts)

    def _apply(self, batch: Batch) -> T:
        return self._context.apply(self._model, self._compute, batch.images)


def _split(batch: Batch, size: int) -> Iterator[Batch]:
    for start in range(0, len(batch), size):
        rows = slice(start, start + size)
        yield replace(batch, images=batch.images[rows], targets=batch.targets[rows], indices=batch.indices[rows])


def _in_order(results: list[T], parts: list[Batch]) -> tuple[T, Batch]:
    """Put the results of images of several sizes into the order of the split. The images themselves cannot be in one tensor."""
    indices = torch.cat([part.indices for part in parts])
    order = indices.argsort()
    first = results[0]
    together: Any
    if isinstance(first, Tensor):
        together = torch.cat(results)[order.to(first.device)]  # type: ignore[arg-type]
    else:
        rows = [row for result in results for row in result]  # type: ignore[attr-defined]
        together = [rows[k] for k in order.tolist()]
    targets = torch.cat([part.targets for part in parts])
    return together, replace(
        parts[0], images=parts[0].images[:0], targets=targets[order.to(targets.device)], indices=indices[order]
    )


def gather_bad_images(context: EvalContext, bad: dict[str, BadImage]) -> list[BadImage]:
    """Collect the bad images of all ranks, sorted by name."""
    by_name = {one.name: one for part in context.world.gather(list(bad.values())) for one in part}
    return [by_name[name] for name in sorted(by_name)]


def none_read(what: str, bad: Sequence[BadImage]) -> str:
    """Say that all images were bad, with the reason of one."""
    first = f" The first: {bad[0].name}: {bad[0].reason}." if bad else ""
    return f"No image of {what} could be read.{first} Repair or replace the images."


def check_finite(outputs: Tensor, batch: Batch, split: Split) -> None:
    """Refuse NaN and infinity: they would count as wrong predictions and hide the cause."""
    rows = torch.nonzero(~outputs.isfinite().flatten(1).all(1))[:, 0]
    if len(rows):
        raise VitrailError(not_finite(split.image_name(int(batch.indices[rows[0].cpu()]))))


def check_features(features: npt.NDArray[Any], names: Sequence[str]) -> None:
    """Do the same for features [images, …]: a comparison with them would give NaN, or another order."""
    if not np.isfinite(features).all():
        finite = np.isfinite(features.reshape(len(features), -1)).all(axis=1)
        raise VitrailError(not_finite(names[int(np.argmin(finite))]))


def not_finite(name: str) -> str:
    return (
        f"The model's output for {name} contains NaN or infinity. Check the weights (`vitrail info`). "
        "If they are finite, use bf16 or fp32: fp16 overflows sooner."
    )
