"""Load for `benchmarks/serving.py` and `benchmarks/serving_timm.py`: servers on their own cores, and clients on plain sockets.

Times are measured from the first byte sent to the last received.
"""

from __future__ import annotations

import asyncio
import csv
import http.client
import io
import json
import os
import platform
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from PIL import Image

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
Row = tuple[str, float | int | str, str]
_TIMEOUT = 120.0
_CLIENT_IDLE = 30.0  # seconds; clients close connections that they have not used for so long, before the server does


@dataclass(frozen=True)
class Target:
    """Where clients send their bodies, and what these are."""

    path: str = "/v1/predict"
    headers: str = "Content-Type: image/jpeg\r\n"


PHOTO = Target()


@dataclass
class Answer:
    status: int  # 0: the connection was closed without an answer, or there was none in time
    seconds: float
    request: str = ""


@dataclass
class Connection:
    """One connection that is kept open and opened again when it was closed."""

    port: int
    reader: asyncio.StreamReader | None = None
    writer: asyncio.StreamWriter | None = field(default=None, repr=False)
    used: float = 0.0

    async def send(self, body: bytes, request: str, target: Target = PHOTO) -> Answer:
        began = time.perf_counter()
        if began - self.used > _CLIENT_IDLE:
            self.close()
        try:
            if self.writer is None:
                self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port)
            assert self.reader is not None
            head = (
                f"POST {target.path} HTTP/1.1\r\nHost: x\r\nX-Request-Id: {request}\r\n{target.headers}"
                f"Content-Length: {len(body)}\r\n\r\n"
            )
            self.writer.write(head.encode() + body)
            answer = (await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), _TIMEOUT)).lower()
            length = re.search(rb"\ncontent-length: (\d+)", answer)
            await self.reader.readexactly(int(length[1]) if length else 0)
            self.used = time.perf_counter()
            if b"connection: close" in answer:
                self.close()
            return Answer(int(answer[9:12]), time.perf_counter() - began, request)
        except (OSError, asyncio.IncompleteReadError):
            self.close()
            return Answer(0, time.perf_counter() - began, request)

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()
        self.reader = self.writer = None


async def closed_loop(port: int, bodies: Sequence[bytes], clients: int, seconds: float, target: Target = PHOTO) -> list[Answer]:
    """Let clients send one request after another; one that is refused waits a moment, as a client should."""
    end, answers = time.monotonic() + seconds, []

    async def client(number: int) -> None:
        connection, sent = Connection(port), 0
        while time.monotonic() < end:
            answers.append(await connection.send(bodies[(number + sent) % len(bodies)], f"{number}.{sent}", target))
            if answers[-1].status != 200:
                await asyncio.sleep(0.05)
            sent += 1
        connection.close()

    await asyncio.gather(*(client(number) for number in range(clients)))
    return answers


async def open_loop(port: int, bodies: Sequence[bytes], rate: float, seconds: float, arrivals: str) -> list[Answer]:
    """Send requests at times that do not depend on the answers."""
    idle: list[Connection] = []
    generator, answers = random.Random(0), []

    async def one(number: int) -> None:
        connection = idle.pop() if idle else Connection(port)
        answers.append(await connection.send(bodies[number % len(bodies)], str(number)))
        idle.append(connection)

    tasks, due, began = [], 0.0, time.monotonic()
    while due < seconds:
        await asyncio.sleep(max(0.0, began + due - time.monotonic()))
        tasks.append(asyncio.ensure_future(one(len(tasks))))
        due += 1 / rate if arrivals == "even" else generator.expovariate(rate)
    await asyncio.gather(*tasks)
    for connection in idle:
        connection.close()
    return answers


