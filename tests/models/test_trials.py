"""The trial of every kernel, for a report."""

from __future__ import annotations

import pytest
import torch

from tests.models.test_fused import DEVICE

pytest.importorskip("triton")

from vitrail.models.fused import launch, selection, self_test_cases, trials

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def test_only_cuda_gpus_have_kernels() -> None:
    assert trials.try_kernels(CPU) == [] and "not for cpu" in trials.why_no_kernels(CPU)
    assert "not for mps" in trials.why_no_kernels(torch.device("mps"))


def test_results_and_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that run, one that is wrong, one that does not compile, one without memory, and Hopper's on another GPU."""

    def broken(*_: object) -> float:
        raise RuntimeError("PTX was refused\nat a line")

    def short(*_: object) -> float:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(trials, "why_no_kernels", lambda device: "")
    monkeypatch.setattr(trials, "sm_major", lambda device: 8)
    monkeypatch.setattr("vitrail.models.fused.attention_backward.sm_major", lambda device: 8)
    monkeypatch.setattr(self_test_cases, "patchify_difference", lambda *_: 0.2)
    monkeypatch.setattr(self_test_cases, "prefix_difference", broken)
    monkeypatch.setattr(self_test_cases, "loss_difference", short)
    monkeypatch.setattr(self_test_cases, "blocks_difference", lambda *_, **__: 0.0)
    found = {one.kernel: (one.result, one.reason) for one in trials.try_kernels(CPU)}
    assert found["patchify"] == ("failed", "they are off by 20.0%")
    assert found["prefix tokens and positions"] == ("failed", "RuntimeError: PTX was refused")
    assert found["cross-entropy"][0] == "not tried" and found["block of ViT-B, erf GELU"] == ("passed", "")
    assert found["attention over 197 tokens"] == ("not used", trials._NEEDS_LARGE_GPU)
    assert found["fp8 matmuls"] == ("not used", trials._NEEDS_FP8)
    hopper = [result for kernel, (result, _) in found.items() if kernel.startswith("Hopper")]
    assert hopper == ["not used"] * len(selection.hopper_differences(CPU, torch.float16, 197, 12)) and len(found) == 12


def test_an_amd_gpu_is_not_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 4))
    launch.sm_major.cache_clear()
    assert launch.sm_major(GPU) == 9
    monkeypatch.setattr(torch.version, "hip", "6.4")
    launch.sm_major.cache_clear()
    assert launch.sm_major(GPU) == 0 and launch.sm_major(CPU) == 9
    launch.sm_major.cache_clear()


def test_fp8_needs_ada_or_later(monkeypatch: pytest.MonkeyPatch) -> None:
    for capability, expected in (((8, 0), False), ((8, 9), True), ((9, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        launch.has_fp8_matmuls.cache_clear()
        assert launch.has_fp8_matmuls(GPU) is expected and not launch.has_fp8_matmuls(CPU)
    launch.has_fp8_matmuls.cache_clear()


def test_bf16_is_not_chosen_where_it_is_emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """A V100 or T4 emulates bfloat16, slower than float32."""
    from vitrail.models import model_config
    from vitrail.models.inference import choose
    from vitrail.train.precision import chosen_precision

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    assert chosen_precision("auto", GPU) == "fp32" and choose(model_config("B/16"), "auto", GPU).precision == "fp32"


@pytest.mark.slow
@pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU")
def test_every_kernel_passes_on_this_gpu() -> None:
    assert {one.result for one in trials.try_kernels(GPU)} <= {"passed", "not used"}
