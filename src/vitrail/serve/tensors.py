"""Tensors of the Open Inference Protocol, in JSON or, with its extension for binary data, after it.

Torch is not imported here: a process of its own reads large JSON (`json_process`), and starts faster without it.
"""

from __future__ import annotations

import asyncio
import json
import math
import struct
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from pydantic import BaseModel, BeforeValidator, Field

from vitrail.errors import counted
from vitrail.serve.base64_text import bytes_of_text
from vitrail.serve.errors import ServiceError, too_many_images
from vitrail.serve.json_body import parse_json

if TYPE_CHECKING:
    from fastapi.responses import Response

Buffer = bytes | memoryview
Images = list[bytes] | np.ndarray[Any, Any]
IMAGES, PIXELS, ENCODED, OUTPUT = "images", "pixels", "encoded_images", "logits"
HEADER = "Inference-Header-Content-Length"
_FLOATS = {"FP16": "<f2", "FP32": "<f4", "FP64": "<f8"}
_FORMAT = "Each value is its length, as a little-endian uint32, and then its bytes."
_Size = Annotated[int, Field(ge=0, le=1 << 40)]
_Text = Annotated[str, Field(max_length=200)]


class Parameters(BaseModel):
    binary_data_size: _Size | None = None
    binary_data: bool | None = None
    binary_data_output: bool = False
    classification: int | None = None


def _unless_null(default: Any) -> BeforeValidator:
    """Some clients send null for what they leave out."""
    return BeforeValidator(lambda value: default if value is None else value)


_Parameters = Annotated[Parameters, _unless_null(Parameters())]


class InputTensor(BaseModel):
    name: _Text = Field(description="images: normalised tensors; pixels: 0 to 255; encoded_images: files in base64.")
    shape: list[Annotated[int, Field(ge=0, le=1 << 30)]] = Field(max_length=8)
    datatype: _Text
    data: list[Any] | None = None
    parameters: _Parameters = Parameters()


class OutputTensor(BaseModel):
    name: _Text
    parameters: _Parameters = Parameters()


class InferRequest(BaseModel):
    id: _Text | None = None
    inputs: list[InputTensor] = Field(min_length=1, max_length=8)
    outputs: Annotated[list[OutputTensor], Field(max_length=8), _unless_null([])] = []
    parameters: _Parameters = Parameters()


def json_length(header: str | None, length: int) -> int:
    """Return how many bytes of a body are JSON: all, or what the header of the extension for binary data says."""
    if header is None:
        return length
    if not (header.isascii() and header.isdigit() and len(header) < 12 and int(header) <= length):
        raise ServiceError(400, f"{HEADER} is {header[:40]!r}; it must be the length of the JSON part, at most {length} bytes.")
    return int(header)


def max_values(expected: list[int], most: int) -> int:
    """Return how many values a request of `most` images can have, with names, shapes and parameters."""
    return most * math.prod(expected) + 1000


def read_images(body: bytes, length: int, expected: list[int], most: int) -> tuple[InferRequest, Images]:
    """Parse a body of which `length` bytes are JSON; return the request without its data, and its images.

    These are encoded files, or one array [image, *expected], float32 or, of pixels, uint8; there are at most `most`.
    """
    request = parse_json(body[:length] if length < len(body) else body, InferRequest, max_values(expected, most))
    images = images_of_request(request, memoryview(body)[length:], expected, most)  # not copied: it may be 32 MiB
    for given in request.inputs:
        given.data = None
    return request, images


def images_of_request(body: InferRequest, binary: Buffer, expected: list[int], most: int) -> Images:
    """Return the images: encoded files, or an array of tensors of the shape `expected`."""
    if len(body.inputs) != 1:
        raise ServiceError(400, f"Give one input, {IMAGES}, {PIXELS} or {ENCODED}; there are {len(body.inputs)}.")
    for output in body.outputs:
        if output.name != OUTPUT:
            raise ServiceError(400, f"There is no output {output.name!r}; the only one is {OUTPUT}.")
        if output.parameters.classification:  # an extension of Triton that answers with texts
            raise ServiceError(400, f"There is no parameter classification, {OUTPUT} are numbers; /v1/predict returns classes.")
    given = body.inputs[0]
    if (given.data is None) == (given.parameters.binary_data_size is None):
        found = "neither data nor binary_data_size" if given.data is None else "both data and binary_data_size"
        raise ServiceError(400, f"The input has {found}; give one of them.")
    size = given.parameters.binary_data_size
    if size is not None and size != len(binary):
        raise ServiceError(400, f"binary_data_size is {size}, but the JSON part is followed by {counted(len(binary), 'byte')}.")
    if given.name == ENCODED:
        return _encoded(given, binary, most)
    if given.name not in (IMAGES, PIXELS):
        raise ServiceError(400, f"There is no input {given.name!r}; use {IMAGES}, {PIXELS} or {ENCODED}.")
    return _tensors(given, binary, expected, most)


