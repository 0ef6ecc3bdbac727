"""CPU time that `vitrail serve` itself needs per request, apart from decoding and the model.

    python -m benchmarks.serving_cpu                        # about a minute on two cores
    python -m benchmarks.serving_cpu --against ../other/src # also another version of the package, in alternating rounds
    python -m benchmarks.serving_cpu --tiny                 # test that everything runs, writes no results

Python runs one thread of a process at a time, so the CPU time of the service's own process per request is a limit on requests/s
that no GPU and no further core lifts. Images, JPEG photos of 640 × 427 pixels, are decoded in helper processes, and the model is a
layer of 8 channels on 16 patches, so that hardly more than the service is left. --clients connections each send their next request
when they have its answer.

CPU time is what the kernel counted (/proc): of the main thread, which is the event loop; of the process's other threads, among
them that of the model; and of the helper processes. Other programs on the machine change it less than they change times.
Prints a table and writes benchmarks/results/serving-cpu-….csv with hardware and versions.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.serving_load import RESULTS, ROOT, Row, Server, closed_loop, cpu_name, make_checkpoint, make_photos
from benchmarks.serving_load import print_rows, versions, write_rows

_PARTS = ("event loop", "other threads", "process", "helper processes")
_MODEL = {"depth": 1, "width": 8, "heads": 1, "mlp": 8, "patch": 56}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, metavar="SRC", help="the src folder of another version")
    parser.add_argument("--decode-in", default="processes", choices=("processes", "threads"))
    parser.add_argument("--decoders", type=int, default=os.cpu_count())
    parser.add_argument("--clients", type=int, default=32, help="connections")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=8.0, help="of a round")
    parser.add_argument("--tiny", action="store_true", help="a second, no results written")
    options = parser.parse_args()
    if options.tiny:
        options.rounds, options.seconds = 1, 1.0
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(options, Path(folder))
    print_rows(rows)
    if not options.tiny:
        facts = {"cpu": cpu_name(), "cores": os.cpu_count(), "decoders": options.decoders, "clients": options.clients}
        command = {"command": " ".join(["python -m benchmarks.serving_cpu", *sys.argv[1:]])}
        file = RESULTS / f"serving-cpu-{platform.machine()}-{options.decode_in}.csv"
        write_rows(file, rows, {**facts, **versions(), **command})


def measure(options: argparse.Namespace, folder: Path) -> list[Row]:
    checkpoint, photos = make_checkpoint(folder, "ViT-Ti/16", **_MODEL), make_photos()
    sources = {"": ROOT / "src"} | ({"before: ": options.against.resolve()} if options.against else {})
    servers: dict[str, Server] = {}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in sources}
    try:
        for name, source in sources.items():
            arguments = ["-m", "vitrail", "serve", f"model={checkpoint}", "--device", "cpu", "--decode-in", options.decode_in]
            arguments += ["--decoders", str(options.decoders)]
            environment = {"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
            servers[name] = Server(arguments, folder / f"{len(servers)}.log", None, environment=environment)
            asyncio.run(closed_loop(servers[name].port, photos, options.clients, min(3.0, options.seconds)))  # warm up
        for _ in range(options.rounds):
            for name, server in servers.items():
                found[name].append(measure_round(server, photos, options))
    finally:
        statuses = [server.stop() for server in servers.values()]
    if any(statuses):
        raise SystemExit(f"A server ended with status {max(statuses)}: {(folder / '0.log').read_text()[-2000:]}")
    rows: list[Row] = []
    for name, rounds in found.items():
        for key in rounds[0]:
            values = [one[key] for one in rounds]
            unit = "ms of CPU time per request" if key in _PARTS else ""
            rows.append((name + key, statistics.median(values), f"{unit}, {min(values):.4g} to {max(values):.4g}".lstrip(", ")))
    return rows


def measure_round(server: Server, photos: list[bytes], options: argparse.Namespace) -> dict[str, float]:
    before, began = cpu_times(server.process.pid), time.monotonic()
    batches, images = server.metric("vitrail_batch_size_count"), server.metric("vitrail_images_total")
    answers = asyncio.run(closed_loop(server.port, photos, options.clients, options.seconds))
    seconds, after = time.monotonic() - began, cpu_times(server.process.pid)
    bad = sum(one.status != 200 for one in answers)
    if bad:
        raise SystemExit(f"{bad} of {len(answers)} answers were not 200.")
    found = {part: 1000 * (after[part] - before[part]) / len(answers) for part in _PARTS}
    images = server.metric("vitrail_images_total") - images
    return found | {
        "requests/s": len(answers) / seconds,
        "images per batch": images / (server.metric("vitrail_batch_size_count") - batches),
    }


def cpu_times(pid: int) -> dict[str, float]:
    """Return the CPU seconds of the parts of a service."""
    threads = {int(path.name): _nanoseconds(path) / 1e9 for path in Path(f"/proc/{pid}/task").iterdir()}
    children = {child for tid in threads for child in Path(f"/proc/{pid}/task/{tid}/children").read_text().split()}
    helpers = sum(_nanoseconds(task) for child in children for task in Path(f"/proc/{child}/task").iterdir()) / 1e9
    total = sum(threads.values())
    return dict(zip(_PARTS, (threads[pid], total - threads[pid], total, helpers), strict=True))


def _nanoseconds(task: Path) -> int:
    return int((task / "schedstat").read_text().split()[0])


if __name__ == "__main__":
    main()
