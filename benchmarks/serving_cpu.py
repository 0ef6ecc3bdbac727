"""CPU time that `vitrail serve` itself needs per request, apart from decoding and the model.

    python -m benchmarks.serving_cpu                           # about a minute on two cores
    python -m benchmarks.serving_cpu --against ../other/src    # also another version of the package, in alternating rounds
    python -m benchmarks.serving_cpu --image-ms 0.875 --max-batch 16 --clients 64    # a slower GPU: how busy is it kept?
    python -m benchmarks.serving_cpu --tiny                    # test that everything runs, writes no results

Python runs one thread of a process at a time, so the CPU time of the service's own process per request is a limit on requests/s
that no GPU and no further core lifts. To bring the service to this limit on two cores, the rest is replaced: the model by a
stand-in for one on a GPU, which computes one batch after the other and takes --image-ms per image, but hardly CPU time,
and the processes that decode by ones that decode the first photo and then answer at once, with as many bytes through the same
pipes, as many cores would. --clients connections each send a JPEG photo of 640 × 427 pixels when they have their last answer.

CPU time is what the kernel counted (/proc): of the main thread, which is the event loop; of the process's other threads, among
them that of the model; and of the helper processes. Other programs on the machine change it less than they change times.
"busy": the share of the time in which the stand-in computed. What is missing from 1 the GPU would have waited for the service, or
for clients.
Prints a table and writes benchmarks/results/serving-cpu-….csv with hardware and versions.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import os
import platform
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.serving_load import (
    RESULTS,
    ROOT,
    Row,
    Server,
    closed_loop,
    cpu_name,
    helper_processes,
    make_checkpoint,
    make_photos,
    print_rows,
    versions,
    write_rows,
)

_PARTS = ("event loop", "other threads", "process", "helper processes")
_MODEL = {"depth": 1, "width": 8, "heads": 1, "mlp": 8, "patch": 56}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, metavar="SRC", help="the src folder of another version")
    parser.add_argument("--decoders", type=int, default=os.cpu_count())
    parser.add_argument("--clients", type=int, default=32, help="connections")
    parser.add_argument("--image-ms", type=float, default=0.2, help="time that the stand-in for a model takes per image")
    parser.add_argument("--max-batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=8.0, help="of a round")
    parser.add_argument("--tiny", action="store_true", help="a second, no results written")
    parser.add_argument("--serve", nargs="+", help=argparse.SUPPRESS)  # the servers' processes
    if "--serve" in sys.argv:
        image_ms, *arguments = sys.argv[sys.argv.index("--serve") + 1 :]
        serve(arguments, float(image_ms) / 1000)
        return
    options = parser.parse_args()
    if options.tiny:
        options.rounds, options.seconds = 1, 1.0
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(options, Path(folder))
    print_rows(rows)
    if not options.tiny:
        facts = {"cpu": cpu_name(), "cores": os.cpu_count(), "decoders": options.decoders, "clients": options.clients}
        given = ["SRC" if options.against and word == str(options.against) else word for word in sys.argv[1:]]
        command = {"command": " ".join(["python -m benchmarks.serving_cpu", *given])}
        facts |= {"image_ms": options.image_ms, "max_batch": options.max_batch}
        file = RESULTS / f"serving-cpu-{platform.machine()}-{os.cpu_count()}cores-{options.image_ms:g}ms.csv"
        write_rows(file, rows, {**facts, **versions(), **command})


def measure(options: argparse.Namespace, folder: Path) -> list[Row]:
    checkpoint, photos = make_checkpoint(folder, "ViT-Ti/16", **_MODEL), make_photos()
    sources = {"": ROOT / "src"} | ({"before: ": options.against.resolve()} if options.against else {})
    servers: dict[str, Server] = {}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in sources}
    try:
        for name, source in sources.items():
            arguments = ["-m", "benchmarks.serving_cpu", "--serve", str(options.image_ms), f"model={checkpoint}", "--device", "cpu"]
            arguments += ["--decode-in", "processes", "--decoders", str(options.decoders), "--max-batch", str(options.max_batch)]
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
        "busy": images * options.image_ms / 1000 / seconds,
        "images per batch": images / (server.metric("vitrail_batch_size_count") - batches),
    }


def serve(arguments: list[str], image_seconds: float) -> None:
    """Run `vitrail serve` with stand-ins for a GPU and for many cores."""
    from vitrail.cli import main as vitrail
    from vitrail.models import inference
    from vitrail.serve import decoder_processes

    start = decoder_processes.start
    decoder_processes.start = lambda _, **environment: start("benchmarks.instant_decoder", **environment)  # type: ignore[assignment]
    overlaps = importlib.util.find_spec("vitrail.serve.engine") is not None  # older versions (--against) wait for each batch
    # Before the service imports it: another version may call it in another module.
    inference.for_inference = lambda model, precision, device: StandIn(model, 0.0 if overlaps else image_seconds)  # type: ignore[assignment, misc]
    if overlaps:
        compute_on_a_stream(image_seconds)
    vitrail(["serve", *arguments])


class StandIn:
    """What the service asks of a model, with outputs that follow from one pixel of each image."""

    def __init__(self, model: Any, image_seconds: float) -> None:
        import torch

        self.config, self.device, self._seconds = model.config, torch.device("cpu"), image_seconds
        self._weight = torch.randn(1, model.config.outputs, generator=torch.Generator().manual_seed(0))

    def __call__(self, images: Any) -> Any:
        time.sleep(len(images) * self._seconds)
        return images[:, 0, 0, :1] * self._weight


def compute_on_a_stream(image_seconds: float) -> None:
    """Let what is launched take its time in a thread, batch after batch, as on a GPU."""
    from vitrail.serve import engine

    stream, launched, initialise = ThreadPoolExecutor(1), engine.Launched, engine.Engine.__init__

    class OnStream(launched):  # type: ignore[misc, valid-type]
        def __init__(self, outputs: Any) -> None:
            super().__init__(outputs)
            self._computed = stream.submit(time.sleep, len(outputs) * image_seconds)

        def rows(self) -> Any:
            self._computed.result()
            return super().rows()

    def overlapping(self: Any, *arguments: Any) -> None:
        initialise(self, *arguments)
        self.overlaps = True

    engine.Launched, engine.Engine.__init__ = OnStream, overlapping  # type: ignore[misc, method-assign]


def cpu_times(pid: int) -> dict[str, float]:
    """Return the CPU seconds of the parts of a service."""
    threads = {int(path.name): _nanoseconds(path) / 1e9 for path in Path(f"/proc/{pid}/task").iterdir()}
    helpers = sum(_nanoseconds(task) for helper in helper_processes(pid) for task in Path(f"/proc/{helper}/task").iterdir()) / 1e9
    total = sum(threads.values())
    return dict(zip(_PARTS, (threads[pid], total - threads[pid], total, helpers), strict=True))


def _nanoseconds(task: Path) -> int:
    return int((task / "schedstat").read_text().split()[0])


if __name__ == "__main__":
    main()
