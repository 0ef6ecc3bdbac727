"""Kernels compile for real GPUs, though there is none here: what Triton's interpreter lets pass, its compiler may not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

SCRIPT = Path(__file__).parent / "compile_kernels.py"
EVERYWHERE = {
    "_column_sum_kernel",
    "_cross_entropy_backward_kernel",
    "_cross_entropy_forward_kernel",
    "_fold_norm_kernel",
    "_gelu_backward_kernel",
    "_gelu_forward_kernel",
    "_norm_backward_kernel",
    "_norm_forward_kernel",
    "_patchify_kernel",
    "_prefix_positions_backward_kernel",
    "_prefix_positions_forward_kernel",
    "_qk_norm_backward_kernel",
    "_qk_norm_kernel",
    "_unfold_norm_kernel",
}
ATTENTION = {"_attention_backward_kernel", "_attention_forward_kernel", "_norm_gradients_kernel"}
HOPPER = {"_hopper_attention_kernel", "_matmul_bias_kernel", "_matmul_gelu_backward_kernel"}


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 89, pytest.param(90, marks=pytest.mark.long), 100, 120])
def test_every_kernel_compiles(capability: int, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONWARNINGS": "error"}
    done = subprocess.run([sys.executable, str(SCRIPT), str(capability)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    expected = EVERYWHERE | (ATTENTION if capability in (90, 100) else set()) | (HOPPER if capability == 90 else set())
    expected |= {"_quantise_kernel"} if capability >= 89 else set()
    assert set(done.stdout.split()) == expected
