"""Write every format and read it back bit for bit, for every kind of model the format can store."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import vitrail
from tests.checkpoints.small_models import KINDS, STORABLE, SUFFIX, bundle_of, images_for, needed_fields, random_model
from vitrail.checkpoints import FORMATS, write
from vitrail.checkpoints.loading import load
from vitrail.errors import VitrailError
from vitrail.models import ViTConfig

CASES = [(name, kind) for name, kinds in STORABLE.items() for kind in kinds]


def same_state(one: torch.nn.Module, two: torch.nn.Module) -> None:
    ours, theirs = one.state_dict(), two.state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype, name
        assert torch.equal(tensor, theirs[name]), name


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_weights_round_trip_bit_for_bit(name: str, kind: str, tmp_path: Path) -> None:
    bundle = bundle_of(KINDS[kind])
    target = tmp_path / f"out{SUFFIX[name]}"
    write(bundle, target, name)
    again = load(target, **({} if name == "vitrail" else needed_fields(KINDS[kind])))
    same_state(bundle.model, again.model)
    assert again.report.percent == 100.0
    if name != "vitrail":
        assert again.report.format == name


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_the_architecture_is_inferred_from_shapes(name: str, kind: str, tmp_path: Path) -> None:
    """Shapes and parts of the model are inferred; numerics are the format's own."""
    config = KINDS[kind]
    write(bundle_of(config), tmp_path / f"out{SUFFIX[name]}", name)
    again = load(tmp_path / f"out{SUFFIX[name]}", **({} if name == "vitrail" else needed_fields(config))).model.config
    if name == "vitrail":
        assert again == config
        return
    same = ["outputs", "channels"]
    if isinstance(config, ViTConfig):
        same += ["image_size", "width", "depth", "heads", "mlp", "patch", "class_token", "distill_token", "registers", "pooling"]
        same += ["qkv_bias", "position", "position_prefix", "final_norm", "pre_logits", "layer_scale", "qk_norm"]
    for field in same:
        assert getattr(again, field) == getattr(config, field), field
    for field, value in FORMATS[name].numerics(config).items():
        assert getattr(again, field, getattr(getattr(again, "resnet", None), field, None)) == value, field


@pytest.mark.parametrize(("name", "kind"), [(name, kind) for name in FORMATS for kind in KINDS if kind not in STORABLE[name]])
def test_models_that_a_format_cannot_store_are_rejected(name: str, kind: str, tmp_path: Path) -> None:
    """Either the file reads back as the same model, or nothing is written; never a file of another function."""
    config, target = KINDS[kind], tmp_path / f"out{SUFFIX[name]}"
    try:
        report = write(bundle_of(config), target, name)
    except VitrailError as error:
        assert str(error)
        assert list(tmp_path.iterdir()) == []
        return
    again = load(target, **needed_fields(config))
    numerics = {field: getattr(config, field) for field in FORMATS[name].numerics(config) if hasattr(config, field)}
    if any("cannot store" in note for note in report.notes):
        again = load(target, **needed_fields(config), **numerics)
    images = images_for(config)
    torch.testing.assert_close(again.model(images), random_model(config)(images), rtol=0, atol=2e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", ["google", "timm", "hf", "vitrail", "torchvision", "big-vision"])
def test_dtypes_are_preserved(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    bundle = bundle_of(KINDS["plain"], dtype=dtype)
    target = tmp_path / f"out{SUFFIX[name]}"
    write(bundle, target, name)
    fields = {} if name == "vitrail" else needed_fields(KINDS["plain"])
    same_state(bundle.model, load(target, **fields).model)
    assert load(target, dtype=torch.float32, **fields).model.norm.weight.dtype is torch.float32


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    heads=st.integers(1, 4),
    size=st.integers(1, 4),
    depth=st.integers(1, 3),
    mlp=st.integers(1, 40),
    patch=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    grid=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    outputs=st.integers(0, 4),
    channels=st.integers(1, 4),
    name=st.sampled_from(["google", "big-vision", "timm", "hf"]),
)
def test_any_size_round_trips(tmp_path: Path, heads, size, depth, mlp, patch, grid, outputs, channels, name) -> None:  # type: ignore[no-untyped-def]
    config = ViTConfig(
        name="any",
        width=heads * size,
        depth=depth,
        heads=heads,
        mlp=mlp,
        patch=patch,
        image_size=(patch[0] * grid[0], patch[1] * grid[1]),
        outputs=outputs,
        channels=channels,
    )
    bundle = bundle_of(config)
    target = tmp_path / f"any{SUFFIX[name]}"
    write(bundle, target, name)
    same_state(bundle.model, load(target, **needed_fields(config)).model)


def test_a_chain_through_every_format_changes_nothing(tmp_path: Path) -> None:
    bundle = first = bundle_of(KINDS["plain"])
    for number, name in enumerate(["google", "timm", "hf", "torchvision", "big-vision", "vitrail", "google"]):
        target = tmp_path / f"{number}{SUFFIX[name]}"
        write(bundle, target, name)
        bundle = load(target, **({} if name == "vitrail" else needed_fields(KINDS["plain"])))
    same_state(first.model, bundle.model)
    one, two = np.load(tmp_path / "0.npz"), np.load(tmp_path / "6.npz")
    assert one.files == two.files
    assert all(np.array_equal(one[key], two[key]) for key in one.files)


def test_public_names() -> None:
    assert vitrail.load.__module__.startswith("vitrail.api") and load.__module__.startswith("vitrail.checkpoints")
    assert vitrail.save.__module__.startswith("vitrail.checkpoints")
