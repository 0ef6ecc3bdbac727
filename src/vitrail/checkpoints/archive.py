"""Read weight files as named tensors: shapes first, values on demand, and never a pickle that could run code.

No file is trusted. Stored sizes are checked against the file before anything is allocated, and any error of a library becomes
one message that names the file.
"""

from __future__ import annotations

import math
import os
import re
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from vitrail.errors import VitrailError, reason_of
from vitrail.regular_files import open_regular, utf8_path

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_NUMPY = {np.dtype(np.float16): torch.float16, np.dtype(np.float32): torch.float32, np.dtype(np.float64): torch.float64}
_SAFE = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}

# Limits against zip bombs: the allowed ratio of unpacked to packed size, for files that unpack to more than 256 MiB.
_BOMB_RATIO, _BOMB_SIZE = 200, 1 << 28


@dataclass(frozen=True)
class StoredTensor:
    """One tensor in a file. `dtype` is None if it is not a floating-point tensor; then it can only be dropped."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None
    read: Callable[[], Tensor]


@dataclass
class Archive:
    """The tensors of a file by name, and notes for the report."""

    path: Path
    kind: str  # "npz", "safetensors" or "pth"
    tensors: dict[str, StoredTensor]
    notes: list[str] = field(default_factory=list)
    parts: tuple[str, ...] = ()  # the other keys of a nested .pth
    prefix: str | None = None  # the part the user named, if it is a prefix of names
    variant: str = ""  # which variant of a format's names it had, where that decides numerics


@contextmanager
def wrap_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn any error that a corrupted or malicious file causes into a `VitrailError` that names it."""
    try:
        yield
    except VitrailError:
        raise
    except FileNotFoundError as error:
        raise VitrailError(f"There is no file {error.filename or path}. Check the path.") from error
    except OSError as error:
        raise VitrailError(f"Cannot read {path}: {reason_of(error)}. Check the path and its permissions.") from error
    except Exception as error:  # libraries raise many kinds of errors on corrupted files
        reason = f"{type(error).__name__}: {str(error).splitlines()[0][:160] if str(error) else 'no details'}"
        raise VitrailError(
            f"Cannot read {path} as a checkpoint ({reason}). The file is corrupted or incomplete: download or copy it again."
        ) from error


def open_archive(path: str | os.PathLike[str], part: str | None = None) -> Archive:
    """Open a weight file; its kind is detected from its first bytes. `part` selects one key of a nested `.pth`."""
    file = Path(path)
    with wrap_errors(file):
        with os.fdopen(open_regular(file), "rb") as stream:
            start = stream.read(64)
        if start[:4] == b"PK\x03\x04":
            with zipfile.ZipFile(file) as archive:
                numpy = any(name.endswith(".npy") for name in archive.namelist())
            return _open_npz(file) if numpy else _open_pth(file, part, mapped=True)
        if start[8:9] == b"{":
            opened = _open_safetensors(file)
            opened.prefix = part
            return opened
        if start[:1] == b"\x80":
            return _open_pth(file, part, mapped=False)
        raise VitrailError(f"{file} {_unknown_file(start)}")


def _unknown_file(start: bytes) -> str:
    if not start:
        return "is empty (0 bytes). Download or copy it again."
    if start.startswith(b"version https://git-lfs"):
        return "is a Git LFS pointer, not the weights. Run `git lfs pull` in its repository."
    if start.startswith(b"\x89HDF"):
        return "is an HDF5 (Keras) file, which is not supported. Export its weights as .npz or .safetensors."
    if start.lstrip()[:1] == b"<":
        return "is a web page, not a weight file: the download returned an error page. Download it again."
    return "is not a supported weight file (.npz, .safetensors or .pth). It may be incomplete: download or copy it again."


def _open_npz(path: Path) -> Archive:
    tensors: dict[str, StoredTensor] = {}
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
        total, packed = sum(info.file_size for info in members), max(path.stat().st_size, 1)
        if total > _BOMB_SIZE and total > _BOMB_RATIO * packed:
            raise VitrailError(
                f"{path} has {packed:,} bytes and claims to unpack to {total:,}. It is rejected: weights do not compress so far. "
                "Get them from another source."
            )
        for info in members:
            name = info.filename.removesuffix(".npy")
            if name in tensors:
                raise VitrailError(f"{path} contains {name!r} twice, so it is rejected. Download or copy it again.")
            with archive.open(info) as stream:
                shape, fortran, dtype, start = _array_header(path, name, stream)
            if math.prod(shape) * dtype.itemsize + start != info.file_size:
                raise VitrailError(
                    f"{path}: {name!r} should be an array {shape} of {dtype}, but {info.file_size:,} bytes are stored for it. "
                    f"The file is corrupted or incomplete: download or copy it again."
                )
            tensors[name] = _npz_tensor(path, info, shape, fortran, dtype, start)
    return Archive(path, "npz", tensors)


