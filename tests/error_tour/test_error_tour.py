"""Mistakes end in one message each: what was found, what was expected, what to do next. No error of the code is without a row."""

from __future__ import annotations

import importlib
import logging
import shlex
import sys
from pathlib import Path

import pytest
import torch

import vitrail
from tests.error_tour.case import Case
from tests.error_tour.files import make_files
from tests.error_tour.raise_sites import ROOT, raise_sites, record
from vitrail.cli import main
from vitrail.serve.errors import ServiceError

_FILES = [file.stem for file in sorted(Path(__file__).parent.glob("*.py")) if not file.stem.startswith(("_", "test_"))]
_MODULES = [importlib.import_module(f"tests.error_tour.{name}") for name in _FILES]
TABLES = [module for module in _MODULES if hasattr(module, "CASES")]
CASES: tuple[Case, ...] = tuple(case for module in TABLES for case in module.CASES)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tour")
    make_files(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.at or case.situation)
def test_the_message_says_what_the_table_says(
    case: Case, files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(files)
    made = record(monkeypatch)
    if case.hidden:
        monkeypatch.setitem(sys.modules, case.hidden, None)  # not found by `import` and `find_spec`
    if case.patch:
        case.patch(monkeypatch)
    for name in ("vitrail.serve", "uvicorn.error"):  # `vitrail serve` writes their log to what is standard error during this test
        monkeypatch.setattr(logging.getLogger(name), "handlers", [])
        monkeypatch.setattr(logging.getLogger(name), "propagate", True)
    message = " ".join(_message(case, capsys).split())
    assert "Traceback" not in message
    for part in (case.found, *case.then):
        assert part in message
    assert not case.at or case.at in made, f"it was made at {' and '.join(sorted(made))}, not at {case.at}"


def _message(case: Case, capsys: pytest.CaptureFixture[str]) -> str:
    if isinstance(case.run, str) and case.run.startswith("vitrail "):
        with pytest.raises(SystemExit) as end:
            main(shlex.split(case.run)[1:])
        assert end.value.code == case.status
        shown = capsys.readouterr()
        return shown.out + shown.err
    with pytest.raises((vitrail.VitrailError, ServiceError)) as error:
        eval(case.run, {"vitrail": vitrail, "torch": torch}) if isinstance(case.run, str) else case.run()
    return str(error.value)


def test_each_case_says_what_was_found_and_what_to_do() -> None:
    for case in CASES:
        assert case.found
        assert case.then
    written = [case.run for case in CASES if isinstance(case.run, str) and not case.hidden]
    assert len(set(written)) == len(written)


# Named by the folder, not by the errors: to find them, all sources are parsed, which need not happen in each process of a run.
@pytest.mark.parametrize("package", sorted({file.relative_to(ROOT).parts[0] for file in ROOT.rglob("*.py")}))
def test_every_error_of_the_code_has_a_case(package: str) -> None:
    with_case = {case.at for case in CASES}
    missing = [site for site in raise_sites().values() if site.package == package and site.name not in with_case]
    assert not missing, "errors without a case:\n" + "\n".join(f"{site.name}: {site.message}" for site in missing)


def test_cases_name_sites_that_exist() -> None:
    assert not {case.at for case in CASES if case.at} - set(raise_sites()), "renamed or removed: name the new site"
