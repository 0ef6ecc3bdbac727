"""The table of published weights, against timm's registry and timm's own models."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch

from tests.checkpoints.hub_files import timm_config_json
from vitrail.checkpoints import published
from vitrail.checkpoints.archive import Archive, StoredTensor
from vitrail.checkpoints.infer_config import Hints, Shapes
from vitrail.checkpoints.mapping import rows_of, unmapped
from vitrail.checkpoints.published import PublishedWeights, find, published_weights
from vitrail.checkpoints.timm import TIMM
from vitrail.errors import VitrailError
from vitrail.models import BiTConfig, build_model
from vitrail.models.variants import model_config

HUB = [one for one in published_weights() if one.repository]


def timm_name(one: PublishedWeights) -> str:
    return one.source.removeprefix("hf:timm/")


@pytest.mark.parametrize("one", HUB, ids=lambda one: one.reference)
def test_every_entry_is_in_timms_registry(one: PublishedWeights) -> None:
    config = timm.get_pretrained_cfg(timm_name(one))
    hub_id = config.hf_hub_id if not config.hf_hub_id.endswith("/") else f"{config.hf_hub_id}{timm_name(one)}"
    assert one.repository == hub_id
    assert (one.outputs, one.image_size, one.licence) == (config.num_classes, config.input_size[-1], config.license)


@pytest.mark.slow
@pytest.mark.parametrize("one", HUB, ids=lambda one: one.reference)
def test_our_reader_takes_every_entry(one: PublishedWeights) -> None:
    """Build timm's model without memory, and infer ours from the shapes and the config.json that it has on the Hub."""
    with torch.device("meta"):
        theirs = timm.create_model(timm_name(one), pretrained=False)
        state = {
            name: StoredTensor(tuple(tensor.shape), tensor.dtype, tensor.clone) for name, tensor in theirs.state_dict().items()
        }
        archive = Archive(path=None, kind="safetensors", tensors=state)  # type: ignore[arg-type]
        TIMM.normalise_names(archive)
        config = TIMM.infer_config(Shapes(archive), Hints(config=timm_config_json(timm_name(one))))
        ours = build_model(config)
        rows = rows_of(TIMM.rows(config), ours)
    assert unmapped(rows, ours) == []
    assert {name for row in rows for name in row.theirs} == set(state)
    numbers = [sum(p.numel() for p in model.parameters()) for model in (ours, theirs)]
    assert numbers == [one.parameters, one.parameters] and config.outputs == one.outputs
    assert config.name == one.name
    assert isinstance(config, BiTConfig) or config.image_size == (one.image_size, one.image_size)


def test_defaults() -> None:
    for name in published.names():
        known = published.tags(name)
        best = [one for one in known if one.outputs == 1000]
        assert known[0] in best or not best, f"{name}: the default cannot classify ImageNet-1k, but others can"
        if any(one.tag == "augreg-in21k-ft-in1k" for one in known):
            assert known[0].tag == "augreg-in21k-ft-in1k"
    assert len({one.reference for one in published_weights()}) == len(published_weights())
    assert all(one.tag == one.tag.casefold() and "_" not in one.tag for one in published_weights())


@pytest.mark.parametrize(
    ("word", "reference"),
    [
        ("ViT-B/16", "ViT-B/16@augreg-in21k-ft-in1k"),
        ("b/16", "ViT-B/16@augreg-in21k-ft-in1k"),
        ("ViT-B_16@mae", "ViT-B/16@mae"),
        ("ViT-B/16@augreg_in21k_ft_in1k", "ViT-B/16@augreg-in21k-ft-in1k"),
        ("vit_base_patch16_224.orig_in21k", "ViT-B/16@orig-in21k"),
        ("timm/vit_small_patch14_reg4_dinov2.lvd142m", "ViT-S/14@dinov2-reg4"),
        ("R50+ViT-B/16", "R50+ViT-B/16@orig-in21k-ft-in1k-384"),
        ("r50x1", "BiT-R50x1@goog-in21k-ft-in1k"),
        ("BiT-R50x1@goog-in1k", "BiT-R50x1@goog-in1k"),
    ],
)
def test_names(word: str, reference: str) -> None:
    found = find(word)
    assert found is not None and found.reference == reference


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("ViT-B/20", r"no published weights of ViT-B/20\. There are weights of ViT-B/8, ViT-B/14, ViT-B/16 and ViT-B/32\."),
        ("R50+ViT-L/16", r"no published weights of R50\+ViT-L/16\. There are weights of R50\+ViT-L/32\."),
        ("BiT-R50x5", r"no published weights of BiT-R50x5\. There are weights of .*BiT-R50x1"),
        ("ViT-B/16@ma", r"no published weights tagged 'ma'\. Did you mean mae\?.*Its tags are augreg-in21k-ft-in1k,"),
        ("ViT-B/16@augreg", r"could be 6 tags: augreg-in21k-ft-in1k, .*Write one of them in full"),
        ("ViT-B/16@", r"tag after ViT-B/16@ is missing\..*without @ it is augreg-in21k-ft-in1k"),
        ("ViT-Q/16@mae", r"There is no model 'ViT-Q/16'"),
        ("Q/16@mae", r"There is no model 'Q/16'"),
        ("vit-g/15@mae", r"no published weights of ViT-g/15|capitals matter"),
        ("vit-g/14", "capitals matter|no published weights of ViT-g/14"),
    ],
)
def test_what_does_not_exist_is_a_sentence_with_what_does(word: str, message: str) -> None:
    with pytest.raises(VitrailError, match=message):
        find(word)


def test_other_words_are_left_to_paths() -> None:
    assert find("runs/first") is None and find("ViT-B_16.npz") is None and find("digits") is None
    paths = ("runs/exp@2", "photo@2x.jpg", "runs/ViT-B/16@mae/model", "me@host", "@", "", "timm/", "timm/@x")
    for word in (*paths, "hf:owner/name@main", "hf:ViT-B/16@mae", "https://me@host/ViT-B/16@mae", "http://host/w@2.npz"):
        assert find(word) is None, word


@pytest.mark.parametrize("one", [one for one in published_weights() if not one.repository], ids=lambda one: one.reference)
def test_files_of_googles_have_the_size_of_the_model(one: PublishedWeights) -> None:
    with torch.device("meta"):
        model = build_model(model_config(one.name, outputs=one.outputs, image_size=one.image_size))
    assert sum(parameter.numel() for parameter in model.parameters()) == one.parameters
    assert one.source.endswith(f"{one.name.removeprefix('BiT-').replace('/', '_')}.npz") and one.class_set == "1k"


def test_published_accuracies_are_plausible() -> None:
    """Top-1 below top-5, only of weights with ImageNet-1k's classes, larger images better within a family."""
    by_reference = {one.reference: one for one in published_weights()}
    for one in published_weights():
        if one.top1 is not None:
            assert one.outputs == 1000 and one.top5 is not None and 60 < one.top1 < one.top5 < 99
        larger: Any = by_reference.get(f"{one.reference}-384")
        if larger is not None and one.top1 is not None:
            assert larger.top1 > one.top1 and larger.image_size == 384
    assert by_reference["ViT-B/16@augreg-in21k-ft-in1k"].top1 == 84.532  # the row of timm's file, once by hand
    assert by_reference["ViT-B/16@deit-in1k"].megabytes == pytest.approx(346.3, abs=0.1)
