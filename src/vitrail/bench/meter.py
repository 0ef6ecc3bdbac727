"""How fast the GPU's clock ran, and what power it drew, while something was measured.

Under a long load a GPU lowers its clock to keep to its power limit, and then a figure is as much the limit's as the program's.
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

_EVERY = 50  # milliseconds


class Reading(NamedTuple):
    """One look at the meter."""

    at: float
    """On `time.monotonic`'s clock."""
    megahertz: float
    watts: float


class Meter:
    """Looks at a GPU's clock and power by nvidia-smi, in a process of its own, as long as it is entered.

    Where there is no such program, or it does not know these, there are no readings.
    """

    def __init__(self, device: torch.device) -> None:
        self.command = _command(device)
        self.readings: list[Reading] = []
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None

    def __enter__(self) -> Meter:
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

    def between(self, begin: float, end: float) -> tuple[float | None, float | None]:
        """Medians of megahertz and watts in a span of time; None without readings."""
        found = [one for one in list(self.readings) if begin <= one.at <= end]
        if not found:
            return None, None
        return statistics.median(one.megahertz for one in found), statistics.median(one.watts for one in found)

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            try:
                megahertz, watts = (float(part) for part in line.split(","))
            except ValueError:
                continue  # it says in words what it does not know
            self.readings.append(Reading(time.monotonic(), megahertz, watts))


def _command(device: torch.device) -> Sequence[str] | None:
    program = shutil.which("nvidia-smi")
    if device.type != "cuda" or program is None:
        return None
    identity = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    what = "--query-gpu=clocks.sm,power.draw.instant"
    return program, what, "--format=csv,noheader,nounits", f"--id={identity}", f"--loop-ms={_EVERY}"
