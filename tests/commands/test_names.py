"""Names of published weights on the command line; nothing here uses a network."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.commands.test_models import run
from vitrail.api.finetuning import short_name
from vitrail.checkpoints.published import published_weights
from vitrail.checkpoints.references import is_name


@pytest.fixture(autouse=True)
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))


def test_models_lists_published_weights(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "models", "--pretrained")
    assert status == 0 and all(one.name in out and one.tag in out for one in published_weights())
    assert "dinov2-reg4" in out and "cc-by-nc-4.0" in out and "2111.06377" in out
    rows = json.loads(run(capsys, "models", "B/16", "R50x1", "--pretrained", "--json")[1])
    assert {row["name"] for row in rows} == {"ViT-B/16", "BiT-R50x1"}
    first = rows[0]
    assert first["reference"] == "ViT-B/16@augreg-in21k-ft-in1k" and first["default"] and first["top1"] == 84.532
    assert first["source"] == "hf:timm/vit_base_patch16_224.augreg_in21k_ft_in1k" and first["megabytes"] == 346.3
    status, _, err = run(capsys, "models", "B/20", "--pretrained")
    assert status == 2 and "no published weights" in err


def test_info_of_a_name_does_not_download(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "info", "ViT-B/16@mae")
    assert status == 0 and "timm/vit_base_patch16_224.mae" in out and "cc-by-nc-4.0" in out and "only a" in out
    found = json.loads(run(capsys, "info", "H/14", "--json")[1])["published"]
    assert found["tag"] == "deit3-in22k-ft-in1k" and found["downloaded"] is False and "mae" in found["other_tags"]
    status, _, err = run(capsys, "info", "ViT-B/20")
    assert status == 2 and "There are weights of ViT-B/8, ViT-B/14, ViT-B/16 and ViT-B/32" in err


@pytest.mark.parametrize(
    "words",
    [
        ("predict", "ViT-B/16", "x.png"),
        ("predict", "ViT-B/16"),
        ("embed", "ViT-B/16", "x.png", "--out", "e.npz"),
        ("eval", "ViT-B/16", "--data", "digits"),
        ("fewshot", "ViT-B/16", "--data", "digits"),
        ("probe", "ViT-B/16", "--data", "digits"),
        ("inspect", "ViT-B/16", "x.png", "--out", "inside"),
        ("convert", "ViT-B/16", "b16"),
        ("finetune", "--from", "ViT-B/16", "--data", "digits", "--out", "run", "--check-images", "none"),
    ],
    ids=lambda words: " ".join(words[:2]),
)
def test_every_command_says_how_to_get_the_weights(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from PIL import Image

    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (32, 32)).save("x.png")
    status, _, err = run(capsys, *words)
    if words == ("predict", "ViT-B/16"):
        assert status == 2
        return
    assert status == 2 and "`hf download timm/vit_base_patch16_224.augreg_in21k_ft_in1k config.json model.safetensors" in err


def test_a_path_is_never_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert is_name("ViT-B/16") and is_name("ViT-B/16@mae") and is_name("hf:a/b") and is_name("https://a/b.npz")
    assert not is_name("photos") and not is_name("ViT-B_16.npz") and not is_name("x" * 5000)
    (tmp_path / "ViT-B" / "16").mkdir(parents=True)
    assert not is_name("ViT-B/16")
    status, _, err = run(capsys, "info", "ViT-B/16")
    assert status == 2 and "is a folder without a checkpoint's config.json" in err


def test_references_with_an_at_that_are_no_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert not is_name("runs/exp@2") and not is_name("photo@2x.jpg") and is_name("hf:owner/name@v1")
    for reference, message in (
        ("hf:owner/name@v1", "is not in the local cache"),
        ("https://host.invalid/w@2.npz", "downloads are disabled"),
        ("runs/exp@2", "There is no checkpoint 'runs/exp@2'"),
    ):
        status, _, err = run(capsys, "info", reference)
        assert status == 2 and message in " ".join(err.split()) and "There is no model" not in err, err


@pytest.mark.parametrize(
    ("reference", "hint"),
    [
        ("google/vit-base-patch16-224", "On the Hub it would be hf:google/vit-base-patch16-224."),
        ("vit_base_patch16_224", "Did you mean vit_base_patch16_224.augreg"),
        ("timm/vit_base_patch16_224", "Did you mean vit_base_patch16_224.augreg"),
        ("runs/nosuch", "There is no checkpoint 'runs/nosuch'. Give"),
    ],
)
def test_names_as_other_libraries_write_them(
    reference: str, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    status, _, err = run(capsys, "info", reference)
    assert status == 2 and hint in " ".join(err.split())


def test_names_of_runs() -> None:
    assert short_name("ViT-B/16") == "ViT-B-16" and short_name("ViT-B/16@mae") == "ViT-B-16-mae"
    assert short_name("weights/ViT-B_16.npz") == "ViT-B_16" and short_name("hf:owner/name") == "name"
    assert short_name("https://me:secret@host/folder/ViT-B_16.npz?signature=secret") == "ViT-B_16"
