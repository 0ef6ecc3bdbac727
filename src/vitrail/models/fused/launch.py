"""Device properties and launch sizes that the kernels share."""

from __future__ import annotations

import functools
import os

import torch
from torch import Tensor, nn

# The kernels expect multiply-adds in one instruction. From 3.10 on Triton fuses them only on request, and 3.9 warns about it.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

PLAIN_TENSORS: frozenset[type] = frozenset({Tensor, nn.Parameter})
"""torch's own classes of tensors: a subclass may have arithmetic of its own."""


@functools.cache
def has_triton() -> bool:
    """Return whether Triton is installed; torch for CUDA depends on it."""
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True


@functools.cache
def num_sms(device: torch.device) -> int:
    """Return the GPU's number of streaming multiprocessors; 2 on a CPU, where tests run kernels in Triton's interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory a block can have; an A100's for memory plans and the interpreter."""
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin if device.type == "cuda" else 166_912


@functools.cache
def has_fp8_matmuls(device: torch.device) -> bool:
    """Tell whether the GPU multiplies fp8: NVIDIA's from compute capability 8.9 on."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 9)


@functools.cache
def sm_major(device: torch.device) -> int:
    """Return the major compute capability; 9 (Hopper) for memory plans and the interpreter, 0 for AMD's GPUs.

    ROCm numbers them otherwise: an MI300 would be 9, like a Hopper GPU.
    """
    if device.type != "cuda":
        return 9
    return torch.cuda.get_device_capability(device)[0] if torch.version.hip is None else 0


def is_fake(tensor: Tensor) -> bool:
    """Return whether the tensor has a shape and no values, as in a memory plan."""
    if type(tensor) is Tensor:  # the usual case first: this runs for every block
        return tensor.is_meta
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor) or tensor.is_meta


def next_power_of_2(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)
