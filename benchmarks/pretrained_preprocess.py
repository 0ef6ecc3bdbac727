"""Compare preprocessings for the included model on held-out training images: square ones, and others cut to a photo's shape.

    python benchmarks/pretrained_preprocess.py IMAGES.npy LABELS.npy --out benchmarks/results/pretrained-preprocess.csv

IMAGES.npy holds uint8 images [N, 64, 64, 3]; the last 2,500, which the model was not trained on, are used. Tiny-ImageNet has square
images of 64 pixels only, so photos of other shapes are imitated: rows or columns at the border are left out. Computed in fp32.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

import numpy as np
import torch

import vitrail
from vitrail.data.preprocess import Preprocess
from vitrail.models.inference import for_inference

HELD_OUT = 2500
SHAPES = {"1:1": (64, 64), "4:3": (48, 64), "3:4": (64, 48), "3:2": (43, 64)}
SHORT_SIDES = (None, 64, 66, 68, 70, 73, 80)  # None: the image is stretched to a square


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("images", type=Path)
    parser.add_argument("labels", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    images = np.load(args.images, mmap_mode="r")[-HELD_OUT:]
    labels = torch.from_numpy(np.load(args.labels)[-HELD_OUT:])
    model = for_inference(vitrail.load("vitrail-ti8-tiny-imagenet").model, "fp32")
    with args.out.open("w", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(["shape", "resize", "short_side", "accuracy", "images"])
        for shape, (height, width) in SHAPES.items():
            top, left = (64 - height) // 2, (64 - width) // 2
            cut = images[:, top : top + height, left : left + width]
            for side in SHORT_SIDES:
                if shape == "1:1" and side == 64:
                    continue  # the same as stretching
                resize = "short-side" if side else "square"
                preprocess = Preprocess(size=(64, 64), resize=resize, resize_to=side)
                with torch.inference_mode():
                    batches = torch.stack([preprocess(np.ascontiguousarray(image)) for image in cut]).split(125)
                    predicted = torch.cat([model(batch).argmax(1) for batch in batches])
                accuracy = (predicted == labels).double().mean().item()
                rows.writerow([shape, resize, side or "", f"{accuracy:.4f}", len(labels)])
                file.flush()
                print(f"{shape}, {resize} {side or ''}: {accuracy:.2%}")


if __name__ == "__main__":
    main()
