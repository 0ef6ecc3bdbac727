"""Compile every kernel for a GPU that is not there: `python tests/models/compile_kernels.py 90` for compute capability 9.0.

The functions that launch kernels are called with tensors on the CPU. Triton compiles each kernel to machine code, and a stub driver
accepts it and runs nothing. This shows that the kernels compile, not that they are right.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

COMPILED: list[str] = []
SHARED = {80: 166_912, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
"""Bytes of shared memory per block, by compute capability; Triton refuses kernels that need more."""


class StubDriver:
    """What Triton asks of a driver."""

    def __init__(self, capability: int) -> None:
        self.capability = capability
        self.utils, self.launcher_cls = self, lambda source, metadata: lambda *given: None

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": SHARED[self.capability], "multiprocessor_count": 132, "max_num_regs": 65_536, "warpSize": 32}

    def load_binary(self, name: str, binary: bytes, *rest: Any) -> tuple[int, ...]:
        assert binary.startswith(b"\x7fELF")
        COMPILED.append(name)
        return 1, 1, 32, 0, 1024

    def unload_module(self, *rest: Any) -> None:
        pass


def low(*size: int) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.bfloat16)


def main(capability: int) -> None:
    driver.set_active(StubDriver(capability))
    from vitrail.models.fused.cross_entropy import CrossEntropy
    from vitrail.models.fused.fold_norm import fold_norm, unfold_norm
    from vitrail.models.fused.fp8 import quantise
    from vitrail.models.fused.gelu import gelu, gelu_backward, gelu_fp8
    from vitrail.models.fused.patchify import patchify
    from vitrail.models.fused.prefix_positions import add_prefix_and_positions
    from vitrail.models.fused.qk_norm import qk_norm
    from vitrail.models.fused.residual_norm import residual_centred, residual_norm

    one = torch.ones(192)
    for keep, drawn in ((None, None), (torch.ones(2), torch.tensor(3))):
        x, branch, bias = torch.zeros(2, 5, 192, requires_grad=True), low(2, 5, 192).requires_grad_(), torch.zeros(192)
        out, y = residual_norm(x, branch, bias.requires_grad_(), keep, drawn, 0.1, 1e-6, torch.bfloat16)
        torch.autograd.grad((out, y), (x, branch, bias), (torch.zeros_like(out), torch.zeros_like(y)))
        for tanh in (True, False):
            gelu(low(4, 768), torch.zeros(768), tanh, drawn, 0.1)
            gelu_backward(low(4, 768), torch.zeros(768), low(4, 768), tanh, drawn, 0.1)
    for mean in (None, torch.zeros(2, 5)):
        residual_centred(low(2, 5, 192), low(2, 5, 192), low(192), None, None, 0.0, 1e-6, mean)
    if capability >= 89:  # older GPUs have no fp8
        quantise(low(4, 192))
        gelu_fp8(low(4, 768), torch.zeros(768), False)
    patchify(torch.zeros(2, 3, 28, 42), (14, 14), torch.bfloat16)
    folded, offset = fold_norm(torch.zeros(64, 192), one[:64], one, one, torch.bfloat16)
    unfold_norm(folded.float(), offset, torch.zeros(64, 192), one, one)
    head_norms = [torch.zeros(80).requires_grad_() for _ in range(4)]
    qk_norm(low(2, 5, 480).requires_grad_(), 2, head_norms, 1e-6).sum().backward()
    add_prefix_and_positions(low(2, 4, 192).requires_grad_(), torch.zeros(5, 192)).sum().backward()
    CrossEntropy.apply(low(3, 40).requires_grad_(), torch.tensor([0, 1, 2])).sum().backward()
    if capability in (90, 100):
        attention_of_few_tokens()
    if capability == 90:
        hopper_matmuls()
        hopper_attentions()
    sys.stdout.write(" ".join(sorted(set(COMPILED))))


def attention_of_few_tokens() -> None:
    from vitrail.models.fused.attention_backward import attention_backward
    from vitrail.models.fused.attention_forward import attention_forward

    for tokens, num_queries in ((50, 50), (65, 65), (197, 197), (197, 1)):
        q, kv = (low(2, tokens, 384), None) if num_queries == tokens else (low(2, num_queries, 128), low(2, tokens, 256))
        for norms in ((), (torch.zeros(64),) * 4):
            for whole_heads in (True, False):
                out, lse = attention_forward(q, kv, 2, norms, 1e-6, whole_heads)
            attention_backward(q, kv, out, out, lse, 2, norms, 1e-6)


def hopper_matmuls() -> None:
    from vitrail.models.fused.hopper_gelu_backward import matmul_gelu_backward
    from vitrail.models.fused.hopper_matmul import matmul_bias, matmul_bias_gelu, matmul_bias_gelu_with_grad

    for rows, tanh in ((100, True), (512, False)):  # tiles of 64 rows and of 128, with both forms of GELU in every epilogue
        x, weight = low(rows, 128), low(256, 128)
        rstd = torch.ones(rows)
        matmul_bias(x, weight, low(256))
        matmul_bias(x, weight, low(256), rstd)
        matmul_bias_gelu(x, weight, torch.zeros(256), not tanh, rstd)
        matmul_bias_gelu(x, weight, torch.zeros(256), tanh)
        matmul_bias_gelu_with_grad(x, weight, torch.zeros(256), tanh)
    matmul_gelu_backward(low(512, 128), low(128, 256), low(512, 256))


def hopper_attentions() -> None:
    from vitrail.models.fused.hopper_attention import hopper_attention

    for tokens in (145, 197):  # keys in two pieces and in three
        for needs_grad in (True, False):
            hopper_attention(low(2, tokens, 384), 2, needs_grad=needs_grad)


if __name__ == "__main__":
    main(int(sys.argv[1]))
