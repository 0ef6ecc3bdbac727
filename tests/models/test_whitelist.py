"""The fused path computes what the module says, or steps aside: models that are not quite plain, one by one.

Without a GPU the kernels run in Triton's interpreter, in float32, so that a step aside that is missing shows in the numbers.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models.other_libraries import randomise
from tests.models.test_fused import DEVICE, blocks_fused, fusing, near
from vitrail.models import ViT, create_model
from vitrail.models.fused import dispatch, encoder, whitelist
from vitrail.models.fused.ordinary_call import is_ordinary_call
from vitrail.models.layers import Mlp, PatchEmbedding
from vitrail.models.positions import LearnedPositions
from vitrail.models.vit import Block

pytest.importorskip("triton")

__all__ = ["blocks_fused", "fusing"]


def tiny(**changes: Any) -> ViT:
    changes = {"image_size": 32, "depth": 3, "width": 32, "heads": 2, "mlp": 32, "outputs": 5, **changes}
    model = randomise(create_model("ViT-Ti/16", seed=0, **changes)).to(DEVICE)
    assert isinstance(model, ViT)
    return model


@pytest.fixture
def images() -> Tensor:
    return torch.randn(2, 3, 32, 32, device=DEVICE)


def logits(model: ViT, images: Tensor, kernels: str) -> Tensor:
    model.kernels = kernels  # type: ignore[assignment]
    with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=DEVICE == "cuda"):
        return model(images)


# Another function than the paper's, in a part of one block


class DoublingMlp(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class HalfBlock(Block):
    def forward(self, x: Tensor, bias: Tensor | None = None, num_queries: int | None = None) -> Tensor:
        return 0.5 * super().forward(x, bias, num_queries)


class RmsNorm(nn.Module):
    """Has weight, bias and eps, as a layer norm has."""

    def __init__(self, norm: nn.LayerNorm) -> None:
        super().__init__()
        self.weight, self.bias, self.eps, self.normalized_shape = norm.weight, norm.bias, norm.eps, norm.normalized_shape

    def forward(self, x: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt() * self.weight + self.bias


class Lora(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        low_rank = torch.linspace(-1, 1, self.in_features, device=x.device).outer(
            torch.arange(self.out_features, device=x.device).cos()
        )
        return super().forward(x) + 0.3 * x @ low_rank.to(x.dtype)


def becomes(kind: type[nn.Module], module: nn.Module) -> nn.Module:
    """A copy of a module as an instance of a subclass."""
    made = copy.deepcopy(module)
    made.__class__ = kind
    return made


def without_bias(norm: nn.LayerNorm) -> nn.LayerNorm:
    made = nn.LayerNorm(norm.normalized_shape, eps=norm.eps, bias=False).to(norm.weight)
    made.weight = norm.weight
    return made


def strided(parameter: Tensor) -> nn.Parameter:
    """Other values, with unused ones between them, as in a column of a larger table."""
    values = torch.stack([parameter.detach().flip(0) + 0.3, torch.full_like(parameter, 9.0)], dim=1)
    return nn.Parameter(values[:, 0])


def patch_merge(attention: nn.Module) -> None:
    merge = attention._merge
    attention._merge = lambda x: 3 * merge(x)  # type: ignore[assignment, operator]


def patch_forward(module: nn.Module, factor: float) -> None:
    kind = type(module)
    module.forward = types.MethodType(lambda self, x: factor * kind.forward(self, x), module)  # type: ignore[method-assign]


CHANGES: dict[str, Callable[[ViT], None]] = {
    "LayerNorm without bias": lambda model: setattr(model.blocks[1], "norm1", without_bias(model.blocks[1].norm1)),
    "another norm class": lambda model: setattr(model.blocks[1], "norm2", RmsNorm(model.blocks[1].norm2)),
    "a subclass of Mlp": lambda model: setattr(model.blocks[1], "mlp", becomes(DoublingMlp, model.blocks[1].mlp)),
    "a subclass of Block": lambda model: model.blocks.__setitem__(1, becomes(HalfBlock, model.blocks[1])),
    "mlp.forward patched on the instance": lambda model: patch_forward(model.blocks[1].mlp, 3.0),
    "a linear layer patched on the instance": lambda model: patch_forward(model.blocks[1].attention.out, 3.0),
    "a call patched on the instance": lambda model: setattr(
        model.blocks[1].mlp, "_call_impl", lambda x, mlp=model.blocks[1].mlp: 3 * mlp.forward(x)
    ),
    "an adapter on qkv": lambda model: setattr(model.blocks[1].attention, "qkv", becomes(Lora, model.blocks[1].attention.qkv)),
    "an adapter on down": lambda model: setattr(model.blocks[1].mlp, "down", becomes(Lora, model.blocks[1].mlp.down)),
    "another activation": lambda model: setattr(model.blocks[1].mlp, "dropout", nn.Tanh()),
    "a scale in place of an identity": lambda model: setattr(model.blocks[1], "scale1", nn.Hardtanh(-0.01, 0.01)),
    "a bias of one number": lambda model: setattr(
        model.blocks[1].mlp.up, "bias", nn.Parameter(torch.full((1,), 0.7, device=DEVICE))
    ),
    "a bias of one row": lambda model: setattr(
        model.blocks[1].mlp.up, "bias", nn.Parameter(model.blocks[1].mlp.up.bias.detach()[None] + 1)
    ),
    "a bias with strides": lambda model: setattr(model.blocks[1].mlp.down, "bias", strided(model.blocks[1].mlp.down.bias)),
    "a norm weight with strides": lambda model: setattr(model.blocks[1].norm1, "weight", strided(model.blocks[1].norm1.weight)),
    "a norm bias with strides": lambda model: setattr(model.blocks[1].norm2, "bias", strided(model.blocks[1].norm2.bias)),
    "a part of attention patched on the instance": lambda model: patch_merge(model.blocks[1].attention),
    "a parametrisation": lambda model: torch.nn.utils.parametrizations.weight_norm(model.blocks[1].mlp.up),
}


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_part_takes_the_plain_path_and_its_block_alone(
    change: str, images: Tensor, fusing: None, blocks_fused: list[nn.Module]
) -> None:
    model = tiny().eval()
    before = logits(model, images, "plain")
    CHANGES[change](model)
    plain, fused = logits(model, images, "plain"), logits(model, images, "auto")
    assert change == "a parametrisation" or not near(plain, before, 1e-3)  # the change matters
    assert near(fused, plain)
    assert blocks_fused == [model.blocks[0], model.blocks[2]]


def test_patched_embeddings_and_positions_take_the_plain_path(
    images: Tensor, fusing: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny().eval()
    before = logits(model, images, "plain")
    with monkeypatch.context() as patched:
        real = PatchEmbedding.forward
        patched.setattr(PatchEmbedding, "forward", lambda self, x: real(self, x.flip(-1)))
        plain = logits(model, images, "plain")
        assert near(logits(model, images, "auto"), plain) and not near(plain, before, 1e-3)
    add = model.positions.at_input
    model.positions.at_input = lambda x: add(2 * x)  # type: ignore[method-assign]
    plain = logits(model, images, "plain")
    assert near(logits(model, images, "auto"), plain) and not near(plain, before, 1e-3)


class TiltedPositions(LearnedPositions):
    """Adds at the input, as its base class, and to the attention's scores."""

    def bias(self, layer: int, *other: Any) -> Tensor:
        return torch.linspace(-5, 5, self.table.shape[1], device=self.table.device).expand(2, self.table.shape[1], -1)


