"""`vitrail finetune`: fine-tune a checkpoint on a folder of images."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from vitrail.commands.help import Option, Section
from vitrail.commands.recipe_options import CONFIG, extract_flags, parsed, read_recipe, recipe_sections
from vitrail.commands.terminal import Console
from vitrail.commands.train import Options, run
from vitrail.errors import VitrailError
from vitrail.recipes import recipe_named
from vitrail.recipes.any_folder import any_folder
from vitrail.train.config import Recipe

_FLAGS = ("--from", "--data", "--recipe", "--config", "--check-images")
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
    CONFIG.with_text(
        "Use the settings of an earlier run, its config.json, instead of the defaults; they name the checkpoint and the data, too."
    ),
    Option(
        ("--check-images",),
        "auto|all|none",
        "Decode images before the first step, and name all bad ones; auto stops after 60 seconds.",
        "auto",
        ("auto", "all", "none"),
    ),
)
# Defaults that follow the start and the number of training images (`any_folder`).
_BY_IMAGES = {
    "--steps": "by the number of images: 500 for 2,000 to 20,000, fewer below, more above",
    "--batch": "by the number of images, at most 512",
    "--eval-every": "a tenth of the run",
    "--schedule.warmup": "10%, or less for 20,000 images and more",
    "--out": "runs/START-on-DATA",
}


def finetune(words: list[str]) -> int:
    """Fine-tune a checkpoint on your own images, as the paper does: a new zero-initialised head, SGD with momentum, cosine.

    Without a recipe, the head has one output per class found, the image size is the checkpoint's, and the number of steps
    depends on the number of images. Every setting below can be changed; --sweep finds the learning rate.

    Example: vitrail finetune --from ViT-B/16 --data photos

    Example: vitrail finetune --from ViT-B_16.npz --recipe finetune-cifar100 --steps 500

    Example: vitrail finetune --from runs/digits --data scans.csv --optim.lr 0.003 --image-size 16

    Example: vitrail finetune --config runs/pets/config.json --from ViT-L/16 --out runs/pets-l16
    """
    given, rest = extract_flags(words, _FLAGS)
    settings = _settings(given)

    from vitrail.api.finetuning import starting_recipe
    from vitrail.api.image_check import image_check

    recipe = starting_recipe(given.get("--from"), given.get("--data"), settings)
    chosen, options = parsed(recipe, rest, Options(), command="finetune")
    console = Console(stderr=True, quiet=options.json)
    say = partial(console.print, highlight=False, soft_wrap=True)
    return run(recipe, chosen, options, check_images=image_check(given.get("--check-images", "auto"), chosen, say=say))


def sections(words: list[str]) -> list[Section]:
    """Return the options of `vitrail finetune`. Without a recipe, some defaults depend on the images, which are not opened here."""
    given, _ = extract_flags(words, _FLAGS)
    settings = _settings(given)
    found = recipe_sections(settings or any_folder("CHECKPOINT", "SOURCE", images=10_000), Options(), own=_OWN)
    if settings is not None:
        return found
    return [replace(section, options=tuple(_without_recipe(option) for option in section.options)) for section in found]


def _without_recipe(option: Option) -> Option:
    default = _BY_IMAGES.get(option.flags[0]) if option.flags else None
    if default is None:
        return option
    return replace(option, text=f"{option.text.partition(' Default: ')[0]} Default: {default}.", default="")


finetune.sections = sections  # type: ignore[attr-defined]  # its options are those of the recipe that its words lead to


def _settings(given: Mapping[str, str]) -> Recipe | None:
    """Return the recipe that --recipe or --config names, if any."""
    if "--recipe" in given and "--config" in given:
        raise VitrailError(f"Both --recipe {given['--recipe']} and --config {given['--config']} were given; leave one out.")
    if "--config" in given:
        return read_recipe(Path(given["--config"]))
    return recipe_named(given["--recipe"]) if "--recipe" in given else None
