"""Make the folder of the included model from trained weights, the run's folder and words for the class names.

    python benchmarks/make_pretrained.py WEIGHTS.pt RUN INDEX.json --out src/vitrail/pretrained/vitrail-ti8-tiny-imagenet
    vitrail eval src/vitrail/pretrained/vitrail-ti8-tiny-imagenet --data folder:TINY --match order --out report
    python benchmarks/make_pretrained.py WEIGHTS.pt RUN INDEX.json --out … --evaluation report/metrics.json

WEIGHTS.pt is a state dict, RUN has config.json, metrics.jsonl and model/config.json, INDEX.json has "classes" with
"wnid" and "name". The second call adds the accuracy on the validation images to the provenance. notes.md, the
part of the model card that is written by hand, is kept. Afterwards `vitrail info vitrail-ti8-tiny-imagenet --card` prints the card
for README.md.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

import vitrail
from vitrail.data.preprocess import Preprocess
from vitrail.models import ModelConfig, build_model
from vitrail.version import __version__

# Chosen on held-out training images by benchmarks/pretrained_preprocess.py.
PREPROCESS = Preprocess(size=(64, 64), resize="short-side", resize_to=70, interpolation="bilinear", antialias=True)


def words(stored: list[str], index: Path) -> list[str]:
    """Return a word for each WordNet id, in the run's order; the names must be unique."""
    known = {entry["wnid"]: entry["name"] for entry in json.loads(index.read_text())["classes"]}
    names = [known[wnid] for wnid in stored]
    assert len(set(names)) == len(names), "two classes have the same name"
    return names


def provenance(run: Path, model: dict[str, Any], evaluation: Path | None) -> dict[str, Any]:
    settings = json.loads((run / "config.json").read_text())["recipe"]
    end = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    stored = model["provenance"]
    facts = {
        "recipe": "tiny-imagenet with other settings; the model card has the command",
        "data": "Tiny-ImageNet: 97,500 training images, 2,500 held out for choices, 10,000 validation images for the result only",
        "terms": "ImageNet's terms of access: non-commercial research and education",
        "licence": "other",
        "licence_name": "imagenet-research-only",
        "licence_link": "https://www.image-net.org/download.php",
        "teacher": "our ViT-S/8 (recipe tiny-imagenet, 55.6 %), soft distillation",
        "epochs": settings["epochs"],
        "steps": stored["steps"],
        "batch": stored["batch"],
        "seconds": end["seconds"],
        "hardware": "1 NVIDIA H200",
        "weights": f"{stored['weights']}; stored in float16",
        "held_out": {"accuracy": end["accuracy"], "top5_accuracy": end["top5_accuracy"], "images": int(end["images"])},
        "task": stored["task"],
        "vitrail": __version__,
        "result": "not evaluated",
    }
    if evaluation is not None:
        result = json.loads(evaluation.read_text())["results"][0]
        metrics = {**result["metrics"], "images": result["images"]}
        facts["result"] = f"{metrics['accuracy']:.1%} top-1 on Tiny-ImageNet's validation images".replace("%", " %")
        facts["evaluation"] = "vitrail eval vitrail-ti8-tiny-imagenet --data folder:tiny-imagenet --match order --out report"
        facts["validation"] = {name: metrics[name] for name in ("accuracy", "top5_accuracy", "nll", "ece", "images")}
    return facts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("weights", type=Path)
    parser.add_argument("run", type=Path)
    parser.add_argument("index", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--evaluation", type=Path)
    args = parser.parse_args()
    stored = json.loads((args.run / "model" / "config.json").read_text())
    model = build_model(ModelConfig.from_dict(stored["model"]), device="cpu", seed=0)
    weights = torch.load(args.weights, map_location="cpu", weights_only=True)
    model.load_state_dict({name: tensor.float() for name, tensor in weights.items()})
    kept = {file: file.read_text(encoding="utf-8") for name in ("README.md", "notes.md") if (file := args.out / name).exists()}
    vitrail.save(
        args.out,
        model,
        preprocess=PREPROCESS,
        classes=words(stored["classes"], args.index),
        task=stored["task"],
        provenance=provenance(args.run, stored, args.evaluation),
        store_dtype=torch.float16,
        read_back=True,
    )
    for file, text in kept.items():
        file.write_text(text, encoding="utf-8")
    print(f"{args.out}: {sum(file.stat().st_size for file in args.out.iterdir()) / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
