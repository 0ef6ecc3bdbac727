"""Sample the GPU's SM clock and power draw during a measurement.

Under a long load a GPU lowers its clock to stay within its power limit, so a speed depends on that limit too.
"""

from __future__ import annotations

import shutil
import statistics
import subprocess
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import NamedTuple

import torch

_INTERVAL_MS = 50


class PowerSample(NamedTuple):
    """The clock and the power draw at one moment."""

    time: float
    """In seconds of `time.monotonic`."""
    mhz: float
    watts: float


class PowerMonitor:
    """Sample a GPU's clock and power with nvidia-smi, in a subprocess, inside a `with` block.

    Without nvidia-smi, or where it does not report these values, there are no samples.
    """

    def __init__(self, device: torch.device) -> None:
        self.command = _command(device)
        self.samples: list[PowerSample] = []
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None

    def __enter__(self) -> PowerMonitor:
        if self.command:
            self._process = subprocess.Popen(self.command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            self._reader = threading.Thread(target=self._read, args=(self._process,), daemon=True)
            self._reader.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._process is not None and self._reader is not None:
            self._process.terminate()
            self._process.wait()
            self._reader.join()

    def medians(self, start: float, end: float) -> tuple[float | None, float | None]:
        """Return the median MHz and watts between two times; None without samples."""
        found = [sample for sample in list(self.samples) if start <= sample.time <= end]
        if not found:
            return None, None
        return statistics.median(sample.mhz for sample in found), statistics.median(sample.watts for sample in found)

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            try:
                mhz, watts = (float(part) for part in line.split(","))
            except ValueError:
                continue  # nvidia-smi prints [N/A] for values it does not know
            self.samples.append(PowerSample(time.monotonic(), mhz, watts))


def _command(device: torch.device) -> Sequence[str] | None:
    program = shutil.which("nvidia-smi")
    if device.type != "cuda" or program is None:
        return None
    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    query = "--query-gpu=clocks.sm,power.draw.instant"
    return program, query, "--format=csv,noheader,nounits", f"--id={uuid}", f"--loop-ms={_INTERVAL_MS}"
