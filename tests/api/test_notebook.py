"""The notebooks of the documentation run, and their stored outputs are those of this code."""

from __future__ import annotations

import os
import re
from pathlib import Path

import nbclient
import nbformat
import pytest

import vitrail

FOLDER = Path(__file__).parents[2] / "docs" / "notebooks"
FILE = FOLDER / "first-steps.ipynb"
OTHERS = ("look-inside", "bring-your-weights")


def accuracy(notebook: nbformat.NotebookNode) -> float:
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    texts = [str(output.data["text/plain"]) for output in outputs if output.output_type == "execute_result"]
    [found] = [match for text in texts if (match := re.match(r"EvalResult\(accuracy ([\d.]+)%", text))]
    return float(found[1])


def test_it_is_short_and_stored_with_its_outputs() -> None:
    notebook = nbformat.read(FILE, 4)
    code = [line for cell in notebook.cells if cell.cell_type == "code" for line in cell.source.splitlines() if line.strip()]
    assert len(code) <= 15 and FILE.stat().st_size < 300_000
    assert all(cell.outputs for cell in notebook.cells if cell.cell_type == "code") and accuracy(notebook) > 85


def execute(notebook: nbformat.NotebookNode, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(vitrail.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]))
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(folder)}}).execute()


def shown(notebook: nbformat.NotebookNode) -> list[str]:
    """Return what cells returned, as text, with shares without their digits: another CPU rounds differently."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", []) if output.output_type == "execute_result"]
    return [re.sub(r"-?\d+\.\d*", "0.0", str(output.data["text/plain"])) for output in outputs]


@pytest.mark.parametrize("name", OTHERS)
def test_the_others_are_short_and_stored_with_their_outputs(name: str) -> None:
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", 4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert sum(len(cell.source.splitlines()) for cell in code) <= 40 and (FOLDER / f"{name}.ipynb").stat().st_size < 300_000
    assert len(shown(notebook)) == len(code) and re.search(r"bout \d+ seconds on one CPU core", notebook.cells[0].source)


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_the_others_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", 4)
    stored = shown(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = []
    execute(notebook, tmp_path, monkeypatch)
    found = shown(notebook)
    assert len(found) == len(stored)
    for before, now in zip(stored, found, strict=True):
        if "array(" not in before:  # of rounded numbers, which may round to the neighbour
            assert now == before


@pytest.mark.slow
def test_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = nbformat.read(FILE, 4)
    stored = accuracy(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = []
    execute(notebook, tmp_path, monkeypatch)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert not [output for output in outputs if output.output_type in ("error", "stream")], "no warnings, no text on the side"
    assert abs(accuracy(notebook) - stored) < 8, "another CPU rounds differently, and a short run amplifies it"
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2
    assert any("<progress" in str(output.get("data", {})) or output.output_type == "display_data" for output in outputs)
    run = vitrail.open_run(tmp_path / "runs" / "digits-notebook")
    assert run.result is not None and run.result.steps == 80
