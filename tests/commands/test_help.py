"""`--help` of every command: 80 columns, every option explained, and the options that the parser knows."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import tyro

from vitrail.cli import main
from vitrail.commands import arguments
from vitrail.commands.help import Option, Section, help_text, sections_of
from vitrail.commands.table import COMMANDS


def help_of(name: str, capsys: pytest.CaptureFixture[str], flag: str = "--help") -> str:
    with pytest.raises(SystemExit) as end:
        main([*name.split(), flag])
    assert not end.value.code
    return capsys.readouterr().out


def command_of(name: str) -> Callable[..., Any]:
    module, function = COMMANDS[name][0].split(":")
    return getattr(importlib.import_module(module), function)  # type: ignore[no-any-return]


def options_of(name: str) -> list[Option]:
    command: Any = command_of(name)
    sections = command.sections([]) if hasattr(command, "sections") else sections_of(command)
    return [option for section in sections for option in section.options]


@pytest.mark.parametrize("name", COMMANDS)
def test_help_is_complete_and_fits_in_80_columns(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    text = help_of(name, capsys, "--help-all")
    assert text.startswith(f"usage: vitrail {name} ")
    assert [line for line in text.splitlines() if len(line) > 80] == []
    assert f"\nexamples:\n  vitrail {name}" in text
    assert "{" not in text and "default: None" not in text and "default: False" not in text
    for option in options_of(name):
        assert option.text, f"{option.flags or option.metavar} has no text"
        assert option.text[0] != "(" and all(flag in text for flag in option.flags)
    flags = [flag for option in options_of(name) for flag in option.flags]
    assert len(flags) == len(set(flags))


@pytest.mark.filterwarnings("ignore:get_parser")
@pytest.mark.parametrize("name", [name for name in COMMANDS if not hasattr(command_of(name), "sections")])
def test_help_has_the_options_of_the_parser(name: str) -> None:
    parser = tyro.extras.get_parser(command_of(name), config=(tyro.conf.FlagCreatePairsOff,))
    known = {flag for action in parser._actions for flag in action.option_strings}
    assert {flag for option in options_of(name) for flag in option.flags} - {"--help-all"} == known


@pytest.mark.filterwarnings("ignore:get_parser")
def test_settings_of_a_recipe_are_those_of_the_parser() -> None:
    from vitrail.commands.recipe_options import shared_flags
    from vitrail.train.config import Recipe

    known = {flag for action in tyro.extras.get_parser(Recipe)._actions for flag in action.option_strings} - {"-h", "--help"}
    listed = {flag for option in options_of("train") for flag in option.flags}
    assert known <= set(shared_flags(sorted(listed)))


@dataclass(frozen=True)
class Options:
    """Some options."""

    number: int | None = None
    """A docstring that is broken here
    and here. None: as many as fit."""
    kind: Literal["one", "two"] = "one"
    """Which."""
    norm: bool = True
    """Normalise. --no-norm: Do not normalise."""


def shown(
    path: Annotated[Path, tyro.conf.arg(metavar="FILE")],
    /,
    *,
    options: Annotated[Options, tyro.conf.arg(name="")] = Options(),
    size: int | tuple[int, int] | None = None,
    clip: float | None = 1.0,
    shots: tuple[int, ...] = (1, 5),
    quiet: bool = False,
) -> None:
    """Show how help looks, for a first paragraph which is longer than a line and is broken in
    (before a bracket)
    2 places.

    Example: vitrail shown a/file/with/a/long/name.png --shots 1 2 3 --clip 0.5 --number 3 --kind two

    Args:
        path: The file.
        options: What to show.
        size: Height and width.
        clip: Clip to this. None: no clipping.
        shots: An argument that is broken here
            and here.
        quiet: Print nothing.
    """


def test_how_help_looks() -> None:
    assert (
        help_text("shown", shown.__doc__ or "", sections_of(shown), 60)
        == """\
usage: vitrail shown FILE [OPTIONS]

Show how help looks, for a first paragraph which is longer
than a line and is broken in (before a bracket) 2 places.

examples:
  vitrail shown a/file/with/a/long/name.png --shots 1 2 3 \\
      --clip 0.5 --number 3 --kind two

arguments:
  FILE                    The file.

options:
  --size INT [INT]        Height and width.
  --clip FLOAT            Clip to this. None: no clipping.
                          (default: 1)
  --shots INT …           An argument that is broken here
                          and here. (default: 1 5)
  --quiet                 Print nothing.
  -h, --help              Show this help and exit.

