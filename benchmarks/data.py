"""How fast images reach the model.

On the CPU: 500×375 JPEGs (written here) to batches of 224×224 inception crops, flipped, against timm's `create_loader`
and torchvision's ImageFolder with transforms v2, all with the same workers, taking turns in one run; and the same
images packed. On a GPU: batches augmented on the device, every parameter drawn for each image.

    python benchmarks/data.py                    # about three minutes on two cores
    python benchmarks/data.py --device cuda      # under a minute and a half
    python benchmarks/data.py --tiny             # does everything run?

Prints a table and writes benchmarks/results/data-….csv with hardware and versions.
"""

from __future__ import annotations

import argparse
import csv
import gc
import logging
import multiprocessing
import os
import platform
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Generator, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torchvision
from PIL import Image

from vitrail.data.augment import Augment
from vitrail.data.batch import HostBatch
from vitrail.data.device_transforms import DeviceTransforms
from vitrail.data.loader import TrainLoader
from vitrail.data.preprocess import preset
from vitrail.data.sampler import BatchSlice
from vitrail.data.types import Split

Row = dict[str, Any]
WARM_UP = 6
SECONDS = 2.0


def main() -> None:
    options = parse()
    torch.manual_seed(0)
    rows = gpu_rows(options) if options.device == "cuda" or options.stage else cpu_rows(options)
    report(rows, options)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--stage", action="store_true", help="measure the GPU's part, on whichever device is given")
    parser.add_argument("--tiny", action="store_true", help="few and small batches, to see that everything runs")
    parser.add_argument("--images", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    if options.tiny:
        options.images, options.rounds = 1600, 1
        torch.set_num_threads(1)
    return options


# --- the CPU's part ---------------------------------------------------------------------------------------------------


def cpu_rows(options: argparse.Namespace) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        photos, packed = Path(folder, "photos"), Path(folder, "packed")
        size = write_photos(photos, options.images)
        print(f"{options.images} JPEGs of 500×375, {size / options.images / 1000:.0f} kB each; packing them at 256")
        pack_photos(photos, packed)
        contenders = contenders_of(photos, packed, options)
        speeds: dict[str, list[float]] = {name: [] for name in contenders}
        costs: dict[str, list[float]] = {name: [] for name in contenders}
        for turn in range(options.rounds):
            for name, start in contenders.items():  # taking turns, so that a busy moment hits all alike
                rate, cost = speed(start, options)
                speeds[name].append(rate)
                costs[name].append(cost)
                print(f"round {turn + 1}: {name:<26} {rate:8,.0f} images/s, {cost:6.3f} ms of processor each", flush=True)
    rows: list[Row] = [
        {"what": name, "images/s": statistics.median(speeds[name]), "processor ms/image": statistics.median(costs[name])}
        for name in contenders
    ]
    ratios = {
        "JPEG folder, uint8: Vitrail / timm": ("vitrail JPEG uint8", "timm JPEG uint8", 1.5),
        "JPEG folder, uint8: Vitrail / torchvision": ("vitrail JPEG uint8", "torchvision JPEG uint8", 1.5),
        "JPEG folder, float32: Vitrail / timm": ("vitrail JPEG float32", "timm JPEG float32", 1.5),
        "JPEG folder, float32: Vitrail / torchvision": ("vitrail JPEG float32", "torchvision JPEG float32", 1.5),
        "packed / JPEG folder, uint8, cropped on the CPU": ("vitrail packed uint8", "vitrail JPEG uint8", 10),
        "packed / JPEG folder, uint8, cropped on the GPU": ("vitrail packed whole", "vitrail JPEG uint8", 10),
        "packed / JPEG folder, float32, cropped on the CPU": ("vitrail packed float32", "vitrail JPEG float32", 10),
    }
    for name, (fast, slow, bar) in ratios.items():
        each = [left / right for left, right in zip(speeds[fast], speeds[slow], strict=True)]
        rows.append({"what": name, "ratio": statistics.median(each), "bar": bar})
        saved = [right / left for left, right in zip(costs[fast], costs[slow], strict=True)]
        rows.append({"what": f"{name}, by processor time", "ratio": statistics.median(saved)})
    return rows


def write_photos(folder: Path, count: int) -> int:
    """Images with the spectrum of photographs (power falling with frequency), in four classes; returns their bytes."""
    rng = np.random.default_rng(0)
    frequency = np.hypot(np.fft.fftfreq(375)[:, None], np.fft.rfftfreq(500)[None])
    falling = 1 / np.maximum(frequency, 1 / 500) ** 1.1

    def layer() -> np.ndarray:
        phase = rng.normal(size=falling.shape) + 1j * rng.normal(size=falling.shape)
        return np.fft.irfft2(falling * phase, s=(375, 500))

    bases = []
    for _ in range(16):
        shades = np.stack([layer() for _ in range(3)], -1) * 0.5 + layer()[..., None] * 1.5
        bases.append(((shades - shades.mean()) / shades.std() * 50 + 120).clip(0, 255).astype(np.uint8))
    total = 0
    for number in range(count):
        place = folder / "train" / f"class {number % 4}" / f"{number:05d}.jpg"
        place.parent.mkdir(parents=True, exist_ok=True)
        rows, columns = int(rng.integers(375)), int(rng.integers(500))
        Image.fromarray(np.roll(bases[number % 16], (rows, columns), (0, 1))).save(place, quality=90)
        total += place.stat().st_size
    return total


def pack_photos(photos: Path, packed: Path) -> None:
    from vitrail.data.pack import choose_settings, pack
    from vitrail.data.sources import open_source

    source = open_source(f"folder:{photos}")
    pack(source, packed, choose_settings(source, size=256))


def contenders_of(photos: Path, packed: Path, options: argparse.Namespace) -> dict[str, Callable[[], Iterator[Any]]]:
    from vitrail.data.sources import open_source

    def ours(reference: str, *, host: bool, place: str = "cpu") -> Callable[[], Iterator[Any]]:
        def start() -> Iterator[Any]:
            loader = TrainLoader(
                open_source(reference).split("train"),
                preprocess=preset("imagenet"),
                augment=Augment(crop_area=(0.08, 1.0), device=place),  # type: ignore[arg-type]
                batch=options.batch,
                workers=options.workers,
            )
            return loader._start() if host else iter(loader)

        return start

    folder, stored = f"folder:{photos}", f"packed:{packed}"
    return {
        "vitrail JPEG uint8": ours(folder, host=True),
        "timm JPEG uint8": lambda: iter(timm_loader(photos / "train", options).loader),
        "torchvision JPEG uint8": lambda: iter(torchvision_loader(photos / "train", options, floats=False)),
        "vitrail JPEG float32": ours(folder, host=False),
        "timm JPEG float32": lambda: iter(timm_loader(photos / "train", options)),
        "torchvision JPEG float32": lambda: iter(torchvision_loader(photos / "train", options, floats=True)),
        "vitrail packed uint8": ours(stored, host=True),
        "vitrail packed float32": ours(stored, host=False),
        "vitrail packed whole": ours(stored, host=True, place="gpu"),
    }


def timm_loader(folder: Path, options: argparse.Namespace) -> Any:
    import timm.data

    dataset = timm.data.create_dataset("", root=str(folder), split="")
    return timm.data.create_loader(
        dataset,
        input_size=(3, 224, 224),
        batch_size=options.batch,
        is_training=True,
        scale=(0.08, 1.0),
        hflip=0.5,
        color_jitter=None,
        interpolation="bilinear",
        num_workers=options.workers,
        persistent_workers=False,
        pin_memory=False,
        device=torch.device("cpu"),
    )


def torchvision_loader(folder: Path, options: argparse.Namespace, *, floats: bool) -> Any:
    from torchvision.transforms import v2

    steps: list[Any] = [v2.RandomResizedCrop(224, antialias=True), v2.RandomHorizontalFlip(), v2.ToImage()]
    if floats:
        steps += [
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225]),
        ]
    dataset = torchvision.datasets.ImageFolder(str(folder), v2.Compose(steps))
    return torch.utils.data.DataLoader(dataset, batch_size=options.batch, shuffle=True, num_workers=options.workers, drop_last=True)


