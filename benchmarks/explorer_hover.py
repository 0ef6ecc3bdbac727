"""Measure how long the explorer takes from a move of the pointer to the drawn map.

Command: python benchmarks/explorer_hover.py [CHECKPOINT | new:NAME:SIZE] [--moves 200]

`new:ViT-B/16:384` makes a model with random weights of that size: the time does not depend on the weights. It needs Playwright and
Chromium. The pointer moves to another patch each time, 200 times, after the first second; the measured time ends with the frame
that shows the map of the new query.
"""

from __future__ import annotations

import argparse
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from playwright.sync_api import sync_playwright

import vitrail
from vitrail.checkpoints.native import save
from vitrail.checkpoints.pretrained import DEFAULT
from vitrail.data.preprocess import Preprocess

MOVES = """async ([count, rows, columns, prefix]) => {
  const frame = document.querySelector(".frame"), box = frame.getBoundingClientRect(), times = [];
  for (let k = 0; k < count; k++) {
    const patch = (k * 37 + 11) % (rows * columns), row = Math.floor(patch / columns), column = patch % columns;
    const place = { clientX: box.left + (column + .5) * box.width / columns, clientY: box.top + (row + .5) * box.height / rows };
    const began = performance.now();
    frame.dispatchEvent(new PointerEvent("pointermove", { ...place, bubbles: true, pointerType: "mouse" }));
    while (document.body.dataset.drawn !== String(prefix + patch)) await new Promise(requestAnimationFrame);
    times.push(performance.now() - began);
  }
  return times;
}"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", nargs="?", default=DEFAULT)
    parser.add_argument("--moves", type=int, default=200)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = options.checkpoint
        if checkpoint.startswith("new:"):
            checkpoint = _new(checkpoint, Path(folder) / "model")
        config = vitrail.load(checkpoint).model.config
        command = [sys.executable, "-m", "vitrail", "explore", checkpoint, "--no-browser"]
        server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        try:
            assert server.stderr is not None
            address = server.stderr.readline().split(" at ")[1].split(" ")[0]
            times = _measure(address, options.moves, [*config.grid, config.prefix])
        finally:
            server.terminate()
            server.wait()
    times.sort()
    median, p95, most = statistics.median(times), times[int(0.95 * len(times))], times[-1]
    print(f"{options.checkpoint}: median {median:.1f} ms, p95 {p95:.1f} ms, maximum {most:.1f} ms of {len(times)} moves")
    print(f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}, Python {platform.python_version()}")


def _new(text: str, folder: Path) -> str:
    _, name, size = text.split(":")
    model = vitrail.create_model(name, outputs=10, image_size=int(size), seed=0)
    torch.nn.init.normal_(model.head.weight, std=0.02)
    save(folder, model, preprocess=Preprocess(size=(int(size), int(size))), classes=[str(k) for k in range(10)])
    return str(folder)


def _measure(address: str, moves: int, grid: list[int]) -> list[float]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 800})
        page.goto(address)
        end = time.monotonic() + 120
        while not page.evaluate("Boolean(document.body.dataset.drawn)") and time.monotonic() < end:
            page.wait_for_timeout(100)
        page.wait_for_timeout(1000)
        times: list[float] = page.evaluate(MOVES, [moves, *grid])
        browser.close()
    return times


if __name__ == "__main__":
    main()