def _array_header(path: Path, name: str, stream: Any) -> tuple[tuple[int, ...], bool, np.dtype[Any], int]:
    version = np.lib.format.read_magic(stream)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, fortran, dtype = read(stream, max_header_size=10_000)
    if dtype.hasobject:
        raise VitrailError(
            f"{path} needs unsafe unpickling ({name!r} contains Python objects), which can run any code, so it is rejected. "
            f"Open it in a sandbox and save only its arrays with numpy.savez."
        )
    if any(not isinstance(side, int) or side < 0 for side in shape):
        raise VitrailError(f"{path}: {name!r} has the invalid shape {shape}. The file is corrupted: download or copy it again.")
    return shape, bool(fortran), dtype, stream.tell()


def _npz_tensor(
    path: Path, info: zipfile.ZipInfo, shape: tuple[int, ...], fortran: bool, dtype: np.dtype[Any], start: int
) -> StoredTensor:
    native = dtype.newbyteorder("=")
    kind = torch.bfloat16 if dtype.str in ("|V2", "<V2") else _NUMPY.get(native)

    def read() -> Tensor:
        array: np.ndarray[Any, Any] = np.empty(shape[::-1] if fortran else shape, np.uint16 if kind is torch.bfloat16 else dtype)
        with wrap_errors(path):
            _fill(path, info, array, start)
        array = array.T if fortran else array
        if kind is torch.bfloat16:  # numpy has no bfloat16: big_vision stores the raw 16 bits
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(array if dtype.isnative else array.astype(native))

    return StoredTensor(shape, kind, read)


def _fill(path: Path, info: zipfile.ZipInfo, array: np.ndarray[Any, Any], start: int) -> None:
    """Read a member's values into an array. Uncompressed members, as in published files, are read directly from the file."""
    target = array.reshape(-1).view(np.uint8).data if array.size else memoryview(b"")
    if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
        with zipfile.ZipFile(path) as archive, archive.open(info) as stream:
            stream.read(start)
            _read_all(stream, target, path)
        return
    with path.open("rb") as file:
        file.seek(info.header_offset + 26)
        lengths = file.read(4)
        skip = int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little")
        file.seek(info.header_offset + 30 + skip)
        check = zlib.crc32(file.read(start))
        _read_all(file, target, path)
    if zlib.crc32(target, check) != info.CRC:
        raise VitrailError(f"{path}: {info.filename!r} has a wrong checksum. The file is corrupted: download or copy it again.")


def _read_all(stream: Any, target: memoryview, path: Path) -> None:
    done = 0
    while done < len(target):
        count = stream.readinto(target[done:])
        if not count:
            raise VitrailError(f"{path} is truncated: download or copy it again.")
        done += count


def _open_safetensors(path: Path) -> Archive:
    from safetensors import safe_open

    with utf8_path(path) as readable:
        file: Any = safe_open(readable, framework="pt")
    tensors = {}
    for name in file.keys():  # noqa: SIM118 - the handle is not a mapping
        part = file.get_slice(name)
        tensors[name] = StoredTensor(tuple(part.get_shape()), _SAFE.get(part.get_dtype()), lambda name=name: file.get_tensor(name))  # type: ignore[misc]
    return Archive(path, "safetensors", tensors)