def _encoded(given: InputTensor, binary: Buffer, most: int) -> list[bytes]:
    if given.datatype != "BYTES":
        raise ServiceError(400, f"datatype is {given.datatype}; for {ENCODED} it must be BYTES.")
    texts: list[Any] = _split(binary, most) if given.data is None else given.data
    if len(texts) > most:
        raise too_many_images(most)
    if given.shape not in ([len(texts)], [len(texts), 1]):
        raise ServiceError(400, f"The shape of {ENCODED} is {given.shape}; for this data it must be [{len(texts)}].")
    if given.data is None:
        return texts
    if len(given.shape) == 2:  # nested as the shape says, or not
        texts = [text[0] if isinstance(text, list) and len(text) == 1 else text for text in texts]
    wrong = next((number for number, text in enumerate(texts) if not isinstance(text, str)), None)
    if wrong is not None:
        raise ServiceError(400, f"Value {wrong} of {ENCODED} is not a string; it must be an image file in base64.")
    return [bytes_of_text(text) for text in texts]


def _split(binary: Buffer, most: int) -> list[bytes]:
    """Return byte strings that each follow their length, a little-endian uint32; if there are more than `most`, only one more."""
    found: list[bytes] = []
    start = 0
    while start < len(binary) and len(found) <= most:  # a request has space for millions of empty ones
        if len(binary) - start < 4:
            raise ServiceError(400, f"The binary data ends within a length. {_FORMAT}")
        (length,) = struct.unpack_from("<I", binary, start)
        if length > len(binary) - start - 4:
            raise ServiceError(400, f"The binary data ends within a value. {_FORMAT}")
        found.append(bytes(binary[start + 4 : start + 4 + length]))
        start += 4 + length
    return found


def _tensors(given: InputTensor, binary: Buffer, expected: list[int], most: int) -> np.ndarray[Any, Any]:
    kinds = _FLOATS if given.name == IMAGES else {"UINT8": "u1"}
    if given.datatype not in kinds:
        wanted = "FP32, FP16 or FP64" if given.name == IMAGES else "UINT8"
        raise ServiceError(400, f"datatype is {given.datatype}; for {given.name} it must be {wanted}.")
    if len(given.shape) != 4 or given.shape[1:] != expected or given.shape[0] < 1:
        raise ServiceError(400, f"The shape is {given.shape}; it must be [number of images, {', '.join(map(str, expected))}].")
    if given.shape[0] > most:
        raise too_many_images(most)
    values = _numbers(given) if given.data is not None else _from_binary(given, binary, np.dtype(kinds[given.datatype]))
    return (_as_floats if given.name == IMAGES else _as_pixels)(values).reshape(given.shape)


def _as_floats(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    with np.errstate(over="ignore"):
        values = values.astype(np.float32)
    if not np.isfinite(values).all():
        raise ServiceError(400, "The data has NaN, infinity or a number outside the range of FP32; send finite numbers.")
    return values


def _as_pixels(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    with np.errstate(invalid="ignore"):
        pixels = values.astype(np.uint8)
    if values.dtype != np.uint8 and not np.array_equal(pixels, values):
        raise ServiceError(400, f"The data has numbers that are not UINT8; {PIXELS} are whole numbers from 0 to 255.")
    return pixels


def _numbers(given: InputTensor) -> np.ndarray[Any, Any]:
    try:
        values = np.asarray(given.data)
        if values.dtype.kind not in "iuf":  # texts, booleans and null are not numbers
            raise TypeError
    except (ValueError, TypeError, OverflowError) as error:
        raise ServiceError(
            400, "The data has values that are not numbers, or uneven lists; send all numbers in one list."
        ) from error
    count = math.prod(given.shape)
    if values.size != count:
        raise ServiceError(400, f"The data has {counted(values.size, 'number')}; the shape {given.shape} needs {count:,}.")
    if values.ndim > 1 and list(values.shape) != given.shape:  # channels last, for example
        raise ServiceError(400, f"The lists in the data have the shape {list(values.shape)}; send {given.shape} or one flat list.")
    return values.ravel()


def _from_binary(given: InputTensor, binary: Buffer, kind: np.dtype[Any]) -> np.ndarray[Any, Any]:
    size = math.prod(given.shape) * kind.itemsize
    if len(binary) != size:
        needed = f"the shape {given.shape} in {given.datatype} needs {size:,}"
        raise ServiceError(400, f"The binary data has {counted(len(binary), 'byte')}; {needed}.")
    return np.frombuffer(binary, kind)


async def answer(name: str, version: str, body: InferRequest, rows: np.ndarray[Any, Any]) -> Response:
    """Return logits in JSON, or after it where the request asks for binary data."""
    from fastapi.responses import Response

    chosen = [one.parameters.binary_data for one in body.outputs if one.parameters.binary_data is not None]
    binary = any(chosen) if chosen else body.parameters.binary_data_output
    output: dict[str, Any] = {"name": OUTPUT, "datatype": "FP32", "shape": list(rows.shape)}
    given = {} if body.id is None else {"id": body.id}
    found: dict[str, Any] = {"model_name": name, "model_version": version, **given, "outputs": [output]}
    if not binary:
        opened = json.dumps(found).removesuffix("}]}")
        return Response(f'{opened}, "data": [{await _json_of(rows)}]}}]}}', media_type="application/json")
    data = rows.astype("<f4").tobytes()
    output["parameters"] = {"binary_data_size": len(data)}
    head = json.dumps(found).encode()
    return Response(head + data, media_type="application/octet-stream", headers={HEADER: str(len(head))})


async def _json_of(rows: np.ndarray[Any, Any]) -> str:
    """Return the numbers of all rows; other requests have their turn after each. 64 images of 21,843 classes take 0.7 s."""
    texts = []
    for row in rows:
        texts.append(json.dumps(row.tolist())[1:-1])
        await asyncio.sleep(0)
    return ", ".join(texts)
