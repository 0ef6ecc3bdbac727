"""Runs that an older version began: their settings are read in today's words, and they can be resumed."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from tests.train.small import same, small, train, weights
from tests.train.test_resume import interrupted
from vitrail.data.augment.spec import Augment
from vitrail.errors import VitrailError
from vitrail.train.config import Recipe
from vitrail.train.precision import MIN_CPU_FLOPS, chosen_precision, cpu_multiplies_bf16
from vitrail.train.run import RunFolder
from vitrail.train.upgrade import FORMAT, upgrade, upgrade_state

# As format 1 wrote it, but for fields that are at their defaults.
OLD = """
{"recipe": {
  "name": "small",
  "model": {"name": "ViT-Ti/4", "start": null, "image_size": 8, "channels": 1, "patch": null, "width": 32, "depth": 2, "heads": 1,
    "mlp": 48, "pooling": null, "dropout": 0.1, "stochastic_depth": 0.1, "recompute": 0, "recompute_keeps": "products",
    "freeze": false},
  "data": {"source": "digits", "train": "train", "validate": "auto", "holdout": 0.02, "preprocess": "auto", "sampling": "shuffle",
    "workers": 0, "bad_images": "error", "ignore_unknown_classes": false},
  "augment": {"crop": "inception-reference", "crop_area": [0.7, 1.0], "flip": 0.0, "randaugment": "none", "mixup": 0.2,
    "cutmix_share": 0.25, "mix": "reference", "mix_probability": 1.0, "smoothing": 0.1, "repeats": 1, "device": "cpu"},
  "task": {"kind": "auto", "loss": "softmax", "distil": "none", "teacher": null, "distil_share": 0.5, "temperature": 3.0},
  "optim": {"name": "adamw", "lr": 0.002, "weight_decay": 0.1, "decay": "times-schedule", "decay_on": "kernels", "clip": 1.0},
  "schedule": {"kind": "cosine", "warmup": 2, "end": 0.0, "timescale": 10000, "cooldown": 0},
  "epochs": null, "steps": 6, "batch": 32, "micro_batch": "auto", "precision": "auto", "compile": false, "cuda_graph": true,
  "ema": 0.9, "seed": 0, "eval_every": 0, "checkpoint_every": 2, "keep": 2, "log_every": 2, "lr_grid": [], "expected": ""},
 "resolved": {"steps": 6, "precision": "fp32"}}
"""


def today() -> Recipe:
    return small(
        data__holdout_rule="seed-0",  # that of the older versions, in which the seed decided
        optim__decay="independent-of-lr",
        model__recompute_keep="matmuls",
        augment=Augment(
            crop="inception-tensorflow", crop_area=(0.7, 1.0), flip=0.0, mixup=0.2, cutmix_probability=0.25, smoothing=0.1
        ),
    )


def test_old_settings_are_read_in_todays_words() -> None:
    read = upgrade(json.loads(OLD))
    data = dataclasses.replace(today().data, split_rule="seed-0")  # that of the older versions, in which the seed decided
    assert Recipe.from_dict(read["recipe"]) == today().replace(data=data) and read["format"] == FORMAT
    assert upgrade(read) == read
    other = json.loads(OLD)
    other["recipe"]["optim"]["decay"] = "times-lr"
    assert upgrade(other)["recipe"]["optim"]["decay"] == "scaled-by-lr"
    other["recipe"]["seed"] = 7  # which selected the held-out images, too
    data = Recipe.from_dict(upgrade(other)["recipe"]).data
    assert (data.holdout_rule, data.split_rule) == ("seed-7", "seed-7")
    other["recipe"]["data"]["holdout_seed"] = 3  # later, a seed of its own
    assert Recipe.from_dict(upgrade(other)["recipe"]).data.holdout_rule == "seed-3"
    assert upgrade_state({"format": 1, "step": 4, "passed_over": [2]}) == {"format": FORMAT, "step": 4, "skipped_steps": [2]}
    task = {"distil": "hard", "distil_weight": 0.3, "teacher": "a"}  # as formats 2 and 3 spelt it
    for number in (2, 3):
        recipe = Recipe.from_dict(upgrade({"format": number, "recipe": {"task": task}})["recipe"])
        assert (recipe.task.distill, recipe.task.distill_weight, recipe.task.teacher) == ("hard", 0.3, "a")
    with pytest.raises(VitrailError, match="format 9"):
        upgrade({"format": 9})


@pytest.mark.slow
def test_a_run_of_the_older_format_is_resumed_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(today(), tmp_path / "whole")
    interrupted(today(), tmp_path / "run", monkeypatch, 4)
    (tmp_path / "run" / "config.json").write_text(OLD)
    for file in (tmp_path / "run" / "checkpoints").glob("*/state.json"):
        state = json.loads(file.read_text())
        state["passed_over"] = state.pop("skipped_steps")
        for name in ("selection", "warned_of_collapse", "checksum"):  # which that version did not have
            del state[name]
        file.write_text(json.dumps({**state, "format": 1}))
    other = today().replace(optim=dataclasses.replace(today().optim, lr=1e-3))
    with pytest.raises(VitrailError, match=r"optim\.lr: 0\.002 → 0\.001"):
        train(other, tmp_path / "run")
    by_names = dataclasses.replace(today().data, holdout_rule="names")  # what a user passes; the run keeps its own rule
    result = train(today().replace(data=by_names), tmp_path / "run")
    assert result.steps == 6 and same(weights(tmp_path / "run"), weights(tmp_path / "whole"))
    assert json.loads((tmp_path / "run" / "config.json").read_text())["format"] == FORMAT


@pytest.mark.slow
def test_a_resumed_run_keeps_its_precision_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a later version, or another CPU, would choose differently."""
    import torch

    cpu = torch.device("cpu")
    assert chosen_precision("auto", cpu) == chosen_precision("auto", cpu, MIN_CPU_FLOPS / 2) == "fp32"
    assert chosen_precision("auto", cpu, 4e9) == ("bf16" if cpu_multiplies_bf16() else "fp32")
    train(small(), tmp_path / "whole")
    interrupted(small(), tmp_path / "run", monkeypatch, 4)
    monkeypatch.setattr("vitrail.train.loop.chosen_precision", lambda *_: "bf16")
    train(small(), tmp_path / "run")
    assert RunFolder(tmp_path / "run").saved_precision() == "fp32"
    assert same(weights(tmp_path / "run"), weights(tmp_path / "whole"))
