"""Using a loaded checkpoint: predictions, zero-initialised and new heads, channels, image sizes, the Hub."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail
from tests.checkpoints.small_models import KINDS, bundle_of, images_for, needed_fields, random_model
from vitrail.checkpoints import write
from vitrail.data.preprocess import preset
from vitrail.errors import VitrailError
from vitrail.models import resize_grid


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    preprocess = preset("google-vit", size=(32, 32))
    vitrail.save(
        tmp_path / "ckpt", random_model(KINDS["plain"]), preprocess=preprocess, classes=("ant", "bee", "cat", "dog", "eel")
    )
    return tmp_path / "ckpt"


def noise_image(seed: int, size: tuple[int, int] = (40, 50)) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)


def test_predictions_are_the_softmax_after_the_stored_preprocessing(folder: Path, tmp_path: Path) -> None:
    bundle = vitrail.load(folder)
    assert bundle.preprocess is not None
    Image.fromarray(noise_image(0)).save(tmp_path / "a.png")
    predictions = bundle.predict([tmp_path / "a.png", noise_image(1), Image.fromarray(noise_image(2))], top=3)
    inputs = torch.stack([bundle.preprocess(noise_image(i)) for i in range(3)])
    expected = bundle.model(inputs).detach().softmax(dim=1)
    for row, found in zip(expected, predictions, strict=True):
        best = row.argsort(descending=True)[:3].tolist()
        assert [item.index for item in found] == best
        assert [item.label for item in found] == [("ant", "bee", "cat", "dog", "eel")[i] for i in best]
        assert [item.score for item in found] == pytest.approx([float(row[i]) for i in best], abs=1e-6)
    one = bundle.predict(str(tmp_path / "a.png"))
    assert len(one) == 1 and len(one[0]) == 5
    assert bundle.predict(inputs)[0][0] == predictions[0][0]


def test_predict_does_not_change_the_training_mode(folder: Path) -> None:
    bundle = vitrail.load(folder, dropout=0.5)
    bundle.model.train()
    assert bundle.predict(noise_image(0)) == bundle.predict(noise_image(0))
    assert bundle.model.training


def test_scores_depend_on_the_task(tmp_path: Path) -> None:
    model = random_model(KINDS["plain"])
    images = images_for(KINDS["plain"])
    for task in ("multilabel", "regress"):
        vitrail.save(tmp_path / task, model, task=task)
        row = vitrail.load(tmp_path / task).predict(images, top=5)[0]
        logits = model(images)[0]
        expected = logits if task == "regress" else logits.sigmoid()
        assert {item.index: item.score for item in row} == pytest.approx(dict(enumerate(expected.tolist())), abs=1e-6)


def test_labels_that_reach_their_thresholds_come_first(tmp_path: Path) -> None:
    """A label with a probability of 60 % and a threshold of 90 % is not one of the image's labels."""
    vitrail.save(
        tmp_path / "labels",
        random_model(KINDS["plain"]),
        task="multilabel",
        provenance={"task": {"kind": "multilabel", "thresholds": [0.9, 0.1, 0.2, 0.99, 0.5]}},
    )
    bundle = vitrail.load(tmp_path / "labels")
    outputs = torch.tensor([[0.6, 0.3, 0.35, 0.8, 0.1]]).logit()
    found = bundle.decode(outputs, top=4)[0]
    assert [(item.index, item.chosen) for item in found] == [(2, True), (1, True), (3, False), (0, False)]
    bundle.provenance = {}
    assert bundle.thresholds == (0.5,) * 5 and [item.index for item in bundle.decode(outputs, top=2)[0]] == [3, 0]


def test_a_zero_head_is_detected_and_does_not_predict(tmp_path: Path) -> None:
    bundle = bundle_of(KINDS["plain"])
    with torch.no_grad():
        for parameter in bundle.model.head.parameters():
            parameter.zero_()
    write(bundle, tmp_path / "i21k.npz", "google")
    loaded = vitrail.load(tmp_path / "i21k.npz")
    assert loaded.head == "zero"
    with pytest.raises(VitrailError, match=r"The head is all zeros: .*i21k\.npz is only a backbone.*finetune"):
        loaded.predict(noise_image(0))
    with pytest.raises(VitrailError, match="There is no head"):
        vitrail.Bundle.of(bundle_of(KINDS["no-head"])).predict(noise_image(0))
    assert bundle_of(KINDS["distilled"]).head == "set"


