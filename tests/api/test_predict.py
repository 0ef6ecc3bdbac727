"""`bundle.predict` and `embed`: everything that can be given, test-time augmentation, and copies that are never out of date."""

from __future__ import annotations

import copy
import io
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import vitrail
from tests.evaluate.conftest import backbone, checkpoint, photos, tiny_model  # noqa: F401 - fixtures
from vitrail.api.images import is_source
from vitrail.cli import main
from vitrail.data import BadImage, open_source, preset
from vitrail.errors import VitrailError


@pytest.fixture
def bundle(checkpoint: Path) -> vitrail.Bundle:  # noqa: F811
    return vitrail.load(checkpoint)


@pytest.fixture
def files(photos: Path) -> list[Path]:  # noqa: F811
    return sorted((photos / "val").rglob("*.jpg"))[:3]


def logits(bundle: vitrail.Bundle, images: Tensor) -> Tensor:
    with torch.no_grad():
        return bundle.model.eval()(images)


def test_every_kind_of_image_gives_the_same_predictions(bundle: vitrail.Bundle, files: list[Path]) -> None:
    pictures = [Image.open(file).convert("RGB") for file in files]
    arrays = [np.asarray(picture) for picture in pictures]
    inputs = torch.stack([bundle.stored_preprocess()(file) for file in files])
    expected = bundle.decode(logits(bundle, inputs), top=2)
    kinds = {
        "paths": files,
        "strings": [str(file) for file in files],
        "contents": [file.read_bytes() for file in files],
        "Pillow images": pictures,
        "arrays": arrays,
        "uint8 tensors": [torch.from_numpy(array.copy()).permute(2, 0, 1) for array in arrays],
        "preprocessed": inputs,
        "preprocessed, one by one": list(inputs),
        "a generator": (file for file in files),
        "mixed": [files[0], pictures[1], arrays[2]],
    }
    for name, images in kinds.items():
        found = bundle.predict(images, top=2)
        assert [[one.index for one in row] for row in found] == [[one.index for one in row] for row in expected], name
        scores = [one.score for row in found for one in row]
        assert scores == pytest.approx([one.score for row in expected for one in row], abs=1e-5), name
    assert bundle.predict(files).names == tuple(map(str, files))
    assert bundle.predict(kinds["mixed"]).names == (str(files[0]), "image 1", "image 2")
    for one in (files[0], str(files[0]), pictures[0], arrays[0], inputs[0], files[0].read_bytes()):
        assert bundle.predict(one, top=1).labels == [expected[0][0].label]


def test_stacked_arrays_folders_sources_and_splits(bundle: vitrail.Bundle, photos: Path, tmp_path: Path) -> None:  # noqa: F811
    stack = np.random.default_rng(0).integers(0, 256, (3, 20, 24, 3), dtype=np.uint8)
    assert bundle.predict(stack) == bundle.predict(list(stack)) == bundle.predict(torch.from_numpy(stack).permute(0, 3, 1, 2))
    folder = bundle.predict(photos / "val")
    assert len(folder) == 36 and all(Path(name).is_file() for name in folder.names)
    source = bundle.predict(f"folder:{photos}", top=1, split="val")
    assert len(source) == 36 and sorted(source.labels) == sorted(bundle.predict(photos / "val", top=1).labels)
    opened = open_source(f"folder:{photos}")
    assert len(bundle.predict(opened, split="train")) == 48 and bundle.predict(opened.split("val"), top=1) == source
    assert len(bundle.predict([opened, photos / "val" / "red"], split="train")) == 48 + 9
    table = tmp_path / "table.csv"
    table.write_text("image,label\n" + "".join(f"{file},red\n" for file in sorted((photos / "val" / "red").glob("*.jpg"))))
    assert is_source(table) and is_source("digits") and is_source("digits?classes=0-4") and is_source("folder:x")
    assert is_source(f"{table}?task=classify") and not is_source("x" * 300)
    assert not is_source(photos) and not is_source("photos") and not is_source(3) and not is_source("C:\\photos")


