"""The speed of two source trees of Vitrail on one GPU, measured in alternating rounds of one run.

    git archive 0b1d1ae src | tar x -C /tmp/old
    python benchmarks/before_after.py --before /tmp/old/src            # all cases
    python benchmarks/before_after.py --before /tmp/old/src --tiny     # on any machine: does everything run?

A tree is the folder that contains the package `vitrail`. Each has a process of its own for the whole run. Both build a case at the
same time, with warm-up, compilation and capture; then they measure one after the other, alternating which goes first. Cases:

    train-S, -B, -L          the training loop's captured step (forward, cross-entropy, backward, fused AdamW), bf16, 256 images
    infer-B, -L, one-B, -L   copies made by `for_inference` in bf16; 256 images, or one, with calls launched back to back
    one-B-wait, one-L-wait   one image, waiting for the GPU after every call: latency, the median over calls

The ratio is that of the speeds, after / before: above 1 the tree after is faster. Weights, images and targets come from the same
seeds; differences of weights, loss, gradient norm or logits are reported. Where they are large, the exit status is 1. Prints a
table and writes, after every case, benchmarks/results/before-after-….csv with hardware and versions.
It knows the names of version 0.1 (0b1d1ae) and of today: see `training` and `inference`. Trees in between may have others.
"""

from __future__ import annotations

import argparse
import csv
import gc
import json
import logging
import math
import os
import shlex
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

CASES = "train-S train-B train-L infer-B infer-L one-B one-L one-B-wait one-L-wait".split()
WARMUP = 16  # steps or calls; a capture comes after 3 ordinary ones
LINE = "{case:<10} {before_ms:>10.4f} {after_ms:>10.4f} {before_images_per_s:>9.1f} {after_images_per_s:>9.1f}"
LINE += " {ratio:>7.4f}  {lowest:.4f}–{highest:.4f}  {differs}"
Values = dict[str, Any]
# A step or call of a model that is ready to run, what reads its results, and what tells whether it is captured.
Run = tuple[Callable[[], Any], Callable[[], Any], Callable[[], str]]


def main() -> int:
    options = parse()
    trees = [options.before.resolve(), options.after.resolve()]
    names = options.names or [commit(tree) for tree in trees]
    workers = [Worker(tree, "cpu" if options.tiny else "cuda:0") for tree in trees]
    about = {"hardware": "", "torch": str(torch.__version__), "command": shlex.join(["python", *sys.argv])}
    for worker, name in zip(workers, names, strict=True):
        about |= worker.read()
        print(f"{name}: {worker.tree}", flush=True)
    rows: list[Values] = []
    for case in options.cases:
        try:
            rows.append({"case": case, "before": names[0], "after": names[1], **compare(case, workers, options), **about})
            if not options.tiny:
                write(rows[-1], options.out)
        except (RuntimeError, OSError) as error:  # the other cases are measured all the same
            print(f"{case} failed: {error}", flush=True)
    print(f"\n{'':<10} {'before ms':>10} {'after ms':>10} {'images/s':>9} {'images/s':>9} {'ratio':>7}  lowest–highest")
    print("\n".join(LINE.format(**row) for row in rows))
    return 1 if len(rows) < len(options.cases) or any(row["differs"] for row in rows) else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, metavar="DIR", required=True, help="the tree to compare with, such as CHECKOUT/src")
    parser.add_argument("--after", type=Path, metavar="DIR", default=Path(__file__).resolve().parent.parent / "src")
    parser.add_argument("--names", nargs=2, metavar=("OLD", "NEW"), help="commits, where git cannot tell them")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES, metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.5, help="length of a measurement")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="the folder of the CSV file")
    parser.add_argument("--tiny", action="store_true", help="a small block on the CPU, two short rounds, no results written")
    options = parser.parse_args()
    if options.tiny:
        options.rounds, options.seconds = 2, 0.1
    return options


def commit(tree: Path) -> str:
    """Return the commit of a tree, or its folder where git does not know its files."""
    command = "git ls-files --error-unmatch vitrail/__init__.py && git describe --always --dirty '--exclude=*'"
    done = subprocess.run(command, shell=True, cwd=tree, capture_output=True, text=True, check=False)
    return done.stdout.split()[-1] if done.returncode == 0 else str(tree)


class Worker:
    """The process of one tree, which answers every line of JSON with another."""

    def __init__(self, tree: Path, device: str) -> None:
        self.tree, self.owed = tree, 1  # answers to come: one at the start, two if the other worker failed at the last request
        path = os.pathsep.join(filter(None, [str(tree), os.environ.get("PYTHONPATH")]))
        # -P: do not search the folder of this script for modules
        command = [sys.executable, "-P", str(Path(__file__).resolve()), "--worker", str(tree), device]
        pipes: Values = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "encoding": "utf-8"}
        self.process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path}, **pipes)

    def send(self, **request: Any) -> None:
        print(json.dumps(request), file=self.process.stdin, flush=True)
        self.owed += 1

    def read(self) -> Values:
        lines = [self.process.stdout.readline() for _ in range(self.owed)]  # type: ignore[union-attr]
        self.owed = 0
        facts: Values = json.loads(lines[-1] or '{"error": "a worker has ended"}')
        if "error" in facts:
            raise RuntimeError(facts["error"])
        return facts


