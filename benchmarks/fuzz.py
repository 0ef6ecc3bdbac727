"""Read mutated files of every format: checkpoints, packed datasets, runs, tars, tables, images, embeddings.

    python benchmarks/fuzz.py --count 20000 --seed 0

Each file is read in a child process with a limit of time and memory. Only a `VitrailError` may leave a reader; nothing may be
written outside the mutated file. The same seed gives the same files.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import multiprocessing
import os
import random
import shutil
import tarfile
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from vitrail.checkpoints import Bundle, load, write
from vitrail.checkpoints.report import Report
from vitrail.data import open_source
from vitrail.data.decode import decode
from vitrail.data.pack import choose_settings, pack
from vitrail.data.preprocess import preset
from vitrail.errors import VitrailError
from vitrail.evaluate.embeddings import Embeddings, load_embeddings
from vitrail.files import sha256
from vitrail.models import BiTConfig, ResNetConfig, ViTConfig, build_model
from vitrail.train.curves import draw_curves
from vitrail.train.parallel import World
from vitrail.train.run import RunFolder
from vitrail.train.shard_metadata import FILE
from vitrail.train.snapshots import Snapshots, checksum

SECONDS, MEMORY = 10, 2 << 30
TINY = ViTConfig(name="tiny", width=4, depth=1, heads=2, mlp=4, patch=(2, 2), image_size=(4, 4), outputs=2)
TINY_BIT = BiTConfig(name="tiny", resnet=ResNetConfig(layers=(1,)), outputs=2, image_size=(8, 8))
CHECKPOINTS = (
    *(("google", ".npz"), ("big-vision", ".npz"), ("timm", ".safetensors"), ("timm", ".pth"), ("timm", ""), ("hf", "")),
    *(("torchvision", ".pth"), ("torchvision", ".safetensors"), ("vitrail", ""), ("bit", ".npz")),
)
IMAGES = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "NPY")


@dataclass(frozen=True)
class Case:
    """A good file or folder, the files in it that are mutated, and the function that reads it."""

    name: str
    target: Path
    files: tuple[Path, ...]
    read: Callable[[], object]


def make_cases(root: Path) -> list[Case]:
    """Write one good file of every format below `root`."""
    cases = [_checkpoint(root, name, suffix) for name, suffix in CHECKPOINTS]
    cases += [_image(root, kind) for kind in IMAGES]
    photos = _photos(root / "photos")
    for store in ("arrays", "encoded"):
        source, target = open_source(f"folder:{photos}?val=0"), root / f"packed-{store}"
        pack(source, target, choose_settings(source, store=store), workers=1)  # type: ignore[arg-type]
        cases.append(Case(f"packed {store}", target, tuple(sorted(target.iterdir())), _reader(f"packed:{target}")))
    table = root / "table" / "table.csv"
    table.parent.mkdir()
    table.write_text("".join(["path,label,split\n", *(f"../photos/{k % 2}/{k}.png,{k % 2},train\n" for k in range(6))]))
    cases.append(Case("csv", table, (table,), _reader(f"csv:{table}")))
    cases += [_tar(root), _embeddings(root), _run(root), _metrics(root), _snapshot(root), _shard_metadata(root)]
    return cases


def _checkpoint(root: Path, name: str, suffix: str) -> Case:
    config: Any = TINY_BIT if name == "bit" else TINY
    model = build_model(config, seed=0).eval()
    bundle = Bundle(model, preset("timm", size=config.image_size), ("a", "b"), "classify", Report("here", "vitrail"))
    target = root / f"{name}{suffix.replace('.', '-')}" / f"good{suffix}"
    target.parent.mkdir()
    write(bundle, target, name)
    files = tuple(sorted(target.iterdir())) if target.is_dir() else (target,)
    fields = {"heads": 2} if name in ("timm", "torchvision") and suffix else {}
    return Case(f"checkpoint {name}{suffix}", target, files, lambda: load(target, **fields))


def _picture(seed: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (12, 10, 3), np.uint8))


def _image(root: Path, kind: str) -> Case:
    file = root / f"image.{kind.lower()}"
    if kind == "NPY":
        np.save(file, np.asarray(_picture(0)))
    else:
        _picture(0).save(file, kind)
    return Case(f"image {kind}", file, (file,), lambda: decode(file.read_bytes(), channels=3))


def _photos(folder: Path) -> Path:
    for k in range(6):
        (folder / str(k % 2)).mkdir(parents=True, exist_ok=True)
        _picture(k).save(folder / str(k % 2) / f"{k}.png")
    return folder


def _reader(reference: str) -> Callable[[], object]:
    def read() -> list[object]:
        splits = open_source(reference).splits.values()
        return [decode(split.payload(k), channels=3) for split in splits for k in range(min(len(split), 8))]

    return read


def _tar(root: Path) -> Case:
    file = root / "tar" / "train.tar"
    file.parent.mkdir()
    with tarfile.open(file, "w") as archive:
        for k in range(3):
            picture = io.BytesIO()
            _picture(k).save(picture, "PNG")
            for ending, content in (("png", picture.getvalue()), ("json", json.dumps({"label": k % 2}).encode())):
                member = tarfile.TarInfo(f"{k}.{ending}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))

    def read() -> object:
        shutil.rmtree(root / "tar-index", ignore_errors=True)  # the cache is keyed by size and time, which mutations share
        return _reader(f"wds:{file}?index={root / 'tar-index'}")()

    return Case("tar", file, (file,), read)


def _embeddings(root: Path) -> Case:
    file = root / "embeddings.npz"
    Embeddings(np.ones((3, 4), np.float32), ("a", "b", "c"), {"model": "tiny"}).save(file)
    return Case("embeddings", file, (file,), lambda: load_embeddings(file).nearest([0], 1))


def _run(root: Path) -> Case:
    """Make the files of a run that are read to resume it; its weights are checkpoints of our own format."""
    from vitrail.recipes import recipe_named
    from vitrail.train.upgrade import FORMAT

    folder = root / "run"
    folder.mkdir()
    config = folder / "config.json"
    config.write_text(json.dumps({"format": FORMAT, "recipe": recipe_named("digits").to_dict()}, indent=1))
    return Case("run config", config, (config,), lambda: RunFolder(folder).saved_recipe())


def _metrics(root: Path) -> Case:
    folder = root / "metrics-run"
    folder.mkdir()
    file = folder / "metrics.jsonl"
    train = {"kind": "train", "step": 2, "loss": 1.5, "lr": 1e-3, "speed": {"seconds": 1.0, "images_per_second": 9.0}}
    records = [train, {"kind": "val", "step": 2, "accuracy": 0.5, "loss": 1.25}, {**train, "step": 4, "loss": 1.0}]
    file.write_text("".join(json.dumps(record) + "\n" for record in records))

    def read() -> None:
        draw_curves(RunFolder(folder), headline="accuracy")
        RunFolder(folder).end()
        RunFolder(folder).seconds()
        shutil.rmtree(RunFolder(folder).figures, ignore_errors=True)

    return Case("run metrics", file, (file,), read)


def _tensors() -> dict[str, torch.Tensor]:
    return {"model.a": torch.ones(2, 3), "optim.a.mean": torch.ones(2, 3, dtype=torch.bfloat16), "optim.count": torch.tensor(7)}


def _snapshot(root: Path, name: str = "run checkpoint") -> Case:
    """Make a checkpoint to resume from. A corrupted one is set aside with a warning, so it is moved back here."""
    made = Snapshots(root / name.replace(" ", "-"), World(torch.device("cpu")))
    made.save(2, _tensors(), {"skipped_steps": [], "window": [], "scaler": None, "ranks": 1})
    made.finish()
    step = made.path(2)

    def read() -> None:
        try:
            made.load(_tensors())
        finally:
            if (aside := step.with_name(f"{step.name}.corrupted")).exists():
                aside.replace(step)

    return Case(name, step, tuple(sorted(step.iterdir())), read)


def _shard_metadata(root: Path) -> Case:
    """Make a checkpoint whose checksums always agree with its metadata, as an attacker's would."""
    case = _snapshot(root, "run shard metadata")
    metadata, state_file = case.target / FILE, case.target / "state.json"

    def read() -> None:
        state = json.loads(state_file.read_text())
        state["files"][FILE] = sha256(metadata)
        state_file.write_text(json.dumps({**state, "checksum": checksum(state)}))
        case.read()

    return Case(case.name, case.target, (metadata,), read)


def mutate(content: bytes, rng: random.Random) -> bytes:
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
    good = file.read_bytes()
    file.write_bytes(content)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            case.read()
    except VitrailError as error:
        return "refused" if str(error) else "an error without a message"
    except Exception:
        return traceback.format_exc()
    finally:
        file.write_bytes(good)
    return "read"


def listing(root: Path) -> set[str]:
    return {str(file.relative_to(root)) for file in root.rglob("*") if "tar-index" not in file.parts}


def _child(root: str, name: str, count: int, seed: int, first: int, results: Any) -> None:
    """Send (number, seconds, outcome) of the mutations of one case from `first` on."""
    import resource  # Unix only; the rest of this file is not

    resource.setrlimit(resource.RLIMIT_AS, (_address_space() + MEMORY, resource.RLIM_INFINITY))
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    case = next(one for one in make_cases(Path(root)) if one.name == name)
    case.read()  # the good file
    before = listing(Path(root))
    for number, file, content in mutations(case, count, seed):
        if number < first:
            continue
        results.send((number, 0.0, "started"))
        start = time.perf_counter()
        result = outcome(case, file, content)
        if listing(Path(root)) != before:
            result = f"files written or removed: {sorted(listing(Path(root)) ^ before)}"
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
