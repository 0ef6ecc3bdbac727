"""How long loading takes, and how much memory: Vitrail against the plain ways of the libraries beneath it.

    python benchmarks/checkpoints.py                 # ViT-L/16, about three minutes and 5 GB of disk
    python benchmarks/checkpoints.py --model B/16

Each figure is the median of several runs, each in a process of its own with the file in the page cache. Compared are:

* `safetensors`: `vitrail.load` of a checkpoint folder, with the verification that is on by default, against
  `safetensors.torch.load_file` + `load_state_dict` into a model that is already built. Ours builds its model in that time.
* `npz`: `vitrail.load` of a file with Google's names against `numpy.load` of all its arrays.
* memory: the process's peak beyond what it held before loading, as a multiple of the weights' size.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import torch

MEASURED = {
    "vitrail folder": "import vitrail; run = lambda: vitrail.load(folder)",
    "vitrail folder, verify=none": "import vitrail; run = lambda: vitrail.load(folder, verify='none')",
    "vitrail folder, verify=full": "import vitrail; run = lambda: vitrail.load(folder, verify='full')",
    "load_file + load_state_dict": (
        "import vitrail, json, safetensors.torch\n"
        "from vitrail.models import ModelConfig, build_model\n"
        "model = build_model(ModelConfig.from_dict(json.load(open(folder + '/config.json'))['model']))\n"
        "run = lambda: model.load_state_dict(safetensors.torch.load_file(folder + '/model.safetensors'))"
    ),
    "vitrail npz": "import vitrail; run = lambda: vitrail.load(npz)",
    "numpy.load of all arrays": "import numpy as np; run = lambda: {k: v for k, v in np.load(npz).items()}",
}
CHILD = """
import re, sys, time, json
folder, npz = sys.argv[1:3]
import torch, vitrail.checkpoints  # imports are not part of the comparison
{setup}
peak = lambda: int(re.search(r"VmHWM:\\s*(\\d+)", open("/proc/self/status").read())[1]) * 1024
before, busy = peak(), time.process_time()
start = time.perf_counter()
kept = run()
seconds = time.perf_counter() - start
print(json.dumps([seconds, time.process_time() - busy, peak() - before]))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="L/16")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "checkpoints.csv")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        size = prepare(options.model, Path(folder))
        rows = measure(Path(folder), options.runs, size)
    write(options.output, options.model, size, rows)


def prepare(name: str, folder: Path) -> int:
    """Write the two files; returns the size of the weights in bytes."""
    import vitrail
    from vitrail.checkpoints import write as write_as

    model = vitrail.create_model(name, seed=0)
    torch.nn.init.normal_(model.head.weight, std=0.01)
    vitrail.save(folder / "folder", model)
    write_as(vitrail.load(folder / "folder"), folder / "weights.npz", "google")
    return sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values())


def measure(folder: Path, runs: int, size: int) -> list[dict[str, object]]:
    found: dict[str, list[tuple[float, ...]]] = {name: [] for name in MEASURED}
    for number in range(runs + 1):  # the first round only brings the files into the page cache
        for name, setup in MEASURED.items():
            code = CHILD.format(setup=setup)
            words = [sys.executable, "-c", code, str(folder / "folder"), str(folder / "weights.npz")]
            answer = subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()[-1]
            if number:
                seconds, processor, memory = json.loads(answer)
                found[name].append((seconds, processor, memory / size))
    rows = []
    for name, values in found.items():
        seconds, processor, memory = (statistics.median(column) for column in zip(*values, strict=True))
        figures = {"seconds": seconds, "processor seconds": processor, "peak memory / weights": memory}
        rows.append({"way": name, **{key: round(value, 3) for key, value in figures.items()}})
    return rows


def write(path: Path, model: str, size: int, rows: list[dict[str, object]]) -> None:
    times = {str(row["way"]): float(str(row["seconds"])) for row in rows}
    compared = {"vitrail folder": "load_file + load_state_dict", "vitrail npz": "numpy.load of all arrays"}
    busy = f"load average {os.getloadavg()[0]:.1f}"
    hardware = f"{platform.machine()}, {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}, {busy}"
    versions = ", ".join(f"{name} {version(name)}" for name in ("vitrail", "torch", "safetensors", "numpy"))
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        common = {"model": model, "weights (GB)": round(size / 1e9, 2)}
        table = csv.DictWriter(file, [*common, *rows[0], "times the plain way", "hardware", "versions"])
        table.writeheader()
        for row in rows:
            plain = compared.get(str(row["way"]))
            ratio = round(float(str(row["seconds"])) / times[plain], 2) if plain else ""
            table.writerow({**common, **row, "times the plain way": ratio, "hardware": hardware, "versions": versions})
            print(*(f"{key} {value}" for key, value in row.items()), f"ratio {ratio}" if ratio else "", sep=", ")


if __name__ == "__main__":
    main()
