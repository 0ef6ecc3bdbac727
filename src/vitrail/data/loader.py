"""Loaders for training and for evaluation.

A training batch depends on (seed, epoch, step) alone, not on workers, ranks, micro-batches or restarts. Evaluation reads
every image exactly once over all ranks, without padding.
"""

from __future__ import annotations

import itertools
import logging
import multiprocessing
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from vitrail.data.augment.spec import Augment
from vitrail.data.batch import Batch, HostBatch
from vitrail.data.classes import check_range
from vitrail.data.data_wait import DataWaitTimer, worker_count
from vitrail.data.device_prefetch import DevicePrefetch
from vitrail.data.device_transforms import DeviceTransforms
from vitrail.data.eval_reader import EvalReader, eval_slices
from vitrail.data.preprocess import Preprocess
from vitrail.data.sampler import BatchSlice, EpochOrder, Sampling, batch_slices
from vitrail.data.settings import BadImages
from vitrail.data.train_reader import TrainReader
from vitrail.data.types import BadImage, Split
from vitrail.data.worker_signals import blocked, caught_signals, end_by_parent, raise_worker_error
from vitrail.errors import VitrailError, counted
from vitrail.files import write_text

log = logging.getLogger("vitrail.data")


class _Loader:
    """Common part of both loaders: workers that read host batches, and the bad images found."""

    def __init__(
        self,
        split: Split,
        reader: TrainReader | EvalReader,
        *,
        rank: int,
        ranks: int,
        workers: int | None,
        local_ranks: int | None,
        device: torch.device | str,
        prefetch: int,
        start_method: str | None,
    ) -> None:
        if not 0 <= rank < ranks:
            raise VitrailError(f"There is no rank {rank} of {counted(ranks, 'rank')}: they are numbered from 0 to {ranks - 1}.")
        self.split, self._reader, self.rank, self.ranks = split, reader, rank, ranks
        self.workers, self.note = worker_count(workers, ranks if local_ranks is None else local_ranks)
        self.device = torch.device(device)
        self.prefetch, self.start_method = prefetch, start_method
        self.bad: dict[str, BadImage] = {}
        self.data_wait = DataWaitTimer()

    def _host_batches(self, order: Iterable[BatchSlice]) -> Iterator[HostBatch]:
        worker_options: dict[str, Any] = {}
        if self.workers > 0:
            worker_options = {"prefetch_factor": self.prefetch}
            if self.start_method is not None:
                worker_options["multiprocessing_context"] = multiprocessing.get_context(self.start_method)
        loader: DataLoader[HostBatch | VitrailError] = DataLoader(
            _ErrorsAsValues(self._reader),
            batch_size=None,
            sampler=order,
            num_workers=self.workers,
            collate_fn=_unchanged,
            worker_init_fn=end_by_parent,
            pin_memory=self.device.type == "cuda",
            # Without its own generator, DataLoader would advance torch's global one.
            generator=torch.Generator().manual_seed(0),
            **worker_options,
        )
        with blocked(caught_signals()):  # workers are not to end by a signal that this process catches, to save first
            iterator = iter(loader)
        return _checked(iterator)

    def _list_bad(self, found: Iterable[BadImage]) -> None:
        """Add images that could not be read to `bad`."""
        for bad in found:
            self.bad.setdefault(bad.name, bad)

    def save_bad_images(self, path: str) -> int:
        """Write the skipped images to a file, one per line with the reason, and return their number."""
        write_text(path, "".join(f"{name}\t{bad.reason}\n" for name, bad in sorted(self.bad.items())))
        return len(self.bad)


