"""Tensors of the Open Inference Protocol, in JSON or, with its extension for binary data, after it."""

from __future__ import annotations

import json
import math
import struct
from typing import Annotated, Any

import numpy as np
import torch
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, Field
from starlette.requests import Request
from torch import Tensor

from vitrail.serve.errors import ServiceError, too_many_images
from vitrail.serve.images import bytes_of_text
from vitrail.serve.json_body import parse_json

IMAGES, ENCODED, OUTPUT = "images", "encoded_images", "logits"
HEADER = "Inference-Header-Content-Length"
_FLOATS = {"FP16": "<f2", "FP32": "<f4", "FP64": "<f8"}
_Size = Annotated[int, Field(ge=0, le=1 << 40)]
_Text = Annotated[str, Field(max_length=200)]


class Parameters(BaseModel):
    binary_data_size: _Size | None = None
    binary_data: bool = False
    binary_data_output: bool = False


class InputTensor(BaseModel):
    name: _Text = Field(description="images: normalised tensors; encoded_images: files in base64.")
    shape: list[Annotated[int, Field(ge=0, le=1 << 30)]] = Field(max_length=8)
    datatype: _Text
    data: list[Any] | None = None
    parameters: Parameters = Parameters()


class OutputTensor(BaseModel):
    name: _Text
    parameters: Parameters = Parameters()


class InferRequest(BaseModel):
    id: _Text | None = None
    inputs: list[InputTensor] = Field(min_length=1, max_length=8)
    outputs: list[OutputTensor] = Field([], max_length=8)
    parameters: Parameters = Parameters()


def read_request(request: Request, body: bytes, most: int) -> tuple[InferRequest, bytes]:
    """Return the request, of at most so many numbers, and the binary data after it; without the extension there is none."""
    most += 1000  # names, shapes and parameters
    given = request.headers.get(HEADER)
    if given is None:
        return parse_json(body, InferRequest, most), b""
    if not (given.isascii() and given.isdigit() and len(given) < 12 and int(given) <= len(body)):
        raise ServiceError(400, f"{HEADER} is not the length of the JSON part, which is at most {len(body)} bytes.")
    return parse_json(body[: int(given)], InferRequest, most), body[int(given) :]


def images_of_request(body: InferRequest, binary: bytes, expected: list[int], most: int) -> list[bytes | Tensor]:
    """Return the images: encoded files, or tensors of the shape `expected`."""
    if len(body.inputs) != 1:
        raise ServiceError(400, f"Give one input, {IMAGES} or {ENCODED}; there are {len(body.inputs)}.")
    for output in body.outputs:
        if output.name != OUTPUT:
            raise ServiceError(400, f"The only output is {OUTPUT}, not {output.name!r}.")
    given = body.inputs[0]
    if (given.data is None) == (given.parameters.binary_data_size is None):
        raise ServiceError(400, "An input has either data, or binary_data_size in its parameters.")
    size = given.parameters.binary_data_size
    if size is not None and size != len(binary):
        raise ServiceError(400, f"binary_data_size is {size}; {len(binary)} bytes follow the JSON part.")
    if given.name == ENCODED:
        return _encoded(given, binary, most)
    if given.name != IMAGES:
        raise ServiceError(400, f"There is no input {given.name!r}; there are {IMAGES} and {ENCODED}.")
    return _floats(given, binary, expected, most)


def _encoded(given: InputTensor, binary: bytes, most: int) -> list[bytes | Tensor]:
    if given.datatype != "BYTES":
        raise ServiceError(400, f"datatype is {given.datatype}; that of {ENCODED} is BYTES.")
    texts: list[Any] = _split(binary, most) if given.data is None else given.data
    if len(texts) > most:
        raise too_many_images(most)
    if given.shape not in ([len(texts)], [len(texts), 1]):
        raise ServiceError(400, f"The shape of {ENCODED} is {given.shape}, but there are {len(texts)} values.")
    if given.data is None:
        return texts
    if not all(isinstance(text, str) for text in texts):
        raise ServiceError(400, f"The data of {ENCODED} must be base64 texts.")
    return [bytes_of_text(text) for text in texts]


def _split(binary: bytes, most: int) -> list[bytes]:
    """Return byte strings that each follow their length, a little-endian uint32; if there are more than `most`, only one more."""
    found: list[bytes] = []
    start = 0
    while start < len(binary) and len(found) <= most:  # a request has space for millions of empty ones
        if len(binary) - start < 4:
            raise ServiceError(400, "The binary data ends within a length.")
        (length,) = struct.unpack_from("<I", binary, start)
        if length > len(binary) - start - 4:
            raise ServiceError(400, "The binary data ends within a value.")
        found.append(binary[start + 4 : start + 4 + length])
        start += 4 + length
    return found


def _floats(given: InputTensor, binary: bytes, expected: list[int], most: int) -> list[bytes | Tensor]:
    if given.datatype not in _FLOATS:
        raise ServiceError(400, f"datatype is {given.datatype}; that of {IMAGES} is FP32, FP16 or FP64.")
    if len(given.shape) != 4 or given.shape[1:] != expected or given.shape[0] < 1:
        raise ServiceError(400, f"The shape is {given.shape}; it must be [number of images, {', '.join(map(str, expected))}].")
    if given.shape[0] > most:
        raise too_many_images(most)
    try:
        values = _numbers(given.data) if given.data is not None else np.frombuffer(binary, _FLOATS[given.datatype])
    except (ValueError, TypeError, OverflowError) as error:
        raise ServiceError(400, "The data must be numbers, in one list or nested evenly.") from error
    if values.size != math.prod(given.shape):
        raise ServiceError(400, f"The data must be {math.prod(given.shape)} numbers; there are {values.size}.")
    with np.errstate(over="ignore"):
        values = values.astype(np.float32)
    if not np.isfinite(values).all():
        raise ServiceError(400, "The data must be finite numbers in the range of FP32.")
    return list(torch.from_numpy(values.reshape(given.shape)))


def _numbers(data: list[Any]) -> np.ndarray[Any, Any]:
    values = np.asarray(data)
    if values.dtype.kind not in "iuf":  # texts, booleans and null are not numbers
        raise TypeError
    return values.ravel()


def answer(name: str, version: str, body: InferRequest, rows: np.ndarray[Any, Any]) -> Response:
    """Return logits in JSON, or after it where the request asks for binary data."""
    binary = body.parameters.binary_data_output or any(output.parameters.binary_data for output in body.outputs)
    output: dict[str, Any] = {"name": OUTPUT, "datatype": "FP32", "shape": list(rows.shape)}
    found: dict[str, Any] = {"model_name": name, "model_version": version, "outputs": [output]}
    if body.id is not None:
        found["id"] = body.id
    if not binary:
        output["data"] = rows.ravel().tolist()
        return JSONResponse(found)
    data = rows.astype("<f4").tobytes()
    output["parameters"] = {"binary_data_size": len(data)}
    head = json.dumps(found).encode()
    return Response(head + data, media_type="application/octet-stream", headers={HEADER: str(len(head))})