class Server:
    """A process that serves, on its own cores. `arguments` are Python's, such as -m vitrail serve."""

    def __init__(
        self,
        arguments: Sequence[str],
        log: Path,
        cores: Sequence[int] | None,
        port: int = 0,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.log = log
        command, how = [sys.executable, *arguments, "--port", str(port)], on_cores(cores)
        how["env"] = {**os.environ, **how.get("env", {}), **(environment or {})}
        with log.open("wb") as stream:
            self.process = subprocess.Popen(command, stderr=stream, cwd=ROOT, **how)
        end = time.monotonic() + 600  # compiling and capturing takes its time
        while not (found := re.search(r"http://127\.0\.0\.1:(\d+)", log.read_text(errors="replace"))):
            self._check(end)
            time.sleep(0.02)
        self.port = int(found[1])
        while self.get("/v2/health/ready")[0] != 200:
            self._check(end)
            time.sleep(0.1)

    def _check(self, end: float) -> None:
        if self.process.poll() is not None or time.monotonic() > end:
            if self.process.poll() is None:
                self.process.kill()
            raise SystemExit(f"The server did not start: {self.log.read_text(errors='replace')[-2000:]}")

    def get(self, path: str) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        connection.request("GET", path)
        answer = connection.getresponse()
        found = answer.status, answer.read().decode()
        connection.close()
        return found

    def metric(self, name: str) -> float:
        """Return the sum of a metric over its labels."""
        found = re.findall(rf"^{name}(?:\{{[^}}]*\}})? (\S+)$", self.get("/metrics")[1], re.MULTILINE)
        return sum(float(value) for value in found)

    def memory(self) -> int:
        """Return the bytes in memory of the server and its helper processes."""
        found = (
            re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
            for pid in (self.process.pid, *helper_processes(self.process.pid))
        )
        return sum(int(one[1]) * 1024 for one in found if one)

    def cpu_seconds(self) -> float:
        """Return the CPU seconds of the server and its helper processes, which decode images where there are many cores."""
        pids = (self.process.pid, *helper_processes(self.process.pid))
        found = (Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids)
        return sum(int(value) for values in found for value in values[11:15]) / os.sysconf("SC_CLK_TCK")  # with children that ended

    def accepted(self) -> list[str]:
        """Return the ids of requests that were taken, by the server's own log; status 0 is one that was cancelled by its end."""
        lines = [json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{")]
        return [line["request_id"] for line in lines if line.get("status") in (0, 200, 499, 500) and "request_id" in line]

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


def helper_processes(pid: int) -> list[int]:
    """Return the processes that any thread of a process has started."""
    return [int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()]


def on_cores(cores: Sequence[int] | None) -> dict[str, Any]:
    """Return what makes a child process run on these cores, with as many threads; None: on all."""
    if cores is None:
        return {}
    return {
        "preexec_fn": lambda: os.sched_setaffinity(0, cores),
        "env": {**os.environ, "OMP_NUM_THREADS": str(len(cores)), "MKL_NUM_THREADS": str(len(cores))},
    }


def busy_seconds(cores: Sequence[int]) -> float:
    """Return how long these cores have computed since the machine started, for any program."""
    lines = dict(line.split(maxsplit=1) for line in Path("/proc/stat").read_text().splitlines() if line.startswith("cpu"))
    found = 0
    for core in cores:
        user, nice, system, _, _, *others = (int(value) for value in lines[f"cpu{core}"].split()[:8])
        found += user + nice + system + sum(others)
    return found / os.sysconf("SC_CLK_TCK")


def make_checkpoint(folder: Path, name: str, **changes: Any) -> Path:
    import torch

    from vitrail.checkpoints.native import save
    from vitrail.data.preprocess import preset
    from vitrail.models import create_model

    model = create_model(name, outputs=1000, seed=0, **changes)
    torch.nn.init.normal_(model.head.weight, std=0.05, generator=torch.Generator().manual_seed(0))
    preprocess = preset("timm", size=model.config.image_size)
    save(folder / "model", model, preprocess=preprocess, classes=[f"class {number}" for number in range(1000)])
    return folder / "model"


def make_photos() -> list[bytes]:
    """Return JPEG photos of 640 × 427 pixels."""
    from vitrail.data import embedded

    found = []
    for name in embedded.PHOTOS:
        photo = Image.open(io.BytesIO(embedded.photo(name))).resize((640, 427))
        for degrees in (0, 180):
            stream = io.BytesIO()
            photo.rotate(degrees).save(stream, "JPEG", quality=90)
            found.append(stream.getvalue())
    return found


def quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


def print_rows(rows: Sequence[Row]) -> None:
    for name, value, unit in rows:
        print(f"{name:52} {value:>12.5g} {unit}" if isinstance(value, float) else f"{name:52} {value:>12} {unit}")


def write_rows(file: Path, rows: Sequence[Row], facts: dict[str, Any]) -> None:
    with file.open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["metric", "value", "unit", *facts])
        for metric, value, unit in rows:
            writer.writerow([metric, f"{value:.5g}" if isinstance(value, float) else value, unit, *facts.values()])
    print(f"written to {file}")


def versions(*more: str) -> dict[str, str]:
    names = ("vitrail", "torch", "fastapi", "uvicorn", "pillow", *more)
    return {**{name: version(name) for name in names}, "python": platform.python_version()}


def cpu_name() -> str:
    found = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return found[1] if found else platform.machine()