class TrainLoader(_Loader):
    """Endless iterator of training batches; `epoch()` yields those of one epoch."""

    def __init__(
        self,
        split: Split,
        *,
        preprocess: Preprocess,
        augment: Augment,
        batch: int,
        seed: int = 0,
        sampling: Sampling = "shuffle",
        keep_last: bool = False,
        rank: int = 0,
        ranks: int = 1,
        micro_batch: int | None = None,
        workers: int | None = None,
        local_ranks: int | None = None,
        bad_images: BadImages = "error",
        device: torch.device | str = "cpu",
        prefetch: int = 2,
        start_method: str | None = None,
    ) -> None:
        """Prepare the loader; workers start with the first batch.

        `batch` is the global batch, over all ranks and micro-batches. `micro_batch` is the maximum per rank and forward pass.
        `local_ranks` is the number of ranks on this machine, which divide its CPUs among them (default: `ranks`).
        """
        check_range(split)
        self.reader = TrainReader(split, preprocess, augment, seed, skip_bad=_skip_bad(bad_images), num_buffers=prefetch + 2)
        super().__init__(
            split,
            self.reader,
            rank=rank,
            ranks=ranks,
            workers=workers,
            local_ranks=local_ranks,
            device=device,
            prefetch=prefetch,
            start_method=start_method,
        )
        self.order = EpochOrder(split, batch=batch, seed=seed, sampling=sampling, repeats=augment.repeats, keep_last=keep_last)
        self.transforms = DeviceTransforms(
            preprocess, augment, task=split.task, classes=len(split.classes), seed=seed, device=self.device
        )
        self._slicing: dict[str, Any] = {
            "rank": rank,
            "ranks": ranks,
            "micro_batch": micro_batch,
            "with_partner": augment.mixes,
        }
        self.reader.buffers.pin_memory = self.workers == 0 and self.device.type == "cuda"
        self._epoch = self._step = 0
        self._batches: Iterator[Batch] | None = None
        for _ in batch_slices(self.order, epoch=0, step=self.steps - 1, **self._slicing):
            pass  # raise now if the last, smallest batch cannot be divided among the ranks, not at the end of the epoch

    @property
    def steps(self) -> int:
        """Optimiser steps per epoch."""
        return self.order.steps

    def set_total_steps(self, total: int) -> None:
        """Say how many optimiser steps the run has, so that mixing ends after the fraction `mix_until` of them."""
        if self.transforms.augment.mix_until < 1:
            self.transforms.stop_mixing_at = divmod(round(self.transforms.augment.mix_until * total), self.steps)

    @property
    def micro_batch(self) -> int | None:
        """Maximum images per rank and forward pass. Setting it restarts an incomplete optimiser step."""
        micro_batch: int | None = self._slicing["micro_batch"]
        return micro_batch

    @micro_batch.setter
    def micro_batch(self, images: int | None) -> None:
        self._slicing = {**self._slicing, "micro_batch": images}
        self.close()

    def __iter__(self) -> Iterator[Batch]:
        while True:
            yield from self.epoch()

    def epoch(self) -> Iterator[Batch]:
        """Yield the remaining batches of the current epoch. Workers already prefetch from the next one."""
        current = self._epoch
        while self._epoch == current:
            if self._batches is None:
                self._batches = self._start()
            batch = next(self._batches)
            self._list_bad(batch.bad)
            if batch.completes_step:  # the state counts complete steps only
                done = batch.epoch * self.steps + batch.step + 1
                self._epoch, self._step = divmod(done, self.steps)
            yield batch

    def state_dict(self) -> dict[str, int | str]:
        """Return the position after the last complete step. It is valid for any number of ranks and workers."""
        return {"epoch": self._epoch, "step": self._step, **self._settings()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict`. Settings that change the batches must be the same."""
        for key, value in self._settings().items():
            if state.get(key) != value:
                raise VitrailError(
                    f"The saved state of the data loader has {key} {state.get(key)!r}, but this run has {value!r}: the "
                    "remaining batches would differ. Resume with the same value, or start a new run."
                )
        self._epoch, self._step = int(state["epoch"]), int(state["step"])
        self.close()  # discard prefetched batches

    def close(self) -> None:
        """Stop the workers. The next batch starts new ones at the same position."""
        if isinstance(self._batches, DevicePrefetch):
            self._batches.close()
        self._batches = None

    def _settings(self) -> dict[str, int | str]:
        order = self.order
        return {
            "seed": order.seed,
            "images": order.length,
            "batch": order.batch,
            "sampling": order.sampling,
            "repeats": order.repeats,
            "keep_last": order.keep_last,
        }

    def _start(self) -> Iterator[Batch]:
        augment = self.transforms.augment
        if augment.mixes and augment.mix_until < 1 and self.transforms.stop_mixing_at is None:
            raise VitrailError(
                f"mix_until is {augment.mix_until:g}, a fraction of the run, but the loader does not know the length of the run. "
                "Call set_total_steps first."
            )
        host_batches = self._host_batches(_endless_slices(self.order, self._epoch * self.steps + self._step, self._slicing))
        if self.device.type == "cuda":
            return DevicePrefetch(host_batches, self.transforms, self.device, self.data_wait)
        return map(self.transforms, _timed(host_batches, self.data_wait))


class EvalLoader(_Loader):
    """Iterate over every image of a split once, in order; each rank gets its part."""

    def __init__(
        self,
        split: Split,
        *,
        preprocess: Preprocess,
        batch: int,
        rank: int = 0,
        ranks: int = 1,
        workers: int | None = None,
        local_ranks: int | None = None,
        bad_images: BadImages = "error",
        device: torch.device | str = "cpu",
        prefetch: int = 2,
        start_method: str | None = None,
        slices: Iterable[BatchSlice] | None = None,
    ) -> None:
        """Prepare the loader. `batch` is per rank. With `bad_images="skip"` bad images are skipped and listed in `bad`.

        `slices` are the batches to read instead of this rank's part of the split; they are taken from the iterable as needed.
        """
        check_range(split)
        if batch < 1:
            raise VitrailError(f"The batch size is {batch}; it must be at least 1.")
        self.reader = EvalReader(split, preprocess, skip_bad=_skip_bad(bad_images), num_buffers=prefetch + 2)
        super().__init__(
            split,
            self.reader,
            rank=rank,
            ranks=ranks,
            workers=workers,
            local_ranks=local_ranks,
            device=device,
            prefetch=prefetch,
            start_method=start_method,
        )
        self.preprocess, self.batch = preprocess, batch
        self._given, self._warned = slices, False
        self.bad_at: dict[int, BadImage] = {}
        """The bad images by their position in the split; names need not be unique in a list of files."""

    def __len__(self) -> int:
        """Return the number of batches of this rank."""
        return len(eval_slices(len(self.split), self.batch, self.rank, self.ranks))

    @property
    def images(self) -> int:
        """Number of images of this rank; over all ranks they add up to the split."""
        return len(range(self.rank, len(self.split), self.ranks))

    def __iter__(self) -> Iterator[Batch]:
        for host in self.host_batches():
            yield from self.batches_of(host)

    def host_batches(self) -> Iterator[HostBatch]:
        """Read this rank's images; `batches_of` prepares them for the model."""
        self.data_wait.reset(idle=True)
        for host in _timed(self._host_batches(self.slices()), self.data_wait):
            self.record(host)
            yield host

    def batches_of(self, host: HostBatch) -> Iterator[Batch]:
        """Yield the images normalised and on the device: one batch, none if all were bad, or one for each size that they have."""
        if len(host.indices) == 0:
            return
        pixels = host.images.to(self.device, non_blocking=True)
        targets = host.targets.to(self.device, non_blocking=True)
        for images, rows in _same_size(pixels, host.groups, self.preprocess.channels):
            total = host.slice.total
            yield Batch(self.preprocess.normalise(images), targets[rows], host.indices[rows], 0, host.slice.step, 0, 1, total)

    def record(self, host: HostBatch) -> None:
        """Record the bad images of a batch, and warn once of an image that the model sees rotated."""
        self._list_bad(host.bad)
        self.bad_at.update({bad.index: bad for bad in host.bad if bad.index is not None})
        if host.rotated is not None and not self._warned:
            self._warned = True
            log.warning("%s", self.preprocess.rotated_note(host.rotated))

    def slices(self) -> Iterable[BatchSlice]:
        """Return the batches to read."""
        return self._given if self._given is not None else eval_slices(len(self.split), self.batch, self.rank, self.ranks)


def _same_size(
    pixels: torch.Tensor, groups: tuple[tuple[int, int, int], ...], channels: int
) -> Iterator[tuple[torch.Tensor, slice]]:
    """Yield images [n, C, H, W] of one size, and which of the batch's they are."""
    if not groups:
        yield pixels, slice(None)
    start, first = 0, 0
    for count, height, width in groups:
        end = start + count * height * width * channels
        yield pixels[start:end].view(count, height, width, channels).permute(0, 3, 1, 2), slice(first, first + count)
        start, first = end, first + count


# These are functions, not methods: a reference back to the loader would be a cycle, and the garbage collector then frees
# the DataLoader iterator in an order in which stopping the workers takes seconds.


class _ErrorsAsValues(Dataset[HostBatch | VitrailError]):
    """Return a VitrailError as a value: DataLoader would wrap it in another exception, with a traceback as its text."""

    def __init__(self, reader: TrainReader | EvalReader) -> None:
        self.reader = reader

    def __getitem__(self, batch_slice: BatchSlice) -> HostBatch | VitrailError:
        try:
            return self.reader[batch_slice]
        except VitrailError as error:
            return error


def _checked(batches: Iterator[HostBatch | VitrailError]) -> Iterator[HostBatch]:
    """Raise the errors that workers return as values."""
    while True:
        try:
            host = next(batches, None)
        except RuntimeError as error:
            raise_worker_error(error)
            raise
        if host is None:
            return
        if isinstance(host, VitrailError):
            raise host
        yield host


def _timed(batches: Iterator[HostBatch], timer: DataWaitTimer) -> Iterator[HostBatch]:
    while True:
        started = timer.start()
        host = next(batches, None)
        if host is None:
            return
        timer.stop(started)
        yield host


def _endless_slices(order: EpochOrder, first: int, slicing: dict[str, Any]) -> Iterator[BatchSlice]:
    for done in itertools.count(first):
        epoch, step = divmod(done, order.steps)
        yield from batch_slices(order, epoch=epoch, step=step, **slicing)


def _skip_bad(bad_images: str) -> bool:
    if bad_images not in ("error", "skip"):
        raise VitrailError(f"bad_images is {bad_images!r}; it must be 'error' or 'skip'.")
    return bad_images == "skip"


def _unchanged(batch: Any) -> Any:
    return batch
