"""Load on `vitrail serve`: throughput against the bare model, latency at half load, overload, and a restart under load.

    python benchmarks/serving.py                        # ViT-B/16 at 224 pixels: about seven minutes on two free cores
    python benchmarks/serving.py --overload-minutes 10  # the long form of the overload
    python benchmarks/serving.py --tiny                 # test that everything runs

Server and bare model run on the same cores (--server-cores) with as many threads; the load comes from this process, on another core
(--load-core). Images are JPEG photos of 640 × 427 pixels; both decode them. The load is sent on plain sockets and measured from the
first byte sent to the last received.

- bare: `for_inference` on batches, the next batch being decoded meanwhile, as a loop without a service would be written
- saturation: as many connections as two batches have images, each sending its next request when it has its answer
- half load: requests at half of that rate, evenly spaced and (poisson) at random, whether or not answers have come
- overload: four times that rate; every answer must be 200, 429 or 503, memory must not grow, and no image may be left
- restart: SIGTERM and a new server on the same port under load; every request that a server accepted must be answered

Prints a table and writes benchmarks/results/serving-….csv with hardware and versions.
"""

from __future__ import annotations

import argparse
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
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from PIL import Image

Row = tuple[str, float | int | str, str]


@dataclass
class Answer:
    status: int  # 0: the connection was closed without an answer
    seconds: float
    request: str = ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="ViT-B/16")
    parser.add_argument("--precision", default="fp32", choices=("fp32", "bf16", "int8", "auto"))
    parser.add_argument("--server-cores", type=int, nargs="+", default=[0])
    parser.add_argument("--load-core", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each part except the overload")
    parser.add_argument("--overload-minutes", "--minutes", type=float, default=1.0)
    parser.add_argument("--parts", nargs="+", default=["half", "overload", "restart"], choices=("half", "overload", "restart"))
    parser.add_argument("--tiny", action="store_true", help="a small model for a few seconds, no results written")
    parser.add_argument("--bare", nargs=2, help=argparse.SUPPRESS)  # this script's own process for the bare model
    options = parser.parse_args()
    if options.tiny:
        options.model, options.seconds, options.overload_minutes = "ViT-Ti/16", 3.0, 0.1
    if options.bare:
        bare(*options.bare, options.precision, options.seconds)
        return
    with suppress(OSError):
        os.sched_setaffinity(0, {options.load_core})
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(options, Path(folder))
    for name, value, unit in rows:
        print(f"{name:42} {value:>12.5g} {unit}" if isinstance(value, float) else f"{name:42} {value:>12} {unit}")
    if not options.tiny:
        write(options, rows)


def measure(options: argparse.Namespace, folder: Path) -> list[Row]:
    checkpoint, photos = make_checkpoint(folder, options.model), make_photos(folder)
    without_service = run_bare(options, checkpoint, folder)
    rows: list[Row] = [("bare model", without_service, "images/s")]
    with running(options, checkpoint, folder) as server:
        asyncio.run(closed_loop(server.port, photos, 8, 3.0))  # warm up
        first = [one.seconds for one in asyncio.run(closed_loop(server.port, photos, 1, min(10.0, options.seconds)))]
        began = time.monotonic()
        answers = asyncio.run(closed_loop(server.port, photos, 64, options.seconds))
        rate = sum(one.status == 200 for one in answers) / (time.monotonic() - began)
        rows += [
            ("service at saturation", rate, "requests/s"),
            ("service / bare model (bar: at least 0.85)", rate / without_service, ""),
            ("one request alone, median", 1000 * statistics.median(first), "ms"),
            ("images per batch at saturation", mean_batch(server), "images"),
        ]
        if "half" in options.parts:
            rows += half_load(server, photos, rate / 2, options.seconds, statistics.median(first))
        if "overload" in options.parts:
            rows += overload(server, photos, 4 * rate, 60 * options.overload_minutes)
    if "restart" in options.parts:
        rows += restart(options, checkpoint, photos, folder)
    return rows


def half_load(server: Server, photos: list[bytes], rate: float, seconds: float, alone: float) -> list[Row]:
    rows: list[Row] = []
    for arrivals in ("even", "poisson"):
        answers = asyncio.run(open_loop(server.port, photos, rate, seconds, arrivals))
        times = sorted(one.seconds for one in answers if one.status == 200)
        p50, p99 = (times[min(len(times) - 1, int(share * len(times)))] for share in (0.5, 0.99))
        name = f"half load, {arrivals}"
        rows += [
            (f"{name}: requests", len(answers), f"of them {Counter(one.status for one in answers)[200]} answered with 200"),
            (f"{name}: p50", 1000 * p50, "ms"),
            (f"{name}: p99", 1000 * p99, "ms"),
            (f"{name}: p99 / alone (bar: below 3)", p99 / alone, ""),
        ]
    return rows


def overload(server: Server, photos: list[bytes], rate: float, seconds: float) -> list[Row]:
    memory: list[int] = []

    async def run() -> list[Answer]:
        async def sample() -> None:
            while True:
                memory.append(server.memory())
                await asyncio.sleep(1.0)

        sampling = asyncio.ensure_future(sample())
        try:
            return await open_loop(server.port, photos, rate, seconds, "even")
        finally:
            sampling.cancel()

    answers = asyncio.run(run())
    statuses = Counter(one.status for one in answers)
    others = sum(count for status, count in statuses.items() if status not in (200, 429, 503))
    refused = sorted(one.seconds for one in answers if one.status == 429)
    time.sleep(1.0)
    left = server.gauges()
    quarter = memory[: max(1, len(memory) // 4)]
    return [
        ("overload: offered", rate, "requests/s"),
        *((f"overload: status {status}", count, "answers") for status, count in sorted(statuses.items())),
        ("overload: other than 200, 429, 503 (bar: 0)", others, "answers"),
        ("overload: accepted", statuses[200] / seconds, "requests/s"),
        ("overload: p99 of a refusal", 1000 * refused[int(0.99 * len(refused))] if refused else 0.0, "ms"),
        ("overload: memory in the first quarter, most", max(quarter) / 1e6, "MB"),
        ("overload: memory at the end", memory[-1] / 1e6, "MB"),
        ("overload: images left in the service (bar: 0)", sum(left), "images"),
    ]


def restart(options: argparse.Namespace, checkpoint: Path, photos: list[bytes], folder: Path) -> list[Row]:
    """Replace the server while 16 clients send: they send a request again if no server took it."""
    first = Server(options, checkpoint, folder / "first.log")
    second: list[Server] = []

    async def run() -> list[Answer]:
        load = asyncio.ensure_future(closed_loop(first.port, photos, 16, max(10.0, options.seconds), retry=True))
        await asyncio.sleep(max(3.0, options.seconds / 4))
        first.process.send_signal(signal.SIGTERM)
        await asyncio.to_thread(first.process.wait, 60)
        second.append(await asyncio.to_thread(Server, options, checkpoint, folder / "second.log", first.port))
        return await load

    answers = asyncio.run(run())
    status = second[0].stop()
    accepted = [*first.accepted(), *second[0].accepted()]
    received = {one.request for one in answers if one.status == 200}
    return [
        ("restart: exit status of the first server", first.process.returncode, ""),
        ("restart: exit status of the second server", status, ""),
        ("restart: requests accepted", len(accepted), ""),
        ("restart: accepted and not answered (bar: 0)", len(set(accepted) - received), ""),
        ("restart: refused with 503, sent again", sum(one.status == 503 for one in answers), ""),
        ("restart: connection closed before, sent again", sum(one.status == 0 for one in answers), ""),
    ]


@dataclass
class Connection:
    """One connection that is kept open and opened again when it was closed."""

    port: int
    reader: asyncio.StreamReader | None = None
    writer: asyncio.StreamWriter | None = field(default=None, repr=False)
    used: float = 0.0

    async def send(self, photo: bytes, request: str) -> Answer:
        began = time.perf_counter()
        if began - self.used > 30:  # as clients do: a server closes idle connections, maybe just now
            self.close()
        try:
            if self.writer is None:
                self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port)
            assert self.reader is not None
            head = f"POST /v1/predict HTTP/1.1\r\nHost: x\r\nX-Request-Id: {request}\r\nContent-Length: {len(photo)}\r\n\r\n"
            self.writer.write(head.encode() + photo)
            answer = (await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), 120)).lower()
            length = re.search(rb"content-length: (\d+)", answer)
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


