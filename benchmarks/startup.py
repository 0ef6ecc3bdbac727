"""How long commands take to answer: CPU seconds of `--help` of each, of a prediction, and of `import torch` for comparison.

Each runs several times in a fresh interpreter, in alternating rounds; the smallest CPU time (user and system) counts, since
other load on the machine only adds to it.

    python benchmarks/startup.py                # about a minute of CPU
    python benchmarks/startup.py --tiny         # test that everything runs

Prints a table and writes benchmarks/results/startup-….csv with hardware and versions.
"""

from __future__ import annotations

import argparse
import csv
import os
import platform
import resource
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from vitrail.commands.table import COMMANDS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--image", type=Path, help="the image to predict; default: a grey one that is written to a temporary folder"
    )
    parser.add_argument("--tiny", action="store_true", help="two commands once, no results written")
    options = parser.parse_args()
    image = options.image or _grey_image()
    cases = {"import torch": ["-c", "import torch"], "predict IMAGE": ["-m", "vitrail", "predict", str(image)]}
    cases |= {f"{name} --help": ["-m", "vitrail", *name.split(), "--help"] for name in ["", *COMMANDS]}
    if options.tiny:
        cases, options.rounds = dict(list(cases.items())[2:4]), 1
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(options.rounds):
        for name, words in cases.items():
            seconds[name].append(cpu_seconds(words))
    for name, found in seconds.items():
        print(f"{name.strip():<24} {min(found):6.2f} s")
    if not options.tiny:
        write({name.strip(): min(found) for name, found in seconds.items()})


def cpu_seconds(words: list[str]) -> float:
    """Return the CPU seconds of an interpreter and its children."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}  # threads that wait for others use CPU time, too
    subprocess.run([sys.executable, *words], check=True, capture_output=True, env=one_thread)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _grey_image() -> Path:
    """Write a grey image in the PPM format, which needs no library."""
    import tempfile

    file = Path(tempfile.mkdtemp()) / "grey.ppm"
    file.write_bytes(b"P6 64 64 255\n" + bytes([128]) * (64 * 64 * 3))
    return file


def write(seconds: dict[str, float]) -> None:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    file = (
        Path(__file__).parent
        / "results"
        / f"startup-{platform.machine()}-{cores}cores-torch{version('torch').partition('+')[0]}.csv"
    )
    about = {"python": platform.python_version(), "torch": version("torch"), "system": platform.platform()}
    with file.open("w", newline="") as stream:
        rows = csv.writer(stream, lineterminator="\n")
        rows.writerow(["command", "cpu_seconds", *about])
        rows.writerows([name, f"{value:.3f}", *about.values()] for name, value in seconds.items())
    print(file)


if __name__ == "__main__":
    main()
