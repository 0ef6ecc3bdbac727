"""`vitrail embed --out FOLDER` and `vitrail predict --out FOLDER`: what they print, on one process or under torchrun."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from vitrail.api.progress import image_progress
from vitrail.commands.options import RunOptions
from vitrail.commands.output import check_place
from vitrail.commands.terminal import Console, say
from vitrail.errors import VitrailError, counted
from vitrail.evaluate.settings import FeatureFormat, FeatureSpec, TableFormat
from vitrail.text import printable, to_json

if TYPE_CHECKING:
    from vitrail.checkpoints import Bundle
    from vitrail.data.types import Split
    from vitrail.evaluate.context import EvalContext
    from vitrail.evaluate.shards import Progress, ShardResult
    from vitrail.train.parallel import World


_SHOWN = 10  # bad images that are printed; all of them are in the folder
_EVERY = 60.0  # seconds between lines of progress in a log


@dataclass(frozen=True, kw_only=True)
class ShardSettings:
    """The arguments that both commands share."""

    checkpoint: str
    images: tuple[str, ...]
    out: Path
    size: int
    options: RunOptions
    json: bool
    default_model: bool = False
    """Whether no checkpoint was given, so that the model is to be named."""


def is_folder(out: Path) -> bool:
    """Whether --out names a folder: an existing one, or a name without a suffix."""
    return out.is_dir() or not out.suffix


def check_shard_folder(out: Path, *, overwrite: bool) -> None:
    """Refuse a folder that cannot be written, and --overwrite, which would have no effect: shards that exist are kept."""
    if overwrite:
        raise VitrailError(f"--overwrite is for single files; a job that writes shards resumes. To start anew, delete {out}.")
    check_place(out)


def refuse_shard_options(format_: str, shard_size: int, defaults: tuple[str, int]) -> None:
    """Refuse --format and --shard-size where no folder of shards is written."""
    for option, given, default in zip(("--format", "--shard-size"), (format_, shard_size), defaults, strict=True):
        if given != default:
            raise VitrailError(f"{option} {given} is for shards, but no folder is written. Pass --out FOLDER, or leave it out.")


def refuse_ranks(out: Path | None) -> None:
    """Refuse torchrun where the output is one file, which one process writes."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        what = f"{out} is one file" if out is not None else "The output is one stream"
        raise VitrailError(f"{what}; under torchrun every rank writes its own shards. Pass --out with the name of a folder.")


def embed_to_folder(settings: ShardSettings, spec: FeatureSpec, format_: FeatureFormat) -> int:
    """Embed images into a folder of shards."""
    from vitrail.evaluate.shards import embed_shards

    def run(bundle: Bundle, split: Split, context: EvalContext, progress: Progress) -> ShardResult | None:
        return embed_shards(bundle, split, settings.out, spec, context, format=format_, shard_size=settings.size, progress=progress)

    return _run(settings, "embedding", f"features, {spec.describe()}", run)


def predict_to_folder(settings: ShardSettings, top: int, format_: TableFormat) -> int:
    """Predict images into a folder of shards."""
    from vitrail.evaluate.shards import predict_shards

    def run(bundle: Bundle, split: Split, context: EvalContext, progress: Progress) -> ShardResult | None:
        return predict_shards(
            bundle, split, settings.out, top=top, context=context, format=format_, shard_size=settings.size, progress=progress
        )

    return _run(settings, "predicting", "predictions", run)


def _run(
    settings: ShardSettings,
    doing: str,
    what: str,
    run: Callable[[Bundle, Split, EvalContext, Progress], ShardResult | None],
) -> int:
    from vitrail.commands.default_model import default_note
    from vitrail.evaluate.shards import find_images_by_machine
    from vitrail.train.parallel import joined

    console = Console(stderr=True)
    with joined(settings.options.device) as world:
        bundle = settings.options.bundle(settings.checkpoint, world)
        split = find_images_by_machine(world, settings.images)
        context = settings.options.eval_context(world)
        if world.main and settings.default_model:
            console.print(default_note(bundle), highlight=False, soft_wrap=True)
        if world.main and (note := context.precision_note(bundle.model)) is not None:
            console.print(note, highlight=False, soft_wrap=True)
        with _progress(console, doing, world) as progress:
            result = run(bundle, split, context, progress)
    if result is None:
        return 0
    _show(console, result, what, settings.json, bundle)
    # Other ranks end with 0: torchrun stops all ranks as soon as one ends with another status.
    return 1 if result.bad_images else 0


@contextmanager
def _progress(console: Console, doing: str, world: World) -> Iterator[Progress]:
    """Show the images of all ranks: a bar on a terminal, a line per minute in a log."""
    from vitrail.evaluate.shards import no_progress

    if not world.main:
        yield no_progress
    elif console.is_terminal:
        with image_progress(console) as bars:
            bar = bars.add_task(doing, total=None)
            yield lambda done, total: bars.update(bar, completed=done, total=total)
    else:
        yield _LogLines(console, doing)


class _LogLines:
    def __init__(self, console: Console, doing: str) -> None:
        self._console, self._doing, self._began = console, doing, time.monotonic()
        self._next = self._began + _EVERY

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now >= self._next:
            self._next = now + _EVERY
            speed = done / (now - self._began)
            self._console.print(f"{self._doing}: {done:,} of {total:,} images, {speed:,.1f} images/s", highlight=False)


def _show(console: Console, result: ShardResult, what: str, as_json: bool, bundle: Bundle) -> None:
    for one in islice(result.bad(), _SHOWN):
        console.print(printable(f"{one.name}: {one.reason}", one_line=True), style="red", highlight=False, soft_wrap=True)
    if result.bad_images:
        more = f" The first {_SHOWN} are above; all are in shard-….json." if result.bad_images > _SHOWN else ""
        text = f"{result.bad_images:,} of {counted(result.images, 'image')} could not be read.{more}"
        console.print(text, highlight=False, soft_wrap=True)
    summary = result.summary()
    if as_json:
        say(to_json({**summary, "assumptions": bundle.report.assumptions}, indent=2))
        return
    shards = counted(len(result.manifest["shards"]), "shard")
    images = counted(result.images - result.bad_images, "image")
    if not result.computed_shards:
        speed = "all of them were finished before"
    else:
        before = len(result.manifest["shards"]) - result.computed_shards
        resumed = f", {counted(before, 'shard')} of them finished before" if before else ""
        speed = f"{summary['images_per_second']:,.1f} images/s{resumed}"
    say(f"{result.folder}: {what} of {images} in {shards}; {speed}")
