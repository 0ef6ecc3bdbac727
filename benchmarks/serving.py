"""Load on `vitrail serve`: throughput against the bare model, latency at half load, overload, and a restart under load.

    python -m benchmarks.serving                        # ViT-B/16 at 224 pixels: about six minutes on two free cores
    python -m benchmarks.serving --overload-minutes 10  # the long form of the overload
    python -m benchmarks.serving --tiny                 # test that everything runs
    python -m benchmarks.serving --table benchmarks/results/serving-….csv   # the results as a Markdown table

Server and bare model run on the same cores (--server-cores) with as many threads, in --rounds alternating rounds of --seconds, so
that both meet the same machine. The load comes from this process, on another core (--load-core). Images are JPEG photos of
640 × 427 pixels; both decode them. Next to the rates it measures the CPU time per image, which other programs on these cores change
least, and how much of the cores other programs had.

- bare: `for_inference` at its best batch size, the next batch being decoded meanwhile, as a loop without a service would be written
- saturation: --clients connections, each sending its next request when it has its answer
- half load: requests at half of that rate, evenly spaced and (poisson) at random, whether or not answers have come
- overload: four times that rate; every answer must be 200, 429 or 503, memory must not grow, and no image may be left
- restart: SIGTERM and a new server on the same port under load; every request that a server accepted must be answered

Prints a table and writes benchmarks/results/serving-….csv with hardware and versions.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from benchmarks.serving_load import (
    RESULTS,
    ROOT,
    Answer,
    Row,
    Server,
    busy_seconds,
    closed_loop,
    cpu_name,
    make_checkpoint,
    make_photos,
    on_cores,
    open_loop,
    print_rows,
    quantile,
    versions,
    write_rows,
)

_FACTS_FROM = 3  # columns of the CSV file: metric, value, unit, then hardware and versions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="ViT-B/16")
    parser.add_argument("--precision", default="fp32", choices=("fp32", "bf16", "int8", "auto"))
    parser.add_argument("--server-cores", type=int, nargs="+", default=[0])
    parser.add_argument("--load-core", type=int, default=1)
    parser.add_argument("--clients", type=int, default=16, help="connections at saturation")
    parser.add_argument("--rounds", type=int, default=3, help="of bare model and service at saturation")
    parser.add_argument("--seconds", type=float, default=20.0, help="of a round, of each half load, and of the restart")
    parser.add_argument("--overload-minutes", type=float, default=1.5)
    parser.add_argument("--parts", nargs="*", default=["half", "overload", "restart"], choices=("half", "overload", "restart"))
    parser.add_argument("--tiny", action="store_true", help="a small model for a few seconds, no results written")
    parser.add_argument("--table", type=Path, metavar="CSV", help="print these results as Markdown, measure nothing")
    parser.add_argument("--bare", nargs=2, help=argparse.SUPPRESS)  # this script's own process for the bare model
    options = parser.parse_args()
    if options.table:
        print(markdown(options.table))
        return
    if options.bare:
        bare(*options.bare, options.precision)
        return
    if options.tiny:
        options.model, options.rounds, options.seconds, options.overload_minutes = "ViT-Ti/16", 1, 3.0, 0.1
    with suppress(OSError):
        os.sched_setaffinity(0, {options.load_core})
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(options, Path(folder))
    print_rows(rows)
    if not options.tiny:
        write(options, rows)


def measure(options: argparse.Namespace, folder: Path) -> list[Row]:
    checkpoint, photos = make_checkpoint(folder, options.model), make_photos()
    for number, photo in enumerate(photos):
        (folder / f"{number}.jpg").write_bytes(photo)
    with BareModel(options, checkpoint, folder) as alone, running(options, checkpoint, folder) as server:
        asyncio.run(closed_loop(server.port, photos, 8, 3.0))  # warm up
        rows, rate = saturation(options, alone, server, photos)
        single = [one.seconds for one in asyncio.run(closed_loop(server.port, photos, 1, min(10.0, options.seconds)))]
        latency = statistics.median(single)
        rows += [("one request alone: p50", 1000 * latency, "ms"), ("one request alone: p99", 1000 * quantile(single, 0.99), "ms")]
        if "half" in options.parts:
            rows += half_load(server, photos, rate / 2, options.seconds, latency)
        if "overload" in options.parts:
            rows += overload(server, photos, 4 * rate, 60 * options.overload_minutes)
    if "restart" in options.parts:
        rows += restart(options, checkpoint, photos, folder)
    return rows


def saturation(options: argparse.Namespace, alone: BareModel, server: Server, photos: list[bytes]) -> tuple[list[Row], float]:
    """Alternate the bare model and the service; their ratio is the median over the rounds."""
    bare_rates, rates, bare_cpu, cpu, statuses = [], [], [], [], Counter[int]()
    busy, began, own = busy_seconds(options.server_cores), time.monotonic(), 0.0
    images, batches = server.metric("vitrail_batch_size_sum"), server.metric("vitrail_batch_size_count")
    for _ in range(options.rounds):
        count, seconds, spent = alone.run(options.seconds)
        own += spent
        bare_rates.append(count / seconds)
        bare_cpu.append(spent / count)
        before, start = server.cpu_seconds(), time.monotonic()
        answers = asyncio.run(closed_loop(server.port, photos, options.clients, options.seconds))
        seconds, spent = time.monotonic() - start, server.cpu_seconds() - before
        own += spent
        statuses.update(one.status for one in answers)
        done = sum(one.status == 200 for one in answers)
        rates.append(done / seconds)
        cpu.append(spent / done)
    others = (busy_seconds(options.server_cores) - busy - own) / (time.monotonic() - began) / len(options.server_cores)
    images = server.metric("vitrail_batch_size_sum") - images
    rows: list[Row] = [
        ("bare model", statistics.median(bare_rates), f"images/s, batches of {alone.batch}"),
        ("service at saturation", statistics.median(rates), "requests/s"),
        ("service / bare model (bar: at least 0.85)", statistics.median(map(_ratio, rates, bare_rates)), "median of the rounds"),
        ("CPU time per image: bare model", 1000 * statistics.median(bare_cpu), "ms"),
        ("CPU time per image: service", 1000 * statistics.median(cpu), "ms"),
        ("CPU time: bare model / service", statistics.median(map(_ratio, bare_cpu, cpu)), "median of the rounds"),
        ("answers at saturation other than 200 (bar: 0)", sum(statuses.values()) - statuses[200], f"of {sum(statuses.values())}"),
        ("images per batch at saturation", images / (server.metric("vitrail_batch_size_count") - batches), "images"),
        ("server's cores used by other programs", max(0.0, others), "share"),
    ]
    return rows, statistics.median(rates)


def _ratio(first: float, second: float) -> float:
    return first / second


def half_load(server: Server, photos: list[bytes], rate: float, seconds: float, alone: float) -> list[Row]:
    rows: list[Row] = []
    for arrivals in ("even", "poisson"):
        answers = asyncio.run(open_loop(server.port, photos, rate, seconds, arrivals))
        times = [one.seconds for one in answers if one.status == 200]
        name = f"half load, {arrivals}"
        rows += [
            (f"{name}: requests", len(answers), f"of them {len(times)} answered with 200"),
            (f"{name}: p50", 1000 * quantile(times, 0.5), "ms"),
            (f"{name}: p99", 1000 * quantile(times, 0.99), "ms"),
            (f"{name}: p99 / p50 alone (bar: below 3)", quantile(times, 0.99) / alone, ""),
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

    began = time.monotonic()
    answers = asyncio.run(run())
    spent = time.monotonic() - began  # until the last accepted request is answered
    statuses = Counter(one.status for one in answers)
    others = sum(count for status, count in statuses.items() if status not in (200, 429, 503))
    accepted, refused = ([one.seconds for one in answers if one.status == status] for status in (200, 429))
    time.sleep(1.0)
    left = server.metric("vitrail_images_in_flight") + server.metric("vitrail_queue_length")
    quarter = memory[: max(1, len(memory) // 4)]
    return [
        ("overload: offered", rate, f"requests/s for {seconds:g} s"),
        *((f"overload: status {status}", count, "answers") for status, count in sorted(statuses.items())),
        ("overload: other than 200, 429, 503 (bar: 0)", others, "answers"),
        ("overload: accepted", statuses[200] / spent, "requests/s"),
        ("overload: p50 of an accepted request", 1000 * quantile(accepted, 0.5), "ms"),
        ("overload: p99 of an accepted request", 1000 * quantile(accepted, 0.99), "ms"),
        ("overload: p99 of a refusal", 1000 * quantile(refused, 0.99), "ms"),
        ("overload: memory in the first quarter, most", max(quarter) / 1e6, "MB"),
        ("overload: memory at the end", memory[-1] / 1e6, "MB"),
        ("overload: images left in the service (bar: 0)", int(left), "images"),
    ]


def restart(options: argparse.Namespace, checkpoint: Path, photos: list[bytes], folder: Path) -> list[Row]:
    """Replace the server while 16 clients send: they send a request again if no server took it."""
    first = start(options, checkpoint, folder / "first.log")
    second: list[Server] = []

    async def run() -> list[Answer]:
        load = asyncio.ensure_future(closed_loop(first.port, photos, 16, max(10.0, options.seconds)))
        await asyncio.sleep(max(3.0, options.seconds / 4))
        first.process.send_signal(signal.SIGTERM)
        await asyncio.to_thread(first.process.wait, 60)
        second.append(await asyncio.to_thread(start, options, checkpoint, folder / "second.log", first.port))
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


def start(options: argparse.Namespace, checkpoint: Path, log: Path, port: int = 0) -> Server:
    arguments = ["-m", "vitrail", "serve", f"model={checkpoint}", "--precision", options.precision]
    return Server(arguments, log, options.server_cores, port)


@contextmanager
def running(options: argparse.Namespace, checkpoint: Path, folder: Path) -> Iterator[Server]:
    server = start(options, checkpoint, folder / "server.log")
    try:
        yield server
    finally:
        status = server.stop()
    if status:
        raise SystemExit(f"The server ended with status {status}: {server.log.read_text()[-2000:]}")


class BareModel:
    """The model without a service, in a process of its own that waits between its rounds."""

    def __init__(self, options: argparse.Namespace, checkpoint: Path, folder: Path) -> None:
        command = [sys.executable, "-m", "benchmarks.serving", "--bare", str(checkpoint), str(folder)]
        command += ["--precision", options.precision]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen(command, cwd=ROOT, **pipes, **on_cores(options.server_cores))
        self.batch = int(self._read()[0])

    def run(self, seconds: float) -> tuple[int, float, float]:
        """Return how many images it computed, in what time, and in what CPU time."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{seconds}\n")
        self._process.stdin.flush()
        count, spent, cpu = self._read()
        return int(count), spent, cpu

    def _read(self) -> list[float]:
        assert self._process.stdout is not None
        found = self._process.stdout.readline().split()
        if not found:
            raise SystemExit("The process of the bare model has ended.")
        return [float(value) for value in found]

    def __enter__(self) -> BareModel:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()  # it ends when nothing is asked any more
        self._process.wait(30)


