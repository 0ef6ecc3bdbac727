"""Plans against arithmetic, and simulated memory against what autograd really keeps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import vitrail
from vitrail.errors import VitrailError
from vitrail.models import create_model, model_config, parameters
from vitrail.train.config import ModelSpec, OptimSpec, Recipe
from vitrail.train.memory import SimulatedModel, simulate, simulate_sharded
from vitrail.train.plan import communication, config_of, make_plan
from vitrail.train.prepare import make_model

TINY = model_config("ViT-Ti/16", image_size=64, depth=3)


def test_the_plan_of_a_checkpoint_has_the_changes_that_training_makes(tmp_path: Path) -> None:
    model = create_model("ViT-Ti/16", image_size=32, depth=1, pre_logits=16, seed=0)
    vitrail.save(tmp_path / "model", model)
    planned = config_of(ModelSpec(start=str(tmp_path / "model"), image_size=64, dropout=0.1, pre_logits=0), 5)
    assert planned == model.config.replace(outputs=5, image_size=64, dropout=0.1, pre_logits=None)


def test_an_image_size_of_zero_is_not_the_default() -> None:
    with pytest.raises(VitrailError, match="image_size is"):
        config_of(ModelSpec(image_size=0), 5)
    with pytest.raises(VitrailError, match="image_size is"):
        make_model(Recipe(model=ModelSpec(image_size=0)), 5, (), [])


def test_weights_and_gradients_are_four_bytes_a_parameter() -> None:
    found = simulate(SimulatedModel(TINY), 4, precision="fp32")
    assert found.weights == pytest.approx(4 * parameters(TINY), rel=0.01)  # rounded up to the allocator's pieces
    assert found.peak > found.weights + found.gradients


def test_activations_are_what_autograd_saves() -> None:
    """An independent count: the bytes of all tensors kept for the backward pass, on a real model."""
    batch = 16
    model = create_model("ViT-Ti/16", image_size=64, depth=3, seed=0)
    own = {one.untyped_storage().data_ptr() for one in model.parameters()}
    saved: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    images, labels = torch.randn(batch, 3, 64, 64), torch.zeros(batch, dtype=torch.int64)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = F.cross_entropy(model(images), labels, reduction="sum")
    del loss
    by_image = (
        simulate(SimulatedModel(TINY), 2 * batch, precision="fp32").peak
        - simulate(SimulatedModel(TINY), batch, precision="fp32").peak
    ) / batch
    # The images are alive too, and at the peak the first gradients.
    assert by_image == pytest.approx(sum(saved.values()) / batch + 3 * 64 * 64 * 4, rel=0.1)


def test_blocks_with_dropout_are_planned_in_fused_kernels() -> None:
    """They keep GELU's argument instead of its value and derivative; as modules they would keep twice as much."""
    without = simulate(SimulatedModel(TINY), 64, precision="bf16").activations
    with_dropout = simulate(SimulatedModel(TINY.replace(dropout=0.1)), 64, precision="bf16").activations
    as_modules = simulate(SimulatedModel(TINY.replace(attention_dropout=0.1)), 64, precision="bf16").activations
    assert with_dropout < without < 0.8 * as_modules


@pytest.mark.slow
def test_low_precision_recomputing_and_accumulating_change_the_peak_as_they_should() -> None:
    full = simulate(SimulatedModel(TINY), 32, precision="fp32")
    assert simulate(SimulatedModel(TINY), 32, precision="bf16").activations < full.activations
    deeper = SimulatedModel(TINY.replace(depth=6))
    whole = simulate(deeper, 32, precision="fp32")
    assert simulate(deeper, 32, precision="fp32", recompute=-1).activations < 0.6 * whole.activations
    for precision in ("fp32", "bf16"):  # the plain path, and the one of our own kernels
        sizes = [
            simulate(SimulatedModel(TINY), 256, precision=precision, recompute=-1, keep=keep) for keep in ("nothing", "matmuls")
        ]
        sizes.append(simulate(SimulatedModel(TINY), 256, precision=precision))
        assert sizes[0].activations < 0.95 * sizes[1].activations < 0.95 * 0.95 * sizes[2].activations
    held = simulate(SimulatedModel(TINY), 32, precision="fp32", accumulates=True)
    assert 0 < held.peak - full.peak <= full.gradients * 1.01


@pytest.mark.slow
def test_shards_beyond_the_fake_ranks_are_computed_right(monkeypatch: pytest.MonkeyPatch) -> None:
    import vitrail.train.memory as memory

    exact = simulate_sharded(SimulatedModel(TINY), 8, precision="fp32", ranks=8)
    monkeypatch.setattr(memory, "_FAKE_RANKS", 2)
    computed = simulate_sharded(SimulatedModel(TINY), 8, precision="fp32", ranks=8)
    assert computed.weights == exact.weights == pytest.approx(4 * parameters(TINY) / 8, rel=0.02)
    assert computed.peak == pytest.approx(exact.peak, rel=0.05)


