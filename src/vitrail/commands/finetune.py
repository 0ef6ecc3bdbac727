"""`vitrail finetune`: a trained model, fine-tuned on other images."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from vitrail.commands.help import Option, Section
from vitrail.commands.options import progress_bar
from vitrail.commands.recipe_options import extract_flags, parsed, recipe_sections
from vitrail.commands.terminal import Console
from vitrail.commands.train import Options, run
from vitrail.data.data_wait import max_workers
from vitrail.errors import VitrailError, counted, did_you_mean
from vitrail.recipes import recipe_named
from vitrail.recipes.any_folder import any_folder
from vitrail.train.config import Recipe

if TYPE_CHECKING:
    from vitrail.data.types import BadImage, Source, Split
    from vitrail.train.parallel import World


_FLAGS = ("--from", "--data", "--recipe", "--check-images")
_SECONDS = 60.0
_OWN = (
    Option(
        ("--from",),
        "CHECKPOINT",
        "The checkpoint to start from: published weights by name (ViT-B/16, ViT-B/16@mae: `vitrail models --pretrained` lists "
        "them), a run or checkpoint folder, an .npz, .pth or .safetensors file, or hf:owner/name.",
        required=True,
    ),
    Option(("--data",), "SOURCE", "The images: a folder with one folder per class, a CSV, torchvision:CIFAR10, …", required=True),
    Option(("--recipe",), "RECIPE", "Use a recipe instead of the defaults, such as finetune-cifar10; it may name the data."),
    Option(
        ("--check-images",),
        "auto|all|none",
        "Decode images before the first step, and name all bad ones; auto stops after 60 seconds.",
        "auto",
        ("auto", "all", "none"),
    ),
)


def finetune(words: list[str]) -> int:
    """Fine-tune a checkpoint on your own images, as the paper does: a new zero-initialised head, SGD with momentum, cosine.

    Without a recipe, the head has one output per class found, the image size is the checkpoint's, and the number of steps
    depends on the number of images. Every setting below can be changed; --sweep finds the learning rate.

    Example: vitrail finetune --from ViT-B/16 --data photos

    Example: vitrail finetune --from ViT-B_16.npz --recipe finetune-cifar100 --steps 500

    Example: vitrail finetune --from runs/digits --data scans.csv --optim.lr 0.003 --image-size 16
    """
    given, rest = extract_flags(words, _FLAGS)
    how = given.get("--check-images", "auto")
    if how not in ("auto", "all", "none"):
        raise VitrailError(f"--check-images is {how!r}; it can be auto, all or none.{did_you_mean(how, ('auto', 'all', 'none'))}")
    recipe = _recipe(given)
    chosen, options = parsed(recipe, rest, Options(), command="finetune")
    checks = how != "none" and chosen.data.bad_images != "skip"
    check = ImageCheck(None if how == "all" else _SECONDS, quiet=options.json) if checks else None
    return run(recipe, chosen, options, check_images=check)


def sections(words: list[str]) -> list[Section]:
    """Return the options of `vitrail finetune`; the number of steps is that for 10,000 images."""
    return recipe_sections(any_folder("CHECKPOINT", "SOURCE", images=10_000), Options(), own=_OWN)


finetune.sections = sections  # type: ignore[attr-defined]  # its options are those of the recipe that its words lead to


class ImageCheck:
    """Names all bad images before the first step, once for all runs of a sweep. Each rank looks at its share."""

    def __init__(self, seconds: float | None, *, quiet: bool = False) -> None:
        self.seconds, self.quiet, self.done = seconds, quiet, False

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
        if looked_at < total and world.main and not self.quiet:
            Console(stderr=True).print(
                f"checked {looked_at:,} of {total:,} images in {self.seconds:.0f} s, all good; --check-images all checks the rest, "
                "none checks none",
                highlight=False,
                soft_wrap=True,
            )

    def _find(self, splits: Sequence[Split], world: World) -> tuple[list[BadImage], int]:
        """Return (bad images, images looked at) of this rank. The smallest split is first; the time is divided equally, and what
        one does not need is left to the next."""
        from vitrail.data.find_bad import find_bad
        from vitrail.data.types import BadImage

        bad, looked_at, start = list[BadImage](), 0, time.monotonic()
        workers = max(1, max_workers() // world.local_ranks)
        total = sum(len(range(world.rank, len(split), world.ranks)) for split in splits)
        with progress_bar(Console(stderr=True, quiet=not world.main), "checking images", total) as advance:
            for k, split in enumerate(sorted(splits, key=len)):
                left = None if self.seconds is None else (self.seconds - (time.monotonic() - start)) / (len(splits) - k)
                share = (world.rank, world.ranks)
                found, done = find_bad(split, workers=workers, seconds=left, share=share, progress=advance)
                bad, looked_at = bad + found, looked_at + done
        return bad, looked_at


def _recipe(given: dict[str, str]) -> Recipe:
    start, data, name = (given.get(flag) for flag in _FLAGS[:3])
    if start is None:
        raise VitrailError("The checkpoint to start from is missing: add --from, such as --from ViT-B/16 or --from runs/digits.")
    if name is not None:
        recipe = recipe_named(name)
        source = data or recipe.data.source
        started = dataclasses.replace(recipe.model, start=start)
        return recipe.replace(model=started, data=dataclasses.replace(recipe.data, source=source))
    if data is None:
        raise VitrailError("The images to train on are missing: add --data, such as --data FOLDER with a folder for each class.")
    from vitrail.data import open_source

    images = len(open_source(data, bad_images="skip", ignore_unknown=True).split("train"))
    return any_folder(start, data, images=images, name=f"{_short_name(start)}-on-{Path(data.split(':')[-1]).name}")


def _short_name(start: str) -> str:
    """Return a name for the run's folder: `ViT-B-16-mae` for published weights, else the stem of the file or URL."""
    from vitrail.checkpoints.references import is_name
    from vitrail.checkpoints.url import is_url

    if is_url(start):
        return Path(unquote(urlsplit(start).path)).stem or "weights"
    return start.replace("/", "-").replace("@", "-") if is_name(start) and not start.startswith("hf:") else Path(start).stem
