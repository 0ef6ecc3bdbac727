"""Position tables: resizing by each rule, and the kinds and places the paper compares."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.ndimage import zoom

from vitrail import VitrailError, create_model
from vitrail.models import RULES, resize_grid
from vitrail.models.resample import sincos_table

SMALL = {"width": 16, "heads": 2, "depth": 2, "mlp": 32, "outputs": 5, "patch": 4}
sides = st.integers(1, 32)


@settings(deadline=None, max_examples=300)
@given(sides, sides, sides, sides)
def test_reference_rule_is_scipys_zoom(rows: int, columns: int, new_rows: int, new_columns: int) -> None:
    table = np.random.default_rng(rows * 33 + columns).normal(size=(rows, columns, 3))
    ours = resize_grid(torch.from_numpy(table)[None], (new_rows, new_columns))[0].numpy()
    # The last coordinate may round to just outside the table, where scipy's default would read zeros; "nearest" reads the edge.
    theirs = zoom(table, (new_rows / rows, new_columns / columns, 1), order=1, mode="nearest")
    assert ours.shape == theirs.shape == (new_rows, new_columns, 3)
    np.testing.assert_allclose(ours, theirs, atol=1e-6)


@pytest.mark.parametrize("rule", RULES)
def test_every_grid_keeps_its_shape_and_the_identity_is_exact(rule: str) -> None:
    for rows in range(1, 33):
        for columns in range(1, 33):
            table = torch.randn(1, rows, columns, 2)
            assert torch.equal(resize_grid(table, (rows, columns), rule), table)  # type: ignore[arg-type]
            there = resize_grid(table, (33 - rows, columns + 1), rule)  # type: ignore[arg-type]
            assert there.shape == (1, 33 - rows, columns + 1, 2) and there.isfinite().all()
            assert resize_grid(there, (rows, columns), rule).shape == table.shape  # type: ignore[arg-type]


def test_the_published_resizes_match_scipy_in_float32() -> None:
    for old, new in [(14, 24), (7, 12), (16, 32), (14, 12), (14, 32), (24, 14)]:
        table = torch.randn(1, old, old, 8)
        theirs = zoom(table[0].double().numpy(), (new / old, new / old, 1), order=1)
        np.testing.assert_allclose(resize_grid(table, (new, new))[0].numpy(), theirs, atol=1e-6)


def test_the_rules_differ() -> None:
    table = torch.randn(1, 14, 14, 4)
    results = {rule: resize_grid(table, (24, 24), rule) for rule in RULES}
    for one in results:
        for other in results:
            same = torch.allclose(results[one], results[other], atol=1e-3)
            # bicubic with antialiasing does nothing more than without when the grid grows
            assert same == (one == other or ({one, other} == {"timm", "hf"} and same))
    shrunk = {rule: resize_grid(table, (7, 7), rule) for rule in RULES}
    assert not torch.allclose(shrunk["timm"], shrunk["hf"], atol=1e-3)


def test_a_low_precision_table_is_resized_in_full_precision() -> None:
    table = torch.randn(1, 14, 14, 4).bfloat16()
    resized = resize_grid(table, (24, 24))
    assert resized.dtype == torch.bfloat16
    assert torch.equal(resized, resize_grid(table.float(), (24, 24)).bfloat16())


def test_bad_rules_and_sizes_are_sentences() -> None:
    with pytest.raises(VitrailError, match="known are reference, timm, hf, torchvision"):
        resize_grid(torch.zeros(1, 2, 2, 1), (3, 3), "scipy")  # type: ignore[arg-type]
    with pytest.raises(VitrailError, match="at least 1"):
        resize_grid(torch.zeros(1, 2, 2, 1), (0, 3))


def test_sincos_against_the_formula() -> None:
    table, width, (rows, columns) = sincos_table((3, 5), 16), 16, (3, 5)
    for y in range(rows):
        for x in range(columns):
            omega = [10_000 ** -(k / (width / 4 - 1)) for k in range(width // 4)]
            expected = [*(np.sin(x * w) for w in omega), *(np.cos(x * w) for w in omega)]
            expected += [*(np.sin(y * w) for w in omega), *(np.cos(y * w) for w in omega)]
            np.testing.assert_allclose(table[y * columns + x].numpy(), expected, atol=1e-6)


KINDS = [
    {"position": "learned"},
    {"position": "learned", "position_at": "every-layer"},
    {"position": "learned", "position_at": "shared"},
    {"position": "learned", "position_prefix": False},
    {"position": "learned-2d"},
    {"position": "learned-2d", "position_at": "every-layer", "registers": 2},
    {"position": "learned-2d", "position_at": "shared", "position_prefix": False},
    {"position": "relative"},
    {"position": "relative", "position_at": "shared"},
    {"position": "relative", "pooling": "mean"},
    {"position": "sincos2d"},
    {"position": "sincos2d", "position_at": "shared", "pooling": "mean"},
    {"position": "none"},
]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_each_kind_resizes_to_rectangles_and_learns(kind: dict[str, object]) -> None:
    model = create_model("ViT-S/16", **SMALL, **kind, image_size=(16, 24), seed=0)  # type: ignore[arg-type]
    torch.nn.init.normal_(model.head.weight)
    prefix = {name: value.clone() for name, value in model.state_dict().items() if name == "positions.prefix"}
    model.resize((32, 12))
    model(torch.randn(2, 3, 32, 12)).square().sum().backward()
    for name, parameter in model.positions.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name
    for name, value in prefix.items():
        assert torch.equal(model.state_dict()[name], value)


def test_every_layer_has_its_own_table_and_shared_has_one() -> None:
    shape = lambda **kind: tuple(create_model("S/16", **SMALL, **kind, image_size=8, device="meta").positions.table.shape)  # type: ignore[arg-type] # noqa: E731
    assert shape() == (1, 5, 16)
    assert shape(position_at="shared") == (1, 5, 16)
    assert shape(position_at="every-layer") == (2, 5, 16)


def test_the_class_position_is_untouched_and_the_grid_is_zoomed() -> None:
    model = create_model("S/16", **SMALL, image_size=(16, 24), seed=0)  # type: ignore[arg-type]
    before = model.positions.table.detach().clone()
    model.resize((24, 40))
    after = model.positions.table.detach()
    assert torch.equal(after[0, 0], before[0, 0])
    expected = zoom(before[0, 1:].reshape(4, 6, 16).double().numpy(), (6 / 4, 10 / 6, 1), order=1)
    np.testing.assert_allclose(after[0, 1:].reshape(6, 10, 16).numpy(), expected, atol=1e-6)


def test_two_dimensional_tables_place_columns_before_rows() -> None:
    model = create_model("S/16", **SMALL, position="learned-2d", position_prefix=False, image_size=(8, 12), seed=0)  # type: ignore[arg-type]
    added = model.positions.at_input(torch.zeros(1, 7, 16))[0]
    assert added[0].abs().sum() == 0
    for y in range(2):
        for x in range(3):
            token = added[1 + y * 3 + x]
            assert torch.equal(token[:8], model.positions.columns[0, x]) and torch.equal(token[8:], model.positions.rows[0, y])


def test_relative_bias_depends_on_the_offset_alone() -> None:
    model = create_model("S/16", **SMALL, position="relative", image_size=(12, 16), seed=0)  # type: ignore[arg-type]
    bias = model.positions.bias(1)
    offsets, prefix = model.positions.offsets[1], model.positions.prefix[1]
    for query in range(12):
        for key in range(12):
            dy, dx = query // 4 - key // 4, query % 4 - key % 4
            assert torch.equal(bias[:, 1 + query, 1 + key], offsets[dy + 2, dx + 3])
    assert torch.equal(bias[:, 0, 5], prefix[0]) and torch.equal(bias[:, 5, 0], prefix[1])
    assert torch.equal(bias[:, 0, 0], prefix[2])


def test_permuting_patches_changes_nothing_without_positions_and_something_with_them() -> None:
    batch = torch.randn(1, 3, 8, 8)
    swapped = torch.cat([batch[..., 4:], batch[..., :4]], dim=-1)
    for kind in ["learned", "learned-2d", "relative", "sincos2d", "none"]:
        model = create_model("S/16", **SMALL, position=kind, position_std=0.5, image_size=8, seed=0).eval()  # type: ignore[arg-type]
        torch.nn.init.normal_(model.head.weight)
        same = torch.allclose(model(batch), model(swapped), atol=1e-5)
        assert same == (kind == "none"), kind
