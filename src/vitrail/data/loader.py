"""The loaders: batches for training and for evaluation.

A training batch depends on (seed, epoch, step) alone: not on workers, ranks, micro-batches or restarts. Evaluation
reads every image exactly once over all ranks, without padding.
"""

from __future__ import annotations

import itertools
import multiprocessing
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from vitrail.data.augment.spec import Augment
from vitrail.data.batch import Batch, HostBatch
from vitrail.data.eval_read import EvalReader, eval_slices
from vitrail.data.preprocess import Preprocess
from vitrail.data.read import TrainReader
from vitrail.data.sampler import EpochOrder, Sampling, Slice, slices
from vitrail.data.stage import Stage
from vitrail.data.types import BadImage, Split
from vitrail.data.waiting import WaitMeter, worker_count
from vitrail.errors import VitrailError
from vitrail.files import write_text

BadImages = Literal["error", "skip"]


class _Loader:
    """What both loaders share: workers that turn slices into host batches, and the list of bad images."""

    def __init__(
        self,
        split: Split,
        reader: TrainReader | EvalReader,
        *,
        rank: int,
        ranks: int,
        workers: int | None,
        ranks_here: int | None,
        device: torch.device | str,
        prefetch: int,
        start_method: str | None,
    ) -> None:
        if not 0 <= rank < ranks:
            raise VitrailError(f"Rank {rank} of {ranks} does not exist; ranks count from 0.")
        self.split, self._reader, self.rank, self.ranks = split, reader, rank, ranks
        self.workers, self.note = worker_count(workers, ranks if ranks_here is None else ranks_here)
        self.device = torch.device(device)
        self.prefetch, self.start_method = prefetch, start_method
        self.bad: dict[str, BadImage] = {}
        self.wait = WaitMeter()

    def _host_batches(self, order: Iterable[Slice]) -> Iterator[HostBatch]:
        several: dict[str, Any] = {}
        if self.workers > 0:
            several = {"prefetch_factor": self.prefetch}
            if self.start_method is not None:
                several["multiprocessing_context"] = multiprocessing.get_context(self.start_method)
        loader: DataLoader[HostBatch | VitrailError] = DataLoader(
            _Guarded(self._reader),
            batch_size=None,
            sampler=order,
            num_workers=self.workers,
            collate_fn=_as_it_is,
            pin_memory=self.device.type == "cuda",
            # Given a generator of its own, the loader leaves torch's global one alone.
            generator=torch.Generator().manual_seed(0),
            **several,
        )
        return _watched(loader, self.wait, self.bad)

    def save_bad_images(self, path: str) -> int:
        """Write the images that were left out, one a line with what is wrong, and return their number."""
        write_text(path, "".join(f"{name}\t{bad.fault}\n" for name, bad in sorted(self.bad.items())))
        return len(self.bad)


