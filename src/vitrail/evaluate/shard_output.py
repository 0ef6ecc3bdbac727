"""What a shard contains: features as safetensors or Parquet, predictions as CSV or Parquet.

A file depends on the images of its shard and on the settings of the job only, so that it has the same bytes whichever process
writes it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vitrail.checkpoints import Bundle, Prediction
from vitrail.data.preprocess import Preprocess
from vitrail.data.types import PackedStrings
from vitrail.evaluate.context import check_features
from vitrail.evaluate.parquet import import_pyarrow, name_column, write_table
from vitrail.evaluate.prediction_table import PredictionTable
from vitrail.evaluate.predictor import ImagePredictions, check_scores
from vitrail.evaluate.settings import FeatureFormat, FeatureSpec, TableFormat
from vitrail.evaluate.shard_folder import BadRow
from vitrail.models import Model
from vitrail.models.inference import InferenceModel
from vitrail.text import printable, to_csv

Array = npt.NDArray[Any]
T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)


class OpenShard(Protocol[T_contra]):
    """A shard that is being computed."""

    def add(self, output: T_contra, indices: Array) -> None:
        """Add a batch: what was computed, and the positions of its images, ascending."""

    def write(self, path: Path, name: Callable[[int], str], bad: Sequence[BadRow]) -> None:
        """Write the file."""


class ShardOutput(Protocol[T]):
    """What is computed for each image, and how a shard of it is written."""

    @property
    def suffix(self) -> str: ...

    def compute(self, images: Tensor) -> T: ...

    def begin(self, rows: range) -> OpenShard[T]: ...


class FeatureOutput:
    """Features of images."""

    def __init__(
        self,
        spec: FeatureSpec,
        model: Model | InferenceModel,
        preprocess: Preprocess,
        format_: FeatureFormat,
        about: dict[str, Any],
        *,
        name_bytes: bool,
    ) -> None:
        self.spec, self.model, self.suffix = spec, model, f".{format_}"
        self.about, self.name_bytes = about, name_bytes
        if format_ == "parquet":
            import_pyarrow("--format safetensors")
        self.shape = self._one_image(preprocess)

    def _one_image(self, preprocess: Preprocess) -> tuple[int, ...]:
        """Return the shape of the features of an image: a shard of bad images only has it, too."""
        weight = next(self.model.parameters())
        with torch.no_grad():
            zeros = torch.zeros(1, preprocess.channels, *preprocess.size, device=weight.device, dtype=weight.dtype)
            return tuple(self.spec.compute(self.model, zeros).shape[1:])

    def compute(self, images: Tensor) -> Tensor:
        return self.spec.compute(self.model, images)

    def begin(self, rows: range) -> _FeatureShard:
        return _FeatureShard(self, len(rows))


class _FeatureShard:
    def __init__(self, output: FeatureOutput, images: int) -> None:
        self._output, self._count = output, 0
        self._features, self._index = np.empty((images, *output.shape), np.float32), np.empty(images, np.int64)

    def add(self, output: Tensor, indices: Array) -> None:
        part = slice(self._count, self._count + len(indices))
        self._features[part], self._index[part] = output.float().cpu().numpy(), indices
        self._count += len(indices)

    def write(self, path: Path, name: Callable[[int], str], bad: Sequence[BadRow]) -> None:
        features, index = self._features[: self._count], self._index[: self._count]
        names = [name(position) for position in index.tolist()]
        check_features(features, names)
        if self._output.suffix == ".safetensors":
            _write_safetensors(path, features, index, names, self._output.about)
        else:
            _write_feature_table(path, features, index, names, self._output)


def _write_safetensors(path: Path, features: Array, index: Array, names: list[str], about: dict[str, Any]) -> None:
    from safetensors.numpy import save_file

    block, ends = PackedStrings(names).to_arrays()
    tensors = {"features": features, "index": index, "names": block, "name_ends": ends}
    # One key: safetensors writes several in random order.
    save_file(tensors, path, metadata={"vitrail": json.dumps(about, sort_keys=True)})


def _write_feature_table(path: Path, features: Array, index: Array, names: list[str], output: FeatureOutput) -> None:
    arrow = import_pyarrow("--format safetensors")
    flat = arrow.array(features.reshape(-1), type=arrow.float32())
    rows = arrow.FixedSizeListArray.from_arrays(flat, int(np.prod(output.shape)))
    columns = {"index": index, "name": name_column(names, as_bytes=output.name_bytes), "features": rows}
    about = json.dumps({**output.about, "shape": list(output.shape)}, sort_keys=True)
    write_table(arrow.table(columns).replace_schema_metadata({"vitrail": about}), path)


class PredictionOutput:
    """The best classes of images."""

    def __init__(self, bundle: Bundle, model: Model | InferenceModel, top: int, format_: TableFormat, *, name_bytes: bool) -> None:
        self.bundle, self.model, self.top, self.suffix = bundle, model, top, f".{format_}"
        self.table, self.name_bytes = PredictionTable(bundle, top), name_bytes
        if format_ == "parquet":
            import_pyarrow("--format csv")

    def compute(self, images: Tensor) -> list[list[Prediction]]:
        return self.bundle.decode(self.model(images), self.top)

    def begin(self, rows: range) -> _PredictionShard:
        return _PredictionShard(self)


class _PredictionShard:
    def __init__(self, output: PredictionOutput) -> None:
        self._output, self._found = output, dict[int, list[Prediction]]()

    def add(self, output: list[list[Prediction]], indices: Array) -> None:
        self._found.update(zip(indices.tolist(), output, strict=True))

    def write(self, path: Path, name: Callable[[int], str], bad: Sequence[BadRow]) -> None:
        for index, found in self._found.items():
            check_scores(found, name(index))
        rows = {index: ImagePredictions(name(index), tuple(found)) for index, found in self._found.items()}
        rows |= {one.index: ImagePredictions(one.name, error=one.reason) for one in bad}
        images, table = [rows[index] for index in sorted(rows)], self._output.table
        if self._output.suffix == ".csv":
            path.write_bytes(to_csv([table.headings, *map(table.cells, images)]))
        else:
            self._write_parquet(path, images)

    def _write_parquet(self, path: Path, images: list[ImagePredictions]) -> None:
        arrow, table = import_pyarrow("--format csv"), self._output.table
        kinds = {str: arrow.string(), float: arrow.float32(), bool: arrow.bool_()}
        names, *values, errors = zip(*map(table.values, images), strict=True)
        columns = [name_column(names, as_bytes=self._output.name_bytes)]
        for column, kind in zip((*values, errors), (*table.columns.values(), str), strict=True):
            # Labels and reasons may have bytes of file names that are not Unicode; a column of text cannot.
            texts = [value if value is None else printable(value) for value in column] if kind is str else column
            columns.append(arrow.array(texts, type=kinds[kind]))
        write_table(arrow.Table.from_arrays(columns, names=table.headings), path)
