"""Requests per second of `vitrail serve` against the same service around timm's model under torch.compile, on one machine.

    python -m benchmarks.serving_timm                     # ViT-B/16 at 224 pixels in bf16: about five minutes on a GPU
    python -m benchmarks.serving_timm --images 1 16       # also requests of 16 images: HTTP costs less, the model more
    python -m benchmarks.serving_timm --images 16 --pixels    # clients decode: the service gets UINT8 tensors of the model's size
    python -m benchmarks.serving_timm --model ViT-L/16 --image-size 384 --max-batch 16    # the model costs more than decoding
    python -m benchmarks.serving_timm --tiny              # test that everything runs, on a CPU too; writes no results

Both servers are this package's, with the same decoding, queue, batches, settings and weights; only the model differs: that of
`for_inference`, or timm's VisionTransformer, compiled, in the same precision. Both are up all the time and measured alternately,
--rounds rounds of --seconds each, so that both meet the same machine; the ratio is the median over the rounds. First their answers
to the same photos are compared. Images are JPEG photos of 640 × 427 pixels. Needs timm, FastAPI and uvicorn.

Next to requests/s it reports the seconds that the model's thread computed per image (the service's own metric): where that is far
below 1 / rate, HTTP and decoding are the limit, and the two models cannot differ much. Then
send more images per request, or --pixels.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import importlib.util
import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.serving_load import (
    PHOTO,
    RESULTS,
    Row,
    Server,
    Target,
    closed_loop,
    cpu_name,
    make_checkpoint,
    make_photos,
    print_rows,
    quantile,
    versions,
    write_rows,
)

_LIBRARIES = ("vitrail", "timm")
_TOLERANCE = {"fp32": 1e-4, "bf16": 5e-2}  # of a probability, between the two servers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="ViT-B/16")
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--max-batch", type=int, default=32, help="of both services; timm's model is compiled for each size")
    parser.add_argument("--precision", default="bf16", choices=("fp32", "bf16"))
    parser.add_argument("--compile-mode", default="reduce-overhead", help="of torch.compile, for timm's model")
    parser.add_argument("--images", type=int, nargs="+", default=[1], help="per request; several are measured one after the other")
    parser.add_argument("--pixels", action="store_true", help="send decoded images, through the Open Inference Protocol")
    parser.add_argument("--clients", type=int, default=64, help="connections; fewer where their images would fill the queue")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=15.0, help="of a round")
    parser.add_argument("--load-cores", type=int, nargs="+", help="for the load; the servers have the others (default: the last)")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--tiny", action="store_true", help="a small model for a few seconds")
    parser.add_argument("--serve", nargs=2, metavar=("LIBRARY", "CHECKPOINT"), help=argparse.SUPPRESS)  # the servers' processes
    parser.add_argument("--port", default="0", help=argparse.SUPPRESS)
    options = parser.parse_args()
    missing = [name for name in ("timm", "fastapi", "uvicorn") if importlib.util.find_spec(name) is None]
    if missing:
        raise SystemExit(f"This needs {', '.join(missing)}: pip install 'vitrail[serve]' timm")
    if options.serve:
        serve(options, *options.serve)
        return
    if options.tiny:
        options.model, options.clients, options.rounds, options.seconds, options.precision = "ViT-Ti/16", 8, 2, 3.0, "fp32"
        options.image_size = 64
    with tempfile.TemporaryDirectory() as folder:
        for images, rows in measure(options, Path(folder)).items():
            print_rows(rows)
            if not options.tiny:
                write(options, images, rows)


def measure(options: argparse.Namespace, folder: Path) -> dict[int, list[Row]]:
    """Return the rows for each number of images per request."""
    changes = {"depth": 1} if options.tiny else {}  # compiled in seconds
    checkpoint, photos = make_checkpoint(folder, options.model, image_size=options.image_size, **changes), make_photos()
    cores = sorted(os.sched_getaffinity(0))
    load = options.load_cores or cores[-1:]
    os.sched_setaffinity(0, load)
    for_servers = [core for core in cores if core not in load] or cores
    servers: dict[str, Server] = {}
    try:
        for library in _LIBRARIES:
            arguments = ["-m", "benchmarks.serving_timm", "--serve", library, str(checkpoint), "--precision", options.precision]
            arguments += ["--compile-mode", options.compile_mode, "--device", options.device]
            arguments += ["--max-batch", str(options.max_batch)]
            servers[library] = Server(arguments, folder / f"{library}.log", for_servers)
        difference = compare_answers(servers, photos, _TOLERANCE[options.precision])
        found = {}
        for images in options.images:
            bodies, target = tensor_bodies(photos, images, options.image_size) if options.pixels else request_bodies(photos, images)
            for server in servers.values():  # warm up: also shapes that come up only under load
                asyncio.run(closed_loop(server.port, bodies, clients(options, images), options.seconds, target))
            found[images] = [
                {library: measure_round(server, options, bodies, target, images) for library, server in servers.items()}
                for _ in range(options.rounds)
            ]
    finally:
        statuses = [server.stop() for server in servers.values()]
    if any(statuses):
        raise SystemExit(f"A server ended with status {max(statuses)}: {(folder / 'timm.log').read_text()[-2000:]}")
    last = ("largest difference of probabilities between the two", difference, "")
    return {images: [*rows_of(rounds, images), last] for images, rounds in found.items()}


def measure_round(server: Server, options: argparse.Namespace, bodies: list[bytes], target: Target, images: int) -> dict[str, Any]:
    computed, before = server.metric("vitrail_compute_seconds_sum"), server.metric("vitrail_images_total")
    batches, began = server.metric("vitrail_batch_size_count"), time.monotonic()
    answers = asyncio.run(closed_loop(server.port, bodies, clients(options, images), options.seconds, target))
    seconds = time.monotonic() - began
    count = server.metric("vitrail_images_total") - before
    times = [one.seconds for one in answers if one.status == 200]
    return {
        "rate": len(times) / seconds,
        "p50": 1000 * quantile(times, 0.5),
        "p99": 1000 * quantile(times, 0.99),
        "compute": 1000 * (server.metric("vitrail_compute_seconds_sum") - computed) / count,
        "batch": count / (server.metric("vitrail_batch_size_count") - batches),
        "statuses": Counter(one.status for one in answers),
    }


def clients(options: argparse.Namespace, images: int) -> int:
    """Return how many send at a time: not more than have places in the service's queue."""
    from vitrail.serve.settings import ServeSettings

    return max(1, min(options.clients, ServeSettings().queue // images))


def rows_of(found: list[dict[str, dict[str, Any]]], images: int) -> list[Row]:
    rows: list[Row] = []
    units = {"rate": "requests/s", "p50": "ms", "p99": "ms", "compute": "ms of the model's thread per image", "batch": "images"}
    for library in _LIBRARIES:
        name = "vitrail" if library == "vitrail" else "timm, compiled"
        rows += [(f"{name}: {key}", statistics.median(one[library][key] for one in found), unit) for key, unit in units.items()]
        statuses = sum((one[library]["statuses"] for one in found), Counter[int]())
        total = sum(statuses.values())
        rows.append((f"{name}: answers other than 200 (bar: 0)", total - statuses[200], f"of {total}"))
    ratios = sorted(one["vitrail"]["rate"] / one["timm"]["rate"] for one in found)
    compute = statistics.median(one["timm"]["compute"] / one["vitrail"]["compute"] for one in found)
    return [
        *rows,
        ("images per request", images, ""),
        ("vitrail / timm: requests/s (bar: at least 1.2)", statistics.median(ratios), f"{ratios[0]:.3f} to {ratios[-1]:.3f}"),
        ("timm / vitrail: compute time per image", compute, ""),
    ]


def tensor_bodies(photos: list[bytes], images: int, side: int) -> tuple[list[bytes], Target]:
    """Return request bodies of pixels as the model takes them, and where they are sent."""
    import numpy as np

    from vitrail.data.preprocess import preset

    pixels = [preset("timm", size=side).pixels(photo, name="photo").transpose(2, 0, 1) for photo in photos]
    count, size = len(photos), {"binary_data_size": images * pixels[0].size}
    tensor = {"name": "pixels", "shape": [images, *pixels[0].shape], "datatype": "UINT8", "parameters": size}
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    bodies = [head + np.stack([pixels[(first + n) % count] for n in range(images)]).tobytes() for first in range(count)]
    return bodies, Target("/v2/models/model/infer", f"Inference-Header-Content-Length: {len(head)}\r\n")


def request_bodies(photos: list[bytes], images: int) -> tuple[list[bytes], Target]:
    """Return request bodies, photos as they are or forms of several, and where they are sent."""
    if images == 1:
        return photos, PHOTO
    boundary = "photos-are-here"
    part = f'--{boundary}\r\nContent-Disposition: form-data; name="image"; filename="a.jpg"\r\n\r\n'.encode()
    end = f"--{boundary}--\r\n".encode()
    count = len(photos)
    bodies = [b"".join(part + photos[(first + n) % count] + b"\r\n" for n in range(images)) + end for first in range(count)]
    return bodies, Target(headers=f"Content-Type: multipart/form-data; boundary={boundary}\r\n")


def compare_answers(servers: dict[str, Server], photos: list[bytes], tolerance: float) -> float:
    """Return the largest difference of probabilities; the two must serve the same model."""
    found: dict[str, list[dict[int, float]]] = {}
    for library, server in servers.items():
        found[library] = []
        for photo in photos:
            connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
            connection.request("POST", "/v1/predict?top=1000", photo)
            answer = json.loads(connection.getresponse().read())
            connection.close()
            found[library].append({one["index"]: one["probability"] for one in answer["results"][0]["predictions"]})
    pairs = zip(found["vitrail"], found["timm"], strict=True)
    worst = max(abs(ours[index] - theirs[index]) for ours, theirs in pairs for index in ours)
    if worst > tolerance:
        raise SystemExit(f"The two services answer differently: probabilities differ by {worst:.2g}, allowed is {tolerance:g}.")
    return worst


def serve(options: argparse.Namespace, library: str, checkpoint: str) -> None:
    """Run `vitrail serve`; for timm with its compiled model in the place of `for_inference`'s."""
    from vitrail.cli import main as vitrail
    from vitrail.serve import engine

    if library == "timm":
        mode = options.compile_mode
        engine.for_inference = lambda model, precision, device: TimmModel(model, precision, device, mode)  # type: ignore[assignment, misc]
    arguments = [f"model={checkpoint}", "--port", options.port, "--precision", options.precision, "--device", options.device]
    vitrail(["serve", *arguments, "--max-batch", str(options.max_batch)])


class TimmModel:
    """timm's model with the weights of ours, compiled; what the service asks of a model."""

    def __init__(self, model: Any, precision: str, device: Any, mode: str) -> None:
        import torch
        from safetensors.torch import load_file

        from vitrail.bench.baselines import build
        from vitrail.checkpoints import Bundle
        from vitrail.checkpoints.conversion import write as write_checkpoint
        from vitrail.checkpoints.report import Report
        from vitrail.data.preprocess import preset

        self.config, self.device = model.config, torch.device(device)
        self.dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        with tempfile.TemporaryDirectory() as folder:
            bundle = Bundle(model, preset("timm", size=model.config.image_size), None, "classify", Report("here", "vitrail"))
            write_checkpoint(bundle, Path(folder) / "timm.safetensors", "timm")
            theirs = build("timm", model.config)
            theirs.load_state_dict(load_file(Path(folder) / "timm.safetensors"))
        theirs = theirs.eval().requires_grad_(False).to(self.device, self.dtype)
        cuda = self.device.type == "cuda"
        torch._dynamo.config.recompile_limit = 64  # a shape per batch size
        self._call = torch.compile(theirs, mode=mode if cuda else None, dynamic=not cuda)
        self._step = torch.compiler.cudagraph_mark_step_begin if cuda else lambda: None

    def __call__(self, images: Any) -> Any:
        import torch

        with torch.inference_mode():
            self._step()
            return self._call(images.to(self.device, self.dtype)).float()


def write(options: argparse.Namespace, images: int, rows: list[Row]) -> None:
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() and options.device != "cpu" else cpu_name()
    facts = {"model": options.model, "image_size": options.image_size, "precision": options.precision}
    facts |= {"max_batch": options.max_batch, "images_per_request": images, "sent": "pixels" if options.pixels else "JPEG photos"}
    facts |= {"device": device, "cpu": cpu_name(), "cores": os.cpu_count(), "compile_mode": options.compile_mode}
    sent = f"{images}{'-pixels' * options.pixels}"
    name = f"{device}-{options.model}-{options.image_size}-{options.precision}-{sent}".replace("/", "-").replace(" ", "-").lower()
    facts |= {**versions("timm"), "command": " ".join(["python -m benchmarks.serving_timm", *sys.argv[1:]])}
    write_rows(RESULTS / f"serving-timm-{name}.csv", rows, facts)


if __name__ == "__main__":
    main()
