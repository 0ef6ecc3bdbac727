"""A small part of `benchmarks/fuzz.py`: more than 300 mutated files of all formats, in this process."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

import pytest

fuzz = pytest.importorskip("benchmarks.fuzz", reason="needs a Unix system")


class Hang(BaseException):
    """Reading takes too long. Not an `OSError`, as `TimeoutError` is, which readers turn into a sentence."""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="uses signals")
def test_mutated_files_of_every_format_are_read_or_refused(tmp_path: Path) -> None:
    def stop(number: int, frame: object) -> None:
        raise Hang

    cases = fuzz.make_cases(tmp_path)
    refused = 0
    previous = signal.signal(signal.SIGALRM, stop)
    try:
        for case in cases:
            case.read()
            before = fuzz.listing(tmp_path)
            for number, file, content in fuzz.mutations(case, 8, seed=1):
                signal.alarm(fuzz.SECONDS)
                start = time.monotonic()
                result = fuzz.outcome(case, file, content)
                assert result in ("read", "refused"), f"{case.name} {number}: {result}"
                assert time.monotonic() - start < fuzz.SECONDS, f"{case.name} {number} takes too long"
                refused += result == "refused"
            assert fuzz.listing(tmp_path) == before, case.name
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)
    assert len(cases) * 8 >= 300
    assert refused > 150


def test_a_hang_and_a_written_file_are_found(tmp_path: Path) -> None:
    file = tmp_path / "a"
    file.write_text("good")

    def hang() -> None:
        try:
            raise Hang
        except OSError as error:
            raise fuzz.VitrailError("refused") from error

    with pytest.raises(Hang):
        fuzz.outcome(fuzz.Case("hang", file, (file,), hang), file, b"bad")
    before = fuzz.listing(tmp_path)
    assert fuzz.outcome(fuzz.Case("sound", file, (file,), file.read_bytes), file, b"bad") == "read"
    assert fuzz.listing(tmp_path) == before
    other = tmp_path / "b"
    other.write_text("one")
    before = fuzz.listing(tmp_path)
    fuzz.outcome(fuzz.Case("writes", file, (file,), lambda: other.write_text("two")), file, b"bad")
    assert fuzz.listing(tmp_path) != before
