"""What docs/comparison.md and the README say about timm and transformers holds for the versions that the page names.

pyproject.toml allows others. With those a check may fail, which is shown and does not fail the tests: then the page has to follow.
"""

from __future__ import annotations

import csv
import inspect
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import transformers
from packaging.requirements import Requirement
from timm.layers import set_fused_attn, use_fused_attn
from timm.utils import AttentionExtract
from timm.utils.onnx import onnx_export

from tests.docs.blocks import ROOT
from vitrail.checkpoints import Bundle, Report, write
from vitrail.data.preprocess import preset
from vitrail.models import VARIANTS, create_model

PAGE = (ROOT / "docs" / "comparison.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
NAMED = dict(re.findall(r"(timm|transformers) (\d+(?:\.\d+)+)", PAGE.partition("\n| ")[0]))
SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "image_size": 32,
}


def about(package: Any) -> pytest.MarkDecorator:
    """Mark a check of a library, which may fail with another version than the page's."""
    installed, named = package.__version__, NAMED[package.__name__]
    other = not f"{installed}.".startswith(f"{named}.")
    return pytest.mark.xfail(other, reason=f"docs/comparison.md is about {package.__name__} {named}, not {installed}", strict=False)


def sources(package: Any) -> list[Path]:
    return sorted(Path(package.__file__).parent.rglob("*.py"))


@pytest.fixture
def google_file(tmp_path: Path) -> Path:
    model = create_model("ViT-B/16", outputs=10, image_size=32, seed=0, width=32, depth=1, heads=2, mlp=64)
    torch.nn.init.normal_(model.head.weight, std=0.1)
    file = tmp_path / "small.npz"
    write(Bundle(model, preset("google-vit", size=32), None, "classify", Report(str(file), "google")), file, "google")
    return file


@about(timm)
@about(transformers)
def test_sizes() -> None:
    assert len(timm.list_models()) > 1000 and "more than 1,000" in PAGE
    folders = [one for one in (Path(transformers.__file__).parent / "models").iterdir() if (one / "__init__.py").exists()]
    assert len(folders) > 400 and "more than 400 model types" in PAGE
    assert len(VARIANTS) == 52 and "52 variants" in PAGE


@about(timm)
def test_timm_reads_googles_files_and_does_not_write_them(google_file: Path) -> None:
    model = timm.create_model("vit_base_patch16_224", img_size=32, embed_dim=32, depth=1, num_heads=2, mlp_ratio=2, num_classes=10)
    before = model.head.weight.clone()
    model.load_pretrained(str(google_file))
    assert not torch.equal(before, model.head.weight)
    assert not [file for file in sources(timm) if "savez" in file.read_text(encoding="utf-8")]


@about(transformers)
@pytest.mark.filterwarnings("ignore")
def test_transformers_does_not_read_them(google_file: Path) -> None:
    for given in (google_file, google_file.parent):
        with pytest.raises((OSError, ValueError)):
            transformers.ViTModel.from_pretrained(str(given))
    named = [file for file in sources(transformers) if ".npz" in file.read_text(encoding="utf-8")]
    assert {file.parent.name for file in named} <= {"bark"}


@about(timm)
@about(transformers)
def test_where_preprocessing_is_stored(tmp_path: Path) -> None:
    model = timm.create_model("vit_tiny_patch16_224", depth=1)
    timm.models.save_for_hf(model, str(tmp_path / "timm"))
    assert "mean" in json.loads((tmp_path / "timm" / "config.json").read_text())["pretrained_cfg"]
    assert all(isinstance(one, torch.Tensor) for one in model.state_dict().values())
    theirs = transformers.ViTForImageClassification(transformers.ViTConfig(**SMALL))
    theirs.save_pretrained(tmp_path / "hf")
    assert not (tmp_path / "hf" / "preprocessor_config.json").exists()
    transformers.ViTImageProcessor().save_pretrained(tmp_path / "hf")
    assert (tmp_path / "hf" / "preprocessor_config.json").exists()


@about(timm)
def test_attention_of_timm_needs_fused_attention_off() -> None:
    assert use_fused_attn()
    with pytest.raises(RuntimeError, match="No node names found"):
        AttentionExtract(timm.create_model("vit_tiny_patch16_224", depth=1), method="fx")
    set_fused_attn(False)
    try:
        found = AttentionExtract(timm.create_model("vit_tiny_patch16_224", depth=1), method="fx")(torch.zeros(1, 3, 224, 224))
    finally:
        set_fused_attn(True)
    assert [tuple(one.shape) for one in found.values()] == [(1, 3, 197, 197)]


