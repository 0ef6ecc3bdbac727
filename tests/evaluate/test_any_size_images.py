"""Folders of images of many sizes: each image keeps its aspect ratio, and gets the answer of a model resized for it alone."""

from __future__ import annotations

import copy
import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail
from vitrail.checkpoints import Bundle, Prediction, load, save
from vitrail.data import open_source
from vitrail.errors import VitrailError
from vitrail.evaluate import (
    EvalContext,
    FeatureSpec,
    FewShotSpec,
    ProbeSpec,
    embed,
    evaluate,
    few_shot,
    load_embeddings,
    predict,
    probe,
)
from vitrail.models import ViT, ViTConfig

ANY = EvalContext(batch=4, workers=0, bad_images="skip", any_size=True)


def resized_for(bundle: Bundle, file: Path, max_size: int = 64) -> Bundle:
    """A bundle for this one image: its model resized, and a plain stretch to that size."""
    height, width = Image.open(file).size[::-1]
    factor = min(32 / min(height, width), max_size / max(height, width))
    size = tuple(min(max(8, int(side * factor / 8 + 0.5) * 8), max_size // 8 * 8) for side in (height, width))
    assert bundle.preprocess is not None
    model = copy.deepcopy(bundle.model).resize(size)
    preprocess = dataclasses.replace(bundle.preprocess, size=size, resize="square", resize_to=None)
    return dataclasses.replace(bundle, model=model, preprocess=preprocess)


def same(ours: tuple[Prediction, ...] | list[Prediction], theirs: list[Prediction]) -> None:
    by_index = {one.index: one.score for one in theirs}
    assert [one.score for one in ours] == pytest.approx([by_index[one.index] for one in ours], abs=1e-5)


@pytest.fixture
def mixed(photos: Path, tmp_path: Path) -> Path:
    for number, file in enumerate(sorted((photos / "val").rglob("*.jpg"))[::2]):
        shutil.copy(file, tmp_path / f"{number:02d}.jpg")
    for number in (3, 7, 11):  # these need a long side beyond the limit
        Image.open(tmp_path / f"{number:02d}.jpg").resize((200, 20 + number)).save(tmp_path / f"{number:02d}.jpg")
    (tmp_path / "05.jpg").write_text("I am a text")
    content = (tmp_path / "09.jpg").read_bytes()
    (tmp_path / "09.jpg").write_bytes(content[: len(content) // 2])
    return tmp_path


@pytest.mark.parametrize("fields", [{"batch": 1}, {"batch": 4, "workers": 2}, {"batch": 64}, {"max_size": 40}], ids=str)
def test_predictions_of_a_folder_are_those_of_one_image_at_a_time(
    bundle: vitrail.Bundle, mixed: Path, fields: dict[str, int]
) -> None:
    context = dataclasses.replace(ANY, **fields)
    found = list(predict(bundle, [mixed], top=4, context=context))
    files = sorted(mixed.glob("*.jpg"))
    assert [Path(one.name) for one in found] == files
    assert [n for n, one in enumerate(found) if one.error] == [5, 9] and "text file" in str(found[5].error)
    differ = 0
    for one, file in zip(found, files, strict=True):
        if one.error is None:
            alone = resized_for(bundle, file, context.max_size or 64)
            same(one.predictions, alone.predict(file, top=4)[0])
            [square] = bundle.predict(file, top=1)
            differ += abs(square[0].score - {p.index: p.score for p in one.predictions}[square[0].index]) > 1e-3
    assert differ > 5  # so that a model that still saw squares would be noticed
    assert isinstance(bundle.model.config, ViTConfig) and not bundle.model.config.any_size


def test_python_and_the_command_agree(bundle: vitrail.Bundle, mixed: Path) -> None:
    files = [file for file in sorted(mixed.glob("*.jpg")) if file.stem not in ("05", "09")]
    for ours, one in zip(bundle.predict(files, top=4, any_size=True), predict(bundle, files, top=4, context=ANY), strict=True):
        same(ours, list(one.predictions))
    tensor = torch.rand(2, 3, 16, 56)
    with torch.no_grad():
        expected = bundle.decode(copy.deepcopy(bundle.model).resize((16, 56))(tensor), 2)
    for ours, theirs in zip(bundle.predict(tensor, top=2, any_size=True), expected, strict=True):
        same(ours, theirs)
    with pytest.raises(VitrailError, match="Add any_size"):
        bundle.predict(files, max_size=40)


def test_threads_and_worker_processes_give_the_same_in_the_same_order(bundle: Bundle, photos: Path) -> None:
    split = open_source(f"folder:{photos}").split("val")
    assert bundle.preprocess is not None
    context = dataclasses.replace(ANY, batch=3)
    model = context.prepare(bundle.model)
    threaded = list(context.run(split, bundle.preprocess, model, model.__call__))
    sequential = list(context.run(split, bundle.preprocess, model, model.__call__)._sequential())
    indices = [index for _, batch in threaded for index in batch.indices.tolist()]
    assert indices == list(range(36))
    for (ours, batch), (theirs, other) in zip(threaded, sequential, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-6) and torch.equal(batch.indices, other.indices)
        assert torch.equal(batch.targets, torch.from_numpy(split.targets[batch.indices.numpy()]))
        assert torch.equal(batch.targets, other.targets)


@pytest.mark.parametrize("spec", [FeatureSpec(), FeatureSpec(feature="mean", layer=0, norm=False)], ids=str)
def test_embeddings_are_those_of_resized_models(bundle: Bundle, mixed: Path, tmp_path: Path, spec: FeatureSpec) -> None:
    found = embed(bundle, [mixed], spec, ANY)
    assert len(found.names) == len(list(mixed.glob("*.jpg"))) - 2 and [Path(one.name).stem for one in found.bad] == ["05", "09"]
    for name, row in zip(found.names, found.features, strict=True):
        alone = embed(resized_for(bundle, Path(name)), [name], spec)
        np.testing.assert_allclose(row, alone.features[0], atol=2e-6)
    found.save(tmp_path / "e.npz")
    again = load_embeddings(tmp_path / "e.npz").with_images([found.names[3]])  # embedded again, as the file says
    np.testing.assert_allclose(again.features[-1], found.features[3], atol=2e-6)


def test_grids_of_patches_do_not_fit_into_one_array(bundle: Bundle, mixed: Path) -> None:
    with pytest.raises(VitrailError, match="do not fit into one array"):
        embed(bundle, [mixed], FeatureSpec(feature="patches"), ANY)


def test_evaluation_counts_every_image_once(bundle: Bundle, photos: Path) -> None:
    result = evaluate(bundle, f"folder:{photos}", context=ANY)
    assert result.images == 36 and result.preprocess.resize == "keep-aspect"
    larger = evaluate(bundle, f"folder:{photos}", image_size=48, context=ANY)
    assert larger.images == 36 and larger.preprocess.resize_to == 48


def test_a_resnet_needs_no_positions(photos: Path) -> None:
    model = vitrail.create_model("BiT-R50x1", outputs=4, image_size=32, layers=(1, 1), seed=0)
    torch.nn.init.normal_(model.head.weight)  # type: ignore[arg-type]
    made = dataclasses.replace(
        vitrail.load("vitrail-ti8-tiny-imagenet"),
        model=model.eval(),
        classes=None,
        preprocess=vitrail.data.preset("google-vit", size=32),
    )
    files = sorted((photos / "val" / "red").glob("*.jpg"))
    for ours, one in zip(made.predict(files, any_size=True), predict(made, files, context=ANY), strict=True):
        same(ours, list(one.predictions))


def test_a_loaded_model_takes_any_size_and_a_saved_one_remembers_it(checkpoint: Path, tmp_path: Path) -> None:
    plain, anything = load(checkpoint), load(checkpoint, any_size=True)
    assert isinstance(plain.model, ViT) and isinstance(anything.model, ViT)
    images = torch.rand(2, 3, 16, 56)
    with torch.no_grad():
        torch.testing.assert_close(anything.model(images), plain.model.resize((16, 56))(images), atol=1e-6, rtol=1e-6)
    save(tmp_path / "saved", anything.model, preprocess=anything.preprocess, classes=anything.classes)
    again = load(tmp_path / "saved", verify="full").model
    assert isinstance(again, ViT) and again.config.any_size and again.config.image_size == (32, 32)


def test_results_record_the_preprocessing_that_was_used(bundle: vitrail.Bundle, photos: Path) -> None:
    context, reference = dataclasses.replace(ANY, bad_images="error"), f"folder:{photos}"
    probed = probe(bundle, reference, spec=ProbeSpec(l2=(1.0,)), context=context)
    shots = few_shot(bundle, reference, protocol=FewShotSpec(shots=(1,), seeds=1), context=context)
    assert probed.preprocess == shots.preprocess == evaluate(bundle, reference, context=context).preprocess
    assert probed.preprocess.resize == "keep-aspect"
