"""What the kernels share: when they can run, and how many programs to start."""

from __future__ import annotations

import functools
import os

import torch
from torch import Tensor

# Products and sums in one instruction, which the kernels are written for. From 3.10 on Triton does so only where it is told to,
# and 3.9 warns of it.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")


@functools.cache
def has_triton() -> bool:
    """Whether the compiler of the kernels is here; torch brings it along where there are CUDA GPUs."""
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True


@functools.cache
def num_sms(device: torch.device) -> int:
    """How many multiprocessors the device has; a few on a processor, where kernels run interpreted, in tests."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes that one program can share among its threads; a data-centre GPU's where only plans are made."""
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin if device.type == "cuda" else 166_912


@functools.cache
def sm_major(device: torch.device) -> int:
    """The GPU's architecture by number; 9, which is Hopper's, where only plans are made or kernels are interpreted."""
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 9


def is_fake(tensor: Tensor) -> bool:
    """Whether the tensor has a shape and no numbers, as when memory is planned: then nothing is launched."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor) or tensor.is_meta


def next_power_of_2(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)
