"""The model card: front matter that the Hub reads, figures from the checkpoint, and commands that exist."""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from tests.checkpoints.small_models import KINDS, bundle_of
from vitrail.checkpoints.bundle import Bundle
from vitrail.checkpoints.model_card import is_generated, model_card
from vitrail.checkpoints.public_provenance import public_provenance
from vitrail.cli import COMMANDS
from vitrail.models import flops, parameters


def made(kind: str = "plain", **changes: Any) -> Bundle:
    bundle = bundle_of(KINDS[kind])
    return dataclasses.replace(bundle, **changes)


def test_figures_and_front_matter() -> None:
    provenance = {
        "start": "ViT-B/16",
        "data": "hf: train 90, test 40 images; 5 classes",
        "trained_on": [{"source": "hf:uoft-cs/cifar10?image=img", "images": 90, "validation": "test", "fraction": 0.5}],
        "validation": {"loss": 0.25, "accuracy": 0.9, "top5_accuracy": 1.0, "images": 40.0, "predicted_classes": 5.0},
        "checkpoint": {"checkpoint": "best"},
        "lora": {"rank": 8},
    }
    bundle = made(provenance=provenance, classes=("a", "b|c", "d <i>", "e_f", "g"))
    text = model_card(bundle, "ada/pets", licence="mit")
    config = bundle.model.config
    assert f"| parameters | {parameters(config):,} |" in text and f"{flops(config) / 2e9:,.2f} GMACs" in text
    assert "| top-1 accuracy | 90.0% | 76.9% – 96.0% |" in text  # Wilson's interval of 36 of 40
    assert "On 40 validation images" in text and "slightly too good" in text
    assert r"b\|c, d &lt;i>, e\_f" in text
    data = ModelCard(text).data.to_dict()
    assert data["license"] == "mit" and data["library_name"] == "vitrail" and data["pipeline_tag"] == "image-classification"
    assert data["datasets"] == ["uoft-cs/cifar10"] and data["base_model"] == "timm/vit_base_patch16_224.augreg_in21k_ft_in1k"
    assert "lora" in data["tags"]
    result = data["model-index"][0]["results"][0]
    assert result["metrics"][0]["value"] == 0.9 and result["dataset"] == {
        "type": "uoft-cs/cifar10",
        "name": "uoft-cs/cifar10",
        "split": "test",
    }
    assert "90 images of hf:uoft-cs/cifar10" in text and "predicted classes" not in text


@pytest.mark.parametrize("kind", ["plain", "no-head", "bit", "hybrid"])
def test_every_kind_has_a_card_with_commands_that_exist(kind: str) -> None:
    text = model_card(made(kind, provenance={}), "ada/x")
    assert "does not record how it was trained" in text and "does not record an evaluation" in text
    assert ("vitrail predict" in text) == bool(KINDS[kind].outputs)
    commands = re.findall(r"^vitrail (.*)$", text, re.MULTILINE)
    assert commands and all(shlex.split(one)[0] in COMMANDS for one in commands)
    assert ModelCard(text).data.to_dict()["library_name"] == "vitrail"


def test_a_name_that_is_not_utf8_can_be_uploaded() -> None:
    provenance = {"trained_on": [{"source": "folder:/x/p\udcffts\n", "images": 3}], "validation": {"accuracy": 0.5}}
    text = model_card(made(provenance=provenance, classes=("\udcff", "b\nc", "d", "e", "f")), "ada/x")
    assert text.encode() and "p\\xffts" in text and ModelCard(text).data.to_dict()["model-index"]


def test_an_edited_card_is_recognised() -> None:
    text = model_card(made(), "ada/x")
    assert is_generated(text) and is_generated(text.replace("\n", "\r\n"))
    assert (
        not is_generated(text.replace("## Limits", "## Bounds")) and not is_generated("# x") and not is_generated(text + "more\n")
    )


@pytest.mark.parametrize(
    ("key", "value", "shown"),
    [
        ("start", "ViT-B/16@mae", "ViT-B/16@mae"),
        ("start", "hf:google/vit-base-patch16-224", "hf:google/vit-base-patch16-224"),
        ("start", "runs/ada/pets/model-best", "pets"),
        ("start", "/home/ada/ViT-B_16.npz", "ViT-B_16.npz"),
        ("start", r"C:\Users\ada\ViT-B_16.npz", "ViT-B_16.npz"),
        ("start", "https://host/ViT-B_16.npz?sig=secret", "https://host/ViT-B_16.npz?…"),
        ("data", "digits", "digits"),
        ("data", "torchvision:CIFAR10", "torchvision:CIFAR10"),
        ("data", "folder:~/Ada Lovelace/pets", "folder:pets"),
        ("data", "/data/Ada Lovelace/pets?holdout=0.1", "pets?holdout=0.1"),
        ("data", "csv:../ada/pets.csv", "csv:pets.csv"),
        ("data", "hf:uoft-cs/cifar10", "hf:uoft-cs/cifar10"),
        ("data", "wds:s3://bucket/{00..12}.tar", "wds:s3://bucket/{00..12}.tar"),
        ("data", "Tiny-ImageNet: 97,500 training images", "Tiny-ImageNet: 97,500 training images"),
        ("location", "0123456789abcdef", "removed"),
        ("weights", "averaged weights of step 3 of 4; 1/2 of R50+ViT-B/16", "averaged weights of step 3 of 4; 1/2 of R50+ViT-B/16"),
        ("note", "read from folder:/data/ada/x and s3://ada:secret@bucket/y?sig=1", "read from folder:x and s3://bucket/y?…"),
        ("note", f"{Path.home()} L/x, then hf_{'a1B2' * 8}", "~ L/x, then removed"),
        ("start", str(Path.home()), "removed"),
        ("note", "from /home/ada/x.npz, file:///home/ada/y and \\\\server\\ada\\z", "from x.npz, y and z"),
    ],
)
def test_paths_are_shortened_and_names_are_not(key: str, value: str, shown: str) -> None:
    assert public_provenance({"nested": [{key: value}]}) == {"nested": [{key: shown}]}


@pytest.mark.skipif(os.name == "nt", reason="Windows has no HOME")
def test_the_users_own_folder_is_removed_from_texts_even_with_a_space(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada lovelace")
    assert public_provenance({"note": "from /home/ada lovelace/pets/x.pth, 3 / 4"}) == {"note": "from x.pth, 3 / 4"}
    monkeypatch.setenv("HOME", "/")
    assert public_provenance({"note": "ViT-B/16 of /data/x.pth"}) == {"note": "ViT-B/16 of x.pth"}


def test_names_of_fields_have_no_paths_either() -> None:
    assert public_provenance({"files": {"/home/ada/x.npz": 3}}) == {"files": {"x.npz": 3}}