class TrainLoader(_Loader):
    """Batches for training, without end; or one epoch's with `epoch()`."""

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
        ranks_here: int | None = None,
        bad_images: BadImages = "error",
        device: torch.device | str = "cpu",
        prefetch: int = 2,
        start_method: str | None = None,
    ) -> None:
        """`batch` is the global batch, over all ranks and micro-batches; `micro_batch` the most one rank takes at once.

        `ranks_here` is the number of ranks on this machine, which share its processors (all of them if not given).
        """
        _check_labels(split)
        self.reader = TrainReader(split, preprocess, augment, seed, skip_bad=_skips(bad_images), pieces=prefetch + 2)
        super().__init__(
            split,
            self.reader,
            rank=rank,
            ranks=ranks,
            workers=workers,
            ranks_here=ranks_here,
            device=device,
            prefetch=prefetch,
            start_method=start_method,
        )
        self.order = EpochOrder(split, batch=batch, seed=seed, sampling=sampling, repeats=augment.repeats, keep_last=keep_last)
        self.stage = Stage(preprocess, augment, task=split.task, classes=len(split.classes), seed=seed, device=self.device)
        self._sharing: dict[str, Any] = {
            "rank": rank,
            "ranks": ranks,
            "micro_batch": micro_batch,
            "neighbour": augment.mixes,
        }
        self.reader.memory.pins = self.workers == 0 and self.device.type == "cuda"
        self._epoch = self._step = 0
        self._running: Iterator[HostBatch] | None = None
        for _ in slices(self.order, epoch=0, step=self.steps - 1, **self._sharing):
            pass  # an impossible division into ranks is refused now, not in the last step of an epoch

    @property
    def steps(self) -> int:
        """Optimiser steps in an epoch."""
        return self.order.steps

    @property
    def micro_batch(self) -> int | None:
        """The most images a rank takes at once. When it is changed, a step that is not complete begins anew."""
        micro_batch: int | None = self._sharing["micro_batch"]
        return micro_batch

    @micro_batch.setter
    def micro_batch(self, images: int | None) -> None:
        self._sharing = {**self._sharing, "micro_batch": images}
        self.close()

    def __iter__(self) -> Iterator[Batch]:
        while True:
            yield from self.epoch()

    def epoch(self) -> Iterator[Batch]:
        """The batches from here to the end of the epoch that is running. Workers go on into the next one meanwhile."""
        running = self._epoch
        while self._epoch == running:
            if self._running is None:
                self._running = self._start()
            batch = self.stage(next(self._running))
            if batch.last:  # only a complete step counts as done
                done = batch.epoch * self.steps + batch.step + 1
                self._epoch, self._step = divmod(done, self.steps)
            yield batch

    def state_dict(self) -> dict[str, int | str]:
        """Where training stands, at the last complete step. It does not depend on ranks or workers, which may change."""
        return {"epoch": self._epoch, "step": self._step, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken. What decides the batches must be the same, or this is another run."""
        for key, value in self._identity().items():
            if state.get(key) != value:
                raise VitrailError(
                    f"The saved place in the data has {key} {state.get(key)!r}, this run {value!r}: the batches that are "
                    "left would not be the same. Resume with the same value, or start a new run."
                )
        self._epoch, self._step = int(state["epoch"]), int(state["step"])
        self.close()  # what workers have read ahead belongs elsewhere

    def close(self) -> None:
        """Stop the workers. A loader that is asked for more starts new ones and goes on where it was."""
        self._running = None

    def _identity(self) -> dict[str, int | str]:
        order = self.order
        return {
            "seed": order.seed,
            "images": order.length,
            "batch": order.batch,
            "sampling": order.sampling,
            "repeats": order.repeats,
            "keep_last": order.keep_last,
        }

    def _start(self) -> Iterator[HostBatch]:
        return self._host_batches(_endless(self.order, self._epoch * self.steps + self._step, self._sharing))


class EvalLoader(_Loader):
    """Every image of a split once, in order: this rank's share of them, as evaluation sees them."""

    def __init__(
        self,
        split: Split,
        *,
        preprocess: Preprocess,
        batch: int,
        rank: int = 0,
        ranks: int = 1,
        workers: int | None = None,
        ranks_here: int | None = None,
        bad_images: BadImages = "error",
        device: torch.device | str = "cpu",
        prefetch: int = 2,
        start_method: str | None = None,
    ) -> None:
        """`batch` is the batch of one rank. With `bad_images` skip a bad image is left out, and listed in `bad`."""
        _check_labels(split)
        if batch < 1:
            raise VitrailError(f"A batch of {batch} images cannot be evaluated; it must be at least 1.")
        self.reader = EvalReader(split, preprocess, skip_bad=_skips(bad_images), pieces=prefetch + 2)
        super().__init__(
            split,
            self.reader,
            rank=rank,
            ranks=ranks,
            workers=workers,
            ranks_here=ranks_here,
            device=device,
            prefetch=prefetch,
            start_method=start_method,
        )
        self.preprocess, self.batch = preprocess, batch

    def __len__(self) -> int:
        """Batches of this rank."""
        return len(self._slices())

    @property
    def images(self) -> int:
        """Images of this rank; over all ranks they add up to the split."""
        return len(range(self.rank, len(self.split), self.ranks))

    def __iter__(self) -> Iterator[Batch]:
        self.wait.reset()
        for host in self._host_batches(self._slices()):
            if len(host.indices) == 0:
                continue  # every image of it was bad
            images = self.preprocess.normalise(host.images.to(self.device, non_blocking=True))
            targets = host.targets.to(self.device, non_blocking=True)
            where = host.where
            yield Batch(images, targets, host.indices, 0, where.step, 0, 1, where.total)

    def _slices(self) -> list[Slice]:
        return eval_slices(len(self.split), self.batch, self.rank, self.ranks)


# What follows runs for as long as a loader lives and is held by it. These are functions and not methods because a way
# back to the loader would be a circle, which Python takes apart in an order that leaves workers waiting for seconds.


class _Guarded(Dataset[HostBatch | VitrailError]):
    """Hands an error for the user over as a value: torch would turn it into another one, with a traceback in words."""

    def __init__(self, reader: TrainReader | EvalReader) -> None:
        self.reader = reader

    def __getitem__(self, where: Slice) -> HostBatch | VitrailError:
        try:
            return self.reader[where]
        except VitrailError as error:
            return error


def _watched(loader: DataLoader[HostBatch | VitrailError], wait: WaitMeter, found: dict[str, BadImage]) -> Iterator[HostBatch]:
    iterator = iter(loader)
    while True:
        began = wait.begin()
        host = next(iterator, None)
        if host is None:
            return
        if isinstance(host, VitrailError):
            raise host
        wait.end(began)
        for bad in host.bad:
            found.setdefault(bad.name, bad)
        yield host


def _endless(order: EpochOrder, first: int, sharing: dict[str, Any]) -> Iterator[Slice]:
    for done in itertools.count(first):
        epoch, step = divmod(done, order.steps)
        yield from slices(order, epoch=epoch, step=step, **sharing)


def _skips(bad_images: str) -> bool:
    if bad_images not in ("error", "skip"):
        raise VitrailError(f"bad_images is {bad_images!r}; it must be 'error' or 'skip'.")
    return bad_images == "skip"


def _check_labels(split: Split) -> None:
    """A label outside the classes would fail on the device, far from its cause; here its image can be named."""
    if split.task != "classify" or len(split) == 0:
        return
    outside = np.flatnonzero((split.targets < 0) | (split.targets >= len(split.classes)))
    if len(outside):
        index = int(outside[0])
        raise VitrailError(
            f"Label {int(split.targets[index])} at {split.image_name(index)}, but there are {len(split.classes)} "
            f"classes (0 to {len(split.classes) - 1}). Check the class map of the data."
        )


def _as_it_is(batch: Any) -> Any:
    return batch
