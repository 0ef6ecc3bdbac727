"""Which patches are hidden, and how: exact counts, positions afterwards, gradients everywhere, the encoder on a quarter."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel

from vitrail.errors import VitrailError
from vitrail.models import ViT, create_model, flops
from vitrail.models.autoencoder import MaskedAutoencoder
from vitrail.models.masked import MaskedPatches, Pretraining, at, corruption_counts, gather_tokens, num_masked_of

TINY = {"patch": 4, "width": 32, "depth": 2, "heads": 2, "mlp": 48}


def vit(size: int | tuple[int, int] = 16, **changes: object) -> ViT:
    model = create_model("ViT-Ti/4", outputs=0, image_size=size, seed=0, **{**TINY, **changes})
    assert isinstance(model, ViT)
    return model


def masked(encoder: ViT, rate: float = 0.5, outputs: int = 8, **shares: float) -> MaskedPatches:
    model = MaskedPatches(encoder, outputs, rate, **shares)
    model.reset(torch.Generator().manual_seed(0))
    return model


def autoencoder(encoder: ViT, rate: float = 0.75, outputs: int = 48) -> MaskedAutoencoder:
    model = MaskedAutoencoder(encoder, outputs, rate, width=32, depth=2)
    model.reset(torch.Generator().manual_seed(0))
    return model


def noise_for(model: Pretraining, images: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(images, model.patches, model.draws, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 7), columns=st.integers(1, 7), images=st.integers(1, 4), rate=st.floats(0.1, 1.0), seed=st.integers(0, 999)
)
def test_the_counts_are_exact_in_every_image(rows: int, columns: int, images: int, rate: float, seed: int) -> None:
    if round(rate * rows * columns) < 1:
        return
    model = masked(vit((4 * rows, 4 * columns), depth=1), rate)
    patches = torch.randn(images, rows * columns, 32, generator=torch.Generator().manual_seed(seed))
    noise = noise_for(model, images, seed)
    order = noise[..., 0].argsort(dim=1)
    corrupted = model.corrupt(patches, order, noise[..., 1])
    count = round(rate * rows * columns)
    first, second = round(0.8 * count), min(round(0.1 * count), count - round(0.8 * count))
    is_mask = (corrupted == model.mask_token).all(-1)
    is_own = (corrupted == patches).all(-1)
    assert is_mask.sum(1).tolist() == [first] * images
    if images * rows * columns > 1:  # with a single patch in the batch there is no other to take its place
        assert is_own.sum(1).tolist() == [rows * columns - first - second] * images
        everyone = patches.flatten(0, 1)
        for number in torch.nonzero(~is_mask & ~is_own).tolist():
            assert (everyone == corrupted[tuple(number)]).all(-1).sum() == 1  # another patch of the batch, whole
    assert (model.num_masked, model.masked, model.replaced) == (count, first, second)


def test_the_papers_numbers() -> None:
    assert num_masked_of(0.5, vit(56).config) == 98
    assert corruption_counts(98) == (78, 10)
    assert corruption_counts(32) == (26, 3)


def test_every_patch_is_masked_and_every_other_patch_replaces_it_at_times() -> None:
    model = masked(vit(), masked=0.0, replaced=1.0)
    noise = noise_for(model, 2000)
    order = noise[..., 0].argsort(dim=1)
    hidden = torch.bincount(order[:, : model.num_masked].flatten(), minlength=16) / 2000
    assert (hidden - 0.5).abs().max() < 0.05
    donors = model.donors(order[:, : model.num_masked], noise[..., 1])
    own = torch.arange(2000)[:, None] * 16 + order[:, : model.num_masked]
    assert (donors != own).all()
    assert donors.min() >= 0 and donors.max() < 2000 * 16
    few = masked(vit(), masked=0.0, replaced=1.0)
    seen = {
        int(one) for seed in range(60) for one in few.donors(torch.zeros(1, 1, dtype=torch.int64), noise_for(few, 1, seed)[..., 1])
    }
    assert 0 not in seen and len(seen) >= 13  # any other patch of the image, never itself


def test_positions_are_added_after_the_corruption() -> None:
    encoder = vit(pooling="mean")
    model, images = masked(encoder, masked=1.0, replaced=0.0), torch.randn(3, 3, 16, 16)
    entered = []
    hook = encoder.blocks[0].register_forward_pre_hook(lambda module, args: entered.append(args[0]))
    noise = noise_for(model, 3)
    model(images, noise)
    hook.remove()
    order = noise[..., 0].argsort(dim=1)
    table = encoder.positions.of_patches().flatten(0, 1)
    hidden, others = order[:, : model.num_masked], order[:, model.num_masked :]
    torch.testing.assert_close(entered[0][:, : model.num_masked], model.mask_token + table[hidden])
    torch.testing.assert_close(entered[0][:, model.num_masked :], at(encoder.embed_patches(images), others) + table[others])


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"pooling": "mean"},
        {"registers": 2},
        {"distill_token": True},
        {"final_norm": "after-pool", "pooling": "mean"},
        {"position": "sincos2d"},
        {"position": "relative"},
        {"position_at": "every-layer"},
        {"attention": "axial"},
    ],
)
def test_the_output_is_the_whole_encoders_at_the_masked_patches(changes: dict[str, object]) -> None:
    """Tokens may be put in another order on the way; the result is the same."""
    encoder = vit(**changes).eval()
    model, images = masked(encoder), torch.randn(3, 3, 16, 16)
    noise = noise_for(model, 3)
    predicted, places = model(images, noise)
    corrupted = model.corrupt(encoder.embed_patches(images), noise[..., 0].argsort(dim=1), noise[..., 1])
    tokens = encoder.encode(encoder.add_prefix_and_positions(corrupted))
    tokens = encoder.norm(tokens) if encoder.config.final_norm == "after-pool" else tokens
    wanted = model.head(at(tokens[:, encoder.config.prefix :], places))
    torch.testing.assert_close(predicted, wanted, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("make", [masked, autoencoder])
def test_gradients_reach_every_part(make) -> None:  # type: ignore[no-untyped-def]
    model = make(vit(registers=1))
    predicted, _ = model(torch.randn(4, 3, 16, 16), noise_for(model, 4))
    predicted.square().sum().backward()
    without = [name for name, one in model.named_parameters() if one.grad is None or not one.grad.any()]
    assert without == []
    assert model.mask_token.grad.abs().max() > 1e-6


@pytest.mark.parametrize("count", [7, 3])
def test_taking_tokens_is_indexing_forward_and_backward(count: int) -> None:
    places = torch.stack([torch.randperm(7)[:count] for _ in range(3)])
    tokens = torch.randn(3, 7, 4, dtype=torch.float64, requires_grad=True)
    assert torch.equal(gather_tokens(tokens, places), at(tokens, places))
    assert torch.autograd.gradcheck(lambda x: gather_tokens(x, places), tokens)
    assert torch.autograd.gradgradcheck(lambda x: gather_tokens(x, places), tokens)


def test_the_same_noise_hides_the_same_patches() -> None:
    model, images = masked(vit()).eval(), torch.randn(2, 3, 16, 16)
    one, two, other = (model(images, noise_for(model, 2, seed)) for seed in (0, 0, 1))
    assert torch.equal(one[0], two[0]) and torch.equal(one[1], two[1])
    assert not torch.equal(one[1], other[1])


def test_an_autoencoders_encoder_sees_a_quarter_and_nothing_else() -> None:
    encoder = vit()
    model, images = autoencoder(encoder).eval(), torch.randn(2, 3, 16, 16)
    lengths: list[int] = []
    hooks = [block.register_forward_hook(lambda m, a, out: lengths.append(out.shape[1])) for block in encoder.blocks]
    predicted, places = model(images, noise_for(model, 2))
    for hook in hooks:
        hook.remove()
    assert lengths == [1 + 4, 1 + 4] and predicted.shape == (2, 12, 48) and places.shape == (2, 12)
    changed = images.clone()
    for number, patch in enumerate(places[0].tolist()):
        row, column = divmod(patch, 4)
        changed[0, :, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4] = number  # only what is hidden
    torch.testing.assert_close(model(changed, noise_for(model, 2))[0], predicted)


@torch.no_grad()
def test_an_autoencoder_as_its_paper_writes_it() -> None:
    """Encode the visible tokens, fill up with [mask], put in order, add positions, decode everything, keep the hidden."""
    encoder = vit().eval()
    model, images = autoencoder(encoder).eval(), torch.randn(2, 3, 16, 16)
    noise = noise_for(model, 2)
    predicted, places = model(images, noise)
    for image in range(2):
        order = noise[image, :, 0].argsort()
        seen = order[12:]
        tokens = encoder.add_prefix_and_positions(encoder.embed_patches(images[image : image + 1]))
        tokens = encoder.encode(torch.cat([tokens[:, :1], tokens[:, 1:][:, seen]], dim=1))
        narrow = model.narrow(tokens)
        full = model.mask_token.expand(1, 16, -1).clone()
        full[:, seen] = narrow[:, 1:]
        x = torch.cat([narrow[:, :1], full + model.positions], dim=1)
        for block in model.decoder_blocks:
            x = block(x)
        wanted = model.head(model.norm(x))[0, 1:]
        torch.testing.assert_close(predicted[image], wanted[places[image]], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"position": "relative"}, "relative positions act inside the layers"),
        ({"position_at": "every-layer"}, "act inside the layers"),
        ({"attention": "axial"}, "whole rows and columns"),
    ],
)
def test_what_an_autoencoder_cannot_do_without_is_refused(changes: dict[str, object], reason: str) -> None:
    with pytest.raises(VitrailError, match=reason):
        autoencoder(vit(**changes))


def test_other_refusals() -> None:
    hybrid = create_model("R26+ViT-S/32", outputs=0, image_size=64, device="meta")
    with pytest.raises(VitrailError, match="ResNet has looked at the whole image"):
        MaskedAutoencoder(hybrid, 8)
    assert MaskedPatches(hybrid, 8).num_masked == 2
    with pytest.raises(VitrailError, match="leaves none of the 16 patches"):
        autoencoder(vit(), rate=1.0)
    with pytest.raises(VitrailError, match="masks 0 of the 16 patches"):
        masked(vit(), rate=0.01)
    with pytest.raises(VitrailError, match="multiple of 32"):
        MaskedAutoencoder(vit(), 8, width=40)


def test_operations_are_those_that_torch_counts() -> None:
    """Matmuls and attention, as the profiler of torch sees them; it has no others."""
    from torch.utils.flop_counter import FlopCounterMode

    images = torch.randn(2, 3, 32, 32)
    for model in (masked(vit(32)), masked(vit(32, attention="axial")), autoencoder(vit(32, registers=1))):
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
            model.eval()(images, noise_for(model, 2))
        assert 2 * model.flops() == pytest.approx(counter.get_total_flops(), rel=0.03)


def test_the_price_of_a_decoder() -> None:
    big = create_model("ViT-B/16", outputs=0, device="meta")
    authors = MaskedAutoencoder(big, 768, width=512, depth=8).flops() / flops(big.config)
    assert 0.5 < authors < 0.6  # the authors' decoder costs as much as the encoder's quarter
    assert MaskedAutoencoder(big, 768).flops() / flops(big.config) < 0.42
    assert MaskedPatches(big, 512).flops() < flops(big.config)
