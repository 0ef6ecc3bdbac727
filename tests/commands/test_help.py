"""`--help` of every command, at 100 columns."""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest

from vitrail.cli import COMMANDS, main
from vitrail.commands.arguments import join_lines, parse


@pytest.fixture(autouse=True)
def _hundred_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")


def help_of(name: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as end:
        main([*name.split(), "--help"])
    assert not end.value.code
    return capsys.readouterr().out


@pytest.mark.parametrize("name", COMMANDS)
def test_lines_are_wrapped_and_arguments_named(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of(name, capsys)
    assert max(map(len, text.splitlines())) <= 100
    usage = text.partition("\n\n")[0].replace("--out PATH", "").replace("--page PATH", "")
    assert not re.search(r"\b(STR|PATH)\b|\[\[", usage), "a positional argument without a name"


@dataclass(frozen=True)
class Options:
    number: int = 3
    """A docstring that is broken here
    and here
    (before a bracket)."""


OPTIONS = Options()


def shown(options: Options = OPTIONS, other: int = 2) -> None:
    """Show how the lines of a docstring are joined, for a first paragraph which is longer than a hundred columns and broken in
    (before a bracket)
    2 places.

    --flag N   an item

    Args:
        options: Some options.
        other: An argument that is broken here
            and here.
    """


def test_line_breaks_of_the_source_do_not_show(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(shown, "shown", ["--help"])
    text = capsys.readouterr().out
    assert "hundred\ncolumns and broken in (before a bracket) 2 places.\n\n--flag N   an item\n" in text
    assert "A docstring that is broken here and here (before a bracket)." in text
    assert "An argument that is broken here and here." in text


def test_a_plan_lists_what_it_uses(capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of("plan", capsys)
    assert text.startswith("usage: vitrail plan RECIPE ")
    assert all(flag in text for flag in ("--gpus N", "--batch INT", "--model.depth", "--json"))
    assert not re.search(r"--(eval-every|data\.source|augment|out|sweep|seed)\b", text)


def test_items_are_not_joined() -> None:
    assert (
        join_lines("One\n    (two)\n½ three\n\nFour\n--flag  five\n--other") == "One (two) ½ three\n\nFour\n--flag  five\n--other"
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
