"""benchmarks/learning.py compares equal things: from the same weights, timm's model in the plain loop ends where ours does."""

from __future__ import annotations

import argparse
import csv
import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from benchmarks import learning
from tests.checkpoints.small_models import bundle_of
from vitrail.checkpoints import write
from vitrail.models import ViTConfig
from vitrail.train.config import Recipe
from vitrail.train.prepare import prepare

CPU = torch.device("cpu")


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[argparse.Namespace]:
    monkeypatch.setattr(sys, "argv", ["learning.py", "--data", "digits", "--out", str(tmp_path), "--tiny", "--precision", "fp32"])
    threads = torch.get_num_threads()
    yield learning.parse()
    torch.set_num_threads(threads)


def _recipe(options: argparse.Namespace) -> Recipe:
    """Without stochastic depth: libraries draw it differently."""
    recipe = learning.recipe_for(0, options)
    return recipe.replace(model=dataclasses.replace(recipe.model, stochastic_depth=0.0))


def _with_weights(theirs: nn.Module, ours: nn.Module, folder: Path) -> nn.Module:
    config = ours.config
    assert isinstance(config, ViTConfig)
    bundle = bundle_of(dataclasses.replace(config, gelu="erf"))  # as timm's files have it; weights do not depend on it
    bundle.model.load_state_dict(ours.state_dict())
    write(bundle, folder / "timm.safetensors", "timm")
    theirs.load_state_dict(load_file(folder / "timm.safetensors"))
    return theirs


def test_both_models_compute_the_same_function(options: argparse.Namespace, tmp_path: Path) -> None:
    recipe = _recipe(options)
    ours = prepare(recipe).model.eval()
    torch.manual_seed(0)
    for parameter in ours.parameters():  # small initial values would hide a difference
        nn.init.normal_(parameter, std=0.3)
    theirs = _with_weights(learning.timm_model(recipe, 10), ours, tmp_path).eval()
    images = torch.randn(8, 1, 16, 16)
    with torch.no_grad():
        torch.testing.assert_close(theirs(images), ours(images), rtol=0, atol=2e-5)


@pytest.mark.slow
def test_both_loops_take_the_same_steps(options: argparse.Namespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = _recipe(options)
    original = learning.timm_model

    def same_weights(recipe: Recipe, classes: int) -> nn.Module:
        return _with_weights(original(recipe, classes), prepare(recipe).model, tmp_path)

    monkeypatch.setattr(learning, "timm_model", same_weights)
    ours = learning.ours(recipe, options, CPU)
    theirs = learning.theirs(recipe, options, CPU)
    assert theirs == pytest.approx(ours, rel=1e-4)


def _row(**changes: object) -> learning.Row:
    row = {
        "library": "timm",
        "epochs": 2.0,
        "seed": 0,
        "accuracy_percent": 50.0,
        "loss": 1.0,
        "attention_entropy": 0.5,
        "seconds": 1.0,
    }
    return {**row, "init": "timm", "data": "digits", "hardware": "a machine", "torch": "2.0", "timm": "1.0", **changes}


def test_a_row_keeps_what_it_was_measured_with(options: argparse.Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learning, "theirs", lambda *_: (0.5, 1.0, 0.5))
    measured = learning.finished("timm", 0, options, CPU)
    monkeypatch.setattr(torch, "__version__", "99.0")
    assert learning.finished("timm", 0, options, CPU) == measured
    assert measured["torch"] != "99.0" and measured["data"].startswith("digits")


def test_a_comparison_leaves_rows_of_others_in_the_file(options: argparse.Namespace) -> None:
    for data, seed, accuracy in (("cifar", 0, 50.0), ("tiny", 0, 40.0), ("tiny", 1, 41.0), ("tiny", 0, 42.0)):
        learning.report([_row(data=data, seed=seed, accuracy_percent=accuracy)], options, CPU)
    (file,) = options.out.glob("learning-*.csv")
    with file.open(encoding="utf-8") as handle:
        rows = [(row["accuracy_percent"], row["data"], row["seed"]) for row in csv.DictReader(handle)]
    assert rows == [("50.0", "cifar", "0"), ("41.0", "tiny", "1"), ("42.0", "tiny", "0")]


def test_a_table_of_an_older_version_is_kept(options: argparse.Namespace, tmp_path: Path) -> None:
    file = tmp_path / "old.csv"
    file.write_text("library,seed,accuracy_percent,data\ntimm,0,30.0,tiny\n", encoding="utf-8")
    (kept,) = learning.of_other_runs(file, [_row()])
    assert list(kept) == list(_row()) and (kept["accuracy_percent"], kept["epochs"]) == ("30.0", "")