def speed(start: Callable[[], Iterator[Any]], options: argparse.Namespace) -> tuple[float, float]:
    """Images a second over an epoch, after the workers have started and filled their queues; and processor time each.

    The processor time is that of this process and its workers. It depends little on what else runs on the machine.
    """
    batches = start()
    for _ in islice(batches, WARM_UP):
        pass
    steps = options.images // options.batch - 2 * WARM_UP  # an epoch ends with queues running empty: stop before
    used, began, count = processor_seconds(), time.perf_counter(), 0
    endless = isinstance(batches, Generator)  # ours; packed images would be over before the clock has ticked
    for _ in batches:
        count += options.batch
        if count >= steps * options.batch and not (endless and time.perf_counter() - began < SECONDS):
            break
    rate = count / (time.perf_counter() - began)
    cost = (processor_seconds() - used) / count * 1000
    if isinstance(batches, Generator):
        batches.close()
    del batches
    gc.collect()  # ends the workers before the next ones start
    return rate, cost


def processor_seconds() -> float:
    """Used so far by this process and the workers that live, in user and system mode."""
    total = sum(os.times()[:2])
    for worker in multiprocessing.active_children():
        status = Path(f"/proc/{worker.pid}/stat")
        if status.exists():  # Linux
            fields = status.read_text().rsplit(")", 1)[1].split()
            total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