class RepeatedPositions(LearnedPositions):
    def before_layer(self, x: Tensor, layer: int, *other: Any) -> Tensor:
        return x + self.table[0]


@pytest.mark.parametrize("change", [TiltedPositions, RepeatedPositions, "bias", "before_layer"])
def test_positions_that_act_inside_the_encoder_take_the_plain_path(
    change: Any, images: Tensor, fusing: None, blocks_fused: list[nn.Module]
) -> None:
    model = tiny(depth=1).eval()
    before = logits(model, images, "plain")
    if isinstance(change, str):
        kind: Any = {"bias": TiltedPositions, "before_layer": RepeatedPositions}[change]
        setattr(model.positions, change, types.MethodType(getattr(kind, change), model.positions))
    else:
        model.positions = becomes(change, model.positions)  # type: ignore[assignment]
    assert not near(logits(model, images, "plain"), before, 1e-3)
    assert near(logits(model, images, "auto"), logits(model, images, "plain"))
    assert not blocks_fused and not dispatch.is_fusable(model)


def test_positions_with_another_table_leave_the_blocks_fused(images: Tensor, fusing: None, blocks_fused: list[nn.Module]) -> None:
    class Doubled(nn.Module):
        def forward(self, table: Tensor) -> Tensor:
            return 2 * table

    model = tiny(depth=1).eval()
    torch.nn.utils.parametrize.register_parametrization(model.positions, "table", Doubled())
    assert near(logits(model, images, "auto"), logits(model, images, "plain")) and len(blocks_fused) == 1


