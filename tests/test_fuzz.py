"""A small part of `benchmarks/fuzz.py`: 351 mutated files of all formats, in this process."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

fuzz = pytest.importorskip("benchmarks.fuzz", reason="needs a Unix system")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="uses signals")
def test_mutated_files_of_every_format_are_read_or_refused(tmp_path: Path) -> None:
    def stop(number: int, frame: object) -> None:
        raise TimeoutError("it hangs")

    cases = fuzz.make_cases(tmp_path)
    refused = 0
    previous = signal.signal(signal.SIGALRM, stop)
    try:
        for case in cases:
            case.read()
            before = fuzz.listing(tmp_path)
            for number, file, content in fuzz.mutations(case, 13, seed=1):
                signal.alarm(fuzz.SECONDS)
                result = fuzz.outcome(case, file, content)
                assert result in ("read", "refused"), f"{case.name} {number}: {result}"
                refused += result == "refused"
            assert fuzz.listing(tmp_path) == before, case.name
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)
    assert len(cases) * 13 >= 300
    assert refused > 150
