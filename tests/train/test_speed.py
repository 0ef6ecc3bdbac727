"""The peak that MFU is relative to."""

from __future__ import annotations

import pytest
import torch

from vitrail.train.speed import peak_flops


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A10G", 70),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA L40S", 362),
        ("Tesla T4", 65),
        ("NVIDIA RTX A4000", None),  # not an A40
        ("NVIDIA RTX A1000", None),
        ("NVIDIA T400 4GB", None),
    ],
)
def test_the_peak_of_a_gpu_is_found_by_its_whole_name(name: str, teraflops: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_flops(torch.device("cuda")) == (None if teraflops is None else teraflops * 1e12)
    assert peak_flops(torch.device("cpu")) is None
