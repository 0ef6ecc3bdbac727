"""The command line: names and the functions behind them, nothing else.

A command's module is imported only when that command is asked for, so `vitrail --help` answers at once.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from vitrail.errors import VitrailError, nearest

COMMANDS = {
    "models": ("vitrail.commands.models:models", "List every model with its size and cost."),
    "info": ("vitrail.commands.info:info", "Say what a checkpoint holds, and whether it is sound."),
    "convert": ("vitrail.commands.convert:convert", "Bring weights from any known format into any other."),
    "train": ("vitrail.commands.train:train", "Train a model as a recipe says."),
    "finetune": ("vitrail.commands.finetune:finetune", "Teach a trained model something else."),
    "plan": ("vitrail.commands.plan:plan", "Say what a recipe needs on GPUs that are not here."),
    "eval": ("vitrail.commands.evaluate:evaluate", "Measure a checkpoint on labelled images."),
    "fewshot": ("vitrail.commands.fewshot:fewshot", "Learn from a few images a class, in closed form, and measure."),
    "probe": ("vitrail.commands.probe:probe", "Fit a linear or a nearest-neighbour classifier on frozen features."),
    "vtab": ("vitrail.commands.vtab:vtab", "Fine-tune on the tasks of VTAB-1k, or of the paper's transfer suite."),
    "predict": ("vitrail.commands.predict:predict", "Say what is in images."),
    "embed": ("vitrail.commands.embed:embed", "Write features of images to a file."),
    "neighbours": ("vitrail.commands.neighbours:neighbours", "Find the images nearest to an image."),
    "inspect": ("vitrail.commands.inspect:inspect", "Draw the paper's figures of what a checkpoint has learnt."),
    "bench": ("vitrail.commands.bench:bench", "Measure speed and memory, against other libraries and the machine's limit."),
    "data check": ("vitrail.commands.data:check", "Look at every image of a data set and say what is wrong."),
    "data split": ("vitrail.commands.data:split", "Divide a data set by class, and write the division down."),
    "data pack": ("vitrail.commands.data:pack", "Decode and resize a data set once, for fast training."),
    "doctor": ("vitrail.commands.doctor:doctor", "Say what this machine can do, and what is missing."),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command; a `VitrailError` becomes a sentence and exit status 2."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        sys.exit(_run(words))
    except VitrailError as error:
        print(f"vitrail: {error}", file=sys.stderr)  # noqa: T201
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # the reader of our output, such as `head`, has left
        sys.stdout = None
        sys.exit(0)


def _run(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        print(_overview())  # noqa: T201
        return 0
    if words[0] == "--version":
        from importlib.metadata import version

        print(f"vitrail {version('vitrail')}")  # noqa: T201
        return 0
    name = next((" ".join(words[:n]) for n in (2, 1) if " ".join(words[:n]) in COMMANDS), None)
    if name is None:
        group = [command for command in COMMANDS if command.startswith(f"{words[0]} ")]
        if group:
            raise VitrailError(f"`vitrail {words[0]}` needs one more word: {', '.join(group)}.")
        raise VitrailError(f"There is no command {words[0]!r}.{nearest(words[0], COMMANDS)} See `vitrail --help`.")
    import tyro

    module, function = COMMANDS[name][0].split(":")
    command = getattr(importlib.import_module(module), function)
    if getattr(command, "reads_words", False):  # it makes its own parser from them
        return command(words[len(name.split()) :]) or 0
    options = (tyro.conf.FlagCreatePairsOff,)  # --json, without a --no-json beside it
    return tyro.cli(command, prog=f"vitrail {name}", args=words[len(name.split()) :], config=options) or 0


def _overview() -> str:
    width = max(map(len, COMMANDS))
    rows = "\n".join(f"  {name:<{width}}  {summary}" for name, (_, summary) in COMMANDS.items())
    return f"Vitrail: the Vision Transformer paper as working software.\n\nCommands:\n{rows}\n\nEach has --help with an example."