def test_the_final_norm_may_be_replaced(images: Tensor, fusing: None) -> None:
    model = tiny().eval()
    model.norm = nn.Identity()  # type: ignore[assignment]
    assert near(logits(model, images, "auto"), logits(model, images, "plain"))
    model.norm = nn.LayerNorm(32, bias=False).to(DEVICE)
    assert near(logits(model, images, "auto"), logits(model, images, "plain"))
    assert model.replace_head(3).head.weight.shape == (3, 32)


def test_a_final_norm_whose_parameter_was_replaced_by_a_tensor(images: Tensor, fusing: None) -> None:
    model = tiny().eval()
    weight = model.norm.weight.detach() + 1
    del model.norm.weight
    model.norm.weight = weight  # as with weights that another network computes
    assert near(logits(model, images, "auto"), logits(model, images, "plain"))


# Dropout as the modules have it


@pytest.mark.slow
def test_dropout_alone_in_train_mode_drops(images: Tensor, fusing: None, blocks_fused: list[nn.Module]) -> None:
    """Monte-Carlo dropout: eval(), and then only the dropouts back in train()."""
    model = tiny(dropout=0.5).eval()
    still = logits(model, images, "auto")
    assert torch.equal(still, logits(model, images, "auto"))
    for module in model.blocks.modules():
        if isinstance(module, nn.Dropout):
            module.train()
    one, two = logits(model, images, "auto"), logits(model, images, "auto")
    assert not near(one, two, 1e-2) and not near(one, still, 1e-2) and len(blocks_fused) == 12


def test_train_mode_with_dropouts_in_eval_mode_drops_nothing(images: Tensor, fusing: None) -> None:
    model = tiny(dropout=0.5).train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.eval()
    assert near(logits(model, images, "auto"), logits(model, images, "plain"))


def test_each_dropout_has_its_own_rate() -> None:
    block = tiny(dropout=0.5).train().blocks[0]
    assert isinstance(block, Block)
    x = torch.zeros(2, 5, 32, device=DEVICE)
    block.mlp.dropout.p = 0.0
    attention, gelu, mlp = encoder.draw_noise(block, x).seeds
    assert attention is not None and gelu is None and mlp is None
    block.mlp.dropout.p, block.dropout.p = 0.25, 0.0
    attention, gelu, mlp = encoder.draw_noise(block, x).seeds
    assert attention is None and gelu is not None and mlp is not None
    block.dropout.p = 1.0
    assert not whitelist.is_plain_block(block)


@pytest.mark.slow
def test_a_changed_rate_of_one_dropout_counts(images: Tensor, fusing: None) -> None:
    model = tiny(dropout=0.5).train()
    model.dropout.eval()
    for block in model.blocks:
        block.dropout.p = block.mlp.dropout.p = 0.0
    assert near(logits(model, images, "auto"), logits(model, images, "plain"))
    model.blocks[0].mlp.dropout.p = 0.5
    assert not near(logits(model, images, "auto"), logits(model, images, "auto"), 1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [np.float32, torch.tensor])
