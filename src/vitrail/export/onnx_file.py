"""Write ONNX files: torch's exporter, then what it leaves to do."""

from __future__ import annotations

import ast
import importlib.util
import json
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitrail.errors import VitrailError
from vitrail.export.module import Exported, block_names, block_outputs
from vitrail.text import printable, to_json

INPUT, OUTPUT = "images", "logits"
_JSON = (
    "assumptions",
    "blocks",
    "classes",
    "config",
    "opset",
    "preprocess",
    "thresholds",
    "versions",
)  # the other metadata are plain texts
_MAX_FILE = 1_900_000_000  # bytes; protobuf holds less than 2 GiB, larger weights go to a second file


def need_onnx(packages: Sequence[str] = ("onnx", "onnxscript", "onnxruntime")) -> None:
    """Raise an error that names the extra if a package is missing."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise VitrailError(f"ONNX needs {', '.join(missing)}: install the extra with pip install 'vitrail[export]'.")


def write_onnx(module: Exported, example: Tensor, path: Path, *, opset: int, metadata: Mapping[str, Any]) -> None:
    """Write the module with any batch size; from opset 23 on, attention is one operator."""
    import onnx

    with quiet():
        program = torch.onnx.export(
            module,
            (example,),
            dynamo=True,
            opset_version=opset,
            input_names=[INPUT],
            output_names=[OUTPUT],
            dynamic_shapes=module.dynamic_shapes,
            verbose=False,
        )
    assert program is not None
    model = program.model_proto
    keep_pad_before_pool(model.graph)
    nodes = ((node.output[0], _scopes(node)) for node in model.graph.node)
    metadata = {**metadata, "blocks": block_outputs(block_names(module.model), nodes)}
    for key, value in metadata.items():
        entry = model.metadata_props.add()
        entry.key, entry.value = f"vitrail.{key}", printable(value) if isinstance(value, str) else to_json(value)
    external = sum(tensor.nbytes for tensor in module.state_dict().values()) > _MAX_FILE
    onnx.save(model, str(path), save_as_external_data=external, location=f"{path.name}.data" if external else None)
    onnx.checker.check_model(str(path))


def keep_pad_before_pool(graph: Any) -> None:
    """Put an operator that changes nothing between padding and max-pooling.

    onnxruntime merges the two, though a pool ignores what is outside, and padding with zeros does not: BiT's pool sees negative
    values, so its logits would differ.
    """
    import onnx
    from onnx import helper, numpy_helper

    pads = {node.output[0]: node for node in graph.node if node.op_type == "Pad"}
    for node in list(graph.node):
        if node.op_type == "MaxPool" and node.input[0] in pads:
            padded = node.input[0]
            lowest, kept = f"{padded}_lowest", f"{padded}_kept"
            types = {value.name: value.type.tensor_type.elem_type for value in graph.value_info}
            kind = types.get(padded, onnx.TensorProto.FLOAT)
            dtype = helper.tensor_dtype_to_np_dtype(kind)
            graph.initializer.append(numpy_helper.from_array(np.array(np.finfo(dtype).min, dtype), lowest))
            graph.node.insert(list(graph.node).index(node), helper.make_node("Max", [padded, lowest], [kept]))
            node.input[0] = kept


def read_metadata(entries: Mapping[str, str]) -> dict[str, Any]:
    """Return what `write_onnx` stored among the entries of a file: class names, preprocessing and so on."""
    found = {key.removeprefix("vitrail."): value for key, value in entries.items()}
    return {key: json.loads(value) if key in _JSON else value for key, value in found.items()}


def _scopes(node: Any) -> list[str]:
    """Return the paths of the modules that a node comes from, as torch's exporter notes them."""
    found = next((entry.value for entry in node.metadata_props if entry.key == "pkg.torch.onnx.name_scopes"), "[]")
    return [str(path) for path in ast.literal_eval(found)]


@contextmanager
def quiet() -> Iterator[None]:
    """Hide what torch logs on its own progress, and the tracebacks of errors that we report, which users cannot act on."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch.export", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