def test_a_source_by_name_has_all_its_images_as_in_the_command(
    bundle: vitrail.Bundle,
    photos: Path,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    bundle.save(tmp_path / "checkpoint")
    table = tmp_path / "unlabelled.csv"
    table.write_text("image\n" + "".join(f"{file}\n" for file in sorted((photos / "val" / "red").glob("*.jpg"))[::-1]))
    for source, images in ((f"folder:{photos}", 84), (str(table), 9)):
        with pytest.raises(SystemExit, match="0"):
            main(["predict", str(tmp_path / "checkpoint"), source, "--json", "--precision", "fp32"])
        printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert printed == bundle.predict(source).to_dicts() and len(printed) == images
        assert bundle.embed(source).names == tuple(one["image"] for one in printed)


def test_a_split_without_a_source_is_an_error(bundle: vitrail.Bundle, files: list[Path]) -> None:
    for images in (files, torch.zeros(1, 3, 32, 32)):
        with pytest.raises(VitrailError, match="split='train' selects a split of a data source"):
            bundle.predict(images, split="train")


def test_what_is_not_an_image_is_named(bundle: vitrail.Bundle, files: list[Path], tmp_path: Path) -> None:
    assert bundle.predict([]) == []
    mistakes = {
        r"type int is not an image\. Pass paths": 3,
        r"array \(4, 4, 3\) of float32 is not an image\. .* as uint8": np.zeros((4, 4, 3), np.float32),
        r"tensor \(4, 4\) of torch\.int64 is not an image": torch.zeros(4, 4, dtype=torch.int64),
        r"shape \(5,\) was given; \[images, channels": torch.zeros(5),
        r"given together": [files[0], torch.zeros(3, 32, 32)],
        r"several shapes": [torch.zeros(3, 32, 32), torch.zeros(3, 64, 64)],
        r"no file or folder nowhere": "nowhere",
    }
    for text, images in mistakes.items():
        with pytest.raises(VitrailError, match=text):
            bundle.predict(images)
    with pytest.raises(VitrailError, match="top is 0"):
        bundle.predict(files, top=0)


def test_bad_images_are_errors_or_empty_rows(bundle: vitrail.Bundle, files: list[Path], tmp_path: Path) -> None:
    (tmp_path / "bad.jpg").write_text("no picture")
    images = [files[0], tmp_path / "bad.jpg", files[1]]
    with pytest.raises(BadImage, match=r"bad\.jpg: a text file"):
        bundle.predict(images)
    found = bundle.predict(images, bad_images="skip")
    assert [len(row) for row in found] == [4, 0, 4] and found.labels[1] is None
    assert [(one.name, "text file" in one.reason) for one in found.bad] == [(str(tmp_path / "bad.jpg"), True)]
    assert "could not be read" in repr(found) and "text file" in found.to_dicts()[1]["error"]
    embeddings = bundle.embed(images, bad_images="skip")
    assert len(embeddings) == 2 and len(embeddings.bad) == 1


@pytest.mark.parametrize("task", ["classify", "multilabel", "regress"])
def test_flip_averaging_is_the_mean_over_the_image_and_its_mirror_image(task: str, tmp_path: Path) -> None:
    model = tiny_model(outputs=3)
    nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(0))
    vitrail.save(tmp_path / "x", model, preprocess=preset("google-vit", size=32), task=task)
    bundle = vitrail.load(tmp_path / "x")
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    activation = {"classify": lambda x: x.softmax(1), "multilabel": torch.sigmoid, "regress": lambda x: x}[task]
    expected = (activation(logits(bundle, images)) + activation(logits(bundle, images.flip(-1)))) / 2
    found = bundle.predict(images, top=3, tta=True)
    plain = bundle.predict(images, top=3)
    for row, (values, without) in zip(expected, zip(found, plain, strict=True), strict=True):
        assert {one.index: one.score for one in values} == pytest.approx(dict(enumerate(row.tolist())), abs=1e-6, rel=1e-6)
        assert {one.index: one.score for one in without} != pytest.approx(dict(enumerate(row.tolist())), abs=1e-4)


def test_flip_averaging_does_not_round_sure_predictions(bundle: vitrail.Bundle) -> None:
    from vitrail.evaluate.flip_average import flip_average

    bundle.task = "multilabel"
    sure = torch.tensor([[30.0, -30.0, 0.0]])
    found = flip_average(bundle, lambda images: sure)(torch.zeros(1, 3, 2, 2))  # type: ignore[arg-type]
    torch.testing.assert_close(found, sure)


def test_a_kept_copy_is_made_again_after_any_change(bundle: vitrail.Bundle) -> None:
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    before = bundle.predict(images)
    assert bundle.predict(images) == before
    kept = bundle._kept._latest
    bundle.predict(images)
    assert bundle._kept._latest is kept, "nothing changed"
    with torch.no_grad():
        bundle.model.head.bias.add_(torch.tensor([9.0, 0, 0, 0]))
    after = bundle.predict(images)
    assert after.labels == ["blue", "blue"] and after != before
    bundle.model.head.bias.data.copy_(torch.tensor([0, 0, 0, 30.0]))  # has no version
    assert bundle.predict(images).labels == ["yellow", "yellow"]
    bundle.model.blocks[0].mlp.up.weight.data.neg_()  # has the same norm
    changed = bundle.predict(images)
    assert changed[0][0].score != after[0][0].score and bundle._kept._latest is not kept
    seen: list[tuple[int, ...]] = []
    bundle.model.head.register_forward_pre_hook(lambda module, inputs: seen.append(tuple(inputs[0].shape)))
    bundle.predict(images)
    assert seen, "a hook that is added later runs, too"