def bare(checkpoint: str, folder: str, precision: Any) -> None:
    """Print the best batch size; then, for every line with a number of seconds, images, seconds and CPU seconds."""
    from concurrent.futures import ThreadPoolExecutor

    import torch

    import vitrail
    from vitrail.models.inference import for_inference

    bundle = vitrail.load(checkpoint)
    model, preprocess = for_inference(bundle.model, precision), bundle.stored_preprocess()
    photos = [path.read_bytes() for path in sorted(Path(folder).glob("*.jpg"))]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool, torch.no_grad():

        def run(batch: int, seconds: float) -> tuple[int, float, float]:
            images = [photos[number % len(photos)] for number in range(batch)]
            coming, count = [pool.submit(preprocess, one) for one in images], 0
            began, cpu = time.monotonic(), time.process_time()
            while time.monotonic() - began < seconds:
                inputs = torch.stack([one.result() for one in coming])
                coming = [pool.submit(preprocess, one) for one in images]
                bundle.decode(model(inputs), 5)
                count += batch
            return count, time.monotonic() - began, time.process_time() - cpu

        for batch in (1, 8, 16):  # warm up
            run(batch, 0.0)
        best = min((1, 8, 16), key=lambda batch: (found := run(batch, 4.0))[2] / found[0])
        print(best, flush=True)
        for line in sys.stdin:
            print(*run(best, float(line)), flush=True)


