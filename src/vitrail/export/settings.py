"""What the user chooses when exporting a model. It does not need torch, so that `--help` answers at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vitrail.errors import VitrailError
from vitrail.models.config import Pair

Format = Literal["onnx", "pt2"]
Precision = Literal["fp32", "fp16", "bf16", "int8"]
Input = Literal["normalised", "pixels", "images"]
PRECISIONS: dict[Format, tuple[Precision, ...]] = {"onnx": ("fp32", "fp16", "int8"), "pt2": ("fp32", "fp16", "bf16")}
OPSETS = range(18, 24)
MAX_DROP = 0.01
"""Most accuracy that an exported model may lose, as a fraction."""


@dataclass(frozen=True, kw_only=True)
class ExportSettings:
    """What is written."""

    format: Format = "onnx"
    """onnx runs in onnxruntime and many other runtimes; pt2 is a torch.export program for PyTorch."""
    precision: Precision = "fp32"
    """onnx: fp32, fp16 or int8; pt2: fp32, fp16 or bf16. Inputs and logits are float32 in any case."""
    opset: int = 20
    """Version of ONNX's operators, 18 to 23. From 20 on GELU, from 23 on attention is one operator."""
    image_size: int | Pair | None = None
    """Resample positions for this size first. None: the model's own."""
    pixels: bool = False
    """Normalise in the graph: it then takes pixels from 0 to 255 [batch, height, width, channels] of the model's size."""
    resize_in_graph: bool = False
    """Resize, crop and normalise in the graph: it then takes decoded images of any size, uint8 [batch, height, width, channels]."""

    @property
    def input(self) -> Input:
        return "images" if self.resize_in_graph else "pixels" if self.pixels else "normalised"

    def __post_init__(self) -> None:
        if self.format not in PRECISIONS:
            raise VitrailError(f"format is {self.format!r}; it must be {' or '.join(PRECISIONS)}.")
        if self.precision not in PRECISIONS[self.format]:
            possible = ", ".join(PRECISIONS[self.format])
            raise VitrailError(f"{self.format} files cannot have precision {self.precision}; use one of {possible}.")
        if self.format == "onnx" and self.opset not in OPSETS:
            raise VitrailError(f"opset is {self.opset}; it must be from {OPSETS[0]} to {OPSETS[-1]}.")
        if self.pixels and self.resize_in_graph:
            raise VitrailError(
                "--pixels takes images of the model's size, --resize-in-graph those of any size, and normalises them, too. "
                "Give one of them."
            )
