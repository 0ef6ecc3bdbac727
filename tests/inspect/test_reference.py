"""Results equal float64 numpy with its own forward pass, and do not depend on batching."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.inspect import numpy_inspect
from tests.inspect.known_attention import images, tiny, trained
from vitrail import inspect
from vitrail.models import ViT
from vitrail.models.features import evaluating

KINDS: dict[str, dict[str, Any]] = {
    "class": {},
    "registers": {"registers": 4},
    "mean": {"pooling": "mean"},
    "map": {"pooling": "map"},
    "distilled": {"distill_token": True},
    "no prefix position": {"position_prefix": False},
}


def with_contrast(**changes: Any) -> ViT:
    """Attention with some contrast, but not so much that float32 and float64 diverge over the layers."""
    model = trained(tiny((3, 4), depth=4, **changes))
    with torch.no_grad():
        for block in model.blocks:
            block.attention.qkv.weight.mul_(1.5)
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_results_equal_float64_numpy(kind: str) -> None:
    model = with_contrast(**KINDS[kind])
    batch, config = images(model, 2), model.config
    maps, distances = inspect.rollout(model, batch), inspect.attention_distances(model, batch)
    heads = inspect.head_attention(model, batch, (2, 1))
    references = [numpy_inspect.attention_of(model, image.double().numpy()) for image in batch]
    for number, (layers, start) in enumerate(references):
        np.testing.assert_allclose(maps[number], numpy_inspect.rollout(layers, start, config.prefix, config.grid), atol=1e-5)
        expected = np.stack(layers)[:, :, config.prefix + 9, config.prefix :].reshape(4, 2, *config.grid)
        np.testing.assert_allclose(heads[number], expected, atol=1e-5)
    for among in ("patches", "all"):
        each = [numpy_inspect.distance(layers, config.prefix, config.grid, config.stride, among) for layers, _ in references]
        np.testing.assert_allclose(distances[among], np.mean(each, axis=0), rtol=1e-5)  # type: ignore[index]


@pytest.mark.parametrize("changes", [{"attention": "axial"}, {"position": "relative"}, {"position_at": "every-layer"}])
def test_rollout_of_other_kinds_of_attention(changes: dict[str, Any]) -> None:
    model = with_contrast(**changes)
    batch = images(model, 2)
    layers = [weights.double().numpy() for _, weights in model.attention(batch)]
    start = np.eye(model.config.tokens)[0]
    for number, found in enumerate(inspect.rollout(model, batch)):
        expected = numpy_inspect.rollout([one[number] for one in layers], start, 1, model.config.grid)
        np.testing.assert_allclose(found, expected, atol=1e-5)


def test_batches_iterables_and_single_images_agree() -> None:
    model = with_contrast(registers=1)
    batch = images(model, 5)
    functions = [inspect.rollout, inspect.gradient_rollout, inspect.token_similarity]
    for function in functions:
        whole = function(model, batch)
        assert len(whole) == 5
        singles = np.concatenate([function(model, one[None]) for one in batch])
        for other in (singles, function(model, batch, batch=2), function(model, (part for part in batch.split(3)))):
            np.testing.assert_allclose(other, whole, rtol=1e-4, atol=1e-6)
    whole = inspect.attention_distance(model, batch)
    for other in (inspect.attention_distance(model, batch, batch=1), inspect.attention_distance(model, list(batch.split(2)))):
        np.testing.assert_allclose(other, whole, rtol=1e-6)
    singles = np.mean([inspect.attention_distance(model, one[None]) for one in batch], axis=0)
    np.testing.assert_allclose(singles, whole, rtol=1e-6)
    np.testing.assert_allclose(inspect.rollout(model, batch.numpy()), inspect.rollout(model, batch))


def test_only_the_chosen_layers_are_returned() -> None:
    model = with_contrast()
    whole = inspect.attention_distance(model, images(model))
    np.testing.assert_allclose(inspect.attention_distance(model, images(model), layers=[-1, 1]), whole[[1, 3]], rtol=1e-5)


def test_training_mode_does_not_change_results_and_is_kept() -> None:
    model = with_contrast(dropout=0.5, attention_dropout=0.5, stochastic_depth=0.5)
    batch, functions = images(model), [inspect.rollout, inspect.gradient_rollout, inspect.token_similarity]
    expected_maps = [function(model.eval(), batch) for function in functions]
    model.train()
    for function, expected in zip(functions, expected_maps, strict=True):
        np.testing.assert_array_equal(function(model, batch), expected)
    assert all(module.training for module in model.modules())
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_attention_gradients_equal_those_of_one_graph(kind: str) -> None:
    model = with_contrast(**KINDS[kind]).eval()
    batch, outputs = images(model, 2), torch.tensor([1, 4])
    x, attentions = model.add_prefix_and_positions(model.embed_patches(batch)), []
    for number, block in enumerate(model.blocks):
        x, weights = block.with_attention(model.positions.before_layer(x, number), model.positions.bias(number))
        attentions.append(weights)
    logits = model.logits(model.norm(x) if model.config.final_norm == "before-pool" else x)
    torch.testing.assert_close(logits, model(batch))
    expected = torch.autograd.grad(logits.gather(1, outputs[:, None]).sum(), attentions)
    (_, start, nothing), *layers = model.attention_gradients(batch, outputs)
    assert nothing is None and [number for number, _, _ in layers] == [3, 2, 1, 0]
    total = torch.eye(x.shape[1], dtype=torch.float64).repeat(2, 1, 1)
    for (_, weights, grads), attention, grad in zip(layers[::-1], attentions, expected, strict=True):
        assert grads is not None and not grads.requires_grad and not weights.requires_grad
        torch.testing.assert_close(weights, attention.detach())
        torch.testing.assert_close(grads, grad, rtol=1e-3, atol=1e-5)
        total = total + (attention * grad).detach().double().clamp(min=0).mean(dim=1) @ total
    initial = start.double().mean(dim=1)
    found = ((initial @ total) - initial)[:, 0, model.config.prefix :].reshape(2, *model.config.grid)
    maps = inspect.gradient_rollout(model, batch, outputs)
    np.testing.assert_allclose(maps, found.numpy(), rtol=1e-3, atol=1e-6)


def test_gradient_rollout_uses_the_highest_output_of_each_image() -> None:
    model = with_contrast()
    batch = images(model, 4)
    with evaluating(model), torch.no_grad():
        highest = model(batch).argmax(dim=1)
    np.testing.assert_allclose(inspect.gradient_rollout(model, batch), inspect.gradient_rollout(model, batch, highest))


@pytest.mark.parametrize("kind", ["class", "mean", "map"])
def test_token_similarity_is_the_cosine_of_final_tokens(kind: str) -> None:
    model = with_contrast(**KINDS[kind]).eval()
    batch = images(model, 2)
    tokens = model.features(batch).tokens.detach().double().numpy()
    patches = tokens[:, model.config.prefix :]
    reference = tokens[:, 0] if kind == "class" else patches.mean(axis=1)
    for found, to in (
        (inspect.token_similarity(model, batch), reference),
        (inspect.token_similarity(model, batch, (1, 2)), patches[:, 6]),
    ):
        lengths = np.linalg.norm(patches, axis=2) * np.linalg.norm(to, axis=1)[:, None]
        np.testing.assert_allclose(found, (np.einsum("npd,nd->np", patches, to) / lengths).reshape(2, 3, 4), atol=1e-5)


def test_half_precision_is_close() -> None:
    model = with_contrast()
    batch = images(model, 2)
    expected = inspect.rollout(model, batch)
    np.testing.assert_allclose(inspect.rollout(model.to(torch.bfloat16), batch), expected, atol=0.03)
