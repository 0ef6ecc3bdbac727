"""GPU clock and power, sampled from a subprocess that prints until it is terminated."""

from __future__ import annotations

import sys
import time

import pytest
import torch

from vitrail.bench.power import PowerMonitor

PROGRAM = """
import time
print("[N/A], [N/A]", flush=True)
for count in range(2000):
    print(f"{1500 + count % 3}, {640.5 + count % 3}", flush=True)
    time.sleep(0.005)
"""


def test_samples_are_collected_inside_the_with_block() -> None:
    monitor = PowerMonitor(torch.device("cpu"))
    monitor.command = [sys.executable, "-c", PROGRAM]
    with monitor:
        deadline = time.monotonic() + 30
        while len(monitor.samples) < 20 and time.monotonic() < deadline:
            time.sleep(0.01)
        process = monitor._process
    assert process is not None and process.poll() not in (None, 0)  # terminated by the monitor
    first, last = monitor.samples[0].time, monitor.samples[-1].time
    assert len(monitor.samples) >= 20 and first < last
    assert monitor.medians(first, last) == (1501.0, 641.5)
    assert monitor.medians(last + 1, last + 2) == (None, None)
    count = len(monitor.samples)
    time.sleep(0.05)
    assert len(monitor.samples) == count


def test_no_process_is_started_without_a_gpu() -> None:
    with PowerMonitor(torch.device("cpu")) as monitor:
        assert monitor.command is None and monitor.medians(0, time.monotonic()) == (None, None)


def test_a_failing_command_gives_no_samples() -> None:
    monitor = PowerMonitor(torch.device("cpu"))
    monitor.command = [sys.executable, "-c", "raise SystemExit('Field is not a valid field to query.')"]
    with monitor:
        time.sleep(0.1)
    assert monitor.samples == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_reports_its_clock() -> None:
    with PowerMonitor(torch.device("cuda", 0)) as monitor:
        deadline = time.monotonic() + 10
        while monitor.command and not monitor.samples and time.monotonic() < deadline:
            time.sleep(0.05)
    assert not monitor.command or monitor.samples[0].mhz > 100
