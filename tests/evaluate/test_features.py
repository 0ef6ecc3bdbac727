"""Features by name: what they are is checked against the model's own parts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import vitrail
from vitrail.checkpoints import Bundle
from vitrail.data import open_source
from vitrail.errors import VitrailError
from vitrail.evaluate.features import FeatureSpec, extract
from vitrail.evaluate.running import Running
from vitrail.models import Model

IMAGES = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def small(**changes: object) -> Model:
    sizes = {"image_size": 32, "width": 48, "depth": 3, "heads": 3, "mlp": 96, "seed": 0, "outputs": 5}
    model = vitrail.create_model("ViT-Ti/8", **{**sizes, **changes}).eval()  # type: ignore[arg-type]
    with torch.no_grad():  # a norm that does something
        model.norm.weight.uniform_(0.5, 2, generator=torch.Generator().manual_seed(1))
        model.norm.bias.normal_(generator=torch.Generator().manual_seed(2))
    return model


@torch.no_grad()
def test_the_last_layer_normed_is_what_the_model_pools() -> None:
    model = small(pre_logits=20)
    everything = model.features(IMAGES)
    assert torch.equal(FeatureSpec(what="class").of(model, IMAGES), everything.pooled)
    assert torch.equal(FeatureSpec().of(model, IMAGES), everything.pre_logits) and everything.pre_logits.shape == (3, 20)
    assert torch.allclose(FeatureSpec(what="mean").of(model, IMAGES), everything.patches.mean((1, 2)), atol=1e-6)
    assert torch.equal(FeatureSpec(what="patches").of(model, IMAGES), everything.patches)
    assert FeatureSpec(what="patches").of(model, IMAGES).shape == (3, 4, 4, 48)


@torch.no_grad()
def test_norm_comes_where_the_model_has_it() -> None:
    after = small(pooling="mean", final_norm="after-pool", registers=2)
    assert torch.allclose(FeatureSpec(what="mean").of(after, IMAGES), after.features(IMAGES).pooled, atol=1e-6)
    raw = FeatureSpec(what="mean", norm=False).of(after, IMAGES)
    assert torch.allclose(after.norm(raw), after.features(IMAGES).pooled, atol=1e-6)
    before = small()
    tokens = before.features(IMAGES, layers=[1]).layers[1]
    assert torch.equal(FeatureSpec(what="class", layer=1, norm=False).of(before, IMAGES), tokens[:, 0])
    assert torch.allclose(FeatureSpec(what="mean", layer=-2).of(before, IMAGES), before.norm(tokens)[:, 1:].mean(1), atol=1e-6)


@torch.no_grad()
def test_a_resnet_has_maps_and_no_class_token() -> None:
    model = vitrail.create_model("BiT-R26x1", outputs=5, image_size=32, layers=(1, 1), seed=0).eval()
    assert torch.allclose(FeatureSpec(what="mean").of(model, IMAGES), model.features(IMAGES).pooled, atol=1e-6)
    assert FeatureSpec(what="patches", layer=0, norm=False).of(model, IMAGES).shape == (3, 8, 8, 256)
    for wrong, words in ((FeatureSpec(what="class"), "class token"), (FeatureSpec(what="mean", layer=0), "--no-norm")):
        with pytest.raises(VitrailError, match=words):
            wrong.check(model)


def test_features_that_do_not_exist() -> None:
    with pytest.raises(VitrailError, match="layer 3 take class, mean or patches"):
        FeatureSpec(layer=3)
    with pytest.raises(VitrailError, match="comes after the final norm"):
        FeatureSpec(what="pooled", norm=False)
    with pytest.raises(VitrailError, match="'map' is none of them"):
        FeatureSpec(what="map")  # type: ignore[arg-type]
    with pytest.raises(VitrailError, match="no class token"):
        FeatureSpec(what="class").check(small(pooling="mean"))
    with pytest.raises(VitrailError, match="There is no layer 7"):
        FeatureSpec(what="mean", layer=7).of(small(), IMAGES)


def test_extraction_keeps_order_and_names_what_is_missing(bundle: Bundle, photos: Path) -> None:
    split = open_source(f"folder:{photos}").split("val")
    assert bundle.preprocess is not None
    found = extract(bundle.model, split, bundle.preprocess, FeatureSpec(), Running(batch=7, workers=2))
    one = bundle.preprocess(split.payload(20))[None]
    with torch.no_grad():
        expected = bundle.model.features(one).pre_logits[0].numpy()
    assert found.features.shape == (36, 48) and found.features.dtype == np.float32 and (found.indices == np.arange(36)).all()
    assert np.abs(found.features[20] - expected).max() < 1e-5
