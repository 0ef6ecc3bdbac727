"""The check of kernels before their first use: what it notices, and what it remembers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models.test_fused import DEVICE

pytest.importorskip("triton")

from vitrail.models.fused import branches, self_test, self_test_cases

HERE = torch.device(DEVICE)
LOW = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # the interpreter takes bfloat16's bits for whole numbers
SIZE = (32, 48, 2)


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if DEVICE == "cpu":  # the interpreter takes a millisecond per instruction
        monkeypatch.setattr(self_test_cases, "_IMAGES", 2)
        monkeypatch.setattr(self_test_cases, "_TOKENS", 5)
    checks = (self_test.works, self_test.works_on, self_test.attention_works, self_test.fp8_fault)
    for check in checks:
        check.cache_clear()  # type: ignore[attr-defined]
    yield
    for check in checks:
        check.cache_clear()  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.parametrize("tanh", [True, False])
def test_right_kernels_pass_and_leave_generators_alone(tanh: bool, caplog: pytest.LogCaptureFixture) -> None:
    before = torch.random.get_rng_state()
    assert self_test.works(HERE, LOW, *SIZE, tanh) and self_test.works_on(HERE, LOW)
    assert torch.equal(torch.random.get_rng_state(), before) and not caplog.records


def test_the_generators_of_other_gpus_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.manual_seed` seeds those of all devices, of which only the tested one's is restored."""
    seeded: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    drawn: list[Tensor] = []

    def difference() -> float:
        drawn.append(torch.rand(3, device=DEVICE))
        return 0.0

    for _ in range(2):
        assert not self_test.fault(HERE, 0.0, difference)
    assert not seeded and torch.equal(*drawn)  # the same numbers each time


@pytest.mark.slow
def test_a_wrong_form_of_gelu_is_noticed(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Each model's own form is checked: the other one may be right."""
    real = branches.gelu
    monkeypatch.setattr(branches, "gelu", lambda h, bias, tanh, *rest: real(h, bias, tanh, *rest) * (1.0 if tanh else 1.2))
    assert self_test.works(HERE, LOW, *SIZE, True) and not caplog.records
    assert not self_test.works(HERE, LOW, *SIZE, False)
    assert "width 32 are not used here (they are off by" in caplog.text and "slower" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("part", ["row", "head", "last row's gradient"])
def test_one_wrong_row_or_head_is_noticed(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would vanish in a norm over everything: 40 % of one row are 4 % of a hundred rows."""
    forward, backward = branches.attention_forward, branches.attention_backward

    def wrong_forward(*args: Any) -> Any:
        out, lse = forward(*args)
        out[(0, -1) if part == "row" else (..., slice(16))] *= 1.4
        return out, lse

    def wrong_backward(*args: Any) -> Any:
        dq, dkv, sums = backward(*args)
        dq[-1, -1] *= 1.4
        return dq, dkv, sums

    if part == "last row's gradient":
        monkeypatch.setattr(branches, "attention_backward", wrong_backward)
    else:
        monkeypatch.setattr(branches, "attention_forward", wrong_forward)
    assert not self_test.works(HERE, LOW, *SIZE, False)


@pytest.mark.slow
def test_dropout_that_differs_between_forward_and_backward_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = branches.gelu_backward

    def other_seed(h: Tensor, bias: Tensor, dg: Tensor, tanh: bool, seed: Tensor | None, rate: float) -> Any:
        return real(h, bias, dg, tanh, None if seed is None else seed + 1, rate)

    monkeypatch.setattr(branches, "gelu_backward", other_seed)
    assert not self_test.works(HERE, LOW, *SIZE, False)


def test_a_kernel_that_does_not_compile_is_remembered(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(branches, "mlp_branch", None)
    assert not self_test.works(HERE, LOW, *SIZE, False) and "TypeError" in caplog.text
    monkeypatch.undo()
    assert not self_test.works(HERE, LOW, *SIZE, False) and len(caplog.records) == 1


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        RuntimeError("CUDA error: all CUDA-capable devices are busy or unavailable"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
    ids=["memory", "busy", "cuBLAS"],
)
def test_a_transient_failure_is_not_remembered(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[int] = []

    def difference(*args: Any, **options: Any) -> float:
        calls.append(1)
        if len(calls) == 1:
            raise error
        return 0.0

    clock = [1000.0]
    monkeypatch.setattr(self_test_cases, "blocks_difference", difference)
    monkeypatch.setattr(self_test.time, "monotonic", lambda: clock[0])
    assert not self_test.works(HERE, LOW, *SIZE, False) and "checking again later" in caplog.text
    assert not self_test.works(HERE, LOW, *SIZE, False) and len(calls) == 1  # not at every call while memory is short
    clock[0] += 11
    assert self_test.works(HERE, LOW, *SIZE, False) and self_test.works(HERE, LOW, *SIZE, False)
    assert len(calls) == 2 and len(caplog.records) == 1
    calls.clear()
    assert "out of memory" in self_test.fp8_fault(HERE) or "CUDA error" in self_test.fp8_fault(HERE)
    clock[0] += 11
    assert not self_test.fp8_fault(HERE)


@pytest.mark.parametrize("found, expected", [(1.4, 0.4), (torch.nan, torch.inf)])
def test_the_worst_row_counts(found: float, expected: float) -> None:
    rows = torch.ones(1000, 8)
    wrong = rows.clone()
    wrong[500] *= found
    assert self_test_cases.worst_row(rows, wrong) == pytest.approx(expected)
    assert self_test_cases.worst_row(rows, wrong, 4) == pytest.approx(expected)


def test_rows_that_are_nearly_zero_do_not_matter() -> None:
    rows = torch.ones(1000, 8)
    rows[3] = 1e-6
    found = rows.clone()
    found[3] = -1e-6
    assert self_test_cases.worst_row(rows, found) < 1e-5
    assert self_test_cases.worst_row(torch.zeros(3, 4), torch.zeros(3, 4)) == 0.0
