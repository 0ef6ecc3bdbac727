"""Maps of images of any size are those of the resized model."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from vitrail import VitrailError, create_model, inspect
from vitrail.models import ViT

SIZE = (24, 16)  # as many tokens as the model's own 16×24


def test_every_map_is_that_of_the_resized_model() -> None:
    small = {"width": 16, "heads": 2, "depth": 2, "mlp": 32, "outputs": 5, "patch": 4, "position_std": 1.0}
    model = create_model("ViT-S/16", **small, image_size=(16, 24), any_size=True, seed=0).eval()
    assert isinstance(model, ViT)
    for parameter in (model.head.weight, *(norm.bias for norm in model.modules() if isinstance(norm, torch.nn.LayerNorm))):
        torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(1))
    other, images = copy.deepcopy(model).resize(SIZE), torch.randn(3, 3, *SIZE)
    for compute in (
        inspect.rollout,
        inspect.gradient_rollout,
        inspect.token_similarity,
        inspect.attention_distance,
        lambda model, images: inspect.token_similarity(model, images, (5, 3)),  # a row that the model's own grid has not
        lambda model, images: inspect.head_attention(model, images, (5, 3)),
    ):
        found = compute(model, images)
        np.testing.assert_allclose(found, compute(other, images), atol=1e-5)
        np.testing.assert_allclose(found, compute(model, images.split(2)), atol=1e-5)
    with pytest.raises(VitrailError, match="16×24 and 24×16 cannot be in one figure"):
        inspect.rollout(model, [images, torch.randn(1, 3, 16, 24)])
