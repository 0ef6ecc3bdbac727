"""Quantise an ONNX file to int8: matmuls and convolutions with weights, except the first and the last.

Norms, softmax, attention's products of activations, GELU and residual additions stay in float32.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.errors import VitrailError
from vitrail.export.onnx_file import INPUT

_WEIGHTED = ("MatMul", "Gemm", "Conv")


def quantise(source: Path, target: Path, batches: Sequence[np.ndarray[Any, Any]]) -> int:
    """Write `source` with int8 weights, one scale per output channel, and uint8 activations; returns the number of layers.

    Ranges of activations are those seen in `batches`, inputs of the model.
    """
    import onnx
    from onnxruntime.quantization import CalibrationMethod, QuantFormat, QuantType, quantize_static

    if not batches:
        raise VitrailError("int8 needs images to measure the range of activations: give some with --calibrate.")
    graph = onnx.load(str(source), load_external_data=False).graph
    names = layers_to_quantise(graph)
    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.ERROR)  # it recommends a preprocessing step that torch's exporter has already done
    try:
        quantize_static(
            str(source),
            str(target),
            _Batches(batches),
            quant_format=QuantFormat.QDQ,
            op_types_to_quantize=list(_WEIGHTED),
            nodes_to_quantize=names,
            use_external_data_format=any(tensor.data_location == onnx.TensorProto.EXTERNAL for tensor in graph.initializer),
            per_channel=True,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
            calibrate_method=CalibrationMethod.MinMax,
            # Products are added to the residual in float32: rounding them first costs accuracy, and onnxruntime gains nothing.
            extra_options={"QuantizeBias": False, "OpTypesToExcludeOutputQuantization": ["MatMul", "Gemm"]},
        )
    finally:
        root.setLevel(level)
    return len(names)


def layers_to_quantise(graph: Any) -> list[str]:
    """Return the names of the nodes that multiply by weights, without the first and the last: a distilled model has two heads."""
    weights = {tensor.name for tensor in graph.initializer}
    for node in graph.node:  # in the order of computation; the patch projection's weight is reshaped, then transposed
        if node.op_type == "Constant" or (node.input and all(name in weights for name in node.input if name)):
            weights.update(node.output)
    found: list[str] = []
    leads_on: set[str] = set()  # tensors that a later layer with weights depends on
    for node in reversed(graph.node):
        weighted = node.op_type in _WEIGHTED and any(name in weights for name in node.input[:2])
        followed = any(name in leads_on for name in node.output)
        if weighted or followed:
            leads_on.update(node.input)
        if weighted and followed:
            found.append(node.name)
    return found[-2::-1]


class _Batches:
    """Calibration data as onnxruntime reads it."""

    def __init__(self, batches: Sequence[np.ndarray[Any, Any]]) -> None:
        self._left = iter(batches)

    def get_next(self) -> dict[str, np.ndarray[Any, Any]] | None:
        batch = next(self._left, None)
        return None if batch is None else {INPUT: batch}