def test_preprocessing_of_another_size_than_the_models_is_refused(folder: Path, tmp_path: Path) -> None:
    bundle = vitrail.load(folder)
    size = bundle.model.config.image_size
    other = dataclasses.replace(bundle.stored_preprocess(), size=(size[0] + 16, size[1]))
    vitrail.save(tmp_path / "x", bundle.model, preprocess=other, classes=bundle.classes)
    loaded = vitrail.load(tmp_path / "x")
    with pytest.raises(VitrailError, match=rf"makes images of {size[0] + 16}×{size[1]} pixels .* takes {size[0]}×{size[1]} pixels"):
        loaded.predict(noise_image(0))
    assert vitrail.load(tmp_path / "x", preprocess="google-vit").predict(noise_image(0))


def test_missing_preprocessing_is_never_guessed(tmp_path: Path) -> None:
    vitrail.save(tmp_path / "x", random_model(KINDS["plain"]))
    with pytest.raises(VitrailError, match=r"No preprocessing is stored in .*preprocess='google-vit'"):
        vitrail.load(tmp_path / "x").predict(noise_image(0))
    assert vitrail.load(tmp_path / "x", preprocess="google-vit").predict(noise_image(0))
    with pytest.raises(VitrailError, match="no preprocessing 'gogle'"):
        vitrail.load(tmp_path / "x", preprocess="gogle")
    with pytest.raises(VitrailError, match="but the model takes"):
        vitrail.load(tmp_path / "x", preprocess=preset("timm", size=64))


def test_assumptions_are_noted(tmp_path: Path) -> None:
    write(bundle_of(KINDS["plain"]), tmp_path / "x.npz", "google")
    bundle = vitrail.load(tmp_path / "x.npz")
    assert bundle.preprocess == preset("google-vit", size=(32, 32))
    assert any("assumed 'google-vit'" in note for note in bundle.report.assumptions)


def test_replacing_the_head(folder: Path) -> None:
    bundle = vitrail.load(folder, outputs=10)
    assert bundle.model.config.outputs == 10 and bundle.classes is None and bundle.head == "zero"
    assert not bundle.model(images_for(KINDS["plain"])).any()
    assert "zero-initialised head with 10 outputs, was 5 outputs" in bundle.report.notes
    assert vitrail.load(folder, outputs=0).head == "none"
    assert vitrail.load(folder, outputs=3, classes=("x", "y", "z")).classes == ("x", "y", "z")
    with pytest.raises(VitrailError, match="5 outputs, but the list of classes has 2 names"):
        vitrail.load(folder, classes=("x", "y"))


def test_another_image_size_resamples_with_the_source_librarys_rule(tmp_path: Path) -> None:
    bundle = bundle_of(KINDS["plain"])
    for name, file, rule in (
        ("google", "g.npz", "reference"),
        ("timm", "t.safetensors", "timm"),
        ("torchvision", "v.pth", "torchvision"),
    ):
        write(bundle, tmp_path / file, name)
        loaded = vitrail.load(tmp_path / file, image_size=(48, 24), **needed_fields(KINDS["plain"]))
        table = bundle.model.positions.table.detach()  # type: ignore[union-attr]
        expected = resize_grid(table[:, 1:].reshape(1, 4, 4, -1), (6, 3), rule)  # type: ignore[arg-type]
        assert torch.equal(loaded.model.positions.table[:, 1:], expected.flatten(1, 2))  # type: ignore[union-attr]
        assert loaded.preprocess is not None and loaded.preprocess.size == (48, 24)
        assert any(f"rule '{rule}'" in note for note in loaded.report.notes)
        assert loaded.model(torch.randn(1, 3, 48, 24)).shape == (1, 5)


