"""Embed or classify millions of images on many devices and machines, into a folder of shards.

A shard is a range of `shard_size` images in the order of the input. Batches never cross its ends, and one rank computes all of it,
so its bytes do not depend on the number of ranks or on restarts. Ranks take shards from a queue. A killed process loses the shards
it had not finished; the same command, with any number of ranks, computes only what is missing.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch.distributed.distributed_c10d import Store

from vitrail.checkpoints import Bundle
from vitrail.data.eval_reader import eval_slice
from vitrail.data.preprocess import Preprocess
from vitrail.data.sampler import BatchSlice
from vitrail.data.types import Split
from vitrail.errors import VitrailError, counted
from vitrail.evaluate.context import EvalContext, Pass, default_context
from vitrail.evaluate.predictor import check_prediction, find_images
from vitrail.evaluate.settings import FeatureFormat, FeatureSpec, TableFormat, check_choice
from vitrail.evaluate.shard_folder import BadRow, ShardFolder, hash_names
from vitrail.evaluate.shard_output import FeatureOutput, OpenShard, PredictionOutput, ShardOutput
from vitrail.evaluate.shard_queue import ShardQueue, default_store
from vitrail.files import atomic_file
from vitrail.models import Model
from vitrail.models.inference import InferenceModel
from vitrail.text import has_surrogates, printable
from vitrail.train.parallel import World
from vitrail.version import __version__

log = logging.getLogger("vitrail.evaluate")
T = TypeVar("T")
Progress = Callable[[int, int], None]
PATIENCE = 120.0
"""Seconds without progress of the other ranks after which rank 0 computes their last shards itself."""


def no_progress(done: int, total: int) -> None:
    """Report nothing."""


@dataclass(frozen=True, kw_only=True)
class ShardResult:
    """A finished folder of shards, and what this call had to do for it."""

    folder: Path
    manifest: dict[str, Any]
    computed_images: int
    """Images of the shards that were missing."""
    computed_shards: int
    seconds: float

    @property
    def images(self) -> int:
        return int(self.manifest["images"])

    @property
    def bad_images(self) -> int:
        return int(self.manifest["bad_images"])

    def summary(self) -> dict[str, Any]:
        """Return plain values for JSON: the manifest without its list of shards."""
        return {
            "out": str(self.folder),
            **{key: value for key, value in self.manifest.items() if key != "shards"},
            "shards": len(self.manifest["shards"]),
            "computed_shards": self.computed_shards,
            "computed_images": self.computed_images,
            "seconds": round(self.seconds, 3),
            "images_per_second": round(self.computed_images / self.seconds, 2) if self.computed_images else None,
        }

    def bad(self) -> Iterator[BadRow]:
        """Yield the images that could not be read, shard by shard."""
        job = ShardFolder(folder=self.folder, images=self.images, shard_size=self.manifest["shard_size"], suffix="", settings={})
        for entry in self.manifest["shards"]:
            record = job.record(entry["shard"]) if entry["bad"] else None
            yield from record.bad if record is not None else ()


def embed_shards(
    bundle: Bundle,
    images: Split | Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    spec: FeatureSpec | None = None,
    context: EvalContext | None = None,
    *,
    format: FeatureFormat = "safetensors",
    shard_size: int = 10_000,
    progress: Progress = no_progress,
    store: Store | None = None,
) -> ShardResult | None:
    """Write the features of images to a folder of shards; resume it if a part is there.

    Under torchrun all ranks call it; ranks other than 0 return None. `progress` gets (images done, images to do) of all ranks.
    """
    check_choice("format", format, FeatureFormat)
    spec, context = spec or FeatureSpec(), context or default_context(bundle.model, bad_images="skip")
    spec.check(bundle.model, any_size=context.any_size)
    preprocess = context.preprocess_for(bundle.stored_preprocess(), bundle.model)
    about = {"model": bundle.model.config.name, "features": spec.to_dict(), "preprocess": preprocess.to_dict()}

    def output(model: Model | InferenceModel, name_bytes: bool) -> FeatureOutput:
        return FeatureOutput(spec, model, bundle.stored_preprocess(), format, about, name_bytes=name_bytes)

    settings = {"command": "embed", "file_format": format, **about}
    job = _Job(bundle, images, Path(out), context, shard_size, settings, progress, store)
    return job.run(f".{format}", output)


def predict_shards(
    bundle: Bundle,
    images: Split | Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    top: int = 5,
    context: EvalContext | None = None,
    format: TableFormat = "csv",
    shard_size: int = 10_000,
    progress: Progress = no_progress,
    store: Store | None = None,
) -> ShardResult | None:
    """Write the `top` predictions of images to a folder of shards, as `embed_shards` does features."""
    check_choice("format", format, TableFormat)
    check_prediction(bundle, top)
    context = context or default_context(bundle.model, bad_images="skip")

    def output(model: Model | InferenceModel, name_bytes: bool) -> PredictionOutput:
        return PredictionOutput(bundle, model, top, format, name_bytes=name_bytes)

    preprocess = context.preprocess_for(bundle.stored_preprocess(), bundle.model)
    about = {"model": bundle.model.config.name, "top": top, "preprocess": preprocess.to_dict()}
    settings = {"command": "predict", "file_format": format, **about}
    job = _Job(bundle, images, Path(out), context, shard_size, settings, progress, store)
    return job.run(f".{format}", output)


def find_images_by_machine(world: World, words: Sequence[str | os.PathLike[str]]) -> Split:
    """Call `find_images` on all ranks. The first rank of each machine is first: it downloads, and indexes tars, for the others."""
    first = os.environ.get("LOCAL_RANK", "0") == "0"
    if not first:
        world.gather(None)  # not a barrier, which would start NCCL on GPUs: nothing else needs it
    split = find_images(words)
    if first:
        world.gather(None)
    return split


@dataclass
class _Job:
    """One call of `embed_shards` or `predict_shards` on one rank."""

    bundle: Bundle
    images: Split | Sequence[str | os.PathLike[str]]
    out: Path
    context: EvalContext
    shard_size: int
    settings: dict[str, Any]
    progress: Progress
    store: Store | None

    def run(self, suffix: str, make_output: Callable[[Model | InferenceModel, bool], ShardOutput[T]]) -> ShardResult | None:
        """Compute what is missing; on rank 0 return the result, when all ranks have finished."""
        try:
            return self._run(suffix, make_output)
        except RuntimeError as error:
            self.context.world.raise_rank_error(error, "compute the shards that are missing")
            raise

    def _run(self, suffix: str, make_output: Callable[[Model | InferenceModel, bool], ShardOutput[T]]) -> ShardResult | None:
        if self.shard_size < 1:
            raise VitrailError(f"The shard size is {self.shard_size}; use 1 or more.")
        began, world = time.monotonic(), self.context.world
        split = self.images if isinstance(self.images, Split) else find_images_by_machine(world, self.images)
        if len(split) == 0:
            raise VitrailError(f"The split {split.name!r} has no images. Choose another one.")
        with _one_thread(world.device):
            names_hash, name_bytes = _hash_names(split)
            folder = self._open_folder(split, names_hash, suffix)
            missing = sorted(shard for part in world.gather(self._unfinished(folder)) for shard in part)
            queue = ShardQueue(world, missing, self.store or default_store())
            if missing and world.main:
                folder.delete_manifest()
            if missing:
                model = self.context.prepare(self.bundle.model)
                preprocess = self.context.preprocess_for(self.bundle.stored_preprocess(), self.bundle.model)
                worker = _Worker(self.context, split, preprocess, model, make_output(model, name_bytes), folder)
                self._compute(worker, queue, missing)
        if not world.main:
            return None
        images = sum(len(folder.rows(shard)) for shard in missing)
        return ShardResult(
            folder=folder.folder,
            manifest=folder.write_manifest(),
            computed_images=images,
            computed_shards=len(missing),
            seconds=time.monotonic() - began,
        )

    def _open_folder(self, split: Split, names_hash: str, suffix: str) -> ShardFolder:
        """Let rank 0 open the folder; all ranks must agree with it about weights, images and precision."""
        context, world = self.context, self.context.world
        settings = {
            **self.settings,
            "checkpoint": self.bundle.report.source,
            "weights_sha256": fingerprint(self.bundle),
            "input": {"images": len(split), "names_sha256": names_hash},
            "shard_size": self.shard_size,
            "precision": context.chosen_precision(self.bundle.model),
            "batch": context.batch_size,
            "device": world.device.type,
            "versions": {"vitrail": __version__, "torch": torch.__version__},
        }
        folder = ShardFolder(folder=self.out, images=len(split), shard_size=self.shard_size, suffix=suffix, settings=settings)
        if world.main:
            folder.open()
        other = folder.differences(world.broadcast(settings))
        if other:
            raise VitrailError(
                f"Rank {world.rank} does not agree with rank 0 ({'; '.join(other[:8])}). All machines need the same checkpoint, "
                "images and options; a precision of auto may differ between them, so choose one."
            )
        return folder

    def _unfinished(self, folder: ShardFolder) -> list[int]:
        """Check the files of every `ranks`-th shard."""
        world = self.context.world
        return folder.unfinished(range(world.rank, len(folder), world.ranks))

    def _compute(self, worker: _Worker[Any], queue: ShardQueue, missing: list[int]) -> None:
        total = sum(len(worker.folder.rows(shard)) for shard in missing)

        def report(images: int) -> None:
            queue.report(images)
            self.progress(queue.last_known(), total)

        worker.run(queue, report)
        queue.images()  # sends what was not yet sent
        if self.context.world.main:
            self._finish(worker, queue, missing, total)

    def _finish(self, worker: _Worker[Any], queue: ShardQueue, missing: list[int], total: int) -> None:
        """Wait for the last shards of the other ranks. If they make no progress, compute these here."""
        seen, since, pause = queue.images(), time.monotonic(), 0.05
        while waiting := [shard for shard in missing if worker.folder.record(shard) is None]:
            if time.monotonic() - since > PATIENCE:
                log.warning(
                    "The other ranks have made no progress for %.0f seconds; rank 0 computes their last %s.",
                    PATIENCE, counted(len(waiting), "shard"),
                )  # fmt: skip
                worker.run(waiting, queue.report)
                return
            time.sleep(pause)
            missing, pause = waiting, min(1.0, 2 * pause)
            if (now := queue.images()) != seen:
                seen, since = now, time.monotonic()
                self.progress(now, total)


@dataclass
class _Worker(Generic[T]):
    """Compute shards on this rank: one pass over all of them, so that reading never stops between two."""

    context: EvalContext
    split: Split
    preprocess: Preprocess
    model: Model | InferenceModel
    output: ShardOutput[T]
    folder: ShardFolder

    def run(self, shards: Iterable[int], progress: Callable[[int], None]) -> None:
        taken: deque[_Taken[T]] = deque()
        context = replace(self.context, progress=progress)
        results = context.run(self.split, self.preprocess, self.model, self.output.compute, self._slices(shards, taken))
        for output, batch in results:
            indices = batch.indices.numpy()
            while int(indices[0]) not in self.folder.rows(taken[0].shard):
                self._write(taken.popleft(), results)
            taken[0].opened.add(output, indices)
            taken[0].images += len(indices)
        while taken:
            self._write(taken.popleft(), results)

    def _slices(self, shards: Iterable[int], taken: deque[_Taken[T]]) -> Iterator[BatchSlice]:
        step, batch = 0, self.context.read_size(self.preprocess)
        for shard in shards:
            rows = self.folder.rows(shard)
            taken.append(_Taken(shard, self.output.begin(rows)))
            for first in range(rows.start, rows.stop, batch):
                yield eval_slice(step, np.arange(first, min(first + batch, rows.stop)))
                step += 1

    def _write(self, taken: _Taken[T], results: Pass[T]) -> None:
        shard, rows = taken.shard, self.folder.rows(taken.shard)
        found = sorted(index for index in results.bad_at if index in rows)
        reasons = {index: printable(results.bad_at.pop(index).reason, one_line=True) for index in found}
        results.bad.clear()
        if taken.images + len(found) != len(rows):
            raise VitrailError(
                f"Shard {shard} has {counted(taken.images, 'image')} and {len(found)} bad ones, {len(rows)} are expected. "
                "This is a bug in Vitrail; please report it."
            )
        bad = [BadRow(index, self.split.image_name(index), reason) for index, reason in reasons.items()]
        try:
            with atomic_file(self.folder.file(shard)) as temporary:
                taken.opened.write(temporary, self.split.image_name, bad)
            self.folder.write_record(shard, bad)
        except FileNotFoundError as error:
            raise VitrailError(
                f"{error.filename} was deleted while shard {shard} was written. If another job has begun in {self.folder.folder}, "
                "it computes this shard, too; otherwise run the same command again."
            ) from error


@dataclass
class _Taken(Generic[T]):
    """A shard that this rank computes now."""

    shard: int
    opened: OpenShard[T]
    images: int = 0


def fingerprint(bundle: Bundle) -> str:
    """Return a SHA-256 of everything in a checkpoint that decides its outputs."""
    digest = hashlib.sha256(repr((bundle.model.config, bundle.task, bundle.classes, bundle.task_info)).encode("utf-8", "replace"))
    for name, value in sorted(bundle.model.state_dict().items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.detach().cpu().contiguous().view(torch.uint8).numpy() if value.ndim else repr(value.item()).encode())
    return digest.hexdigest()


def _hash_names(split: Split) -> tuple[str, bool]:
    """Return the hash of all names, and whether one of them is not valid Unicode."""
    name_bytes = False

    def names() -> Iterator[str]:
        nonlocal name_bytes
        for index in range(len(split)):
            name = split.image_name(index)
            name_bytes = name_bytes or has_surrogates(name)
            yield name

    return hash_names(names()), name_bytes


@contextmanager
def _one_thread(device: torch.device) -> Iterator[None]:
    """Compute each batch in one thread on a CPU: sums of several threads are rounded differently than those of one."""
    threads = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
