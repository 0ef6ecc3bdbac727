"""Read which tensor is where in a checkpoint of torch's distributed format, without running pickle.

Torch stores that as a pickle, `.metadata`, and a pickle can run any code. Here the classes that torch writes are replaced by
inert ones, which only keep what they are given, every other name or instruction is refused, and torch's objects are made from
the result.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from collections.abc import Container
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from vitrail.regular_files import read_bytes

FILE = ".metadata"
_METADATA = "torch.distributed.checkpoint.metadata"
_NAMES = {
    *((_METADATA, name) for name in ("Metadata", "TensorStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING")),
    *((_METADATA, name) for name in ("ChunkStorageMetadata", "MetadataIndex", "StorageMeta")),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    *((module, name) for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "WindowsPath")),
}

# Of protocols 4 and 5. Others make what no checkpoint holds, or let a few bytes ask for gigabytes of memory.
_INSTRUCTIONS = {
    *("PROTO", "FRAME", "STOP", "MARK", "MEMOIZE", "BINGET", "LONG_BINGET", "STACK_GLOBAL", "REDUCE", "NEWOBJ", "BUILD"),
    *("NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "SHORT_BINUNICODE", "BINUNICODE"),
    *("EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "EMPTY_LIST", "APPEND", "APPENDS", "EMPTY_DICT", "SETITEM", "SETITEMS"),
}


class _Inert:
    """What the pickle makes instead of an object of torch's: its arguments and its state, without behaviour."""

    arguments: tuple[Any, ...]
    state: Any

    def __new__(cls, *arguments: Any) -> _Inert:
        one = object.__new__(cls)
        one.arguments, one.state = arguments, {}
        return one

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    def __init__(self, content: bytes) -> None:
        super().__init__(io.BytesIO(content))
        self._classes: dict[tuple[str, str], type[_Inert]] = {}

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(dtype := vars(torch).get(name), torch.dtype):
            return dtype
        if (module, name) not in _NAMES:
            raise ValueError(f"it names {module}.{name}, which no checkpoint needs")
        # Made anew for each file, since a pickle may set attributes of a class.
        return self._classes.setdefault((module, name), type(name, (_Inert,), {}))


def read_metadata(folder: Path, files: Container[str]) -> Metadata:
    """Return the metadata of a checkpoint whose tensors are in `files`; a `ValueError` says what is wrong with it."""
    content = read_bytes(folder / FILE)
    try:
        for instruction, _, _ in pickletools.genops(content):
            if instruction.name not in _INSTRUCTIONS:
                raise ValueError(f"it has the instruction {instruction.name}, which no checkpoint needs")
        state = _Unpickler(content).load().state
        tensors: dict[str, STORAGE_TYPES] = {_text(name): _tensor(one.state) for name, one in state["state_dict_metadata"].items()}
        places = {_index(index.state): _place(one.state, files) for index, one in state["storage_data"].items()}
    except Exception as error:  # whatever a corrupted pickle leads to
        raise ValueError(f"{FILE} is not a checkpoint's: {type(error).__name__}: {error}") from error
    return Metadata(tensors, {name: (name,) for name in tensors}, places, StorageMeta(), state.get("version"))


class Reader(FileSystemReader):
    """Torch's reader, with the metadata that `read_metadata` returned."""

    def __init__(self, folder: Path, files: Container[str]) -> None:
        super().__init__(str(folder))
        self._metadata = read_metadata(folder, files)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata


def _tensor(state: Any) -> TensorStorageMetadata:
    dtype = state["properties"].state[0]
    if not isinstance(dtype, torch.dtype):
        raise ValueError("a tensor has no dtype")
    chunks = [ChunkStorageMetadata(_size(one.state["offsets"]), _size(one.state["sizes"])) for one in state["chunks"]]
    return TensorStorageMetadata(TensorProperties(dtype=dtype), _size(state["size"]), chunks)


def _index(state: Any) -> MetadataIndex:
    offset = state["offset"]
    return MetadataIndex(_text(state["fqn"]), None if offset is None else _size(offset), state["index"])


def _place(state: Any, files: Container[str]) -> _StorageInfo:
    name = _text(state["relative_path"])
    if name not in files:
        raise ValueError(f"a tensor is in {name!r}, which is not a file of this checkpoint")
    if state.get("transform_descriptors"):
        raise ValueError("its files are transformed")
    return _StorageInfo(name, _count(state["offset"]), _count(state["length"]))


def _size(one: Any) -> torch.Size:
    return torch.Size([_count(number) for number in (one.arguments[0] if one.arguments else ())])


def _count(number: Any) -> int:
    if type(number) is not int or number < 0:
        raise ValueError(f"{number!r} is not a size")
    return number


def _text(text: Any) -> str:
    if type(text) is not str:
        raise ValueError(f"{text!r} is not a name")
    return text
