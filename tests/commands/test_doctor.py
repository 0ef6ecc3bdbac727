"""`vitrail doctor` shows what works, and how to install what is missing."""

from __future__ import annotations

import json

import pytest

from vitrail.cli import main
from vitrail.commands import doctor


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
