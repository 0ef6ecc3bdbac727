"""Time and memory of loading a checkpoint: Vitrail against safetensors and numpy.

    python benchmarks/checkpoints.py                 # ViT-L/16, about three minutes and 5 GB of disk
    python benchmarks/checkpoints.py --model B/16

Each value is the median of several runs, each in its own process with the file in the page cache. Compared are:

* `safetensors`: `vitrail.load` of a checkpoint folder, with the default verification, against `safetensors.torch.load_file` +
  `load_state_dict` into a model that is already built. Our time includes building the model.
* `npz`: `vitrail.load` of a file with Google's names against `numpy.load` of all its arrays.
* memory: the increase of the process's peak memory during loading, divided by the size of the weights.
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

METHODS = {
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
before, cpu_start = peak(), time.process_time()
start = time.perf_counter()
result = run()
seconds = time.perf_counter() - start
print(json.dumps([seconds, time.process_time() - cpu_start, peak() - before]))
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
    """Write the two files; return the size of the weights in bytes."""
    import vitrail
    from vitrail.checkpoints import write as write_as

    model = vitrail.create_model(name, seed=0)
    torch.nn.init.normal_(model.head.weight, std=0.01)
    vitrail.save(folder / "folder", model)
    write_as(vitrail.load(folder / "folder"), folder / "weights.npz", "google")
    return sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values())


def measure(folder: Path, runs: int, size: int) -> list[dict[str, object]]:
    found: dict[str, list[tuple[float, ...]]] = {name: [] for name in METHODS}
    for number in range(runs + 1):  # the first round only loads the files into the page cache
        for name, setup in METHODS.items():
            code = CHILD.format(setup=setup)
            command = [sys.executable, "-c", code, str(folder / "folder"), str(folder / "weights.npz")]
            line = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1]
            if number:
                seconds, cpu_seconds, memory = json.loads(line)
                found[name].append((seconds, cpu_seconds, memory / size))
    rows = []
    for name, values in found.items():
        seconds, cpu_seconds, memory = (statistics.median(column) for column in zip(*values, strict=True))
        medians = {"seconds": seconds, "cpu_seconds": cpu_seconds, "peak_memory_over_weights": memory}
        rows.append({"method": name, **{key: round(value, 3) for key, value in medians.items()}})
    return rows


def write(path: Path, model: str, size: int, rows: list[dict[str, object]]) -> None:
    times = {str(row["method"]): float(str(row["seconds"])) for row in rows}
    references = {"vitrail folder": "load_file + load_state_dict", "vitrail npz": "numpy.load of all arrays"}
    load = f"load average {os.getloadavg()[0]:.1f}"
    hardware = f"{platform.machine()}, {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}, {load}"
    versions = ", ".join(f"{name} {version(name)}" for name in ("vitrail", "torch", "safetensors", "numpy"))
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        common = {"model": model, "weights_gb": round(size / 1e9, 2)}
        table = csv.DictWriter(file, [*common, *rows[0], "ratio", "hardware", "versions"])
        table.writeheader()
        for row in rows:
            reference = references.get(str(row["method"]))
            ratio = round(float(str(row["seconds"])) / times[reference], 2) if reference else ""
            table.writerow({**common, **row, "ratio": ratio, "hardware": hardware, "versions": versions})
            print(*(f"{key} {value}" for key, value in row.items()), f"ratio {ratio}" if ratio else "", sep=", ")


if __name__ == "__main__":
    main()
