"""`vitrail doctor` shows what works, and how to install what is missing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vitrail.bench import benchmark
from vitrail.cli import main
from vitrail.commands import doctor, doctor_report


@pytest.mark.slow
def test_the_report(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(doctor.EXTRAS, "hub", ("a_missing_package",))
    with pytest.raises(SystemExit) as exit_:
        main(["doctor"])
    out = capsys.readouterr().out
    assert not exit_.value.code and "float32 ✓" in out and "math ✓" in out
    assert "needs a_missing_package: pip install 'vitrail[hub]'" in out


@pytest.mark.slow
def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["doctor", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["devices"][-1]["device"] == "cpu" and found["devices"][-1]["precisions"]["float32"]
    assert found["versions"]["torch"] != "not installed"


FOUND = {
    "system": "Linux x86_64",
    "python": "3.12.1",
    "cpus": 2,
    "versions": {"vitrail": "0.1.0"},
    "devices": [
        {
            "device": "cpu",
            "name": "x86_64",
            "memory_gib": None,
            "precisions": {"float32": True, "float16": False},
            "kernels": {"math": True},
            "inference": {"precision": "fp32", "why": "of /home/ada/torch/lib on analytical-engine by ada"},
            "compile": False,
        }
    ],
    "extras": {},
}


@pytest.mark.slow
def test_a_report_has_a_bench_and_nothing_private(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "examine", lambda: FOUND)
    monkeypatch.setattr(doctor_report, "_private_names", lambda: ["/home/ada", "analytical-engine", "ada"])
    monkeypatch.setattr(doctor_report, "MODELS", ("Ti/32",))
    monkeypatch.setattr(benchmark, "measure_peak_flops", lambda *_: 1e12)  # it takes seconds
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exit_:
        main(["doctor", "--report"])
    assert not exit_.value.code and "written to vitrail-report.md" in capsys.readouterr().out
    text = (tmp_path / "vitrail-report.md").read_text(encoding="utf-8")
    assert text.startswith("# Vitrail report") and "ada" not in text and "engine" not in text and "/home" not in text
    values = json.loads(text.partition("```json\n")[2].rpartition("\n```")[0])
    assert [(row["model"], row["task"]) for row in values["bench"]] == [("ViT-Ti/32", task) for task in ("infer", "infer", "train")]
    assert all(row["images_per_s"] > 0 for row in values["bench"])
    assert "| Vitrail's kernels | none: the kernels are for CUDA GPUs, not for cpu |" in text


def test_other_files_are_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "thesis.md").write_text("# Thesis\n")
    for name, expected in (("thesis.md", "is not a report"), ("", "is a folder")):
        with pytest.raises(SystemExit) as exit_:
            main(["doctor", "--report", str(tmp_path / name)])
        assert exit_.value.code == 2 and expected in capsys.readouterr().err
    assert (tmp_path / "thesis.md").read_text() == "# Thesis\n"