def test_rates_and_epsilons_may_be_other_numbers_than_pythons(
    kind: Callable[[float], Any], images: Tensor, fusing: None, blocks_fused: list[nn.Module]
) -> None:
    """torch's functions take numpy's numbers and tensors of one value. Triton's kernels do not."""
    model = tiny(dropout=0.5, qk_norm=True)
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.eps = kind(1e-3)
        if isinstance(module, nn.Dropout):
            module.p = kind(0.25)
    logits(model.train(), images, "auto").sum().backward()
    assert near(logits(model.eval(), images, "auto"), logits(model, images, "plain")) and len(blocks_fused) == 6


# The decision


@pytest.mark.slow
def test_blocks_may_be_any_module_of_tokens(images: Tensor, fusing: None, blocks_fused: list[nn.Module]) -> None:
    for number in (1, 2):  # in the middle, and last, where only the class token is read
        model = tiny().eval()
        model.blocks[number] = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32)).to(DEVICE)
        blocks_fused.clear()
        plain, fused = logits(model, images, "plain"), logits(model, images, "auto")
        assert plain.shape == (2, 5) and near(fused, plain) and len(blocks_fused) == 2


METHODS = {
    "": ("forward", "_add_branches", "_call_impl", "_compiled_call_impl"),
    "attention": ("forward", "_split", "_attend", "_merge", "_call_impl"),
    **dict.fromkeys(("norm1", "norm2", "scale1", "scale2", "dropout", "skip", "mlp", "mlp.dropout"), ("forward", "_call_impl")),
    **dict.fromkeys(
        ("attention.qkv", "attention.out", "attention.q_norm", "mlp.up", "mlp.down"), ("forward", "_compiled_call_impl")
    ),
}


@pytest.mark.parametrize(("part", "name"), [(part, name) for part, names in METHODS.items() for name in names])
def test_every_method_that_is_patched_on_an_instance_is_seen(part: str, name: str) -> None:
    block = tiny(depth=1, qk_norm=True).blocks[0]
    module = block.get_submodule(part)
    assert whitelist.is_plain_block(block)
    module.__dict__[name] = lambda *given: given[0]
    assert not whitelist.is_plain_block(block)
    del module.__dict__[name]
    assert whitelist.is_plain_block(block)


@pytest.mark.parametrize(("part", "name"), [("skip", "rate"), ("dropout", "p"), ("mlp.dropout", "p")])
def test_where_nothing_survives_the_plain_path_is_taken(part: str, name: str) -> None:
    block = tiny(depth=1).blocks[0]
    setattr(block.get_submodule(part), name, 1.0)
    assert not whitelist.is_plain_block(block) and whitelist.is_plain_block(block, eval_mode=True)


@pytest.mark.parametrize("kind", ["quick", None, 1])
def test_a_kind_of_gelu_that_torch_does_not_know_is_torchs_to_refuse(kind: Any, images: Tensor, fusing: None) -> None:
    model = tiny(depth=1).eval()
    model.blocks[0].mlp.approximate = kind
    assert not whitelist.is_plain_block(model.blocks[0])
    for kernels in ("plain", "auto"):
        with pytest.raises((RuntimeError, TypeError), match="approximate"):
            logits(model, images, kernels)


def test_a_block_that_is_always_skipped_returns_its_tokens() -> None:
    block, x = tiny(depth=1).train().blocks[0], torch.randn(2, 5, 32, device=DEVICE)
    block.skip.rate = 1.0
    assert torch.equal(block(x), x)


def test_a_norm_of_heads_that_was_added_is_seen() -> None:
    block = tiny(depth=1).blocks[0]
    block.attention.__dict__["k_norm"] = lambda k: 2 * k
    assert not whitelist.is_plain_block(block)


def test_the_decision_is_never_remembered(images: Tensor, fusing: None, blocks_fused: list[nn.Module]) -> None:
    model = tiny().eval()
    logits(model, images, "auto")
    patch_forward(model.blocks[0].mlp, 2.0)
    logits(model, images, "auto")
    del model.blocks[0].mlp.forward
    logits(model, images, "auto")
    assert [len(blocks_fused), blocks_fused.count(model.blocks[0])] == [8, 2]


