"""Errors of exported models: settings, files that are none, and models that differ."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import vitrail
from tests.error_tour.case import at
from tests.error_tour.files import scratch
from vitrail.data.preprocess import Preprocess
from vitrail.export import Artefact, ExportSettings, compare, export_model, write
from vitrail.export.graph_preprocess import GraphPreprocess
from vitrail.export.module import exported_module
from vitrail.export.onnx_file import need_onnx
from vitrail.export.quantise import quantise
from vitrail.export.verify import sample_photos

PT2 = ExportSettings(format="pt2")
ONE = [np.zeros((40, 40, 3), np.uint8)]
OTHER = [np.zeros((40, 50, 3), np.uint8)]


@cache
def bundle() -> vitrail.Bundle:
    return vitrail.load("model")


def artefact(preprocess: Preprocess | None, factor: float = 1.0, outputs: int = 2, input: str = "normalised") -> Artefact:
    """Return an exported model that multiplies the logits."""
    metadata = {"preprocess": preprocess.to_dict() if preprocess else None, "input": input}

    @torch.no_grad()
    def run(batch: Any) -> Any:
        return factor * bundle().model(torch.from_numpy(batch)).numpy().repeat(outputs, axis=1)[:, :outputs]

    return Artefact(Path("x.onnx"), "onnx", metadata, run)


def write_another_model(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(write, "_write", lambda *arguments: None)
    patch.setattr(Artefact, "open", lambda file: artefact(bundle().stored_preprocess(), 1.5))


def fail_without_a_message(*arguments: Any, **options: Any) -> None:
    raise AssertionError


def garbage(name: str) -> Path:
    file = scratch() / name
    file.write_bytes(b"\x08\x07garbage")
    return file


def foreign_onnx() -> Path:
    """Write an ONNX file as another program would."""
    import onnx
    from onnx import helper

    x, y = (helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1]) for name in "xy")
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "graph", [x], [y])
    file = scratch() / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9), str(file))
    return file


# fmt: off
CASES = (
    at("export/artefact.py:Artefact.open#1", lambda: Artefact.open("photos"),
       "photos is not an exported model:", "give a folder with model.onnx or model.pt2, or such a file."),
    at("export/artefact.py:Artefact.open#2", lambda: Artefact.open(foreign_onnx()),
       "model.onnx is not as `vitrail export` wrote it: its metadata has no model, config, classes, task, activation,",
       "thresholds, preprocess, input, input_type, layout, precision. Export it again."),
    at("export/artefact.py:Artefact.prepare", lambda: artefact(bundle().preprocess, input="images").prepare([*ONE, *OTHER]),
       "The images differ in size, but a batch has one size:", "give them one by one, or call logits(images)."),
    at("export/artefact.py:Artefact._stored_preprocess", lambda: artefact(None).prepare(ONE),
       "No preprocessing is stored in x.onnx;", "export it again with --preprocess."),
    at("export/artefact.py:_open_onnx", lambda: Artefact.open(garbage("x.onnx")),
       "x.onnx cannot be read as an ONNX model (", "Export or copy it again."),
    at("export/artefact.py:_open_pt2", lambda: Artefact.open(garbage("x.pt2")),
       "x.pt2 cannot be read as a torch.export program (AssertionError).", "Export or copy it again.",
       patch=lambda patch: patch.setattr(torch.export, "load", fail_without_a_message)),
    at("export/graph_preprocess.py:GraphPreprocess.__init__", lambda: GraphPreprocess(Preprocess(interpolation="nearest")),
       "Pillow's nearest interpolation cannot be computed in the graph;", "export without --resize-in-graph."),
    at("export/module.py:exported_module#1",
       lambda: exported_module(bundle().model, torch.float32, preprocess=Preprocess(size=(32, 32)).keep_aspect((8, 8))),
       "This preprocessing keeps the aspect ratio, so its images differ in size,", "Give another one with --preprocess."),
    at("export/module.py:exported_module#2",
       lambda: exported_module(bundle().model, torch.float32, input="pixels", preprocess=Preprocess(size=(32, 32), bits=16)),
       "Pixels of 16 bits cannot be normalised in the graph;", "export without --pixels."),
    at("export/onnx_file.py:need_onnx", need_onnx,
       "ONNX needs onnxscript:", "install the extra with pip install 'vitrail[export]'.", hidden="onnxscript"),
    at("export/quantise.py:quantise", lambda: quantise(Path("x.onnx"), Path("y.onnx"), []),
       "int8 needs images to measure the range of activations:", "give some with --calibrate."),
    at("export/settings.py:ExportSettings.__post_init__#1", lambda: ExportSettings(format="tflite"),  # type: ignore[arg-type]
       "format is 'tflite';", "it must be onnx or pt2."),
    at("export/settings.py:ExportSettings.__post_init__#2", lambda: ExportSettings(precision="bf16"),
       "onnx files cannot have precision bf16;", "use one of fp32, fp16, int8."),
    at("export/settings.py:ExportSettings.__post_init__#3", lambda: ExportSettings(opset=12),
       "opset is 12;", "it must be from 18 to 23."),
    at("export/settings.py:ExportSettings.__post_init__#4", lambda: ExportSettings(pixels=True, resize_in_graph=True),
       "--pixels takes images of the model's size, --resize-in-graph those of any size", "Give one of them."),
    at("export/verify.py:compare#1", lambda: compare(bundle(), artefact(None), []),
       "There is no image to compare the two models on:", "give one or more."),
    at("export/verify.py:compare#2", lambda: compare(bundle(), artefact(bundle().preprocess, outputs=3), ONE),
       "x.onnx has 3 outputs, but model has 2 outputs: it was exported from another checkpoint.",
       "Give that one, or export it again."),
    at("export/verify.py:sample_photos", lambda: sample_photos(channels=13),
       "The embedded photos have 3 channels, but the model takes 13.", "Give images to compare on: --data folder:DIR."),
    at("export/write.py:export_model#1", lambda: export_model(bundle(), "new", PT2, calibrate=ONE),
       "Images to calibrate with have no effect on fp32.", "Leave them out, or choose int8."),
    at("export/write.py:export_model#2", lambda: export_model(bundle(), "new", PT2, images=ONE),
       "The exported model does not compute what the PyTorch model does, so it was not written: logits differ by up to",
       "(1 image of your data).", "--force writes it all the same.", patch=write_another_model),
)
# fmt: on
