"""The fused path under torch.compile and FSDP2: one graph, and the same numbers."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.models.test_fused import CLOSE, DEVICE, blocks_fused, fusing, near
from tests.models.test_whitelist import images, logits, tiny
from vitrail.models.fused import whitelist

pytest.importorskip("triton")

__all__ = ["blocks_fused", "fusing", "images"]


@pytest.mark.slow
def test_compiled_models_have_one_graph_and_the_same_numbers(images: Tensor, fusing: None, blocks_fused: list[nn.Module]) -> None:
    for kernels in ("auto", "plain"):
        model = tiny().train()
        plain = logits(model, images, "plain")
        model.kernels = kernels  # type: ignore[assignment]
        torch._dynamo.reset()
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=DEVICE == "cuda"):
            found = compiled(images)
        found.sum().backward()
        assert near(found, plain) and not blocks_fused


def test_a_block_compiled_by_itself_is_called_as_such(fusing: None) -> None:
    block = tiny().blocks[0]
    assert whitelist.is_plain_block(block)
    block.compile(backend="eager")
    assert not whitelist.is_plain_block(block)


@pytest.fixture
def group() -> Iterator[None]:
    """A process group of one rank."""
    import torch.distributed as dist

    dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recompute", "kept", "fields"),
    [
        (None, False, {}),
        (None, True, {}),
        ("nothing", False, {}),
        ("matmuls", False, {}),
        (None, False, {"qk_norm": True}),
        ("matmuls", False, {"qk_norm": True}),
    ],
)
def test_sharded_blocks_are_fused_and_compute_the_same(
    recompute: Any, kept: bool, fields: dict[str, Any], images: Tensor, fusing: None, blocks_fused: list[nn.Module], group: None
) -> None:
    from vitrail.train.parallel import Runner, World

    model = tiny(**fields).train()
    plain = logits(model, images, "plain")
    plain.square().sum().backward()
    expected = {name: one.grad for name, one in model.named_parameters()}
    sharded = copy.deepcopy(model)
    sharded.zero_grad()
    sharded.kernels = "auto"
    if recompute:
        sharded.checkpoint_activations(2, recompute)
    low = torch.bfloat16 if DEVICE == "cuda" else None
    run = Runner(sharded, World(torch.device(DEVICE), mode="fsdp"), param_dtype=low, keep_gathered=kept)
    for _ in range(2):  # twice: the second pass finds parameters that were freed after the first
        blocks_fused.clear()
        sharded.zero_grad()
        with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=DEVICE == "cuda"):
            found = run(images)
        found.square().sum().backward()
    assert len(blocks_fused) == (3 if recompute != "nothing" else 5) and near(found, plain)
    for name, one in sharded.named_parameters():
        assert near(one.grad.full_tensor(), expected[name], 3 * CLOSE), name


def test_a_hook_on_a_sharded_block_is_called(images: Tensor, fusing: None, blocks_fused: list[nn.Module], group: None) -> None:
    from vitrail.train.parallel import Runner, World

    model, calls = tiny().train(), []
    run = Runner(model, World(torch.device(DEVICE), mode="fsdp"))
    assert all(whitelist.is_plain_block(block) for block in model.blocks)
    model.blocks[1].register_forward_hook(lambda *given: calls.append(1))
    with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=DEVICE == "cuda"):
        run(images)
    assert calls and len(blocks_fused) == 2


@pytest.mark.slow
def test_a_method_patched_on_the_class_that_fsdp2_made_is_called(
    images: Tensor, fusing: None, blocks_fused: list[nn.Module], group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vitrail.train.parallel import Runner, World

    model = tiny().train()
    run = Runner(model, World(torch.device(DEVICE), mode="fsdp"))
    monkeypatch.setattr(type(model.blocks[0]), "forward", lambda self, x, *more: 0 * x, raising=False)
    with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=DEVICE == "cuda"):
        found = run(images)
    assert not blocks_fused and near(found, found[:1].expand_as(found))  # nothing of the images is left


@pytest.mark.slow
def test_blocks_that_a_user_sharded_are_called_as_modules(
    images: Tensor, fusing: None, blocks_fused: list[nn.Module], group: None
) -> None:
    """FSDP2 gathers parameters for `forward_pending` only once it is registered."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    model = tiny().train()
    plain = logits(model, images, "plain")
    model.kernels = "auto"
    mesh = init_device_mesh(DEVICE, (1,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    found = logits(model, images, "auto")
    found.sum().backward()
    assert near(found, plain) and not blocks_fused
    for block in model.blocks:
        register_fsdp_forward_method(block, "forward_pending")
    assert near(logits(model, images, "auto"), plain) and len(blocks_fused) == 3
