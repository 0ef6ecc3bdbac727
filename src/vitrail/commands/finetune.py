"""`vitrail finetune`: a trained model, fine-tuned on other images."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

from vitrail.checkpoints.references import is_name
from vitrail.commands.options import progress_bar
from vitrail.commands.terminal import Console
from vitrail.commands.train import Options, main_rank, parsed, run
from vitrail.data.data_wait import max_workers
from vitrail.data.find_bad import find_bad
from vitrail.data.types import BadImage
from vitrail.errors import VitrailError, counted, did_you_mean
from vitrail.recipes import recipe_named
from vitrail.recipes.any_folder import any_folder
from vitrail.train.config import Recipe

_FLAGS = ("--from", "--data", "--recipe", "--check-images")
_SECONDS = 60.0


def finetune(words: list[str]) -> int:
    """Fine-tune a checkpoint on your own images, as the paper does: a new zero-initialised head, SGD with momentum, cosine.

    --from REF       the checkpoint to start from: published weights by name (ViT-B/16, ViT-B/16@mae: `vitrail models --pretrained`
                     lists them), a run, a checkpoint folder, an .npz, .pth or .safetensors file, hf:owner/name
    --data SRC       the images: a folder with one folder per class, a CSV, torchvision:CIFAR10, …
    --recipe NAME    use a recipe instead of the defaults, such as finetune-cifar10
    --check-images auto|all|none    decode images before the first step, and name all bad ones; auto stops after 60 seconds

    Without a recipe, the head has one output per class found, the image size is the checkpoint's, and the number of steps
    depends on the number of images. Every setting below can be changed; --sweep finds the learning rate.

    Example: vitrail finetune --from ViT-B/16 --data photos

    Example: vitrail finetune --from ViT-B_16.npz --recipe finetune-cifar100 --steps 500

    Example: vitrail finetune --from runs/digits --data scans.csv --optim.lr 0.003 --model.image-size 16
    """
    given, rest = extract_flags(words, _FLAGS)
    if "-h" in rest or "--help" in rest:
        parsed(any_folder("REF", "FOLDER", images=10_000), ["--help"], command="finetune", description=finetune.__doc__)
    how = given.get("--check-images", "auto")
    if how not in ("auto", "all", "none"):
        raise VitrailError(f"--check-images is {how!r}; it can be auto, all or none.{did_you_mean(how, ('auto', 'all', 'none'))}")
    recipe = _recipe(given)
    chosen, options = parsed(recipe, rest, command="finetune", description=finetune.__doc__)
    if how != "none" and not options.explain and main_rank():
        _check_images(chosen, options, None if how == "all" else _SECONDS)
    return run(recipe, chosen, options)


finetune.parses_arguments = True  # type: ignore[attr-defined]  # its options are those of the recipe that its words lead to


def _check_images(recipe: Recipe, options: Options, seconds: float | None) -> None:
    """Name all bad images before the first step. Not when a run is resumed, or when bad images are skipped anyway."""
    out = options.out or Path("runs") / recipe.name
    if recipe.data.bad_images == "skip" or (out / "config.json").exists():
        return
    from vitrail.train.prepare import check_no_empty_class, chosen_splits, opened_source

    source = opened_source(recipe)
    if source.kind == "packed":  # decoded and checked when it was packed
        return
    check_no_empty_class(source, recipe.data.train)
    console, bad, looked_at = Console(stderr=True), list[BadImage](), 0
    splits = [split for split in chosen_splits(recipe, source) if split is not None]
    total = sum(map(len, splits))
    start = time.monotonic()
    with progress_bar(console, "checking images", total) as advance:
        for split in splits:
            left = None if seconds is None else seconds - (time.monotonic() - start)
            found, done = find_bad(split, workers=max_workers(), seconds=left, progress=advance)
            bad, looked_at = bad + found, looked_at + done
    if bad:
        listed = "\n".join(f"  {one.name}: {one.reason}" for one in bad)
        of = f"{counted(looked_at, 'image')}{'' if looked_at == total else f' looked at, of {total:,}'}"
        raise VitrailError(
            f"{len(bad):,} of {of} cannot be read:\n{listed}\nRepair or remove them, or skip them with --bad-images skip."
        )
    if looked_at < total and not options.json:
        console.print(
            f"checked {looked_at:,} of {total:,} images in {seconds:.0f} s, all good; --check-images all checks the rest, none "
            "checks none",
            highlight=False,
            soft_wrap=True,
        )


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
    """Return a name for the run's folder: `ViT-B-16-mae` for published weights, else the file's name without its suffix."""
    return start.replace("/", "-").replace("@", "-") if is_name(start) and not start.startswith("hf:") else Path(start).stem


def extract_flags(words: list[str], flags: tuple[str, ...]) -> tuple[dict[str, str], list[str]]:
    """Return the values of some flags, as `--flag value` or `--flag=value`, and the other words."""
    given: dict[str, str] = {}
    rest: list[str] = []
    words = list(words)
    while words:
        word = words.pop(0)
        flag, equals, value = word.partition("=")
        if flag not in flags:
            rest.append(word)
        elif equals or words:
            given[flag] = value if equals else words.pop(0)
        else:
            raise VitrailError(f"{flag} needs a value after it.")
    return given, rest
