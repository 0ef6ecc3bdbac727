"""Read `.npy` and `.npz` content only after its header agrees with the bytes present.

numpy allocates what a header claims before it reads: 128 bytes can claim a terabyte.
"""

from __future__ import annotations

import io
import math
import os
import zipfile
from typing import Any

import numpy as np
import numpy.typing as npt

from vitrail.regular_files import MAX_BYTES, read_bytes

Array = npt.NDArray[Any]


def read_npy(content: bytes) -> Array:
    """Return the array of a `.npy` file. Raise ValueError if its header is wrong or it contains Python objects."""
    stream = io.BytesIO(content)
    try:
        version = np.lib.format.read_magic(stream)
        read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read_header(stream)
    except Exception as error:  # the header is a Python literal: a wrong one raises nearly anything
        raise ValueError(f"its header cannot be read: {error}") from error
    if dtype.hasobject:
        raise ValueError("it contains Python objects")
    present = len(content) - stream.tell()
    claimed = math.prod(shape) * dtype.itemsize
    if min(shape, default=0) < 0 or claimed > present:
        raise ValueError(f"its header claims {dtype} {shape}, {claimed:,} bytes, but {present:,} bytes follow")
    stream.seek(0)
    return np.asarray(np.lib.format.read_array(stream, allow_pickle=False))


def read_npz(path: str | os.PathLike[str], limit: int = MAX_BYTES) -> dict[str, Array]:
    """Return the arrays of an uncompressed `.npz` file, as `np.savez` writes it. Raise ValueError if it is not one."""
    content = read_bytes(path, limit)
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            members = archive.infolist()
            if any(member.compress_type != zipfile.ZIP_STORED for member in members):
                raise ValueError("an array is compressed")
            if sum(member.file_size for member in members) > len(content):  # members may overlap
                raise ValueError("its arrays are larger than the file")
            return {member.filename.removesuffix(".npy"): read_npy(archive.read(member)) for member in members}
    except ValueError:
        raise
    except Exception as error:  # zipfile raises many kinds on corrupted content: BadZipFile, struct.error, NotImplementedError, …
        raise ValueError(f"not a readable .npz file: {error}") from error