@pytest.mark.parametrize("kind", ["plain", "hybrid", "bit"])
def test_grey_input_with_the_sum_stem_is_exact_for_a_vit(kind: str, tmp_path: Path) -> None:
    vitrail.save(tmp_path / "x", random_model(KINDS[kind]), preprocess=preset("imagenet", size=KINDS[kind].image_size))
    with pytest.raises(VitrailError, match=r"3 input channels.*channels=1.*stem='sum'"):
        vitrail.load(tmp_path / "x", channels=1)
    colour, grey = vitrail.load(tmp_path / "x"), vitrail.load(tmp_path / "x", channels=1, stem="sum")
    image = torch.randn(2, 1, *KINDS[kind].image_size)
    if kind == "plain":
        torch.testing.assert_close(grey.model(image), colour.model(image.expand(-1, 3, -1, -1)), rtol=0, atol=1e-5)
    rescaled = any("weight standardisation rescales" in note for note in grey.report.notes)
    assert rescaled == (kind != "plain")
    assert grey.preprocess is not None and (grey.preprocess.channels, len(grey.preprocess.mean)) == (1, 1)
    assert any("with stem='sum'" in note for note in grey.report.notes)


def test_the_other_stem_rules(folder: Path) -> None:
    three = vitrail.load(folder).model.patches.weight  # type: ignore[union-attr]
    six = vitrail.load(folder, channels=6, stem="repeat").model
    assert torch.equal(six.patches.weight, torch.cat([three, three], dim=1) / 2)  # type: ignore[union-attr]
    fresh = vitrail.load(folder, channels=13, stem="random").model
    assert fresh.patches.weight.shape == (32, 13, 8, 8) and fresh.patches.weight.requires_grad  # type: ignore[union-attr]
    assert vitrail.load(folder, channels=3).report.notes == []
    with pytest.raises(VitrailError, match="it must be one of sum, repeat, random"):
        vitrail.load(folder, channels=1, stem="mean")  # type: ignore[arg-type]


def test_device_and_precision(folder: Path) -> None:
    bundle = vitrail.load(folder, device="cpu", dtype=torch.bfloat16)
    assert bundle.model.norm.weight.dtype is torch.bfloat16
    assert bundle.predict(noise_image(0))[0][0].score > 0
    with pytest.raises(VitrailError, match="it must be 'none', 'quick' or 'full'"):
        vitrail.load(folder, verify="some")  # type: ignore[arg-type]


# The Hub, from a hand-made cache and without a network


def cached(home: Path, name: str, fill: Path) -> None:
    """Store files as huggingface_hub caches them."""
    repository = home / "hub" / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / ("0123456789" * 4)
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0123456789" * 4)
    for item in fill.iterdir():
        (snapshot / item.name).write_bytes(item.read_bytes())


def offline(home: Path, code: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        environment.pop(variable, None)
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False, timeout=300)


@pytest.mark.slow
def test_hub_repositories_work_offline_from_the_cache(tmp_path: Path) -> None:
    bundle = bundle_of(KINDS["plain"])
    bundle.classes = tuple("abcde")
    expected = bundle.model(images_for(KINDS["plain"])).sum().item()
    for name in ("hf", "timm", "vitrail"):
        write(bundle, tmp_path / name, name)
        cached(tmp_path / "home", f"someone/{name}-vit", tmp_path / name)
    code = (
        "import json, torch, vitrail\n"
        "images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(7))\n"
        "out = {}\n"
        "for name in ('hf', 'timm', 'vitrail'):\n"
        "    b = vitrail.load(f'hf:someone/{name}-vit')\n"
        "    out[name] = [b.report.format, float(b.model(images).sum()), b.classes, b.preprocess.resize]\n"
        "print(json.dumps(out))\n"
    )
    done = offline(tmp_path / "home", code)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    for name in ("hf", "timm", "vitrail"):
        assert found[name] == [name, pytest.approx(expected, abs=1e-4), list("abcde"), "short-side"]


@pytest.mark.slow
def test_a_clear_error_for_what_is_not_in_the_cache(tmp_path: Path) -> None:
    code = (
        "import vitrail\n"
        "for name in ('someone/absent', 'not a name!'):\n"
        "    try:\n"
        "        vitrail.load(f'hf:{name}')\n"
        "    except vitrail.VitrailError as error:\n"
        "        print(error)\n"
    )
    done = offline(tmp_path, code)
    assert done.returncode == 0, done.stderr
    assert (
        "hf:someone/absent is not in the local cache" in done.stdout and "'not a name!' is not a repository's name" in done.stdout
    )