def compare(case: str, workers: list[Worker], options: argparse.Namespace) -> Values:
    """Build a case in both workers and measure it in alternating rounds."""
    for worker in workers:
        worker.send(do="build", case=case)
    built = [worker.read() for worker in workers]
    captured = " / ".join(facts["captured"] for facts in built)
    difference, differs = differences(*built)
    print(f"\n{case}, {captured}; before / after: {difference}{'  <-- MORE THAN ROUNDING' * differs}", flush=True)
    times: list[list[float]] = [[], []]
    ratios: list[float] = []
    for number in range(options.rounds):
        for side in (0, 1) if number % 2 == 0 else (1, 0):
            workers[side].send(do="measure", seconds=options.seconds, wait=case.endswith("-wait"))
            times[side].append(workers[side].read()["ms"])
        ratios.append(times[0][-1] / times[1][-1])
        print(f"{case:<10} {times[0][-1]:10.4f} {times[1][-1]:10.4f} ms  ratio {ratios[-1]:.4f}", flush=True)
    (old, new), batch = map(statistics.median, times), built[0]["batch"]
    row = {"model": built[0]["model"], "batch": batch, "precision": "bf16", "rounds": options.rounds, "seconds": options.seconds}
    row |= {"before_ms": round(old, 5), "before_images_per_s": round(batch / old * 1e3, 1)}
    row |= {"after_ms": round(new, 5), "after_images_per_s": round(batch / new * 1e3, 1)}
    row |= {"ratio": round(statistics.median(ratios), 5), "lowest": round(min(ratios), 5), "highest": round(max(ratios), 5)}
    row |= {f"{side}_rounds_ms": " ".join(f"{one:.5f}" for one in times[i]) for i, side in enumerate(("before", "after"))}
    return {**row, "captured": captured, "difference": difference, "differs": "results differ" * differs}


def differences(old: Values, new: Values) -> tuple[str, bool]:
    """Say how far apart the results of two trees are, and whether that is more than rounding in bf16."""
    pairs = [(key, value, new["values"][key][0], tolerance) for key, (value, tolerance) in old["values"].items()]
    text = "; ".join(f"{key} {one:.7g} / {other:.7g}" for key, one, other, _ in pairs)
    differs = not all(math.isclose(one, other, rel_tol=tolerance) for _, one, other, tolerance in pairs)
    if old["logits"]:
        apart = max(abs(one - other) for one, other in zip(old["logits"], new["logits"], strict=True))
        deviation = statistics.pstdev(old["logits"])
        text += f"; logits at most {apart:.2g} apart, standard deviation {deviation:.2g}"
        differs = differs or not apart < deviation / 4
    return text, differs


def write(row: Values, folder: Path) -> None:
    """Write a row; those of other cases and commits stay."""
    device = row["hardware"].lower().replace(" ", "-").replace(",", "")
    file = folder / f"before-after-{device}-torch{row['torch'].split('+')[0]}.csv"
    stored = list(csv.DictReader(file.open(encoding="utf-8"))) if file.exists() else []
    with file.open("w", newline="", encoding="utf-8") as handle:
        writer = csv.DictWriter(handle, row, lineterminator="\n")
        writer.writeheader()
        writer.writerows(one for one in stored if any(one[key] != row[key] for key in ("case", "before", "after")))
        writer.writerow(row)