What to show:
  --number INT            A docstring that is broken here
                          and here. Default: as many as fit.
  --kind one|two          Which. (default: one)
  --no-norm               Do not normalise."""
    )


def test_long_choices_are_broken() -> None:
    option = Option(("--kind",), "|".join(f"choice-{k}" for k in range(9)), "Which.")
    text = help_text("x", "Do it.", [Section("options", (option,))], 60)
    assert max(map(len, text.splitlines())) <= 60 and "choice-8" in text


def test_common_options_come_first(capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of("train", capsys)
    assert text.count("\n") < 100 and "more settings: `vitrail train --help-all`" in text
    order = [text.index(f"\n  {flag} ") for flag in ("--data", "--model.name", "--epochs", "--batch", "--optim.lr", "--out")]
    assert order == sorted(order) and "--augment.mixup" not in text
    assert "--augment.mixup" in help_of("train", capsys, "--help-all")


def test_the_list_of_commands_fits_in_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    lines = capsys.readouterr().out.splitlines()
    assert not end.value.code and [line for line in lines if len(line) > 80] == []


def test_a_group_of_commands_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of("data", capsys)
    assert "  data check  Check every image" in text and "data sheet" in text and "predict" not in text


def test_finetune_shows_no_default_that_depends_on_the_images(capsys: pytest.CaptureFixture[str]) -> None:
    text = " ".join(help_of("finetune", capsys).split())
    assert "default: 500" not in text and "default: 512" not in text
    assert "Default: by the number of images, at most 512." in text and "Default: runs/START-on-DATA." in text
    with_recipe = " ".join(help_of("finetune --recipe finetune-cifar10", capsys).split())
    assert "(default: 512)" in with_recipe


def test_a_plan_lists_what_it_uses(capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of("plan", capsys, "--help-all")
    assert text.startswith("usage: vitrail plan RECIPE ")
    assert all(flag in text for flag in ("--gpus INT", "--batch INT", "--model.depth", "--json"))
    assert not re.search(r"--(eval-every|data|augment|out|sweep|seed)\b", text)


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        (["plan", "digits", "--augment.mixup", "0.2"], "--augment.mixup"),
        (["plan", "digits", "--data=photos"], "--data"),
        (["data", "sheet", "digits", "--optim.lr", "1"], "--optim.lr"),
        (["data", "sheet", "digits", "--epochs", "2"], "--epochs"),
    ],
)
def test_settings_without_effect_are_refused(words: list[str], flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 2 and f"vitrail: {flag} has no effect on" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "size"),
    [
        (["32x48"], [32, 48]),
        (["32×48"], [32, 48]),  # as it is printed
        (["32", "48"], [32, 48]),
        (["16"], 16),
        (["None"], None),
    ],
)
def test_height_and_width_are_written_alike_in_every_command(
    words: list[str], size: object, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["train", "digits", "--image-size", *words, "--explain", "--json"])
    assert not end.value.code
    assert json.loads(capsys.readouterr().out)["recipe"]["model"]["image_size"] == size


@pytest.mark.parametrize("size", ["32x", "32,48", "-3", "1x2x3", "nan"])
def test_a_size_that_is_none_says_what_is_expected(size: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["train", "digits", f"--image-size={size}"])
    assert end.value.code == 2 and "height and width such as 384x512" in " ".join(
        re.sub("[│─]", "", capsys.readouterr().err).split()
    )


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (["train", "digits", "--optim.lr", "nan"], "--optim.lr is nan"),
        (["train", "digits", "--augment.mixup=inf"], "--augment.mixup is inf"),
        (["train", "digits", "--lr-grid", "0.1", "nan"], "--lr-grid is nan"),
        (["train", "digits", "--optim.clip", "-inf"], "--optim.clip is -inf"),
        (["plan", "digits", "--memory", "nan"], "--memory is nan"),
        (["plan", "digits", "--ema", "nan"], "--ema is nan"),
        (["data", "split", "a", "b.csv", "--val", "nan"], "--val is nan"),
        (["probe", "a", "--data", "b", "--temperature", "1e999"], "--temperature is 1e999"),
        (["fewshot", "a", "--data", "b", "--l2", "Infinity"], "--l2 is Infinity"),
        (["vtab", "a", "--lr", "nan"], "--lr is nan"),
        (["study", "shape", "--budget", "inf"], "--budget is inf"),
    ],
)
def test_numbers_must_be_finite(words: list[str], option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 2 and f"{option}; it must be a finite number" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["eval", "runs/pets", "pets"], "usage: vitrail eval CHECKPOINT [OPTIONS]"),  # as one calls `vitrail predict`
        (["train", "--recipe", "digits"], "usage: vitrail train [RECIPE] [OPTIONS]"),  # as one calls `vitrail finetune`
        (["export", "runs/pets"], "usage: vitrail export CHECKPOINT OUT [OPTIONS]"),
    ],
)
def test_a_mistake_shows_how_the_command_is_called(words: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(words)
    out, err = capsys.readouterr()
    assert end.value.code == 2 and not out
    assert err.endswith(f"{expected}\n`vitrail {words[0]} --help` explains the options.\n")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["train", "--batch-size", "32", "--lr=0.1"], ["--batch-size is --batch here.", "--lr is --optim.lr here."]),
        (["train", "--model", "ViT-S/16"], ["--model is --model.name here."]),
        (
            ["finetune", "--from", "vitrail-ti8-tiny-imagenet", "--data", "digits", "--num-workers", "2"],
            ["--num-workers is --workers here."],
        ),
        (["predict", "new", "--topk", "3", "--lr", "1"], ["--topk is --top here."]),
        (
            ["train", "--drop-path", "0.1", "--model-ema"],
            ["--drop-path is --model.stochastic-depth here.", "--model-ema is --ema here."],
        ),
        (["predict", "--weights", "runs/pets", "cat.jpg"], ["--weights is the first argument, CHECKPOINT, here."]),
        (["eval", "--model=runs/pets", "--data", "digits"], ["--model is the first argument, CHECKPOINT, here."]),
    ],
)
def test_options_of_other_libraries_are_translated(
    words: list[str], expected: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(words)
    assert [line for line in capsys.readouterr().err.splitlines() if line.endswith(" here.")] == expected


def test_every_translated_option_exists() -> None:
    flags = {flag for name in ("train", "finetune", "predict") for option in options_of(name) for flag in option.flags}
    assert set(arguments._OTHER_NAMES.values()) <= flags
