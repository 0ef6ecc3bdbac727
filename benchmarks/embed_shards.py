"""Images per second of `vitrail embed` into shards: one process against two, and the same bytes after a kill -9.

Every process is a rank with one thread: `torchrun --nproc-per-node N -m vitrail embed … --workers 1`, with OMP_NUM_THREADS=1. One
and two processes alternate, and the ratio is the median over rounds. Then a job of two processes is started, one rank is killed
with SIGKILL in the middle, and the same command is run again. All folders must have the same bytes.

    python benchmarks/embed_shards.py                                  # 600 JPEGs that are written here, one round, to try it
    python benchmarks/embed_shards.py --data DIR --images 10000 --rounds 3

Prints a table and, from 10,000 images on, writes benchmarks/results/embed-shards-….csv with hardware and versions.
`images_per_second` counts from the list of images to the manifest; `command_seconds` is the whole command, with the start of Python
and the loading of the model.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from vitrail.data.sources.layout import images_under

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="a folder of images; default: JPEGs of 500×375 that are written here")
    parser.add_argument("--images", type=int, default=600)
    parser.add_argument("--model", default="vitrail-ti8-tiny-imagenet")
    parser.add_argument("--shards", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        images = list_images(options.data, options.images, root)
        size = -(-options.images // options.shards)
        words = [options.model, str(images), "--shard-size", str(size), "--workers", "1", "--device", "cpu", "--json"]
        rows = [row for number in range(options.rounds) for row in one_round(words, root, number)]
        pairs = zip(rows[::2], rows[1::2], strict=True)
        ratio = statistics.median(two["images_per_second"] / one["images_per_second"] for one, two in pairs)
        expected = checksums(root / "one-0")
        same = all(checksums(root / f"{name}-{number}") == expected for name in ("one", "two") for number in range(options.rounds))
        killed = kill_and_resume(words, root / "killed")
        killed["same_bytes"] = same and checksums(root / "killed") == expected
    for row in rows:
        row |= {"ratio": round(ratio, 3), **killed}
    report(rows, options)


def list_images(data: Path | None, count: int, root: Path) -> Path:
    """Return a list of files: the first ones of a folder, or JPEGs with structure and noise."""
    if data is not None:
        files = [str((data / name).resolve()) for name, _ in zip(images_under(data), range(count), strict=False)]
    else:
        random, files = np.random.default_rng(0), []
        tiles = np.kron(random.integers(0, 255, (24, 32, 3)), np.ones((16, 16, 1)))
        for number in range(count):
            pixels = np.roll(tiles, 7 * number, 1)[:375, :500] + random.normal(0, 12, (375, 500, 3))
            files.append(str(root / f"{number:05d}.jpg"))
            Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(files[-1], quality=85)
    if len(files) < count:
        raise SystemExit(f"{data} has {len(files)} images, {count} were asked for.")
    path = root / "list.txt"
    path.write_text("\n".join(files))
    return path


def command(words: list[str], out: Path, processes: int) -> list[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    return [sys.executable, *launcher, "-m", "vitrail", "embed", *words, "--out", str(out)]


def one_round(words: list[str], root: Path, number: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for processes, name in ((1, "one"), (2, "two")):
        began = time.perf_counter()
        done = subprocess.run(
            command(words, root / f"{name}-{number}", processes), env=ENVIRONMENT, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise SystemExit(done.stderr)
        summary, seconds = json.loads(done.stdout), time.perf_counter() - began
        row = {"round": number, "processes": processes, "images_per_second": summary["images_per_second"]}
        rows.append({**row, "seconds": summary["seconds"], "command_seconds": round(seconds, 2)})
        print(rows[-1], flush=True)
    return rows


def kill_and_resume(words: list[str], out: Path) -> dict[str, Any]:
    """Kill one of two ranks when half of the shards are finished, and run the command again."""
    shards = len(list((out.parent / "one-0").glob("shard-*.json")))
    process = subprocess.Popen(command(words, out, 2), env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None and len(list(out.glob("shard-*.json"))) < shards // 2:
        time.sleep(0.02)
    ranks = [int(word) for task in Path(f"/proc/{process.pid}/task").iterdir() for word in (task / "children").read_text().split()]
    os.kill(max(ranks), signal.SIGKILL)
    process.wait()
    finished = len(list(out.glob("shard-*.json")))
    done = subprocess.run(command(words, out, 2), env=ENVIRONMENT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    resumed = json.loads(done.stdout)
    print(f"killed after {finished} of {resumed['shards']} shards; then {resumed['computed_shards']} were computed", flush=True)
    return {"finished_before_kill": finished, "computed_after_kill": resumed["computed_shards"]}


def checksums(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(folder.iterdir())}


def report(rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    for row in rows:
        print(row)
    if options.images < 10_000:
        return
    machine = f"{platform.machine()}-{len(os.sched_getaffinity(0))}cores"
    about = {"model": options.model, "images": options.images, "data": "folder" if options.data else "JPEG 500×375"}
    about |= {"machine": machine, "torch": torch.__version__, "load": round(os.getloadavg()[1], 1)}
    path = Path(__file__).parent / "results" / f"embed-shards-{machine}.csv"
    path.parent.mkdir(exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*about, *rows[0]], lineterminator="\n")
        writer.writeheader()
        writer.writerows([{**about, **row} for row in rows])
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