@pytest.mark.slow
def test_what_is_frozen_needs_no_gradient_and_no_optimiser_state() -> None:
    whole = make_plan(small_plan(ema=0.99), gpus=8, memory=8, micro_batch=8)
    part = make_plan(small_plan(ema=0.99, optim=OptimSpec(freeze=("*", "!head"))), gpus=8, memory=8, micro_batch=8)
    for before, after in zip(whole.needs, part.needs, strict=True):
        assert after.weights == before.weights and after.activations < before.activations
        assert before.optimizer == 2 * before.weights == 2 * before.average
        assert after.gradients < 0.4 * before.gradients and after.communication < before.communication
        assert after.optimizer == 2 * after.gradients == 2 * after.average
    head = 192 * 1000 + 1000
    assert part.needs[0].communication == round(2 * 7 / 8 * 4 * head)
    assert [(group.frozen, group.values) for group in part.groups] == [
        (False, head), (True, part.parameters - head),
    ]  # fmt: skip
    only_head = make_plan(
        Recipe(model=ModelSpec(name="ViT-Ti/16", image_size=64, depth=3, freeze=True), epochs=1), gpus=1, memory=8
    )
    assert [group.values for group in only_head.groups] == [head, only_head.parameters - head]


def test_communication_by_hand() -> None:
    config = model_config("ViT-B/16")
    count = parameters(config)
    assert communication(SimulatedModel(config), "ddp", 8, 1, "bf16") == round(2 * 7 / 8 * 4 * count)
    blocks = 12 * (12 * 768**2 + 13 * 768)  # qkv, out, up, down with their biases, and two norms
    once = 7 / 8 * (2 * 2 * blocks + 4 * (count - blocks))
    assert communication(SimulatedModel(config), "fsdp", 8, 1, "bf16") == pytest.approx(once + 7 / 8 * 4 * count)
    assert communication(SimulatedModel(config), "fsdp", 8, 3, "bf16") == pytest.approx(3 * once + 7 / 8 * 4 * count)
    assert communication(SimulatedModel(config), "single", 1, 1, "bf16") == 0


def small_plan(**changes: object) -> Recipe:
    return Recipe(model=ModelSpec(name="ViT-Ti/16", image_size=64, depth=3), batch=256, epochs=1, **changes)


@pytest.mark.slow
def test_the_largest_micro_batch_fits_and_one_more_tenth_does_not() -> None:
    made = make_plan(small_plan(optim=OptimSpec(name="adam")), gpus=1, memory=0.6)
    need = made.needs[0]
    assert 0 < need.largest_micro_batch < 256
    assert need.total <= made.memory
    over = make_plan(
        small_plan(optim=OptimSpec(name="adam")), gpus=1, memory=0.6, micro_batch=round(need.largest_micro_batch * 1.1) + 1
    )
    assert over.needs[0].total > made.memory
    assert need.optimizer == 2 * need.weights and need.average == 0


@pytest.mark.slow
def test_sgd_needs_less_and_averaging_more() -> None:
    sgd = make_plan(small_plan(optim=OptimSpec(name="sgd"), ema=0.99), gpus=1, memory=8).needs[0]
    assert sgd.optimizer == sgd.weights == sgd.average


@pytest.mark.slow
def test_many_gpus() -> None:
    made = make_plan(small_plan(), gpus=256, memory=1)
    ddp, fsdp = made.needs
    assert (ddp.engine, fsdp.engine) == ("ddp", "fsdp")
    assert fsdp.weights < ddp.weights / 50
    assert ddp.micro_batch == fsdp.micro_batch == 1


def test_impossible_plans_are_sentences() -> None:
    with pytest.raises(VitrailError, match="1 to 4096"):
        make_plan(small_plan(), gpus=5000, memory=1)
    with pytest.raises(VitrailError, match="cannot be split over 512 GPUs"):
        make_plan(small_plan(), gpus=512, memory=1)
    nothing = make_plan(small_plan(), gpus=1, memory=0.51).needs[0]
    assert nothing.largest_micro_batch == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["BiT-R26x1", "R26+ViT-S/32"])
def test_bit_and_hybrids_can_be_planned(name: str) -> None:
    config = model_config(name, image_size=64)
    found = simulate(SimulatedModel(config), 2, precision="bf16")
    assert found.weights == pytest.approx(4 * parameters(config), rel=0.01) and found.activations > 0


@pytest.mark.slow
def test_a_micro_batch_is_no_larger_than_its_accumulation_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 256 images in three parts, each has 86; 100 would need more memory for nothing."""
    monkeypatch.setattr("vitrail.train.plan._largest", lambda footprint, available: 100)
    (need,) = make_plan(small_plan().replace(batch=256), gpus=1, memory=8).needs
    assert (need.largest_micro_batch, need.micro_batch, need.accumulation) == (100, 86, 3)
    (need,) = make_plan(small_plan().replace(batch=256), gpus=1, memory=8, micro_batch=100).needs
    assert need.micro_batch == 100
