"""Read mutated files of every format: checkpoints, packed datasets, runs, tars, tables, images, embeddings.

    python -m benchmarks.fuzz --count 20000 --seed 0

Each file is read in a child process with a limit of time and memory. Only a `VitrailError` may leave a reader; nothing may be
written. The same seed gives the same files. Folders of Hugging Face models are made with transformers.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import multiprocessing
import os
import random
import stat
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.fuzz_cases import Case, make_cases, restored
from benchmarks.fuzz_json import mutate_json
from vitrail.errors import VitrailError

SECONDS, MEMORY = 10, 2 << 30


def mutate(content: bytes, rng: random.Random) -> bytes:
    """Change bytes; in half of the files with JSON, change its values instead."""
    changed = mutate_json(content, rng) if rng.random() < 0.5 else None
    return mutate_bytes(content, rng) if changed is None else changed


def mutate_bytes(content: bytes, rng: random.Random) -> bytes:
    """Flip bits; overwrite, insert, remove and copy pieces; mostly where names and sizes are stored."""
    changed = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 5))):
        if not changed:
            break
        near_start = int(len(changed) * rng.random() ** rng.choice((1, 4)))
        near_end = max(0, len(changed) - 1 - int(rng.expovariate(1 / 400)))
        position = min(near_start if rng.random() < 0.7 else near_end, len(changed) - 1)
        size = rng.choice((1, 2, 4, 8, 40))
        match rng.randrange(7):
            case 0:
                changed[position] ^= 1 << rng.randrange(8)
            case 1:
                changed[position : position + size] = rng.randbytes(size)
            case 2:
                changed[position:position] = rng.randbytes(size)
            case 3:
                del changed[position : position + size]
            case 4:
                changed[position : position + size] = rng.choice((b"\xff", b"\0", b"9", b"-", b"]", b"}", b"\x7f")) * size
            case 5:
                del changed[position:]
            case 6:
                other = rng.randrange(len(changed))
                changed[other : other + size] = changed[position : position + size]
    return bytes(changed)


def mutations(case: Case, count: int, seed: int) -> Iterator[tuple[int, Path, bytes]]:
    """Yield (number, file, changed content)."""
    contents = {file: file.read_bytes() for file in case.files}
    for number in range(count):
        rng = random.Random(f"{seed} {case.name} {number}")
        file = case.files[number % len(case.files)]
        yield number, file, mutate(contents[file], rng)


def outcome(case: Case, file: Path, content: bytes) -> str:
    """Read the case with one file changed, and restore it. Return read, refused, or the traceback of another error."""
    with restored(file):
        file.write_bytes(content)
        try:
            with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
                warnings.simplefilter("ignore")
                case.read()
        except VitrailError as error:
            return "refused" if str(error) else "an error without a message"
        except Exception:
            return traceback.format_exc()
    return "read"


def listing(root: Path) -> dict[str, tuple[int, int]]:
    """Return the size and time of every file, but not those of the cache of tars."""
    files = (file for file in root.rglob("*") if "tar-index" not in file.parts)
    return {str(file.relative_to(root)): (status.st_size, status.st_mtime_ns) for file in files if _is_file(status := file.stat())}


def _is_file(status: os.stat_result) -> bool:
    return not stat.S_ISDIR(status.st_mode)


def _child(root: str, name: str, count: int, seed: int, first: int, results: Any) -> None:
    """Send (number, seconds, outcome) of the mutations of one case from `first` on."""
    import resource  # Unix only; the rest of this file is not

    resource.setrlimit(resource.RLIMIT_AS, (_address_space() + MEMORY, resource.RLIM_INFINITY))
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    (case,) = make_cases(Path(root), name)
    case.read()  # the good file
    before = listing(Path(root))
    for number, file, content in mutations(case, count, seed):
        if number < first:
            continue
        results.send((number, 0.0, "started"))
        start = time.perf_counter()
        result = outcome(case, file, content)
        if listing(Path(root)) != before:
            result = f"files written or removed: {sorted(name for name, _ in listing(Path(root)).items() ^ before.items())}"
        results.send((number, time.perf_counter() - start, result))
    results.send((count, 0.0, f"peak {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10} MiB"))


def _address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def fuzz_case(name: str, count: int, seed: int, counts: Counter[str], failures: list[str]) -> str:
    """Run all mutations of one case in child processes; a new one starts after a hang or a crash."""
    context, first, peak = multiprocessing.get_context("fork"), 0, ""
    while first < count:
        with tempfile.TemporaryDirectory() as folder:
            receiver, sender = context.Pipe(duplex=False)
            child = context.Process(target=_child, args=(folder, name, count, seed, first, sender))
            child.start()
            sender.close()
            number = first - 1
            while True:
                if not receiver.poll(SECONDS if number >= first else 60):
                    child.kill()
                    failures.append(f"{name} {number}: no answer within {SECONDS} s")
                    break
                try:
                    number, seconds, result = receiver.recv()
                except EOFError:
                    if number < first:
                        raise SystemExit(f"{name}: the good file cannot be read") from None
                    failures.append(f"{name} {number}: the process ended")
                    break
                if number == count:
                    peak = result
                    break
                if result in ("read", "refused"):
                    counts[result] += 1
                elif result != "started":
                    failures.append(f"{name} {number} ({seconds:.1f} s): {result}")
            child.join()
            first = number + 1
    return peak


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=20_000, help="files in all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="only cases whose name contains this")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        names = [case.name for case in make_cases(Path(folder)) if options.only in case.name]
    total: Counter[str] = Counter()
    failures: list[str] = []
    start = time.perf_counter()
    for k, name in enumerate(names):
        count = options.count // len(names) + (k < options.count % len(names))
        counts: Counter[str] = Counter()
        failed = len(failures)
        peak = fuzz_case(name, count, options.seed, counts, failures)
        found = f"{counts['read']:6} read {counts['refused']:6} refused {len(failures) - failed:4} failed"
        print(f"{name:32} {found}  {peak}", flush=True)
        total += counts
    seconds = time.perf_counter() - start
    found = f"{total['read']:,} read, {total['refused']:,} refused, {len(failures)} failed"
    print(f"{sum(total.values()) + len(failures):,} files: {found}, {seconds:.0f} s")
    for failure in failures[:40]:
        print(f"\n{failure}")
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