def write(options: argparse.Namespace, rows: Sequence[Row]) -> None:
    import torch

    cores = len(options.server_cores)
    facts = {"model": options.model, "precision": options.precision, "cpu": cpu_name(), "server_cores": cores}
    simd = {"simd": torch.backends.cpu.get_cpu_capability()}
    command = {"command": " ".join(["python -m benchmarks.serving", *sys.argv[1:]])}
    name = options.model.replace("/", "-").lower()
    file = RESULTS / f"serving-{platform.machine()}-{cores}core-{name}-{options.precision}.csv"
    write_rows(file, rows, {**facts, **versions(), **simd, **command})


def markdown(file: Path) -> str:
    """Return the rows of a CSV file as a Markdown table, and below it hardware, versions and command."""
    with file.open(newline="") as stream:
        names, *rows = list(csv.reader(stream))
    facts = dict(zip(names[_FACTS_FROM:], rows[0][_FACTS_FROM:], strict=True))
    lines = ["| | | |", "|---|---|---|", *(f"| {metric} | {value} | {unit} |" for metric, value, unit, *_ in rows)]
    command = facts.pop("command", "")
    about = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in facts.items())
    return "\n".join([f"`{command}`, {about}:" if command else f"{about}:", "", *lines])


if __name__ == "__main__":
    main()
