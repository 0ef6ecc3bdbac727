"""The notebook of the documentation runs, in about 15 lines of code, and its stored outputs are those of this code."""

from __future__ import annotations

import os
import re
from pathlib import Path

import nbclient
import nbformat
import pytest

import vitrail

FILE = Path(__file__).parents[2] / "docs" / "notebooks" / "first-steps.ipynb"


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


@pytest.mark.slow
def test_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = nbformat.read(FILE, 4)
    stored = accuracy(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = []
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(vitrail.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]))
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert not [output for output in outputs if output.output_type in ("error", "stream")], "no warnings, no text on the side"
    assert abs(accuracy(notebook) - stored) < 8, "another CPU rounds differently, and a short run amplifies it"
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2
    assert any("<progress" in str(output.get("data", {})) or output.output_type == "display_data" for output in outputs)
    run = vitrail.open_run(tmp_path / "runs" / "digits-notebook")
    assert run.result is not None and run.result.steps == 80
