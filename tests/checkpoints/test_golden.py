"""Golden outputs allow for another CPU's rounding, and for nothing else."""

from __future__ import annotations

import pytest
import torch

from tests.checkpoints.small_models import KINDS, random_model
from vitrail.checkpoints import golden
from vitrail.errors import VitrailError
from vitrail.models import Model, build_model


def _sharp() -> Model:
    """Return a model whose attention amplifies rounding errors beyond the plain tolerance."""
    model = random_model(KINDS["plain"].replace(depth=14, width=64, mlp=128))
    with torch.no_grad():
        for block in model.blocks:  # type: ignore[union-attr]
            block.attention.qkv.weight[: 2 * 64] *= 60
    return model


def _rounded_otherwise(model: Model) -> Model:
    """Return the model with each weight changed by a rounding error, which is what other vector instructions amount to."""
    other = build_model(model.config)
    generator = torch.Generator().manual_seed(3)
    state = model.state_dict()
    other.load_state_dict({k: v * (1 + 6e-8 * torch.randn(v.shape, generator=generator).sign()) for k, v in state.items()})
    return other.eval()


def test_rounding_of_another_cpu_is_allowed() -> None:
    model = _sharp()
    recorded = golden.record(_rounded_otherwise(model))
    distance = golden._distance(recorded["full"]["logits"], golden.record(model)["full"]["logits"])
    assert distance > 1e-4 * max(map(abs, recorded["full"]["logits"])), "the plain tolerance would do"
    golden.check(model, recorded, "here", full=True)


@pytest.mark.parametrize("sharp", [False, True])
def test_another_gelu_and_swapped_weights_are_caught(sharp: bool) -> None:
    model = _sharp() if sharp else random_model(KINDS["plain"])
    recorded = golden.record(model)
    other = build_model(model.config.replace(gelu="erf"))
    other.load_state_dict(model.state_dict())
    with pytest.raises(VitrailError, match="does not compute the same outputs"):
        golden.check(other.eval(), recorded, "here", full=True)
    state = dict(model.state_dict())
    state["norm.weight"], state["blocks.0.norm1.weight"] = state["blocks.0.norm1.weight"], state["norm.weight"]
    model.load_state_dict(state)
    with pytest.raises(VitrailError, match="does not compute the same outputs"):
        golden.check(model, recorded, "here", full=True)


@pytest.mark.parametrize("row", [0, 1])
def test_an_output_that_is_nan_is_caught(row: int) -> None:
    model = random_model(KINDS["plain"])
    recorded = golden.record(model)
    with torch.no_grad():
        model.head.bias[row] = torch.nan  # type: ignore[union-attr,index]
    with pytest.raises(VitrailError, match="does not compute the same outputs"):
        golden.check(model, recorded, "here", full=False)
