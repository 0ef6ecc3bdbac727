"""Images per second of classifying a folder of JPEGs, against Hugging Face's pipeline and timm's inference, on the same weights.

All three read the same 500×375 JPEGs (written here), resize them to 224×224 with an antialiased bilinear filter, run the same ViT
and return the top five classes of each image: in float32, and Vitrail also in the default precision of `vitrail predict`. They run
interleaved in one process, folder by folder, and ratios are medians over the rounds, so that other load on the machine affects all
alike. The other libraries run with several batch sizes and workers on some of the images first, and then with their best. Loading
the model is not counted.

    python benchmarks/predict.py                    # ViT-Ti/16, 1,000 images: about four minutes on two free cores
    python benchmarks/predict.py --model S/16
    python benchmarks/predict.py --tiny             # test that everything runs

Prints a table and writes benchmarks/results/predict-….csv with hardware and versions.
"""

from __future__ import annotations

import argparse
import csv
import logging
import os
import platform
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import timm
import torch
import transformers
from PIL import Image
from timm.data import ImageDataset, create_loader

import vitrail
from vitrail.checkpoints import load, save, write
from vitrail.data.preprocess import Preprocess
from vitrail.evaluate import EvalContext, predict
from vitrail.evaluate.settings import Precision

DEFAULT, EXACT = "vitrail", "vitrail --precision fp32"
Predictions = list[tuple[str, int]]  # the name of each image and its top class
Tool = Callable[[Path, int, int], Predictions]  # folder, batch, workers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="Ti/16")
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--tiny", action="store_true", help="a few images, no results written")
    options = parser.parse_args()
    if options.tiny:
        options.images, options.rounds = 24, 2
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    logging.getLogger("vitrail").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for number in range(options.rounds):
            write_images(root / f"round{number}", options.images // options.rounds, seed=number)
        write_images(root / "some", min(48, options.images), seed=-1)
        tools = make_tools(root, options.model)
        rows = time_tools(tools, root, options)
    report(rows, options)


def write_images(folder: Path, count: int, seed: int) -> None:
    """JPEGs with structure and noise, about 80 kB each, as photographs of that size are."""
    folder.mkdir()
    random = np.random.default_rng(seed + 1)
    tiles = np.kron(random.integers(0, 255, (24, 32, 3)), np.ones((16, 16, 1)))
    for number in range(count):
        picture = Image.fromarray(np.roll(tiles, 7 * number, 1)[:375, :500].astype(np.uint8)).rotate(number % 9)
        noisy = np.asarray(picture) + random.normal(0, 12, (375, 500, 3))
        Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(folder / f"{number:05d}.jpg", quality=85)


def make_tools(root: Path, name: str) -> dict[str, Tool]:
    preprocess = Preprocess(size=(224, 224), resize="square", interpolation="bilinear", name="hf")
    model = vitrail.create_model(name, outputs=1000, gelu="erf", norm_eps=1e-6, position_resize="hf", seed=0)
    torch.nn.init.normal_(model.head.weight, std=0.5, generator=torch.Generator().manual_seed(0))
    save(root / "vitrail", model, preprocess=preprocess)
    bundle = load(root / "vitrail")
    write(bundle, root / "hf", "hf")
    write(bundle, root / "timm.safetensors", "timm")
    pipeline = transformers.pipeline("image-classification", model=str(root / "hf"), device="cpu")
    arch = f"vit_{ {'Ti': 'tiny', 'S': 'small', 'B': 'base'}[name.split('/')[0]] }_patch{name.split('/')[1]}_224"
    theirs = timm.create_model(arch, checkpoint_path=str(root / "timm.safetensors")).eval()

    def with_vitrail(folder: Path, _batch: int, _workers: int, precision: Precision) -> Predictions:
        context = EvalContext(bad_images="skip", precision=precision)
        return [(Path(one.name).name, one.predictions[0].index) for one in predict(bundle, [folder], context=context)]

    def with_pipeline(folder: Path, batch: int, workers: int) -> Predictions:
        files = sorted(map(str, folder.iterdir()))
        found = pipeline(files, batch_size=batch, num_workers=workers, top_k=5)
        labels = pipeline.model.config.label2id
        return [(Path(file).name, labels[answers[0]["label"]]) for file, answers in zip(files, found, strict=True)]

    @torch.inference_mode()
    def with_timm(folder: Path, batch: int, workers: int) -> Predictions:
        """What timm's inference.py does: its loader, softmax, the top five converted to numpy."""
        data = ImageDataset(str(folder), transform=None)
        loader = create_loader(
            data, batch_size=batch, input_size=(3, 224, 224), use_prefetcher=False, num_workers=workers, device=torch.device("cpu"),
            interpolation="bilinear", mean=(0.5,) * 3, std=(0.5,) * 3, crop_pct=1.0, crop_mode="squash",
        )  # fmt: skip
        best = [theirs(images).softmax(-1).topk(5)[1].cpu().numpy() for images, _ in loader]
        names = data.filenames(basename=True)
        return list(zip(names, np.concatenate(best)[:, 0].tolist(), strict=True))

    ours = {DEFAULT: partial(with_vitrail, precision="auto"), EXACT: partial(with_vitrail, precision="fp32")}
    return {**ours, "hugging face": with_pipeline, "timm": with_timm}


def time_tools(tools: dict[str, Tool], root: Path, options: argparse.Namespace) -> list[dict[str, object]]:
    chosen = {name: best_setting(name, tool, root / "some") for name, tool in tools.items()}
    times: dict[str, list[float]] = {name: [] for name in tools}
    for number in range(options.rounds):
        predictions: dict[str, Predictions] = {}
        for name, tool in tools.items():
            began = time.perf_counter()
            predictions[name] = tool(root / f"round{number}", *chosen[name])
            times[name].append(time.perf_counter() - began)
        check_results(predictions)
        each = options.images // options.rounds
        print(", ".join(f"{name} {each / times[name][-1]:.1f} images/s" for name in tools), flush=True)
    return [
        {
            "tool": name,
            "batch": chosen[name][0],
            "workers": chosen[name][1],
            "images_per_second": round(each / statistics.median(times[name]), 2),
            "vitrail_is_faster_by": round(statistics.median(np.divide(times[name], times[DEFAULT]).tolist()), 3),
            "exact_vitrail_is_faster_by": round(statistics.median(np.divide(times[name], times[EXACT]).tolist()), 3),
        }
        for name in tools
    ]


def check_results(predictions: dict[str, Predictions]) -> None:
    """Tools whose predictions differ do not compute the same thing, and cannot be compared."""
    ours = dict(predictions[EXACT])
    for name, found in predictions.items():
        if name == DEFAULT:
            continue  # it rounds more, and with random weights the top two classes may be close
        same = np.mean([ours[image] == index for image, index in found])
        if len(found) != len(ours) or same < 0.97:
            raise SystemExit(f"{name} has {len(found)} predictions for {len(ours)} images, {same:.1%} of them Vitrail's.")


def best_setting(name: str, tool: Tool, folder: Path) -> tuple[int, int]:
    """Vitrail runs with its defaults (written 0, 0); the others with the fastest setting on this machine."""
    if name in (DEFAULT, EXACT):
        tool(folder, 0, 0)
        return 0, 0
    tool(folder, 8, 0)
    found = {}
    for setting in product((8, 32, 64), (0, 1, 2)):
        began = time.perf_counter()
        tool(folder, *setting)
        found[setting] = time.perf_counter() - began
    return min(found, key=lambda setting: found[setting])


def report(rows: list[dict[str, object]], options: argparse.Namespace) -> None:
    for row in rows:
        print(row)
    if options.tiny:
        return
    machine = f"{platform.machine()}-{len(os.sched_getaffinity(0))}cores"
    versions = {"torch": torch.__version__, "timm": timm.__version__, "transformers": transformers.__version__}
    path = Path(__file__).parent / "results" / f"predict-{machine}-{options.model.replace('/', '-')}.csv"
    path.parent.mkdir(exist_ok=True)
    with path.open("w", newline="") as file:
        about = {"model": options.model, "images": options.images, "machine": machine, **versions}
        writer = csv.DictWriter(file, [*about, *rows[0]], lineterminator="\n")
        writer.writeheader()
        writer.writerows([{**about, **row} for row in rows])
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
