"""Mistakes of users end in one message each: what was found, what was expected, what to do next."""

from __future__ import annotations

import importlib.util
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

import vitrail
from tests.error_tour import CASES, Case
from tests.error_tour_files import make_files
from vitrail.cli import main

pytestmark = pytest.mark.slow  # 8 seconds in all


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tour")
    make_files(folder)
    return folder


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.situation)
def test_the_message_says_what_the_table_says(
    case: Case, files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(files)
    if case.hidden:
        _hide(case.hidden, monkeypatch)
    if case.run.startswith("vitrail "):
        with pytest.raises(SystemExit) as end:
            main(shlex.split(case.run)[1:])
        assert end.value.code == case.status
        shown = capsys.readouterr()
        message = shown.out + shown.err
    else:
        with pytest.raises(vitrail.VitrailError) as error:
            eval(case.run, {"vitrail": vitrail, "torch": torch})
        message = str(error.value)
    message = " ".join(message.split())
    assert "Traceback" not in message
    for part in (case.found, *case.then):
        assert part in message


def test_each_case_says_what_was_found_and_what_to_do() -> None:
    for case in CASES:
        assert case.found
        assert case.then
    assert len({case.run for case in CASES if not case.hidden}) == sum(not case.hidden for case in CASES)


def _hide(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original = importlib.util.find_spec

    def find_spec(name: str, *rest: Any) -> Any:
        return None if name == package else original(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
