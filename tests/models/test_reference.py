"""Our networks against a float64 numpy version, with the numerics of the paper's own code."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.models import numpy_reference as ref
from tests.models import other_libraries as others
from vitrail.models import BiTConfig, ResNetConfig, ViTConfig, build_model

SHAPE = {"width": 32, "depth": 2, "heads": 4, "mlp": 48, "outputs": 6}


def numbers(model: torch.nn.Module) -> ref.State:
    return {key: value.double().numpy() for key, value in model.state_dict().items()}


@pytest.mark.parametrize("gelu", ["tanh", "erf"])
@pytest.mark.parametrize("pooling", ["class", "mean", "map"])
def test_vit_with_rectangular_patches(gelu: str, pooling: str) -> None:
    config = ViTConfig(
        name="t", **SHAPE, image_size=(24, 20), patch=(8, 4), channels=5, gelu=gelu, pooling=pooling,
        class_token=pooling == "class", pre_logits=16,
    )  # fmt: skip
    model = others.randomise(build_model(config))
    state, image = numbers(model), np.random.default_rng(0).normal(size=(5, 24, 20))
    x = ref.patch_tokens(image, state, (8, 4))
    if pooling == "class":
        x = np.concatenate([state["class_token"][0], x])
    x = ref.encode(x + state["positions.table"][0], state, heads=4, depth=2, kind=gelu, eps=1e-6)
    x = ref.layer_norm(x, state, "norm", 1e-6)
    pooled = {"class": lambda: x[0], "mean": lambda: x.mean(0), "map": lambda: ref.map_pool(x, state, 4, gelu, 1e-6)}[pooling]()
    expected = ref.dense(np.tanh(ref.dense(pooled, state, "pre_logits")), state, "head")
    ours = model(torch.from_numpy(image).float()[None])[0].detach().numpy()
    np.testing.assert_allclose(ours, expected, atol=2e-5)


NUMERICS = [
    {"standardise": "std+eps", "standardise_eps": 1e-5, "padding": "same", "pool_fill": "-inf", "group_norm_eps": 1e-6},
    {"standardise": "sqrt(var+eps)", "standardise_eps": 1e-2, "padding": "symmetric", "pool_fill": "zero", "group_norm_eps": 1e-2},
    {"standardise": "std+eps", "standardise_eps": 1e-2, "padding": "symmetric", "pool_fill": "-inf", "group_norm_eps": 1e-5},
    {"standardise": "sqrt(var+eps)", "standardise_eps": 1e-10, "padding": "same", "pool_fill": "zero", "group_norm_eps": 1e-5},
]


class Convolutions:
    """The numerics of one configuration, so that the networks below read like their definition."""

    def __init__(self, state: ref.State, numerics: dict[str, object]) -> None:
        self.state, self.numerics = state, numerics

    def conv(self, x: ref.Array, name: str, stride: int = 1) -> ref.Array:
        n = self.numerics
        kind = {"padding": n["padding"], "rule": n["standardise"], "eps": n["standardise_eps"]}
        return ref.standardised_conv(x, self.state[f"{name}.weight"], stride, **kind)  # type: ignore[arg-type]

    def norm(self, x: ref.Array, name: str) -> ref.Array:
        return ref.group_norm(x, self.state, name, self.numerics["group_norm_eps"])  # type: ignore[arg-type]

    def relu_norm(self, x: ref.Array, name: str) -> ref.Array:
        return np.maximum(self.norm(x, name), 0)

    def pool(self, x: ref.Array) -> ref.Array:
        fill = 0.0 if self.numerics["pool_fill"] == "zero" else -np.inf
        return ref.max_pool(x, self.numerics["padding"], fill)  # type: ignore[arg-type]


@pytest.mark.parametrize("numerics", NUMERICS, ids=lambda n: f"{n['standardise']} {n['padding']} {n['pool_fill']}")
def test_hybrid(numerics: dict[str, object]) -> None:
    resnet = ResNetConfig(layers=(2, 1), **numerics)  # type: ignore[arg-type]
    model = others.randomise(build_model(ViTConfig(name="h", **SHAPE, image_size=(32, 48), patch=(1, 1), resnet=resnet)))
    state, image = numbers(model), np.random.default_rng(0).normal(size=(3, 32, 48))
    net = Convolutions(state, numerics)
    x = net.pool(net.relu_norm(net.conv(image, "resnet.root", 2), "resnet.norm"))
    for stage, units in enumerate((2, 1)):
        for unit in range(units):
            name, stride = f"resnet.stages.{stage}.{unit}", 2 if stage and not unit else 1
            y = net.relu_norm(net.conv(x, f"{name}.conv1"), f"{name}.norm1")
            y = net.relu_norm(net.conv(y, f"{name}.conv2", stride), f"{name}.norm2")
            y = net.norm(net.conv(y, f"{name}.conv3"), f"{name}.norm3")
            shortcut = x if unit else net.norm(net.conv(x, f"{name}.projection", stride), f"{name}.projection_norm")
            x = np.maximum(shortcut + y, 0)
    tokens = np.concatenate([state["class_token"][0], ref.patch_tokens(x, state, (1, 1))]) + state["positions.table"][0]
    tokens = ref.encode(tokens, state, heads=4, depth=2, kind="tanh", eps=1e-6)
    expected = ref.dense(ref.layer_norm(tokens, state, "norm", 1e-6)[0], state, "head")
    np.testing.assert_allclose(model(torch.from_numpy(image).float()[None])[0].detach().numpy(), expected, atol=1e-4)


@pytest.mark.parametrize("numerics", NUMERICS, ids=lambda n: f"{n['standardise']} {n['padding']} {n['pool_fill']}")
def test_bit(numerics: dict[str, object]) -> None:
    resnet = ResNetConfig(layers=(1, 2), **numerics)  # type: ignore[arg-type]
    model = others.randomise(build_model(BiTConfig(name="b", outputs=6, image_size=(33, 46), resnet=resnet)))
    state, image = numbers(model), np.random.default_rng(0).normal(size=(3, 33, 46))
    net = Convolutions(state, numerics)
    x = net.pool(net.conv(image, "root", 2))
    for stage, units in enumerate((1, 2)):
        for unit in range(units):
            name, stride = f"stages.{stage}.{unit}", 2 if stage and not unit else 1
            active = net.relu_norm(x, f"{name}.norm1")
            shortcut = x if unit else net.conv(active, f"{name}.projection", stride)
            y = net.conv(net.relu_norm(net.conv(active, f"{name}.conv1"), f"{name}.norm2"), f"{name}.conv2", stride)
            x = shortcut + net.conv(net.relu_norm(y, f"{name}.norm3"), f"{name}.conv3")
    final = net.relu_norm(x, "norm")
    assert final.shape[1:] == model.config.grid
    expected = ref.dense(final.mean((1, 2)), state, "head")
    np.testing.assert_allclose(model(torch.from_numpy(image).float()[None])[0].detach().numpy(), expected, atol=1e-4)