@pytest.mark.parametrize("change", ["a tensor subclass", "a mode", "a global hook", "a precision"])
def test_the_decision_is_made_again_after_a_users_code(
    change: str, images: Tensor, fusing: None, blocks_fused: list[nn.Module]
) -> None:
    """A hook on one block may change how the next ones must run."""

    class NoGelu(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
            return args[0] if func is F.gelu else func(*args, **(kwargs or {}))

    model, undo, mode = tiny().eval(), list[Callable[[], object]](), NoGelu()

    def begin(block: nn.Module, given: Any, out: Tensor) -> Tensor | None:
        if change == "a mode":
            mode.__enter__()
            undo.append(lambda: mode.__exit__(None, None, None))
        if change == "a global hook":
            undo.append(nn.modules.module.register_module_forward_hook(_double_up_layers).remove)
        if change == "a precision":
            return out.double()
        return out.as_subclass(DoublingGelu) if change == "a tensor subclass" else None

    def end() -> None:
        while undo:
            undo.pop()()

    before = logits(model, images, "plain")
    model.blocks[0].register_forward_hook(begin)
    model.head.register_forward_pre_hook(lambda *given: end())
    if change == "a precision":
        for kernels in ("plain", "auto"):
            with pytest.raises(RuntimeError, match=r"expected|dtype"):
                logits(model, images, kernels)
    else:
        plain = logits(model, images, "plain")
        assert near(logits(model, images, "auto"), plain) and not near(plain, before, 1e-3)
    assert not blocks_fused


def _double_up_layers(module: nn.Module, given: Any, out: Tensor) -> Tensor | None:
    return 2 * out if isinstance(module, nn.Linear) and module.out_features == 32 else None


def test_tensor_subclasses_take_the_plain_path() -> None:
    class Marked(Tensor):
        pass

    model = tiny().eval()
    block = model.blocks[0]
    assert whitelist.is_plain_block(block)
    block.mlp.up.weight = nn.Parameter(block.mlp.up.weight.detach().as_subclass(Marked))
    assert not whitelist.is_plain_block(block)
    assert not dispatch.can_fuse(torch.zeros(1, 5, 32, dtype=torch.bfloat16).as_subclass(Marked))


class DoublingGelu(Tensor):
    """Its GELU is another one, also of whatever is computed from it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = super().__torch_function__(func, types, args, kwargs)
        return 2 * found if func is F.gelu else found


@pytest.mark.parametrize("name", ["class_token", "positions.table"])
def test_tokens_and_positions_of_tensor_subclasses_take_the_plain_path(name: str, images: Tensor, fusing: None) -> None:
    model = tiny().eval()
    before = logits(model, images, "plain")
    owner, _, attribute = name.rpartition(".")
    parameter = getattr(model.get_submodule(owner), attribute)
    setattr(model.get_submodule(owner), attribute, nn.Parameter(parameter.detach().as_subclass(DoublingGelu)))
    plain = logits(model, images, "plain")
    assert near(logits(model, images, "auto"), plain) and not near(plain, before, 1e-3)


def test_images_of_a_tensor_subclass_take_the_plain_path(images: Tensor, fusing: None, blocks_fused: list[nn.Module]) -> None:
    model = tiny().eval()
    before, marked = logits(model, images, "plain"), images.as_subclass(DoublingGelu)  # type: ignore[arg-type]
    plain = logits(model, marked, "plain")
    assert near(logits(model, marked, "auto"), plain) and not near(plain, before, 1e-3) and not blocks_fused


def test_a_batch_without_images_takes_the_plain_path(
    images: Tensor, fusing: None, blocks_fused: list[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vitrail.models.fused import patchify

    monkeypatch.setattr(patchify, "patchify", None)  # a grid of no programs cannot be launched
    model = tiny().train()
    found = logits(model, images[:0], "auto")
    found.sum().backward()
    assert found.shape == (0, 5) and not blocks_fused and not model.blocks[0].mlp.up.weight.grad.any()


@pytest.fixture(autouse=True)
def _no_hooks_left() -> Iterator[None]:
    yield
    assert is_ordinary_call()
