"""`Artefact`: an exported file with its preprocessing and class names, ready to run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vitrail.data.preprocess import Preprocess
from vitrail.errors import VitrailError
from vitrail.export.metadata import Shape, check_metadata
from vitrail.export.settings import Format
from vitrail.regular_files import utf8_path

FILES: dict[Format, str] = {"onnx": "model.onnx", "pt2": "model.pt2"}
REPORT = "report.json"
Array = np.ndarray[Any, Any]
Opened = tuple[dict[str, Any], Callable[[Array], Array], tuple[str, Shape]]  # metadata, what runs it, type and shape of its input


@dataclass(frozen=True)
class Artefact:
    """An exported model: `logits(images)`, or `run(batch)` with a batch from `prepare(images)`."""

    path: Path
    format: str
    metadata: dict[str, Any]
    run: Callable[[Array], Array] = field(repr=False)

    @classmethod
    def open(cls, path: str | Path) -> Artefact:
        """Open a folder that `vitrail export` wrote, or the .onnx or .pt2 file in it."""
        given = Path(path)
        file = next((given / name for name in FILES.values() if (given / name).is_file()), given) if given.is_dir() else given
        format: Format | None = next((format for format in FILES if file.suffix == f".{format}"), None)
        if format is None or not file.is_file():
            raise VitrailError(f"{path} is not an exported model: give a folder with model.onnx or model.pt2, or such a file.")
        with utf8_path(file.parent) as folder:  # weights above 2 GB are in a second file there
            metadata, run, (type, shape) = (_open_onnx if format == "onnx" else _open_pt2)(Path(folder) / file.name)
        problem = check_metadata(metadata, format, type, shape)
        if problem is not None:
            raise VitrailError(f"{file} is not as `vitrail export` wrote it: {problem}. Export it again.")
        return cls(file, format, metadata, run)

    @property
    def classes(self) -> tuple[str, ...] | None:
        return tuple(self.metadata["classes"]) if self.metadata["classes"] else None

    @property
    def preprocess(self) -> Preprocess | None:
        return Preprocess.from_dict(self.metadata["preprocess"]) if self.metadata["preprocess"] else None

    def prepare(self, images: Sequence[Any]) -> Array:
        """Decode images (paths, bytes, arrays, Pillow images), and resize, crop and normalise them unless the graph does.

        A graph that resizes takes images of one size at a time; `logits` takes any.
        """
        if self.metadata["input"] != "images":
            return self._resized(images)
        batches = list(self.batches(images))
        if len(batches) != 1:
            raise VitrailError("The images differ in size, but a batch has one size: give them one by one, or call logits(images).")
        return batches[0][1]

    def logits(self, images: Sequence[Any]) -> Array:
        """Prepare images and run the model: [image, output]."""
        rows: dict[int, Array] = {}
        for numbers, batch in self.batches(images):
            rows.update(zip(numbers, self.run(batch), strict=True))
        return np.stack([rows[number] for number in range(len(images))])

    def batches(self, images: Sequence[Any]) -> Iterator[tuple[list[int], Array]]:
        """Yield the numbers of images and a batch of them: all, or those of one size where the graph resizes."""
        if self.metadata["input"] != "images":
            yield list(range(len(images))), self._resized(images)
            return
        decoded = [self._stored_preprocess().decoded(image) for image in images]
        for shape in dict.fromkeys(image.shape for image in decoded):
            numbers = [number for number, image in enumerate(decoded) if image.shape == shape]
            yield numbers, np.stack([decoded[number] for number in numbers])

    def _resized(self, images: Sequence[Any]) -> Array:
        preprocess = self._stored_preprocess()
        if self.metadata["input"] == "pixels":
            return np.stack([preprocess.pixels(image) for image in images]).astype(self.metadata["input_type"])
        return torch.stack([preprocess(image) for image in images]).numpy()

    def _stored_preprocess(self) -> Preprocess:
        if self.preprocess is None:
            raise VitrailError(f"No preprocessing is stored in {self.path}; export it again with --preprocess.")
        return self.preprocess


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, or its type if it has none."""
    return next(iter(str(error).splitlines()), type(error).__name__)


_ONNX_TYPES = {"tensor(float)": "float32", "tensor(uint8)": "uint8"}


def _open_onnx(file: Path) -> Opened:
    from vitrail.export.onnx_file import INPUT, need_onnx, read_metadata

    need_onnx(["onnxruntime"])
    import onnxruntime

    try:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
        metadata = read_metadata(session.get_modelmeta().custom_metadata_map)
    except Exception as error:  # onnxruntime has many kinds of its own
        raise VitrailError(f"{file} cannot be read as an ONNX model ({first_line(error)}). Export or copy it again.") from error
    given = session.get_inputs()[0]
    type = _ONNX_TYPES.get(given.type, given.type)
    shape = tuple(side if isinstance(side, int) else None for side in given.shape)
    return metadata, lambda batch: np.asarray(session.run(None, {INPUT: batch})[0]), (type, shape)


def _open_pt2(file: Path) -> Opened:
    from vitrail.export.onnx_file import quiet

    extra = {"vitrail.json": ""}
    try:
        with quiet():
            program = torch.export.load(str(file), extra_files=extra)
        metadata = json.loads(extra["vitrail.json"] or "{}")
    except Exception as error:
        raise VitrailError(
            f"{file} cannot be read as a torch.export program ({first_line(error)}). Export or copy it again."
        ) from error
    module = program.module()
    given = [node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"][-1]  # weights come first
    shape = tuple(side if isinstance(side, int) else None for side in given.shape)

    @torch.no_grad()
    def run(batch: Array) -> Array:
        return module(torch.from_numpy(batch)).numpy()  # type: ignore[no-any-return]

    return metadata, run, (str(given.dtype).removeprefix("torch."), shape)