# --- the GPU's part ---------------------------------------------------------------------------------------------------


class Stored(Split):
    """Images of one size in memory, as a packed set has them."""

    def __init__(self, count: int, side: int) -> None:
        self.name, self.task, self.classes = "train", "classify", tuple(str(c) for c in range(1000))
        self.targets = np.arange(count) % 1000
        small = np.random.default_rng(0).integers(0, 256, (count, side // 8, side // 8, 3), dtype=np.uint8)
        self._arrays = small.repeat(8, axis=1).repeat(8, axis=2)

    def image_name(self, index: int) -> str:
        return str(index)

    def payload(self, index: int) -> np.ndarray:
        return self._arrays[index]

    @property
    def arrays(self) -> np.ndarray:
        return self._arrays


def gpu_rows(options: argparse.Namespace) -> list[Row]:
    device = torch.device(options.device)
    kinds = {
        "crop, flip, mixup": Augment(mixup=0.2, device="gpu"),
        "+ RandAugment (torchvision 2, 9)": Augment(mixup=0.2, randaugment="torchvision", randaugment_magnitude=9, device="gpu"),
        "+ RandAugment (big-vision 2, 15)": Augment(mixup=0.2, randaugment="big-vision", randaugment_magnitude=15, device="gpu"),
        "+ cutmix, erasing, smoothing, per sample": Augment(
            randaugment="big-vision",
            randaugment_magnitude=15,
            mixup=0.8,
            cutmix=1.0,
            mix="per-sample",
            erase=0.25,
            smoothing=0.1,
            device="gpu",
        ),
    }
    rows: list[Row] = []
    cases = ((64, 64, 2048, 100_000), (256, 224, 512, 20_000))
    for stored_side, side, batch, bar in cases:
        batch = 16 if options.tiny else batch
        split = Stored(4 * batch, stored_side)
        for name, augment in kinds.items():
            title = f"{side}×{side} from {stored_side}×{stored_side}: {name}"
            here = on_device(split, augment, side, batch, device, options)
            rows.append({"what": f"{title}; batch on the device", "images/s": here, "bar": bar, "batch": batch})
            through = end_to_end(split, augment, side, batch, device, options)
            rows.append({"what": f"{title}; from memory, by the loader", "images/s": through, "bar": "", "batch": batch})
            print(f"{title}: {here:,.0f} images/s on the device, {through:,.0f} through the loader", flush=True)
        rows.append(agreement(split, kinds["+ RandAugment (torchvision 2, 9)"], side, device))
    return rows


def stage_of(split: Split, augment: Augment, side: int, device: torch.device) -> DeviceTransforms:
    return DeviceTransforms(preset("imagenet", size=side), augment, task="classify", classes=len(split.classes), seed=0, device=device)


def host_batch(split: Stored, batch: int, step: int, device: torch.device) -> HostBatch:
    where = BatchSlice(0, step, 0, 1, np.arange(batch), ((step * batch, batch),), 0, batch, batch)
    images = torch.from_numpy(split.arrays[:batch]).to(device)
    targets = torch.from_numpy(split.targets[:batch]).to(device)
    return HostBatch(images, targets, torch.arange(batch), where, uncropped=True)


def on_device(split: Stored, augment: Augment, side: int, batch: int, device: torch.device, options: argparse.Namespace) -> float:
    """From uint8 batches on the device to the model's input; parameters are drawn and sent for every batch."""
    stage = stage_of(split, augment, side, device)
    steps = 2 if options.tiny else 30
    batches = [host_batch(split, batch, 0, device)] * (2 * steps)
    batches = [
        HostBatch(host.images, host.targets, host.indices, _at(host.slice, step), uncropped=True) for step, host in enumerate(batches)
    ]
    for host in batches[: steps // 2 + 1]:
        stage(host)
    return timed(lambda: [stage(host) for host in batches[steps:]][-1] and None, steps * batch, device)


def _at(where: BatchSlice, step: int) -> BatchSlice:
    count = where.total
    return BatchSlice(0, step, 0, 1, where.indices, ((step * count, count),), 0, count, count)


def end_to_end(split: Stored, augment: Augment, side: int, batch: int, device: torch.device, options: argparse.Namespace) -> float:
    """From stored images in main memory: gathered, sent, augmented."""
    loader = TrainLoader(split, preprocess=preset("imagenet", size=side), augment=augment, batch=batch, workers=0, device=device)
    batches = iter(loader)
    for _ in islice(batches, 4):
        pass
    steps = 2 if options.tiny else 20

    def run() -> None:
        for _ in islice(batches, steps):
            pass

    return timed(run, steps * batch, device)


def timed(work: Callable[[], Any], images: int, device: torch.device) -> float:
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    began = time.perf_counter()
    work()
    wait()
    return images / (time.perf_counter() - began)


def agreement(split: Stored, augment: Augment, side: int, device: torch.device) -> Row:
    """The device's images against the CPU's, in levels of 255: a fast wrong answer would be worth nothing."""
    here, there = (
        stage_of(split, augment, side, place)(host_batch(split, 16, 3, place)).images.cpu()
        for place in (device, torch.device("cpu"))
    )
    std = torch.tensor(preset("imagenet", size=side).std)[:, None, None]
    levels = (here - there).abs() * std * 255
    print(f"  differs from the CPU by {levels.mean():.3f} levels on average; {(levels > 2).float().mean():.2%} by over 2")
    return {"what": f"{side}×{side}: mean difference from the CPU, in levels of 255", "ratio": float(levels.mean())}


# --- the report -------------------------------------------------------------------------------------------------------


def report(rows: list[Row], options: argparse.Namespace) -> None:
    where = hardware(options.device)
    common = {
        "hardware": where,
        "torch": torch.__version__,
        "torchvision": torchvision.__version__,
        "timm": version_of("timm"),
        "pillow": version_of("PIL"),
        "simplejpeg": version_of("simplejpeg"),
        "python": platform.python_version(),
        "load average": f"{os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "",
        "workers": options.workers if options.device == "cpu" and not options.stage else 0,
    }
    print(f"\n{where}; " + ", ".join(f"{key} {value}" for key, value in common.items() if key != "hardware"))
    for row in rows:
        value = f"{row['images/s']:12,.0f} img/s" if "images/s" in row else f"{row['ratio']:12.3f}      "
        bar = row.get("bar", "")
        met = "" if bar == "" else f"  bar {bar:,}: {'met' if row.get('images/s', row.get('ratio', 0)) >= bar else 'MISSED'}"
        print(f"{row['what']:<92}{value}{met}")
    if options.tiny:
        print("(tiny: nothing written)")
        return
    options.results.mkdir(parents=True, exist_ok=True)
    name = "".join(c if c.isalnum() else "-" for c in where.lower()).strip("-")
    part = "device" if options.device == "cuda" or options.stage else "loaders"
    file = options.results / f"data-{part}-{name}-torch{torch.__version__.split('+')[0]}.csv"
    columns = ["what", "images/s", "processor ms/image", "ratio", "bar", "batch", *common]
    with file.open("w", newline="", encoding="utf-8") as handle:
        writer = csv.DictWriter(handle, columns)
        writer.writeheader()
        for row in rows:
            rounded = {key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()}
            writer.writerow({"batch": options.batch, **rounded, **common})
    print(f"Written to {file}")


def hardware(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    model = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), model)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{model} {cores} cores"


def version_of(package: str) -> str:
    try:
        return str(__import__(package).__version__)
    except ImportError:
        return "none"


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    sys.exit(main())