def test_features_of_files_and_tensors(bundle: vitrail.Bundle, backbone: Path, files: list[Path]) -> None:  # noqa: F811
    inputs = torch.stack([bundle.stored_preprocess()(file) for file in files])
    with torch.no_grad():
        expected = bundle.model.eval().features(inputs).pre_logits.numpy()
    for images in (files, inputs):
        found = bundle.embed(images)
        np.testing.assert_allclose(np.asarray(found), expected, atol=1e-5)
        assert len(found) == 3 and found.about["model"] == bundle.model.config.name
    assert bundle.embed(files, feature="patches", layer=0, norm=False).features.shape == (3, 4, 4, 48)
    assert bundle.embed(files[0]).names == (str(files[0]),) and vitrail.load(backbone).embed(files[0]).features.shape == (1, 48)
    with pytest.raises(VitrailError, match="only a backbone"):
        vitrail.load(backbone).predict(files)
    with pytest.raises(VitrailError, match="no images"):
        bundle.embed(inputs[:0])


def test_saved_bundles_load_again(bundle: vitrail.Bundle, files: list[Path], tmp_path: Path) -> None:
    bundle.save(tmp_path / "copy")
    again = vitrail.load(tmp_path / "copy", verify="full")
    assert again.predict(files) == bundle.predict(files) and again.classes == bundle.classes
    bundle.classes_assumed = True
    bundle.save(tmp_path / "copy")
    assert vitrail.load(tmp_path / "copy").classes is None and bundle.classes is not None


def test_rotated_photos_are_reported_once(tmp_path: Path, caplog: pytest.LogCaptureFixture, checkpoint: Path) -> None:  # noqa: F811
    bundle, content = vitrail.load(checkpoint, preprocess="timm"), io.BytesIO()
    exif = Image.Exif()
    exif[274] = 6
    Image.new("RGB", (40, 30)).save(content, "JPEG", exif=exif)
    bundle.predict([content.getvalue()] * 3)
    assert sum("stored rotated" in one.getMessage() for one in caplog.records) == 1


def _patch_forward(model: nn.Module) -> None:
    model.blocks[0].forward = lambda x, *rest: x


def _raise_epsilon(model: nn.Module) -> None:
    model.norm.eps = 100.0


def _swap_biases(model: nn.Module) -> None:
    values = model.head.bias.detach().numpy()  # writes through NumPy have no version; norm and sum stay the same
    values[0], values[1] = float(values[1]), float(values[0])


@pytest.mark.parametrize("change", [_patch_forward, _raise_epsilon, _swap_biases])
def test_a_kept_copy_follows_changes_that_torch_does_not_count(bundle: vitrail.Bundle, change: Callable[[nn.Module], None]) -> None:
    with torch.no_grad():
        bundle.model.head.bias.copy_(torch.tensor([1.0, 3.0, 0.0, 0.0]))
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    before = bundle.predict(images, top=4)
    change(bundle.model)
    found, expected = bundle.predict(images, top=4), bundle.decode(logits(bundle, images), top=4)
    assert found != before
    assert [[one.index for one in row] for row in found] == [[one.index for one in row] for row in expected]
    assert [one.score for row in found for one in row] == pytest.approx([one.score for row in expected for one in row], abs=1e-5)


def test_copies_and_pickles_of_a_bundle_leave_the_kept_copy_behind(bundle: vitrail.Bundle) -> None:
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    size = len(pickle.dumps(bundle))
    expected = bundle.predict(images)
    assert abs(len(pickle.dumps(bundle)) - size) < 1000
    for one in (copy.deepcopy(bundle), pickle.loads(pickle.dumps(bundle))):
        assert one._kept._latest is None and one.predict(images) == expected
        with torch.no_grad():
            one.model.head.weight.zero_()[0] = 1
        assert bundle.predict(images) == expected != one.predict(images)


def test_threads_with_several_precisions_each_get_their_own(bundle: vitrail.Bundle) -> None:
    """The copy of one call is never handed to another call that asked for something else in between."""
    kept = bundle._kept
    first, second = tiny_model(outputs=2), tiny_model(outputs=3)

    def make_first() -> nn.Module:
        assert kept.get("second", lambda: second) is second  # as another thread does meanwhile
        return first

    assert kept.get("first", make_first) is first
    assert kept.get("first", lambda: second) is first


def test_names_that_are_not_unicode_are_in_tables(bundle: vitrail.Bundle, files: list[Path], tmp_path: Path) -> None:
    odd = os.fsdecode(os.fsencode(tmp_path) + b"/\xff.jpg")
    try:
        Path(odd).write_bytes(files[0].read_bytes())
    except OSError:
        pytest.skip("this file system has Unicode names only")
    assert bundle.predict(odd, top=1).to_pandas()["image"].tolist() == [odd]
    assert bundle.embed([odd]).to_pandas()["image"].tolist() == [odd]


def test_an_unknown_device_is_a_sentence(bundle: vitrail.Bundle, files: list[Path]) -> None:
    with pytest.raises(VitrailError, match="There is no device 'tpu'"):
        bundle.predict(files, device="tpu")
