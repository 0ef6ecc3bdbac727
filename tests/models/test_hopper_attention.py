"""Warp-specialised attention for Hopper GPUs, and its selection.

The kernel needs a Hopper GPU: it is written in Gluon, which has no interpreter. Without one a stand-in takes its place in a model,
and test_compiling.py compiles it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.models.test_fused import CLOSE, DEVICE, LOW, fusing, near, results, small
from tests.models.test_hopper_matmul import HOPPER, on_hopper

pytest.importorskip("triton")

__all__ = ["fusing"]


def plain_attention(qkv: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """The output, and softmax's logsumexp."""
    q, k, v = qkv.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
    scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
    return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2), scores.logsumexp(-1)


@on_hopper
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [129, 145, 170, 192, 197, 224])
def test_hopper_attention(low: torch.dtype, tokens: int) -> None:
    from vitrail.models.fused.hopper_attention import hopper_attention

    qkv = torch.randn(7, tokens, 3 * 3 * 64, device=DEVICE).to(low)
    qkv[3] *= 20  # scores so high that only their differences can be exponents
    expected, lse64 = plain_attention(qkv.double(), 3)
    for programs in (1, 4, None):  # with all 21 heads, some of them, one
        out, lse = hopper_attention(qkv, 3, needs_grad=True, programs=programs)
        assert (lse - lse64).abs().max() < 1e-5 * lse64.abs().max()
        assert (out - expected).abs().max() < 4 * torch.finfo(low).eps * expected.abs().max()
        assert torch.equal(hopper_attention(qkv, 3, needs_grad=False, programs=programs)[0], out)


@pytest.mark.parametrize("needs_grad", [True, False])
def test_hopper_attentions_fake_rule(needs_grad: bool) -> None:
    from vitrail.models.fused.hopper_attention import hopper_attention

    meta = hopper_attention(torch.zeros(2, 197, 384, dtype=torch.bfloat16, device="meta"), 2, needs_grad)
    with FakeTensorMode():
        fake = hopper_attention(torch.zeros(2, 197, 384, dtype=torch.bfloat16), 2, needs_grad=needs_grad)
    for out, lse in (meta, fake):
        assert out.shape == (2, 197, 128) and out.dtype == torch.bfloat16
        assert lse.shape == ((2, 2, 197) if needs_grad else (0,)) and lse.dtype == torch.float32


@on_hopper
def test_hopper_attention_is_deterministic() -> None:
    from vitrail.models.fused.hopper_attention import hopper_attention

    qkv = torch.randn(200, 197, 3 * 12 * 64, device=DEVICE).to(LOW)
    first, _ = hopper_attention(qkv, 12, needs_grad=True)
    assert all(torch.equal(first, hopper_attention(qkv, 12, needs_grad=True)[0]) for _ in range(30))


def test_selection_by_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    from vitrail.models.fused import selection

    with FakeTensorMode():
        assert not selection.use_hopper_attention(torch.zeros(64, 197, 2304, dtype=torch.bfloat16), 12, True)  # nothing is launched
    assert not selection.use_hopper_attention(torch.zeros(2, 197, 576, dtype=torch.bfloat16), 3, True)  # on a CPU
    if DEVICE == "cuda":
        monkeypatch.setattr(selection, "_hopper_attention_works", lambda *given: True)
        many = 2 * selection.num_sms(torch.device(DEVICE))

        def taken(images: int, tokens: int, heads: int = 1, width: int = 64, dtype: torch.dtype = LOW) -> bool:
            return selection.use_hopper_attention(torch.zeros(images, tokens, 3 * width, dtype=dtype, device=DEVICE), heads, True)

        assert taken(many, 129) and taken(many, 224) and not taken(many // 2, 197)
        assert not any((taken(many, 128), taken(many, 225), taken(many, 197, 2), taken(many, 197, dtype=torch.float32)))


@pytest.mark.parametrize("number, off, expected", [(9, 0.001, True), (9, 0.5, False), (9, float("nan"), False), (10, 0.001, False)])
def test_self_test_decides(
    number: int, off: float, expected: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from vitrail.models.fused import selection

    monkeypatch.setattr(selection, "sm_major", lambda device: number)
    monkeypatch.setattr(selection, "_hopper_attention_difference", lambda *given: off)
    selection._hopper_attention_works.cache_clear()
    assert selection._hopper_attention_works(torch.device("cpu"), LOW, 197, 12, True) == expected
    selection._hopper_attention_works.cache_clear()
    assert bool(caplog.records) == (number == 9 and not expected)


@pytest.mark.skipif(DEVICE == "cuda", reason="stands in for a kernel that this machine may have")
@pytest.mark.parametrize("case", ["right", "one head", "last query", "lse"])
def test_the_self_test_finds_what_is_wrong(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from vitrail.models.fused import hopper_attention, selection

    def stand_in(qkv: Tensor, heads: int, needs_grad: bool, programs: int) -> tuple[Tensor, Tensor]:
        out, lse = plain_attention(qkv.float(), heads)
        if case == "one head":
            out[2, :, 128:192] *= 1.05
        elif case == "last query":
            out[-1, -1, -64:] *= 1.05
        elif case == "lse":
            lse[1, 2] += 0.5
        return out.to(qkv.dtype), lse

    monkeypatch.setattr(hopper_attention, "hopper_attention", stand_in)
    worst = selection._hopper_attention_difference(torch.device("cpu"), torch.bfloat16, 145, 6, True)
    assert (worst < 0.6 * selection.TOLERANCE) if case == "right" else (worst > selection.TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("keep", [None, "matmuls", "nothing"])
def test_a_model_with_hopper_attention(keep: Any, fusing: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from vitrail.models.fused import branches, hopper_attention

    taken: list[bool] = []
    real = hopper_attention.hopper_attention

    def watched(qkv: Tensor, heads: int, *, needs_grad: bool) -> tuple[Tensor, Tensor]:
        taken.append(needs_grad)
        if HOPPER:
            return real(qkv, heads, needs_grad=needs_grad)
        out, lse = plain_attention(qkv, heads)
        return out, lse if needs_grad else lse[:0]

    size = 192 if HOPPER else 48
    model, images = small(depth=2, image_size=size), torch.randn(2, 3, size, size, device=DEVICE)
    plain, plain_gradients = results(model, images, "plain")
    if keep:
        model.checkpoint_activations(keep=keep)
    monkeypatch.setattr(branches, "use_hopper_attention", lambda qkv, heads, needs_grad: True)
    monkeypatch.setattr(hopper_attention, "hopper_attention", watched)
    fused, gradients = results(model, images, "auto")
    # The last block's queries are apart from its keys, and few; so one block is left, and computed again if little is kept of it.
    assert taken == [True] * (2 if keep else 1)
    assert near(fused, plain, 1e-4 + CLOSE)
    assert all(near(gradients[name], one, 1e-4 + 2 * CLOSE) for name, one in plain_gradients.items())
    with torch.no_grad(), torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=DEVICE == "cuda"):
        assert near(model(images), plain, 1e-4 + CLOSE)
    assert not taken[-1]
