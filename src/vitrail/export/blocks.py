"""Where an exported model differs: the outputs of its blocks, compared with those of the PyTorch model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

from vitrail.checkpoints import Bundle
from vitrail.errors import counted
from vitrail.export.artefact import Array, Artefact
from vitrail.export.module import block_names, block_outputs
from vitrail.export.onnx_file import INPUT, quiet
from vitrail.export.verify import BATCH, THRESHOLDS
from vitrail.models.features import evaluating
from vitrail.regular_files import utf8_path

Errors = dict[str, float]


def block_errors(bundle: Bundle, artefact: Artefact, images: Sequence[Any]) -> Errors:
    """Return ‖found − expected‖ / ‖expected‖ of each block's output by the block's name, in the order of computation.

    Some images are enough. If the outputs of blocks cannot be read from the file, there are no entries.
    """
    numbers, batch = next(artefact.batches(images[:BATCH]))
    try:
        with utf8_path(artefact.path.parent) as folder:
            found = _outputs_of_file(Path(folder) / artefact.path.name, artefact, batch, block_names(bundle.model))
    except Exception:  # a runtime may not run the changed graph; then it is only known that the models differ
        return {}
    expected = _outputs_of_model(bundle, [images[number] for number in numbers])
    return {name: _relative(found[name], expected[name]) for name in expected if name in found}


def describe(errors: Mapping[str, float], precision: str) -> str:
    """Say in a sentence where the difference begins and where it is largest."""
    if not errors:
        return "Which block differs is not known: the outputs of blocks cannot be read from the file."
    limit = THRESHOLDS[precision].error or THRESHOLDS[precision].regression
    worst = max(errors, key=lambda name: _rank(errors[name]))
    first = next((name for name, error in errors.items() if not error <= limit), None)
    if first is None:
        return f"Relative to their norm, outputs of {counted(len(errors), 'block')} differ by up to {errors[worst]:.2g} ({worst})."
    text = f"The first block whose output differs by more than {limit:g}, relative to its norm, is {first} ({errors[first]:.2g})"
    return f"{text}." if worst == first else f"{text}; the largest difference is that of {worst} ({errors[worst]:.2g})."


def _outputs_of_model(bundle: Bundle, images: Sequence[Any]) -> dict[str, Array]:
    model, found = bundle.model, {}
    inputs = torch.stack([bundle.stored_preprocess()(image) for image in images])

    def keep(name: str) -> Any:
        def hook(_: nn.Module, __: Any, output: Tensor) -> None:
            found[name] = output.float().cpu().numpy()

        return hook

    hooks = [model.get_submodule(name).register_forward_hook(keep(name)) for name in block_names(model)]
    try:
        with torch.no_grad(), evaluating(model):
            model(inputs.to(next(model.parameters()).device))
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _outputs_of_file(file: Path, artefact: Artefact, batch: Array, names: Sequence[str]) -> dict[str, Array]:
    return _onnx_outputs(file, artefact, batch) if artefact.format == "onnx" else _pt2_outputs(file, batch, names)


def _onnx_outputs(file: Path, artefact: Artefact, batch: Array) -> dict[str, Array]:
    """Run a copy of the graph in memory whose outputs are those of the blocks."""
    import onnx
    import onnxruntime

    model = onnx.load(str(file), load_external_data=False)
    computed = {name for node in model.graph.node for name in node.output}
    blocks = {name: tensor for name, tensor in artefact.metadata.get("blocks", {}).items() if tensor in computed}
    if not blocks:
        return {}
    del model.graph.output[:]
    model.graph.output.extend(onnx.ValueInfoProto(name=tensor) for tensor in dict.fromkeys(blocks.values()))
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(file.parent))
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    outputs = session.run(list(blocks.values()), {INPUT: batch})
    return {name: np.asarray(output, np.float32) for name, output in zip(blocks, outputs, strict=True)}


def _pt2_outputs(file: Path, batch: Array, names: Sequence[str]) -> dict[str, Array]:
    """Run the program node by node."""
    with quiet():
        graph = torch.export.load(str(file)).module()
    assert isinstance(graph, fx.GraphModule)
    nodes = ((node, [path for path, _ in node.meta.get("nn_module_stack", {}).values()]) for node in graph.graph.nodes)
    outputs = {node: name for name, node in block_outputs(names, nodes).items()}
    found: dict[str, Array] = {}

    class Keeping(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            result = super().run_node(n)
            if n in outputs and isinstance(result, Tensor):
                found[outputs[n]] = result.float().numpy()
            return result

    with torch.no_grad():
        Keeping(graph).run(torch.from_numpy(batch))
    return found


def _relative(found: Array, expected: Array) -> float:
    if found.shape != expected.shape:
        return float("nan")
    difference = np.linalg.norm(found.astype(np.float64) - expected.astype(np.float64))
    return float(difference / max(float(np.linalg.norm(expected.astype(np.float64))), 1e-30))


def _rank(error: float) -> float:
    return error if np.isfinite(error) else float("inf")
