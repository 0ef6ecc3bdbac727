"""Every feature equals the part of the model that it names."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import vitrail
from vitrail.checkpoints import Bundle
from vitrail.data import open_source
from vitrail.errors import VitrailError
from vitrail.evaluate.context import EvalContext
from vitrail.evaluate.features import extract_features
from vitrail.evaluate.settings import FeatureSpec
from vitrail.models import Model

IMAGES = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def small(**changes: object) -> Model:
    sizes = {"image_size": 32, "width": 48, "depth": 3, "heads": 3, "mlp": 96, "seed": 0, "outputs": 5}
    model = vitrail.create_model("ViT-Ti/8", **{**sizes, **changes}).eval()  # type: ignore[arg-type]
    with torch.no_grad():  # a norm that is not the identity
        model.norm.weight.uniform_(0.5, 2, generator=torch.Generator().manual_seed(1))
        model.norm.bias.normal_(generator=torch.Generator().manual_seed(2))
    return model


@torch.no_grad()
def test_last_layer_features_equal_the_models_own() -> None:
    model = small(pre_logits=20)
    everything = model.features(IMAGES)
    assert torch.equal(FeatureSpec(feature="class").compute(model, IMAGES), everything.pooled)
    assert torch.equal(FeatureSpec().compute(model, IMAGES), everything.pre_logits) and everything.pre_logits.shape == (3, 20)
    assert torch.allclose(FeatureSpec(feature="mean").compute(model, IMAGES), everything.patches.mean((1, 2)), atol=1e-6)
    assert torch.equal(FeatureSpec(feature="patches").compute(model, IMAGES), everything.patches)
    assert FeatureSpec(feature="patches").compute(model, IMAGES).shape == (3, 4, 4, 48)


@torch.no_grad()
def test_the_final_norm_is_applied_where_the_model_applies_it() -> None:
    after = small(pooling="mean", final_norm="after-pool", registers=2)
    assert torch.allclose(FeatureSpec(feature="mean").compute(after, IMAGES), after.features(IMAGES).pooled, atol=1e-6)
    raw = FeatureSpec(feature="mean", norm=False).compute(after, IMAGES)
    assert torch.allclose(after.norm(raw), after.features(IMAGES).pooled, atol=1e-6)
    before = small()
    tokens = before.features(IMAGES, layers=[1]).layers[1]
    assert torch.equal(FeatureSpec(feature="class", layer=1, norm=False).compute(before, IMAGES), tokens[:, 0])
    assert torch.allclose(
        FeatureSpec(feature="mean", layer=-2).compute(before, IMAGES), before.norm(tokens)[:, 1:].mean(1), atol=1e-6
    )


@torch.no_grad()
def test_a_resnet_has_feature_maps_and_no_class_token() -> None:
    model = vitrail.create_model("BiT-R26x1", outputs=5, image_size=32, layers=(1, 1), seed=0).eval()
    assert torch.allclose(FeatureSpec(feature="mean").compute(model, IMAGES), model.features(IMAGES).pooled, atol=1e-6)
    assert FeatureSpec(feature="patches", layer=0, norm=False).compute(model, IMAGES).shape == (3, 8, 8, 256)
    for wrong, words in ((FeatureSpec(feature="class"), "class token"), (FeatureSpec(feature="mean", layer=0), "--no-norm")):
        with pytest.raises(VitrailError, match=words):
            wrong.check(model)


def test_unknown_features_are_refused() -> None:
    with pytest.raises(VitrailError, match="layer 3 use class, mean or patches"):
        FeatureSpec(layer=3)
    with pytest.raises(VitrailError, match="comes after the final norm"):
        FeatureSpec(feature="pooled", norm=False)
    with pytest.raises(VitrailError, match="feature is 'map'; it can be pre_logits"):
        FeatureSpec(feature="map")  # type: ignore[arg-type]
    with pytest.raises(VitrailError, match="no class token"):
        FeatureSpec(feature="class").check(small(pooling="mean"))
    with pytest.raises(VitrailError, match="There is no layer 7"):
        FeatureSpec(feature="mean", layer=7).compute(small(), IMAGES)


def test_extraction_keeps_the_order_of_the_split(bundle: Bundle, photos: Path) -> None:
    split = open_source(f"folder:{photos}").split("val")
    assert bundle.preprocess is not None
    found = extract_features(bundle.model, split, bundle.preprocess, FeatureSpec(), EvalContext(batch=7, workers=2))
    one = bundle.preprocess(split.payload(20))[None]
    with torch.no_grad():
        expected = bundle.model.features(one).pre_logits[0].numpy()
    assert found.features.shape == (36, 48) and found.features.dtype == np.float32 and (found.indices == np.arange(36)).all()
    assert np.abs(found.features[20] - expected).max() < 1e-5