async def closed_loop(port: int, photos: list[bytes], clients: int, seconds: float, *, retry: bool = False) -> list[Answer]:
    """Let clients send one request after another."""
    end, answers = time.monotonic() + seconds, []

    async def client(number: int) -> None:
        connection, sent = Connection(port), 0
        while time.monotonic() < end:
            answers.append(await connection.send(photos[(number + sent) % len(photos)], f"{number}.{sent}"))
            if retry and answers[-1].status != 200:
                await asyncio.sleep(0.05)
            sent += 1
        connection.close()

    await asyncio.gather(*(client(number) for number in range(clients)))
    return answers


async def open_loop(port: int, photos: list[bytes], rate: float, seconds: float, arrivals: str) -> list[Answer]:
    """Send requests at times that do not depend on the answers."""
    idle: list[Connection] = []
    generator, answers = random.Random(0), []

    async def one(number: int) -> None:
        connection = idle.pop() if idle else Connection(port)
        answers.append(await connection.send(photos[number % len(photos)], str(number)))
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
    """`vitrail serve` on its own cores."""

    def __init__(self, options: argparse.Namespace, checkpoint: Path, log: Path, port: int = 0) -> None:
        self.log = log
        arguments = ["serve", f"model={checkpoint}", "--port", str(port), "--precision", options.precision]
        with log.open("wb") as stream:
            self.process = subprocess.Popen([sys.executable, "-m", "vitrail", *arguments], stderr=stream, **on_cores(options))
        end = time.monotonic() + 120
        while not (found := re.search(r"http://127\.0\.0\.1:(\d+)", log.read_text(errors="replace"))):
            if self.process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"The server did not start: {log.read_text(errors='replace')[-2000:]}")
            time.sleep(0.02)
        self.port = int(found[1])
        while self.get("/v2/health/ready")[0] != 200 and time.monotonic() < end:
            time.sleep(0.1)

    def get(self, path: str) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        connection.request("GET", path)
        answer = connection.getresponse()
        found = answer.status, answer.read().decode()
        connection.close()
        return found

    def gauges(self) -> list[float]:
        text = self.get("/metrics")[1]
        return [float(value) for value in re.findall(r"vitrail_(?:images_in_flight|queue_length)\{[^}]*\} (\S+)", text)]

    def memory(self) -> int:
        found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{self.process.pid}/status").read_text())
        return int(found[1]) * 1024 if found else 0

    def accepted(self) -> list[str]:
        """Return the ids of requests that were computed, by the server's own log."""
        lines = [json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{")]
        return [line["request_id"] for line in lines if line.get("status") in (200, 499, 500) and "request_id" in line]

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


@contextmanager
def running(options: argparse.Namespace, checkpoint: Path, folder: Path) -> Iterator[Server]:
    server = Server(options, checkpoint, folder / "server.log")
    try:
        yield server
    finally:
        status = server.stop()
    if status:
        raise RuntimeError(f"The server ended with status {status}: {server.log.read_text()[-2000:]}")


def on_cores(options: argparse.Namespace) -> dict[str, Any]:
    """Return what makes a child process run on the server's cores, with as many threads."""
    cores = options.server_cores
    return {
        "preexec_fn": lambda: os.sched_setaffinity(0, cores),
        "env": {**os.environ, "OMP_NUM_THREADS": str(len(cores)), "MKL_NUM_THREADS": str(len(cores))},
    }


def mean_batch(server: Server) -> float:
    text = server.get("/metrics")[1]
    total, count = (float(re.search(rf"vitrail_batch_size_{name}\{{[^}}]*\}} (\S+)", text)[1]) for name in ("sum", "count"))  # type: ignore[index]
    return total / count


def make_checkpoint(folder: Path, name: str) -> Path:
    import torch

    from vitrail.checkpoints.native import save
    from vitrail.data.preprocess import preset
    from vitrail.models import create_model

    model = create_model(name, outputs=1000, seed=0)
    torch.nn.init.normal_(model.head.weight, std=0.05, generator=torch.Generator().manual_seed(0))
    save(folder / "model", model, preprocess=preset("timm"), classes=[f"class {number}" for number in range(1000)])
    return folder / "model"


def make_photos(folder: Path) -> list[bytes]:
    from sklearn.datasets import load_sample_images

    found = []
    for photo in load_sample_images().images:
        for turned in range(0, 4, 2):
            stream = io.BytesIO()
            Image.fromarray(photo).rotate(90 * turned, expand=True).save(stream, "JPEG", quality=90)
            found.append(stream.getvalue())
    for number, data in enumerate(found):
        (folder / f"{number}.jpg").write_bytes(data)
    return found


def run_bare(options: argparse.Namespace, checkpoint: Path, folder: Path) -> float:
    arguments = ["--bare", str(checkpoint), str(folder), "--precision", options.precision, "--seconds", str(options.seconds)]
    done = subprocess.run([sys.executable, __file__, *arguments], check=True, capture_output=True, text=True, **on_cores(options))
    return float(done.stdout.split()[-1])


def bare(checkpoint: str, folder: str, precision: str, seconds: float) -> None:
    """Print images per second of the model alone, at its best batch size; images are decoded and preprocessed in threads."""
    from concurrent.futures import ThreadPoolExecutor

    import torch

    import vitrail
    from vitrail.models.inference import for_inference

    bundle = vitrail.load(checkpoint)
    model, preprocess = for_inference(bundle.model, precision), bundle.stored_preprocess()  # type: ignore[arg-type]
    photos = [path.read_bytes() for path in sorted(Path(folder).glob("*.jpg"))]
    best = 0.0
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool, torch.no_grad():
        for batch in (1, 8, 32):
            images = [photos[number % len(photos)] for number in range(batch)]
            coming = [pool.submit(preprocess, one) for one in images]
            model(torch.stack([one.result() for one in coming]))
            coming, count, began = [pool.submit(preprocess, one) for one in images], 0, time.monotonic()
            while time.monotonic() - began < seconds / 3:
                inputs = torch.stack([one.result() for one in coming])
                coming = [pool.submit(preprocess, one) for one in images]
                bundle.decode(model(inputs), 5)
                count += batch
            best = max(best, count / (time.monotonic() - began))
    print(best)


def write(options: argparse.Namespace, rows: list[Row]) -> None:
    import torch

    cores = len(options.server_cores)
    facts = {
        "model": options.model,
        "precision": options.precision,
        "cpu": _cpu(),
        "server_cores": cores,
        **{name: version(name) for name in ("vitrail", "torch", "fastapi", "uvicorn", "pillow")},
        "python": platform.python_version(),
        "simd": torch.backends.cpu.get_cpu_capability(),
    }
    name = options.model.replace("/", "-").lower()
    file = Path(__file__).parent / "results" / f"serving-{platform.machine()}-{cores}core-{name}-{options.precision}.csv"
    with file.open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["metric", "value", "unit", *facts])
        for metric, value, unit in rows:
            writer.writerow([metric, f"{value:.5g}" if isinstance(value, float) else value, unit, *facts.values()])
    print(f"written to {file.name}")


def _cpu() -> str:
    found = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return found[1] if found else platform.machine()


if __name__ == "__main__":
    main()
