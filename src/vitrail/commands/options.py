"""Options shared by the commands that run a model over images."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from vitrail.api.progress import terminal_bar
from vitrail.commands.terminal import Console
from vitrail.data.settings import BadImages
from vitrail.errors import VitrailError, counted
from vitrail.evaluate.settings import FeatureSpec, Precision, no_progress
from vitrail.text import printable

if TYPE_CHECKING:
    from vitrail.checkpoints import Bundle
    from vitrail.data.trained_on import Overlap
    from vitrail.data.types import BadImage
    from vitrail.evaluate.context import EvalContext
    from vitrail.train.parallel import World


_FIRST, _PAUSE = 5.0, 10.0  # seconds to the first plain line, and between the others
_SKIPPED = 10  # bad images that are listed
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
    image_size: str | None = None
    """Input size in pixels: 384, or height and width as 384x512. Position embeddings are resampled. None: the checkpoint's own."""
    any_size: bool = False
    """Let each image keep its aspect ratio instead of being cropped or stretched: the short side gets the input size, and both
    sides are rounded to whole patches. Images of one size are computed together."""
    max_size: int | None = None
    """With --any-size: the longest side in pixels. None: twice the short side."""

    def bundle(self, ref: str, world: World) -> Bundle:
        """Load the checkpoint on its device, and say on stderr what its file does not show and was assumed."""
        from vitrail.checkpoints import load

        size = None if self.image_size is None else parse_size(self.image_size)
        bundle = load(ref, preprocess=self.preprocess, image_size=size, device=world.device)
        if world.main:
            show_assumptions(bundle)
            self._show_sizes(bundle)
        return bundle

    def _show_sizes(self, bundle: Bundle) -> None:
        """Print on stderr how the position embedding is resampled."""
        from vitrail.models.features import stride_of

        console = Console(stderr=True)
        if self.image_size is not None:
            note = next(note for note in reversed(bundle.report.notes) if note.startswith("image size"))
            console.print(note, highlight=False, soft_wrap=True)
        if self.any_size and bundle.preprocess is not None:
            kept = bundle.preprocess.keep_aspect(stride_of(bundle.model.config), self.max_size)
            sides = f"short side {kept.resize_to}, long side up to {kept.max_size}, in steps of {_times(kept.multiple)} pixels"
            rule = getattr(bundle.model.config, "position_resize", None)
            how = f"; position embedding resampled for each size with rule {rule!r}" if rule else ""
            console.print(f"images keep their aspect ratio: {sides}{how}", highlight=False, soft_wrap=True)

    def eval_context(self, world: World, progress: Callable[[int], None] = no_progress) -> EvalContext:
        from vitrail.evaluate.context import EvalContext

        return EvalContext(
            world=world,
            batch=self.batch,
            workers=self.workers,
            precision=self.precision,
            bad_images=self.bad_images,
            any_size=self.any_size,
            max_size=self.max_size,
            progress=progress,
        )


Options = Annotated[RunOptions, tyro.conf.arg(name="")]
DEFAULT = RunOptions()


def parse_size(text: str) -> tuple[int, int]:
    """Read 384, or 384x512: height and width."""
    match = re.fullmatch(r"([1-9]\d{0,4})(?:[x×]([1-9]\d{0,4}))?", text)
    if match is None:
        raise VitrailError(f"--image-size is {text!r}; it takes a number of pixels, or height and width such as 384x512.")
    return int(match[1]), int(match[2] or match[1])


def _times(pair: tuple[int, int] | None) -> str:
    return "" if pair is None else str(pair[0]) if pair[0] == pair[1] else f"{pair[0]}×{pair[1]}"


def data_or_own(data: str | None, checkpoint: str, console: Console) -> str:
    """Return the data source that was given; otherwise that of the run, which is printed."""
    if data is not None:
        return data
    from vitrail.train.run import RunFolder

    path = Path(checkpoint).expanduser()
    folder = path.parent if path.name == "model" else path
    is_run = (folder / "config.json").is_file() and ((folder / "model").is_dir() or (folder / "checkpoints").is_dir())
    recipe = RunFolder(folder).saved_recipe() if is_run else None
    if recipe is None or not recipe.data.source:
        raise VitrailError(f"{checkpoint} is not a run that knows its data: add --data, such as --data folder:DIR.")
    if os.environ.get("RANK", "0") == "0":
        console.print(f"data: {recipe.data.source}, which the run was trained on", highlight=False, soft_wrap=True)
    return recipe.data.source


def show_assumptions(bundle: Bundle) -> None:
    """Print on stderr what the file of a checkpoint does not show and was assumed."""
    console = Console(stderr=True)
    for assumption in bundle.report.assumptions:
        console.print(f"note: {bundle.report.source}: {assumption}", highlight=False, markup=False, soft_wrap=True)


def show_trained_on(console: Console, seen: Overlap | None) -> None:
    """Warn of images to evaluate on that the checkpoint was trained on."""
    if seen is not None and not seen.images:
        known = "was among the training images of this model"
        sampled = "is identical to one of a sample of training images; resized or re-saved copies are not recognised"
        console.print(f"none of these images {known if seen.exact else sampled}", highlight=False, soft_wrap=True)
    for note in seen.notes if seen is not None else ():
        console.print(f"warning: {note}", style="bold red", highlight=False, markup=False, soft_wrap=True)


def show_skipped(console: Console, bad: Sequence[BadImage]) -> None:
    """List images that could not be read: the first ten, and how many more there are."""
    for one in bad[:_SKIPPED]:
        console.print(printable(f"skipped {one.name}: {one.reason}", one_line=True), highlight=False, soft_wrap=True)
    if len(bad) > _SKIPPED:
        console.print(f"skipped {counted(len(bad) - _SKIPPED, 'more image')}", highlight=False)


class PlainProgress:
    """A line on standard error after five seconds, then every ten, for logs and pipes; nothing for what takes less."""

    def __init__(self, console: Console, description: str, total: int, ranks: int = 1) -> None:
        self.console = console if console.stderr else Console(stderr=True)
        self.description, self.total, self.ranks = description, total, ranks
        self.done, self.next = 0, time.monotonic() + _FIRST

    def __call__(self, images: int) -> None:
        self.done += images * self.ranks
        now = time.monotonic()
        if now >= self.next:
            self.next = now + _PAUSE
            self.console.print(f"{self.description}: {min(self.done, self.total):,} of {self.total:,}", highlight=False)


@contextmanager
def progress_bar(
    console: Console, description: str, total: int, world: World | None = None, *, hidden: bool = False
) -> Iterator[Callable[[int], None]]:
    """Show a progress bar over images, or where there is no terminal a line now and then; nothing on other ranks than 0."""
    if hidden or (world is not None and not world.main):
        yield no_progress
        return
    if not console.is_terminal:
        yield PlainProgress(console, description, total, world.ranks if world is not None else 1)
        return
    with terminal_bar(console, description, total, ranks=world.ranks if world is not None else 1) as advance:
        yield advance