def _open_pth(path: Path, part: str | None, *, mapped: bool) -> Archive:
    import pickle
    import warnings

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the pickle protocol: only success or failure matters
            with torch.serialization.safe_globals([(_Placeholder, name) for name in _SETTINGS]), utf8_path(path) as readable:
                content = torch.load(readable, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        raise VitrailError(_pickle_message(path, str(error))) from error
    (key, state), others = _state_dict(path, content, part)
    also = f"; it also contains {', '.join(others)}" if others else ""
    notes = [f"loaded key {key!r} of this file{also}"] if key else []
    tensors = {str(name): _pth_tensor(value) for name, value in state.items()}
    prefix = part if part is not None and key != part else None
    return Archive(path, "pth", tensors, notes, tuple(others), prefix=prefix)


class _Placeholder:
    """Stands for a settings object in a pickle, whose class is never imported: whatever the file does to it has no effect."""

    def __new__(cls, *arguments: Any, **named: Any) -> _Placeholder:
        return super().__new__(cls)

    def __setstate__(self, state: Any) -> None:
        pass

    def __setitem__(self, key: Any, value: Any) -> None:
        pass


# Objects that training code stores next to weights.
_SETTINGS = (
    "argparse.Namespace",
    "types.SimpleNamespace",
    "pathlib.PosixPath",
    "pathlib._local.PosixPath",
    "pytorch_lightning.utilities.parsing.AttributeDict",
    "lightning.fabric.utilities.data.AttributeDict",
    "lightning_fabric.utilities.data.AttributeDict",
    "lightning.pytorch.utilities.parsing.AttributeDict",
    "omegaconf.dictconfig.DictConfig",
    "omegaconf.listconfig.ListConfig",
    "omegaconf.base.ContainerMetadata",
    "omegaconf.base.Metadata",
    "omegaconf.nodes.AnyNode",
    "typing.Any",
    "yacs.config.CfgNode",
    "easydict.EasyDict",
)


def _pickle_message(path: Path, reason: str) -> str:
    found = re.search(r"(?:Unsupported (?:global|class|operand):? (?:GLOBAL )?|GLOBAL )([\w.]+)", reason)
    what = f" ({found[1]})" if found and not found[1].isdigit() else ""  # the number of an instruction says nothing
    return (
        f"{path} needs unsafe unpickling{what}, which can run any code, so it is rejected. Open it in a sandbox, save only its "
        f"tensors with `torch.save(checkpoint['model'], 'weights.pth')` and load that file, or use a .safetensors file."
    )


def _state_dict(path: Path, content: Any, part: str | None) -> tuple[tuple[str, dict[Any, Any]], list[str]]:
    """Find the state dict in a .pth, which may also contain an optimizer state, an epoch, averaged weights."""
    if not isinstance(content, dict):
        raise VitrailError(f"{path} contains a value of type {type(content).__name__}, not a state dict. Save model.state_dict().")
    nested = {str(key): value for key, value in content.items() if _holds_tensors(value)}
    if part is not None and part in nested:
        return (part, nested[part]), [str(key) for key in content if str(key) != part]
    if part is not None and not any(_has_prefix(inner, part) for inner in (content, *nested.values())):
        raise VitrailError(f"{path} has no part {part!r}; its parts with tensors: {', '.join(nested) or 'none'}.")
    if any(isinstance(value, Tensor) for value in content.values()):
        return ("", content), []
    for key in ("model", "state_dict", "teacher", "net", "params", *(nested if len(nested) == 1 else ())):
        if key in nested:
            return (key, nested[key]), [str(other) for other in content if str(other) != key]
    if nested:
        raise VitrailError(f"{path} has several parts: {', '.join(nested)}. Choose one, such as {path}:{next(iter(nested))}.")
    raise VitrailError(f"{path} contains no tensors. Save model.state_dict().")


def _has_prefix(state: Any, part: str) -> bool:
    return any(str(name).startswith(f"{part}.") for name in state)


def _holds_tensors(value: Any) -> bool:
    return isinstance(value, dict) and any(isinstance(inner, Tensor) for inner in value.values())


def _pth_tensor(value: Any) -> StoredTensor:
    plain = isinstance(value, Tensor) and value.layout is torch.strided and not value.is_meta and not value.is_quantized
    if not plain:
        return StoredTensor((), None, lambda: torch.empty(0))
    tensor = value.detach()
    return StoredTensor(tuple(tensor.shape), tensor.dtype if tensor.dtype in FLOATS else None, lambda: tensor)


def write_npz(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write an uncompressed .npz, like the published files; bfloat16 as raw 16 bits, like big_vision."""
    with path.open("wb") as file:
        _savez(file, {name: _to_numpy(tensor) for name, tensor in tensors.items()})


def _savez(file: BinaryIO, arrays: dict[str, np.ndarray[Any, Any]]) -> None:
    # numpy.savez takes names as keyword arguments, so a tensor named "file" would fail
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)


def _to_numpy(tensor: Tensor) -> np.ndarray[Any, Any]:
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype is torch.bfloat16:
        return tensor.view(torch.int16).numpy().view("V2")
    return tensor.numpy()