@about(transformers)
def test_attention_of_transformers_needs_eager() -> None:
    shapes = {}
    for kind in ("sdpa", "eager"):
        model = transformers.ViTForImageClassification._from_config(
            transformers.ViTConfig(**SMALL), attn_implementation=kind
        ).eval()
        shapes[kind] = [tuple(one.shape) for one in model(torch.zeros(1, 3, 32, 32), output_attentions=True).attentions or ()]
    assert shapes == {"sdpa": [], "eager": [(1, 2, 5, 5)]}
    assert transformers.ViTForImageClassification(transformers.ViTConfig(**SMALL)).config._attn_implementation == "sdpa"


@pytest.mark.slow
@pytest.mark.parametrize("package", [pytest.param(one, marks=about(one), id=one.__name__) for one in (timm, transformers)])
def test_what_was_not_found(package: Any) -> None:
    names = re.compile(
        r"^\s*(?:def|class) \w*(?:rollout_?attention|attention_?rollout|attention_?distance|few_?shot|mean_?color)\w*",
        re.I | re.M,
    )
    found = [(file.name, one) for file in sources(package) for one in names.findall(file.read_text(encoding="utf-8"))]
    assert not found


@about(transformers)
def test_masked_image_modelling_of_transformers_predicts_pixels() -> None:
    model = transformers.ViTForMaskedImageModeling
    assert "SimMIM" in (model.__doc__ or "") and "l1_loss" in inspect.getsource(model.forward)


@about(timm)
@about(transformers)
def test_export_to_onnx() -> None:
    assert inspect.signature(onnx_export).parameters["check_forward"].default is False
    assert "torch.randn" in inspect.getsource(onnx_export)
    text = (Path(transformers.__file__).parent / "exporters" / "exporter_onnx.py").read_text(encoding="utf-8")
    assert not re.search(r"allclose|assert_close|InferenceSession", text)


def test_speeds_are_those_of_the_csv_files() -> None:
    def speed(file: str, library: str) -> float:
        with (ROOT / "benchmarks" / "results" / f"{file}-nvidia-h200-torch2.11.0.csv").open(encoding="utf-8") as stream:
            rows = [
                row
                for row in csv.DictReader(stream)
                if (row["model"], row["task"], row["library"]) == ("ViT-B/16", "train", library)
            ]
        return float(rows[0]["images_per_s"])

    timms = speed("bench", "vitrail") / speed("bench", "timm")
    theirs = speed("bench-libraries", "hf") / speed("bench-libraries", "vitrail") * timms
    assert f"[{timms:.2f}](" in PAGE and f"[{theirs:.2f}, not compiled](" in PAGE
    assert f"{timms:.2f}" in README and f"{theirs:.2f}" in README


def test_speeds_on_a_cpu_are_those_of_the_csv_files() -> None:
    folder = ROOT / "benchmarks" / "results"
    with (folder / "cpu-inference-x86_64-2cores-B-16-batch16.csv").open(encoding="utf-8") as stream:
        times = {row["variant"]: row["times_timm_eager"] for row in csv.DictReader(stream)}
    with (folder / "bench-cpu-amd-epyc-2-cores-torch2.15.0.csv").open(encoding="utf-8") as stream:
        speeds = {(row["library"], row["mode"]): float(row["images_per_s"]) for row in csv.DictReader(stream)}
    theirs = speeds["hf", "eager"] / speeds["timm", "eager"]
    for page in (PAGE, README):
        assert f"[{times['vitrail, for_inference int8']}, int8](" in page and f"{times['timm, dynamic int8']}, " in page
        assert f"{theirs:.2f}" in page


def test_the_page_names_versions_that_the_tests_may_install() -> None:
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["dependency-groups"]
    allowed = {one.name: one.specifier for one in map(Requirement, groups["dev"])}
    assert NAMED.keys() == {"timm", "transformers"}
    for name, version in NAMED.items():
        assert allowed[name].contains(version), f"docs/comparison.md is about {name} {version}: check it with another one"
