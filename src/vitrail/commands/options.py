"""Options shared by the commands that run a model over images."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated

import tyro
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from vitrail.checkpoints import Bundle, load
from vitrail.commands.terminal import Console
from vitrail.data.trained_on import Overlap
from vitrail.evaluate.context import BadImages, EvalContext, Precision, no_progress
from vitrail.evaluate.features import FeatureSpec
from vitrail.train.parallel import World

Json = Annotated[bool, tyro.conf.arg(name="json")]
Checkpoint = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="CHECKPOINT")]
CheckpointAndImages = Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[CHECKPOINT] IMAGE|DIR|LIST.txt …")]
Images = Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="IMAGE|DIR|LIST.txt …")]
Features = Annotated[FeatureSpec, tyro.conf.arg(name="")]


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How images are loaded and computed."""

    device: str = "auto"
    """Device: auto, cpu, cuda or mps."""
    batch: int | None = None
    """Images per batch. Changes speed and memory, not results. None: 8 on a CPU, 128 on a GPU."""
    workers: int | None = None
    """Processes that read images for a GPU; on a CPU, threads that read and compute. None: one per CPU core."""
    precision: Precision = "fp32"
    """bf16, fp16 and, on a CPU, int8 are faster but less exact. auto: the fastest one that suits the device and the model."""
    bad_images: BadImages = "error"
    """What to do with an image that cannot be read: stop with an error, or skip and list it."""
    preprocess: str | None = None
    """A preset (google-vit, big-vision, timm, imagenet, deit, cifar) that replaces the checkpoint's own preprocessing. With +exif
    (timm+exif, or stored+exif for the checkpoint's own) photos are turned upright, which most libraries do not."""

    def bundle(self, ref: str, world: World) -> Bundle:
        """Load the checkpoint on its device, and say on stderr what its file does not show and was assumed."""
        bundle = load(ref, preprocess=self.preprocess, device=world.device)
        if world.main:
            show_assumptions(bundle)
        return bundle

    def eval_context(self, world: World, progress: Callable[[int], None] = no_progress) -> EvalContext:
        return EvalContext(
            world=world,
            batch=self.batch,
            workers=self.workers,
            precision=self.precision,
            bad_images=self.bad_images,
            progress=progress,
        )


Options = Annotated[RunOptions, tyro.conf.arg(name="")]
DEFAULT = RunOptions()


def show_assumptions(bundle: Bundle) -> None:
    """Print on stderr what the file of a checkpoint does not show and was assumed."""
    console = Console(stderr=True)
    for assumption in bundle.report.assumptions:
        console.print(f"note: {bundle.report.source}: {assumption}", highlight=False, markup=False, soft_wrap=True)


def show_trained_on(console: Console, seen: Overlap | None) -> None:
    """Warn of images to evaluate on that the checkpoint was trained on."""
    if seen is not None and not seen.images:
        partly = "" if seen.exact else ", as far as a sample of them was recorded: only identical files are recognised here"
        console.print(f"none of these images was among the training images of this model{partly}", highlight=False, soft_wrap=True)
    for note in seen.notes if seen is not None else ():
        console.print(f"warning: {note}", style="bold red", highlight=False, markup=False, soft_wrap=True)


@contextmanager
def progress_bar(
    console: Console, description: str, total: int, world: World | None = None, *, hidden: bool = False
) -> Iterator[Callable[[int], None]]:
    """Show a progress bar over images; nothing if the output is not a terminal or this is not rank 0."""
    if hidden or not console.is_terminal or (world is not None and not world.main):
        yield no_progress
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bars:
        bar = bars.add_task(description, total=total)
        ranks = world.ranks if world is not None else 1
        yield lambda images: bars.advance(bar, images * ranks)