def work(tree: Path, device: torch.device) -> int:
    """Answer the parent's requests with the `vitrail` of a tree, which is imported only here and below."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a library prints must not get among the answers
    import vitrail

    if not Path(str(vitrail.__file__)).resolve().is_relative_to(tree):
        raise SystemExit(f"{vitrail.__file__} was imported, which is not in {tree}")
    logging.basicConfig(format=f"{tree}: %(message)s", level=logging.WARNING)  # that a kernel is not used, say
    run: Run | None = None
    facts: Values = {"hardware": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"}
    print(json.dumps(facts), file=answers, flush=True)
    for request in map(json.loads, sys.stdin):
        try:
            if request["do"] == "measure" and run is not None:
                facts = {"ms": measure(run, request["seconds"], request["wait"], device) * 1e3}
            else:
                run = None  # give back the memory of the case before
                gc.collect()
                torch.cuda.empty_cache()
                run, facts = build(request["case"], device)
        except Exception:
            facts = {"error": f"{tree}\n{traceback.format_exc()}"}
        print(json.dumps(facts), file=answers, flush=True)
    return 0


def build(case: str, device: torch.device) -> tuple[Run, Values]:
    """Build a case and run it until it is compiled and captured."""
    from vitrail.models import build_model, model_config

    task, size, tiny = *case.split("-")[:2], device.type == "cpu"
    name, batch = ("ViT-Ti/16" if tiny else f"ViT-{size}/16"), (1 if task == "one" else 4 if tiny else 256)
    config = model_config(name, **({"image_size": 64, "depth": 1, "outputs": 10} if tiny else {}))
    torch.manual_seed(0)
    images = torch.randn(batch, config.channels, *config.image_size, device=device)
    targets = torch.randint(config.outputs, (batch,), device=device)
    model: Any = build_model(config, device=device)
    torch.nn.init.trunc_normal_(model.head.weight, std=0.02)  # multiplying zeros draws less power, and so is faster
    sums = {"weights": model.parameters(), "images": [images]}
    values = {key: (sum(float(one.detach().double().abs().sum()) for one in those), 1e-6) for key, those in sums.items()}
    run = step, read, captured = training(model, images, targets) if task == "train" else inference(model, images)
    for steps, period in ((1, "step 1"), (WARMUP - 1, f"steps 2 to {WARMUP}")):
        for _ in range(steps):
            step()
        if task == "train":
            reading = read()
            values |= {f"loss of {period}": (reading.loss, 0.005), f"gradient norm of {period}": (reading.grad_norm, 0.05)}
    logits = [] if task == "train" else read()[:4].flatten().tolist()
    return run, {"model": name, "batch": batch, "values": values, "logits": logits, "captured": captured()}


def measure(run: Run, seconds: float, wait: bool, device: torch.device) -> float:
    """Return the seconds of a step or call."""
    step, read, _ = run

    def timed(count: int) -> float:
        began = time.perf_counter()
        for _ in range(count):
            step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - began

    gc.collect()
    gc.disable()
    warm, end = [timed(1)], time.perf_counter() + seconds / 3  # after sleep and idleness CPU and GPU are slower or faster
    while time.perf_counter() < end:
        warm.append(timed(1))
    count = max(2, round(seconds / statistics.median(warm)))
    found = statistics.median(timed(1) for _ in range(count)) if wait else timed(count) / count
    gc.enable()
    read()
    return found


def training(model: Any, images: torch.Tensor, targets: torch.Tensor) -> Run:
    """The training loop's own step."""
    from vitrail.data.batch import Batch
    from vitrail.tasks import Classify
    from vitrail.train.config import OptimSpec, Recipe, ScheduleSpec
    from vitrail.train.optimizers import Optimizer
    from vitrail.train.parallel import Runner, World
    from vitrail.train.step import Step

    today = hasattr(Step, "why_not_captured")
    optim, schedule = OptimSpec(name="adamw", lr=1e-5, weight_decay=0.1, clip=None), ScheduleSpec(kind="constant")
    recipe = Recipe(optim=optim, schedule=schedule, batch=len(images), on_nonfinite="skip")
    runner, task = Runner(model.train(), World(images.device)), Classify(model.config.outputs)
    more = {"schedule": schedule} if today else {}
    step: Any = Step(runner, task, Optimizer(model, optim), recipe, total=1, precision="bf16", average=None, **more)
    batch = Batch(images, targets, torch.arange(len(images)), 0, 0, 0, 1, len(images))

    def read() -> Any:
        reading = step.read()
        assert not reading.skipped, f"{reading.skipped} steps had gradients that were not finite"
        return reading

    def captured() -> str:
        reason, capture = (step.why_not_captured(), step._captured) if today else (step.unrecorded(), step._recording)
        done = capture is not None and (capture.captured if today else capture._graph is not None)
        return "captured" if done else f"not captured {reason}".strip()

    return lambda: step.take([batch], 0), read, captured


def inference(model: Any, images: torch.Tensor) -> Run:
    """A call of a copy made for inference."""
    from vitrail.models.inference import for_inference

    made: Any = for_inference(model, precision="bf16", device=images.device)

    def call() -> torch.Tensor:
        with torch.inference_mode():
            return made(images)  # type: ignore[no-any-return]

    def read() -> torch.Tensor:
        logits = call()
        assert logits.isfinite().all(), "logits are not finite"
        return logits

    def captured() -> str:
        captures = made._captured._captures if hasattr(made, "_captured") else getattr(made, "_recorded", None)  # today, or 0.1
        return "captured" if captures else "not captured"

    return call, read, captured


if __name__ == "__main__":
    sys.exit(work(Path(sys.argv[2]), torch.device(sys.argv[3])) if sys.argv[1:2] == ["--worker"] else main())
