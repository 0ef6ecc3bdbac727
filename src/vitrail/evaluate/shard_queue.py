"""Hand out shards to ranks, and count the images of all ranks, through the store of torch's process group.

A rank takes the next shard when it needs one, so fast ranks take more. The store lives as long as the job: after a restart the
queue has the shards that are still missing, and no claim of a dead rank is left.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Iterator, Sequence

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

from vitrail.train.parallel import World

_INTERVAL = 1.0  # seconds between two messages to the store


def default_store() -> Store | None:
    """Return the store of the process group; None without one."""
    return _get_default_store() if dist.is_initialized() else None


class ShardQueue:
    """The shards of one call that are still to be computed, taken by one rank at a time."""

    def __init__(self, world: World, shards: Sequence[int], store: Store | None) -> None:
        self._shards, self._taken, self._unsent, self._sent_at = shards, 0, 0, time.monotonic()
        self._lock, self._count = threading.Lock(), 0
        token = world.broadcast(secrets.token_hex(8)) if world.ranks > 1 else ""
        self._store = PrefixStore(f"vitrail-shards-{token}", store) if world.ranks > 1 and store is not None else None

    def __iter__(self) -> Iterator[int]:
        """Yield shards until no one is left."""
        while (position := self._take()) < len(self._shards):
            yield self._shards[position]

    def _take(self) -> int:
        if self._store is not None:
            return int(self._store.add("taken", 1)) - 1
        self._taken += 1
        return self._taken - 1

    def report(self, images: int) -> None:
        """Count images that this rank has finished."""
        with self._lock:
            self._unsent += images
            if self._store is None:
                self._count, self._unsent = self._count + self._unsent, 0
            elif time.monotonic() - self._sent_at >= _INTERVAL:
                self._count, self._unsent, self._sent_at = int(self._store.add("images", self._unsent)), 0, time.monotonic()

    def images(self) -> int:
        """Return how many images all ranks have finished, about a second ago."""
        if self._store is not None:
            with self._lock:
                self._count, self._unsent, self._sent_at = int(self._store.add("images", self._unsent)), 0, time.monotonic()
        return self._count

    def last_known(self) -> int:
        """Return the same without asking the store."""
        return self._count
