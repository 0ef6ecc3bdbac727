"""What settings and commands can choose about a model besides its configuration. It does not need torch."""

from __future__ import annotations

from typing import Literal, get_args

Precision = Literal["auto", "fp32", "bf16", "int8"]
"""What a copy for inference computes in."""
LoraMatrix = Literal["qkv", "out", "up", "down"]
LORA_MATRICES: tuple[LoraMatrix, ...] = get_args(LoraMatrix)
