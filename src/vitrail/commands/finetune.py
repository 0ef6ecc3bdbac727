"""`vitrail finetune`: a trained model, fine-tuned on other images."""

from __future__ import annotations

from functools import partial

from vitrail.api.finetuning import starting_recipe
from vitrail.api.image_check import image_check
from vitrail.commands.terminal import Console
from vitrail.commands.train import parsed, run
from vitrail.errors import VitrailError
from vitrail.recipes.any_folder import any_folder

_FLAGS = ("--from", "--data", "--recipe", "--check-images")


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
    start, data, name = (given.get(flag) for flag in _FLAGS[:3])
    recipe = starting_recipe(start, data, name)
    chosen, options = parsed(recipe, rest, command="finetune", description=finetune.__doc__)
    console = Console(stderr=True, quiet=options.json)
    say = partial(console.print, highlight=False, soft_wrap=True)
    return run(recipe, chosen, options, check_images=image_check(given.get("--check-images", "auto"), chosen, say=say))


finetune.parses_arguments = True  # type: ignore[attr-defined]  # its options are those of the recipe that its words lead to


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
