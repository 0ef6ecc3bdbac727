"""Benchmark data loading and augmentation.

On the CPU: from 500×375 JPEGs (generated here) to batches of flipped 224×224 inception crops, against timm's
`create_loader` and torchvision's ImageFolder with transforms v2, with the same number of workers, interleaved in one run;
and the same images packed. On a GPU: batches augmented on the device, with parameters per image.

    python benchmarks/data.py                    # about three minutes on two cores
    python benchmarks/data.py --device cuda      # under a minute and a half
    python benchmarks/data.py --tiny             # smoke test

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
from vitrail.data.split import stratified
from vitrail.data.types import Split

Row = dict[str, Any]
WARM_UP = 6
SECONDS = 2.0


def main() -> None:
    options = parse()
    torch.manual_seed(0)
    rows = gpu_rows(options) if options.device == "cuda" or options.device_transforms else cpu_rows(options)
    report(rows, options)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--device-transforms", action="store_true", help="benchmark the device transforms, also on a CPU")
    parser.add_argument("--tiny", action="store_true", help="smoke test with few and small batches")
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


# --- loaders on the CPU -----------------------------------------------------------------------------------------------


def cpu_rows(options: argparse.Namespace) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        photos, packed = Path(folder, "photos"), Path(folder, "packed")
        size = write_photos(photos, options.images)
        print(f"{options.images} JPEGs of 500×375, {size / options.images / 1000:.0f} kB each; packing them at 256")
        pack_photos(photos, packed)
        loaders = make_loaders(photos, packed, options)
        speeds: dict[str, list[float]] = {name: [] for name in loaders}
        costs: dict[str, list[float]] = {name: [] for name in loaders}
        for k in range(options.rounds):
            for name, start in loaders.items():  # interleaved, so that background load affects all alike
                rate, cost = speed(start, options)
                speeds[name].append(rate)
                costs[name].append(cost)
                print(f"round {k + 1}: {name:<26} {rate:8,.0f} images/s, {cost:6.3f} ms of CPU time per image", flush=True)
    rows: list[Row] = [
        {"what": name, "images/s": statistics.median(speeds[name]), "CPU ms/image": statistics.median(costs[name])}
        for name in loaders
    ]
    ratios = {
        "JPEG folder, uint8: Vitrail / timm": ("vitrail JPEG uint8", "timm JPEG uint8", 1.5),
        "JPEG folder, uint8: Vitrail / torchvision": ("vitrail JPEG uint8", "torchvision JPEG uint8", 1.5),
        "JPEG folder, float32: Vitrail / timm": ("vitrail JPEG float32", "timm JPEG float32", 1.5),
        "JPEG folder, float32: Vitrail / torchvision": ("vitrail JPEG float32", "torchvision JPEG float32", 1.5),
        "packed / JPEG folder, uint8, cropped on the CPU": ("vitrail packed uint8", "vitrail JPEG uint8", 10),
        "packed / JPEG folder, uint8, cropped on the GPU": ("vitrail packed whole", "vitrail JPEG uint8", 10),
        "packed, hold-out left out / all images, cropped on the GPU": ("vitrail packed part whole", "vitrail packed whole", 0.9),
        "packed / JPEG folder, float32, cropped on the CPU": ("vitrail packed float32", "vitrail JPEG float32", 10),
    }
    for name, (fast, slow, target) in ratios.items():
        each = [left / right for left, right in zip(speeds[fast], speeds[slow], strict=True)]
        rows.append({"what": name, "ratio": statistics.median(each), "target": target})
        saved = [right / left for left, right in zip(costs[fast], costs[slow], strict=True)]
        rows.append({"what": f"{name}, by CPU time", "ratio": statistics.median(saved)})
    return rows


def write_photos(folder: Path, count: int) -> int:
    """Write images with the power spectrum of photographs, in four classes; return their total size in bytes."""
    rng = np.random.default_rng(0)
    frequency = np.hypot(np.fft.fftfreq(375)[:, None], np.fft.rfftfreq(500)[None])
    amplitude = 1 / np.maximum(frequency, 1 / 500) ** 1.1

    def layer() -> np.ndarray:
        phase = rng.normal(size=amplitude.shape) + 1j * rng.normal(size=amplitude.shape)
        return np.fft.irfft2(amplitude * phase, s=(375, 500))

    bases = []
    for _ in range(16):
        shades = np.stack([layer() for _ in range(3)], -1) * 0.5 + layer()[..., None] * 1.5
        bases.append(((shades - shades.mean()) / shades.std() * 50 + 120).clip(0, 255).astype(np.uint8))
    total = 0
    for number in range(count):
        file = folder / "train" / f"class {number % 4}" / f"{number:05d}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        rows, columns = int(rng.integers(375)), int(rng.integers(500))
        Image.fromarray(np.roll(bases[number % 16], (rows, columns), (0, 1))).save(file, quality=90)
        total += file.stat().st_size
    return total


def pack_photos(photos: Path, packed: Path) -> None:
    from vitrail.data.pack import choose_settings, pack
    from vitrail.data.sources import open_source

    source = open_source(f"folder:{photos}")
    pack(source, packed, choose_settings(source, size=256))


def make_loaders(photos: Path, packed: Path, options: argparse.Namespace) -> dict[str, Callable[[], Iterator[Any]]]:
    from vitrail.data.sources import open_source

    def ours(reference: str, *, host: bool, device: str = "cpu", holdout: float = 0.0) -> Callable[[], Iterator[Any]]:
        def start() -> Iterator[Any]:
            split = open_source(reference).split("train")
            if holdout:
                split = split.subset(np.setdiff1d(np.arange(len(split)), stratified(split, holdout)))
            loader = TrainLoader(
                split,
                preprocess=preset("imagenet"),
                augment=Augment(crop_area=(0.08, 1.0), device=device),  # type: ignore[arg-type]
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
        "vitrail packed whole": ours(stored, host=True, device="gpu"),
        "vitrail packed part whole": ours(stored, host=True, device="gpu", holdout=0.025),
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
    """Return images per second, once the workers have filled their queues, and milliseconds of CPU time per image.

    The CPU time is that of this process and its workers. It depends little on other load on the machine.
    """
    batches = start()
    for _ in islice(batches, WARM_UP):
        pass
    steps = options.images // options.batch - 2 * WARM_UP  # stop before the queues run empty at the end of the epoch
    used, started, count = cpu_seconds(), time.perf_counter(), 0
    endless = isinstance(batches, Generator)  # ours; an epoch of packed images is too short to time
    for _ in batches:
        count += options.batch
        if count >= steps * options.batch and not (endless and time.perf_counter() - started < SECONDS):
            break
    rate = count / (time.perf_counter() - started)
    cost = (cpu_seconds() - used) / count * 1000
    if isinstance(batches, Generator):
        batches.close()
    del batches
    gc.collect()  # stops the workers before the next ones start
    return rate, cost


def cpu_seconds() -> float:
    """Return the user and system time of this process and its live workers."""
    total = sum(os.times()[:2])
    for worker in multiprocessing.active_children():
        status = Path(f"/proc/{worker.pid}/stat")
        if status.exists():  # Linux
            fields = status.read_text().rsplit(")", 1)[1].split()
            total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


# --- transforms on the device -----------------------------------------------------------------------------------------


class StoredSplit(Split):
    """Images of one size in memory, as in a packed dataset."""

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
        "+ RandAugment (timm 2, 9, deviation .5, bicubic)": Augment(
            mixup=0.2,
            randaugment="timm",
            randaugment_magnitude=9,
            randaugment_deviation=0.5,
            randaugment_increasing=True,
            interpolation="bicubic",
            device="gpu",
        ),
        "+ TrivialAugment": Augment(mixup=0.2, trivialaugment=True, device="gpu"),
        "+ 3-Augment and colour jitter": Augment(
            mixup=0.2, three_augment=True, brightness=0.3, contrast=0.3, saturation=0.3, device="gpu"
        ),
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
    for stored_side, side, batch, target in cases:
        batch = 16 if options.tiny else batch
        split = StoredSplit(4 * batch, stored_side)
        for name, augment in kinds.items():
            title = f"{side}×{side} from {stored_side}×{stored_side}: {name}"
            here = on_device(split, augment, side, batch, device, options)
            rows.append({"what": f"{title}; batch on the device", "images/s": here, "target": target, "batch": batch})
            through = end_to_end(split, augment, side, batch, device, options)
            rows.append({"what": f"{title}; through the loader", "images/s": through, "target": "", "batch": batch})
            print(f"{title}: {here:,.0f} images/s on the device, {through:,.0f} through the loader", flush=True)
        rows.append(agreement(split, kinds["+ RandAugment (torchvision 2, 9)"], side, device))
    return rows


def make_transforms(split: Split, augment: Augment, side: int, device: torch.device) -> DeviceTransforms:
    preprocess = preset("imagenet", size=side)
    return DeviceTransforms(preprocess, augment, task="classify", classes=len(split.classes), seed=0, device=device)


def host_batch(split: StoredSplit, batch: int, step: int, device: torch.device) -> HostBatch:
    batch_slice = BatchSlice(0, step, 0, 1, np.arange(batch), ((step * batch, batch),), 0, batch, batch)
    images = torch.from_numpy(split.arrays[:batch]).to(device)
    targets = torch.from_numpy(split.targets[:batch]).to(device)
    return HostBatch(images, targets, torch.arange(batch), batch_slice, uncropped=True)


def on_device(
    split: StoredSplit, augment: Augment, side: int, batch: int, device: torch.device, options: argparse.Namespace
) -> float:
    """Time the transforms from uint8 batches on the device to the model's input, including drawing and copying parameters."""
    transforms = make_transforms(split, augment, side, device)
    steps = 2 if options.tiny else 30
    batches = [host_batch(split, batch, 0, device)] * (2 * steps)
    batches = [
        HostBatch(host.images, host.targets, host.indices, _at(host.slice, step), uncropped=True)
        for step, host in enumerate(batches)
    ]
    for host in batches[: steps // 2 + 1]:
        transforms(host)
    return timed(lambda: [transforms(host) for host in batches[steps:]][-1] and None, steps * batch, device)


def _at(batch_slice: BatchSlice, step: int) -> BatchSlice:
    count = batch_slice.total
    return BatchSlice(0, step, 0, 1, batch_slice.indices, ((step * count, count),), 0, count, count)


def end_to_end(
    split: StoredSplit, augment: Augment, side: int, batch: int, device: torch.device, options: argparse.Namespace
) -> float:
    """Time the loader from stored images in main memory: gather, copy, augment."""
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
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    synchronize()
    started = time.perf_counter()
    work()
    synchronize()
    return images / (time.perf_counter() - started)


def agreement(split: StoredSplit, augment: Augment, side: int, device: torch.device) -> Row:
    """Compare the images of the device with those of the CPU, in levels of 255."""
    here, there = (
        make_transforms(split, augment, side, where)(host_batch(split, 16, 3, where)).images.cpu()
        for where in (device, torch.device("cpu"))
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
        "workers": options.workers if options.device == "cpu" and not options.device_transforms else 0,
    }
    print(f"\n{where}; " + ", ".join(f"{key} {value}" for key, value in common.items() if key != "hardware"))
    for row in rows:
        value = f"{row['images/s']:12,.0f} img/s" if "images/s" in row else f"{row['ratio']:12.3f}      "
        target = row.get("target", "")
        met = (
            ""
            if target == ""
            else f"  target {target:,}: {'met' if row.get('images/s', row.get('ratio', 0)) >= target else 'MISSED'}"
        )
        print(f"{row['what']:<92}{value}{met}")
    if options.tiny:
        print("(tiny: nothing written)")
        return
    options.results.mkdir(parents=True, exist_ok=True)
    name = "".join(c if c.isalnum() else "-" for c in where.lower()).strip("-")
    part = "device" if options.device == "cuda" or options.device_transforms else "loaders"
    file = options.results / f"data-{part}-{name}-torch{torch.__version__.split('+')[0]}.csv"
    columns = ["what", "images/s", "CPU ms/image", "ratio", "target", "batch", *common]
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
