"""Clock and power, read from a program that goes on printing until it is ended."""

from __future__ import annotations

import sys
import time

import pytest
import torch

from vitrail.bench.meter import Meter

PROGRAM = """
import time
print("[N/A], [N/A]", flush=True)
for count in range(2000):
    print(f"{1500 + count % 3}, {640.5 + count % 3}", flush=True)
    time.sleep(0.005)
"""


def test_readings_are_taken_while_it_is_entered() -> None:
    meter = Meter(torch.device("cpu"))
    meter.command = [sys.executable, "-c", PROGRAM]
    with meter:
        deadline = time.monotonic() + 30
        while len(meter.readings) < 20 and time.monotonic() < deadline:
            time.sleep(0.01)
        process = meter._process
    assert process is not None and process.poll() not in (None, 0)  # ended by us, not by itself
    first, last = meter.readings[0].at, meter.readings[-1].at
    assert len(meter.readings) >= 20 and first < last
    assert meter.between(first, last) == (1501.0, 641.5)
    assert meter.between(last + 1, last + 2) == (None, None)
    count = len(meter.readings)
    time.sleep(0.05)
    assert len(meter.readings) == count


def test_without_a_gpu_nothing_is_started() -> None:
    with Meter(torch.device("cpu")) as meter:
        assert meter.command is None and meter.between(0, time.monotonic()) == (None, None)


def test_a_program_that_knows_nothing_does_no_harm() -> None:
    meter = Meter(torch.device("cpu"))
    meter.command = [sys.executable, "-c", "raise SystemExit('Field is not a valid field to query.')"]
    with meter:
        time.sleep(0.1)
    assert meter.readings == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_real_gpu_has_a_clock() -> None:
    with Meter(torch.device("cuda", 0)) as meter:
        deadline = time.monotonic() + 10
        while meter.command and not meter.readings and time.monotonic() < deadline:
            time.sleep(0.05)
    assert not meter.command or meter.readings[0].megahertz > 100
