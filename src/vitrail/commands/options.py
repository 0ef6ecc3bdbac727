"""Options and small habits that the commands which run a model over images have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated

import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from vitrail.checkpoints import Bundle, load
from vitrail.evaluate.features import FeatureSpec
from vitrail.evaluate.running import BadImages, Precision, Running, no_progress
from vitrail.train.parallel import World

Json = Annotated[bool, tyro.conf.arg(name="json")]
Checkpoint = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="CHECKPOINT")]
Images = Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="IMAGE|DIR|LIST.txt …")]
Features = Annotated[FeatureSpec, tyro.conf.arg(name="")]


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How images are read and computed."""

    device: str = "auto"
    """Where to compute: auto, cpu, cuda or mps."""
    batch: int | None = None
    """Images at once. It changes speed and memory, not results. None: 8 on a processor, 128 on a GPU."""
    workers: int | None = None
    """Processes that read images for a GPU; on a processor, threads that read and compute. None: one a processor."""
    precision: Precision = "fp32"
    """bf16 and fp16 are faster and round more; so is int8, on a processor. auto: the fastest that suits the processor and model."""
    bad_images: BadImages = "error"
    """What to do with an image that cannot be read: stop, or leave it out and list it."""
    preprocess: str | None = None
    """A preset (google-vit, big-vision, timm, imagenet, cifar) in place of the checkpoint's own preprocessing."""

    def bundle(self, ref: str, world: World) -> Bundle:
        """The checkpoint, on its device."""
        return load(ref, preprocess=self.preprocess, device=world.device)

    def running(self, world: World, progress: Callable[[int], None] = no_progress) -> Running:
        return Running(
            world=world,
            batch=self.batch,
            workers=self.workers,
            precision=self.precision,
            bad_images=self.bad_images,
            progress=progress,
        )


Options = Annotated[RunOptions, tyro.conf.arg(name="")]
DEFAULT = RunOptions()


@contextmanager
def progress_bar(
    console: Console, words: str, total: int, world: World | None = None, *, hidden: bool = False
) -> Iterator[Callable[[int], None]]:
    """A bar that moves as images are done; nothing where the output is not a terminal, or another rank draws it."""
    if hidden or not console.is_terminal or (world is not None and not world.main):
        yield no_progress
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bars:
        bar = bars.add_task(words, total=total)
        ranks = world.ranks if world is not None else 1
        yield lambda images: bars.advance(bar, images * ranks)
