"""Look at the images of a new run before its first step."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Literal

from vitrail.api.progress import Advance, progress_bar
from vitrail.data.data_wait import max_workers
from vitrail.data.find_bad import find_bad
from vitrail.data.types import BadImage, Source, Split
from vitrail.errors import VitrailError, counted, did_you_mean
from vitrail.train.config import Recipe
from vitrail.train.parallel import World

HowMany = Literal["auto", "all", "none"]
_SECONDS = 60.0


def image_check(how: str, recipe: Recipe, *, say: Callable[[str], None]) -> ImageCheck | None:
    """Return the check of a new run: `auto` looks at images for 60 seconds, `all` at all of them, `none` at none."""
    if how not in ("auto", "all", "none"):
        raise VitrailError(f"--check-images is {how!r}; it can be auto, all or none.{did_you_mean(how, ('auto', 'all', 'none'))}")
    if how == "none" or recipe.data.bad_images == "skip":
        return None
    return ImageCheck(None if how == "all" else _SECONDS, say=say)


class ImageCheck:
    """Names all bad images before the first step, once for all runs of a sweep. Each rank looks at its share."""

    def __init__(self, seconds: float | None, *, say: Callable[[str], None] = lambda text: None) -> None:
        self.seconds, self.say, self.done = seconds, say, False

    def __call__(self, source: Source, splits: Sequence[Split], *, world: World) -> None:
        if self.done or source.kind == "packed":  # decoded and checked when it was packed
            return
        self.done = True
        found = world.gather(self._find(splits, world))
        bad = sorted((one for some, _ in found for one in some), key=lambda one: one.name)
        looked_at, total = sum(done for _, done in found), sum(map(len, splits))
        if bad:
            listed = "\n".join(f"  {one.name}: {one.reason}" for one in bad)
            of = f"{counted(looked_at, 'image')}{'' if looked_at == total else f' looked at, of {total:,}'}"
            raise VitrailError(
                f"{len(bad):,} of {of} cannot be read:\n{listed}\nRepair or remove them, or skip them with --bad-images skip."
            )
        if looked_at < total and world.main:
            self.say(
                f"checked {looked_at:,} of {total:,} images in {self.seconds:.0f} s, all good; --check-images all checks the rest, "
                "none checks none"
            )

    def _find(self, splits: Sequence[Split], world: World) -> tuple[list[BadImage], int]:
        """Return (bad images, images looked at) of this rank. The smallest split is first; the time is divided equally, and what
        one does not need is left to the next."""
        bad, looked_at, start = list[BadImage](), 0, time.monotonic()
        workers = max(1, max_workers() // world.local_ranks)
        total = sum(len(range(world.rank, len(split), world.ranks)) for split in splits)
        bar: AbstractContextManager[Advance] = progress_bar("checking images", total, shown=None if world.main else False)
        with bar as advance:
            for k, split in enumerate(sorted(splits, key=len)):
                left = None if self.seconds is None else (self.seconds - (time.monotonic() - start)) / (len(splits) - k)
                share = (world.rank, world.ranks)
                found, done = find_bad(split, workers=workers, seconds=left, share=share, progress=advance)
                bad, looked_at = bad + found, looked_at + done
        return bad, looked_at
