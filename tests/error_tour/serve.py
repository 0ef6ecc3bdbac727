"""Errors of the service: what it answers to wrong requests, and what keeps it from starting."""

from __future__ import annotations

import asyncio
import atexit
import base64
import json
import signal
import socket
import struct
import time
import zlib
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import vitrail
from tests.error_tour.case import Case, at
from tests.serve.conftest import error_text
from vitrail.data.preprocess import Preprocess, preset
from vitrail.serve.app import create_app
from vitrail.serve.base64_text import bytes_of_text
from vitrail.serve.byte_maps import MAX_REPLY
from vitrail.serve.decoder_processes import crashed
from vitrail.serve.engine import Engine
from vitrail.serve.errors import ServiceError
from vitrail.serve.exploration import Exploration, _finite
from vitrail.serve.explorations import Explorations, NamedImage
from vitrail.serve.explorer import _check, _check_size
from vitrail.serve.form import files_of_form
from vitrail.serve.guard import Guard, _Body
from vitrail.serve.images import decode
from vitrail.serve.json_body import parse_json
from vitrail.serve.json_process import MANY_VALUES, JsonProcess
from vitrail.serve.limits import ByteLimit, PixelLimit
from vitrail.serve.metrics import Metrics
from vitrail.serve.open_inference import _unstacked
from vitrail.serve.page_files import position_bytes
from vitrail.serve.saved_page import _explored
from vitrail.serve.server import _bind
from vitrail.serve.service import Service, models_of
from vitrail.serve.settings import ServeSettings, token_of_environment
from vitrail.serve.tensors import InferRequest, images_of_request, json_length, read_images
from vitrail.serve.worker import ModelWorker

Headers = list[tuple[bytes, bytes]]


@cache
def service(model: str = "model") -> Service:
    """Return a service whose model is loaded."""
    made = Service({"tiny": lambda: vitrail.load(model)}, ServeSettings(device="cpu", max_images=2))
    made.start(on_failure=lambda: None)
    atexit.register(made.close)
    end = time.monotonic() + 30
    while made.workers["tiny"].state == "loading" and time.monotonic() < end:
        time.sleep(0.005)
    return made


def photo(name: str = "cat.jpg") -> bytes:
    return Path(name).read_bytes()


def ask(method: str, path: str, body: bytes | dict[str, Any] = b"", *, app: Any = None, **headers: str) -> Any:
    """Send a request to the application, without a network, and return its answer. An error is raised."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    names = {"host": "localhost", "content-length": str(len(data)), **headers}
    route, _, query = path.partition("?")
    scope = {
        "type": "http", "http_version": "1.1", "method": method, "scheme": "http", "path": route, "raw_path": route.encode(),
        "query_string": query.encode(), "root_path": "", "client": None, "server": ("localhost", 80),
        "headers": [(name.replace("_", "-").encode(), value.encode()) for name, value in names.items()],
    }  # fmt: skip
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": data, "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run((app or create_app(service()))(scope, receive, send))
    answer = b"".join(one.get("body", b"") for one in sent)
    if sent[0]["status"] >= 400:
        raise ServiceError(sent[0]["status"], error_text(json.loads(answer)))
    return answer


def explore(path: str, body: bytes = b"") -> Any:
    """Analyse a photo and ask for a part of the result."""
    app = create_app(service())
    key = json.loads(ask("POST", "/explorer/analyse", photo(), app=app))["id"]
    return ask("POST" if body else "GET", f"/explorer/{key}/{path}", body, app=app)


def form(*parts: bytes) -> bytes:
    head = b'--xyz\r\nContent-Disposition: form-data; name="a"; filename="a.jpg"\r\n\r\n'
    return b"".join(head + part + b"\r\n" for part in parts) + b"--xyz--\r\n"


FORM = "multipart/form-data; boundary=xyz"


def infer(data: Any = None, *, binary: bytes = b"", most: int = 2, outputs: tuple[Any, ...] = (), **given: Any) -> Any:
    """Read the tensor of a request for images of 3×2×2."""
    one = {"name": "images", "shape": [1, 3, 2, 2], "datatype": "FP32", "data": data, **given}
    return images_of_request(InferRequest.model_validate({"inputs": [one], "outputs": outputs}), binary, [3, 2, 2], most)


def encoded(data: Any = None, *, binary: bytes = b"", **given: Any) -> Any:
    sizes = {} if data is not None else {"parameters": {"binary_data_size": len(binary)}}
    return infer(data, binary=binary, **{"name": "encoded_images", "shape": [1], "datatype": "BYTES", **sizes, **given})


def of_16_bits() -> Any:
    return SimpleNamespace(stored_preprocess=lambda: preset("imagenet", size=2, bits=16))


def inputs(count: int) -> InferRequest:
    return InferRequest.model_validate({"inputs": [{"name": "images", "shape": [1], "datatype": "FP32", "data": [0]}] * count})


def decoded(data: bytes, preprocess: Any = None, **settings: Any) -> Any:
    return decode(data, preprocess or preset("imagenet", size=32), ServeSettings(**settings), PixelLimit(10**9))


class Corrupted(Preprocess):
    """Fails as a decoder may fail."""

    def pixels(self, image: Any, *, name: str = "image") -> Any:
        raise SyntaxError("broken PNG file")


def many_scans() -> bytes:
    data = photo()
    return data[:-2] + 101 * b"\xff\xda\x00\x02" + data[-2:]


def png(width: int, height: int) -> bytes:
    """Return the beginning of a PNG."""
    header = struct.pack(">4sIIBBBBB", b"IHDR", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n\0\0\0\r" + header + struct.pack(">I", zlib.crc32(header)) + b"\0\0\0\0IDAT"


def check(headers: Headers, *, path: str = "/v1/models", token: str | None = None, images: tuple[int, ...] = ()) -> None:
    """Check the headers of a request."""
    about: Any = SimpleNamespace(draining=False, explorer_images=images, settings=ServeSettings())
    Guard(fail, about, token)._check({"path": path, "headers": headers})


async def fail(*_: Any) -> None:
    raise RuntimeError


def slow_upload() -> None:
    async def receive() -> Any:
        await asyncio.sleep(60)

    asyncio.run(_Body(receive, ServeSettings(upload_seconds=0.01), ByteLimit(10), True).receive())


def worker() -> ModelWorker:
    return ModelWorker("tiny", lambda: vitrail.load("model"), ServeSettings(), Metrics())


def answer_to(error: Exception) -> None:
    """Raise what a request gets if its computation fails."""
    raise worker()._as_answer(error)


def busy_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        _bind("127.0.0.1", other.getsockname()[1])


def large_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitrail.serve.exploration.MAX_ATTENTION", 0)


def no_readv(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("os.readv")


def no_gpu_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be")

    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(synchronize=fails))


def broken_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Metrics, "text")


RESNET = SimpleNamespace(model=SimpleNamespace(config=SimpleNamespace(name="ResNet-50")))
ANALYSED_RESNET = Exploration(torch.zeros(1), {"name": "ResNet-50", "attention": None}, np.zeros((1, 4, 2)), None)
TEXT = "eA=="  # base64 of a text, not of an image
FORMATS = "known format (JPEG, PNG, WEBP, BMP, GIF, TIFF, PPM)."
CORS = {"origin": "https://example.com", "access_control_request_method": "POST"}


def crashed_decoder() -> None:
    raise crashed(-signal.SIGSEGV)


# fmt: off
def other_process() -> None:
    """Parse a body without inputs in the other process."""
    process = JsonProcess(1000)
    try:
        asyncio.run(process.run(read_images, b"{}", 2, [3, 2, 2], 2, length=2, values=MANY_VALUES))
    finally:
        process.close()


CASES: tuple[Case, ...] = (
    at("serve/engine.py:Engine.check", lambda: Engine.check(SimpleNamespace(_model=SimpleNamespace(device=torch.device("cuda")))),  # type: ignore[arg-type]
       "The GPU computes nothing any more (CUDA error: an illegal memory access was encountered).", "Start the service again;",
       patch=no_gpu_any_more),
    at("serve/errors.py:not_finite",
       lambda: ask("POST", "/v2/models/tiny/infer",
                   {"inputs": [{"name": "images", "shape": [1, 3, 32, 32], "datatype": "FP32", "data": [3e38] * 3072}]}),
       "The model's output for this image is not finite.", "Check its values, or serve the model in fp32."),
    at("serve/errors.py:queue_full", lambda: ByteLimit(10).take(11), "The queue is full.", "Try again in 1 s."),
    at("serve/errors.py:unavailable", lambda: worker().admit(1), "tiny is loading.", "Try again later."),
    at("serve/errors.py:too_many_images", lambda: infer([0.0], shape=[3, 3, 2, 2]),
       "The request has too many images: more than 2.", "Split it into several requests."),
    at("serve/app.py:create_app.vitrail_error", lambda: ask("POST", "/v1/predict", photo(), app=create_app(service("zero-head"))),
       "The head is all zeros: zero-head is only a backbone", "Fine-tune it on your classes"),
    at("serve/app.py:create_app.invalid", lambda: ask("POST", "/v1/predict?top=0"),
       "query.top:", "Input should be greater than or equal to 1."),
    at("serve/known_queries.py:_check_names", lambda: ask("POST", "/v1/predict?tops=1"),
       "There is no parameter 'tops';", "/v1/predict has model, top."),
    at("serve/app.py:create_app.http_error", lambda: ask("GET", "/v1/predictions"),
       "There is nothing at /v1/predictions;", "see /docs."),
    at("serve/app.py:create_app.http_error", lambda: ask("GET", "/v1/predict"), "GET is not possible at /v1/predict;", "use POST."),
    at("serve/app.py:create_app.unexpected", lambda: ask("GET", "/metrics"),
       "An unexpected error happened;", "the server's log says more.", patch=broken_metrics),
    at("serve/app.py:_Cors.preflight_response",
       lambda: ask("OPTIONS", "/v1/predict", app=create_app(service(), cors=("https://example.org",)), **CORS),
       "Disallowed CORS origin.", "`vitrail serve --cors` names the origins that may call."),
    # The explorer
    at("serve/explorations.py:Explorations.__getitem__", lambda: Explorations()["0123"],
       "This image is no longer kept;", "send it again."),
    at("serve/explorer.py:page_routes.answer", lambda: ask("GET", "/page/other.js"),
       "The page has no file 'other.js';", "open the page at /."),
    at("serve/explorer.py:_start_routes.image", lambda: ask("GET", "/explorer/images/99"),
       "There is no image 99;", "/explorer/start lists the images, counted from 0."),
    at("serve/explorer.py:_start_routes.analyse",
       lambda: ask("POST", "/explorer/analyse", form(b"a", b"b"), content_type=FORM), "there are 2.", "Send one image at a time;"),
    at("serve/explorer.py:_start_routes.photo", lambda: explore("photo"),
       "The image has no more pixels than the model's input;", "use /explorer/ID/picture."),
    at("serve/explorer.py:_map_routes.attention", lambda: explore("attention?query=0"),
       "The attention of this model is too large for all layers at once;", "give the parameter layer.", patch=large_attention),
    at("serve/explorer.py:_map_routes.positions", lambda: explore("positions?query=16"),
       "query is 16;", "the last patch is 15, counted from 0."),
    at("serve/explorer.py:_map_routes.similarity", lambda: explore("similarity?layer=2"),
       "layer is 2;", "the last layer is 1, counted from 0."),
    at("serve/explorer.py:_model_routes.masked#1", lambda: explore("masked", b" " * ((1 << 20) + 1)),
       "The list of patches has 1,048,577 bytes;", "at most 1,048,576 are read."),
    at("serve/explorer.py:_model_routes.masked#2", lambda: explore("masked", b'{"patches": [3, 16]}'),
       "There is no patch 16;", "the patches are 0 to 15."),
    at("serve/explorer.py:_check#1", lambda: _check(ANALYSED_RESNET, None, None, attention=True),
       "ResNet-50 is a ResNet: it has no attention.", "ViTs and hybrids have."),
    at("serve/explorer.py:_check#2", lambda: explore("attention?layer=2"), "layer is 2;", "the last layer is 1, counted from 0."),
    at("serve/explorer.py:_check#3", lambda: explore("attention?query=17"),
       "query is 17;", "the last token is 16, counted from 0."),
    at("serve/explorer.py:_check_size", lambda: _check_size(MAX_REPLY + 1),
       "This is 2,097,153 bytes;", "at most 2,097,152 are sent at once. Ask for single queries."),
    at("serve/page_files.py:position_bytes", lambda: position_bytes(RESNET, (32, 32)),  # type: ignore[arg-type]
       "ResNet-50 is a ResNet: it has no position embeddings.", "ViTs and hybrids have."),
    at("serve/saved_page.py:_explored", lambda: _explored(vitrail.load("model"), "model", NamedImage("cat", photo())),
       "is too large for a saved page;", "run `vitrail explore` without --save.", patch=large_attention),
    # Forms
    at("serve/form.py:files_of_form#1", lambda: files_of_form(form(b"a"), "multipart/form-data", 2),
       "The form cannot be read: Content-Type has no boundary.", "Let your HTTP library set it."),
    at("serve/form.py:files_of_form#2", lambda: files_of_form(form(*5 * [b"a"]), FORM, 1),
       "The form has too many parts;", "send at most 1 file at a time."),
    at("serve/form.py:files_of_form#3", lambda: files_of_form(form(b"a")[:-5], FORM, 2),
       "The form cannot be read: its last boundary is missing.", "Send the whole form."),
    at("serve/form.py:files_of_form#4", lambda: files_of_form(form(b"a", b"b", b"c"), FORM, 2),
       "The form has 3 files;", "send at most 2 at a time."),
    at("serve/form.py:_file#1", lambda: files_of_form(b"--xyz\r\nno headers\r\n--xyz--\r\n", FORM, 2),
       "The form cannot be read: a part has no headers,", "or more than 4,096 bytes of them."),
    at("serve/form.py:_file#2", lambda: files_of_form(b"--xyz\r\nContent-Type: image/jpeg\r\n\r\na\r\n--xyz--\r\n", FORM, 2),
       "The form cannot be read: a part has no Content-Disposition,", "such as form-data; name=a; filename=a.jpg."),
    # What every request passes first
    at("serve/guard.py:Guard._run", lambda: ask("GET", "/", app=Guard(fail, service(), None)),
       "An unexpected error happened;", "the server's log says more."),
    at("serve/guard.py:Guard._check#1", lambda: check([], token="secret"),
       "The token is missing or wrong:", "send the header Authorization: Bearer TOKEN."),
    at("serve/guard.py:Guard._check#2", lambda: check([(b"host", b"example.org")], path="/explorer/start", images=(1,)),
       "The explorer shows files of this machine,", "so it opens only as localhost or 127.0.0.1."),
    at("serve/guard.py:Guard._check#4", lambda: check([(b"content-length", b"ten")]),
       "Content-Length is 'ten';", "it must be the number of bytes of the body."),
    at("serve/guard.py:Guard._check#3", lambda: check([(b"content-encoding", b"gzip")]),
       "The body is compressed (Content-Encoding: gzip);", "send it as it is."),
    at("serve/settings.py:token_of_environment", lambda: token_of_environment({"VITRAIL_TOKEN": " "}),
       "VITRAIL_TOKEN is set but empty, so the service would be open to all.", "Give it a value, or unset it."),
    at("serve/guard.py:_Body.receive", slow_upload, "The request was not received within 0.01 s.", "Send fewer or smaller images."),
    at("serve/guard.py:_too_large", lambda: check([(b"content-length", b"99999999")]),
       "The request is larger than 33,554,432 bytes.", "Send fewer or smaller images."),
    # Images
    at("serve/exploration.py:_finite", lambda: _finite(torch.tensor([float("nan")])),
       "The model's outputs for this image are not finite.", "Check the image and the weights."),
    at("serve/images.py:decode#1", lambda: decoded(photo(), max_pixels=1000),
       "The image, or a tile of it, has 80 × 60 pixels;", "send one of at most 1,000."),
    at("serve/images.py:decode#2", lambda: decoded(many_scans()),
       "The JPEG has 80 × 60 pixels in too many scans: 101 or more.", "Save it as a baseline JPEG."),
    at("serve/images.py:decode#3", lambda: decoded(png(33_000, 1), preset("timm", size=64)),
       "The image has 33000 × 1 pixels, and 166,353,000 while it is resized;", "crop it to a shape that is less narrow."),
    at("serve/images.py:decode#4", lambda: decoded(photo("truncated.jpg")),
       "the image: truncated: the file ends before the image is complete.", "Replace or remove it."),
    at("serve/images.py:decode#5", lambda: decoded(photo(), Corrupted()),
       "The image cannot be decoded: the file is corrupted.", "Send an intact JPEG or PNG file."),
    at("serve/decoder_processes.py:crashed", crashed_decoder,
       "The image cannot be decoded: its decoder crashed.", "Send an intact JPEG or PNG file."),
    at("serve/images.py:_size#1", lambda: decoded(b""), "The image is empty (0 bytes);", "send the content of an image file."),
    at("serve/images.py:_size#2", lambda: decoded(b"\x93NUMPY"), "not a readable .npy image", "Replace or remove it."),
    at("serve/images.py:_size#3", lambda: decoded(png(20_000, 20_000)),
       "The image has too many pixels;", "send one of at most 64,000,000."),
    at("serve/images.py:_size#4", lambda: decoded(photo("text.jpg")), "This is not an image of a", FORMATS),
    at("serve/costly_files.py:check_opened", lambda: decoded(b"P3 1 1 255 1 2 3"),
       "This is a PPM file of text, which takes long to decode.", "Save it as PNG or JPEG."),
    at("serve/costly_files.py:_corrupted", lambda: decoded(b"GIF89a" + bytes(7) + b"!\xfe" + b"\1x" * 4001),
       "The image is not decoded, because it has too many comments.", "Save it again, for instance as PNG."),
    at("serve/base64_text.py:bytes_of_text#1", lambda: bytes_of_text("https://example.org/a.jpg"),
       "URLs are not fetched;", "send the image itself as a data: URI or base64."),
    at("serve/base64_text.py:bytes_of_text#2", lambda: bytes_of_text("data:text/plain,hello"),
       "This is not a data: URI with base64,", "such as data:image/jpeg;base64,…"),
    at("serve/base64_text.py:bytes_of_text#3", lambda: bytes_of_text("%%%"),
       "The image is not valid base64;", "send the bytes of its file in base64."),
    # JSON
    at("serve/json_body.py:check_values", lambda: parse_json(b"[" * 9, InferRequest, 5),
       "The JSON has too many values;", "at most 5 are read here. Send fewer images."),
    at("serve/json_body.py:parse_json", lambda: parse_json(b"{}", InferRequest, 5), "inputs:", "Field required."),
    at("serve/process.py:Refused.error", other_process, "inputs:", "Field required."),
    at("serve/open_inference.py:routes._worker", lambda: ask("GET", "/v2/models/tiny/versions/7"),
       "There is no version '7' of tiny;", "the only version is 1."),
    at("serve/errors.py:first_failure", lambda: ask("POST", "/v1/embeddings", {"input": [TEXT, TEXT]}),
       "image 0: This is not an image of a", FORMATS),
    at("serve/openai.py:routes.embeddings",
       lambda: ask("POST", "/v1/embeddings", {"input": base64.b64encode(photo()).decode(), "dimensions": 7}),
       "dimensions is 7;", "the vectors of tiny have 32. Leave it out."),
    at("serve/own.py:routes.attention#1", lambda: ask("POST", "/v1/attention?layer=1", photo()),
       "layer, head and query have no effect on rollout;", "add method=attention, or leave them out."),
    at("serve/own.py:routes.attention#2", lambda: ask("POST", "/v1/attention", form(b"a", b"b"), content_type=FORM),
       "there are 2.", "Send one image at a time;"),
    at("serve/own.py:uploaded#1", lambda: ask("POST", "/v1/predict", form(), content_type=FORM),
       "The form has no file;", "send at least one, as curl -F image=@cat.jpg does."),
    at("serve/own.py:uploaded#2", lambda: ask("POST", "/v1/predict", b"cat.jpg", content_type="application/x-www-form-urlencoded"),
       "This is not an image,", "use curl --data-binary @FILE"),
    at("serve/own.py:_one_map#1", lambda: ask("POST", "/v1/attention?method=attention&layer=2", photo()),
       "layer is 2;", "the last layer is 1, counted from 0."),
    at("serve/own.py:_one_map#2", lambda: ask("POST", "/v1/attention?method=attention&head=2", photo()),
       "head is 2;", "the last head is 1, counted from 0."),
    at("serve/own.py:_one_map#3", lambda: ask("POST", "/v1/attention?method=attention&query=17", photo()),
       "query is 17;", "the last token is 16, counted from 0."),
    # Tensors
    at("serve/tensors.py:json_length", lambda: json_length("x", 2),
       "Inference-Header-Content-Length is 'x';", "it must be the length of the JSON part, at most 2 bytes."),
    at("serve/tensors.py:images_of_request#1", lambda: images_of_request(inputs(2), b"", [3, 2, 2], 2),
       "there are 2.", "Give one input, images, pixels or encoded_images;"),
    at("serve/tensors.py:images_of_request#2", lambda: infer([0.0], outputs=({"name": "labels"},)),
       "There is no output 'labels';", "the only one is logits."),
    at("serve/tensors.py:images_of_request#3",
       lambda: infer([0.0], outputs=({"name": "logits", "parameters": {"classification": 3}},)),
       "There is no parameter classification,", "/v1/predict returns classes."),
    at("serve/tensors.py:images_of_request#4", infer, "The input has neither data nor binary_data_size;", "give one of them."),
    at("serve/tensors.py:images_of_request#4", lambda: infer([0.0], parameters={"binary_data_size": 4}, binary=bytes(4)),
       "The input has both data and binary_data_size;", "give one of them."),
    at("serve/tensors.py:images_of_request#5", lambda: infer(parameters={"binary_data_size": 4}, binary=bytes(1)),
       "binary_data_size is 4,", "but the JSON part is followed by 1 byte."),
    at("serve/tensors.py:images_of_request#6", lambda: infer([0.0], name="input"),
       "There is no input 'input';", "use images, pixels or encoded_images."),
    at("serve/tensors.py:_encoded#1", lambda: encoded([TEXT], datatype="FP32"),
       "datatype is FP32;", "for encoded_images it must be BYTES."),
    at("serve/tensors.py:_encoded#2", lambda: encoded([TEXT], shape=[2]),
       "The shape of encoded_images is [2];", "for this data it must be [1]."),
    at("serve/tensors.py:_encoded#3", lambda: encoded([TEXT, None], shape=[2]),
       "Value 1 of encoded_images is not a string;", "it must be an image file in base64."),
    at("serve/tensors.py:_split#1", lambda: encoded(binary=bytes(2)),
       "The binary data ends within a length.", "Each value is its length, as a little-endian uint32, and then its bytes."),
    at("serve/tensors.py:_split#2", lambda: encoded(binary=struct.pack("<I", 5) + b"abc"),
       "The binary data ends within a value.", "Each value is its length, as a little-endian uint32, and then its bytes."),
    at("serve/tensors.py:_tensors#1", lambda: infer([0.0], datatype="INT8"),
       "datatype is INT8;", "for images it must be FP32, FP16 or FP64."),
    at("serve/tensors.py:_tensors#1", lambda: infer([0.0], name="pixels", datatype="FP32"),
       "datatype is FP32;", "for pixels it must be UINT8."),
    at("serve/tensors.py:_tensors#2", lambda: infer([0.0], shape=[1, 2, 2, 3]),
       "The shape is [1, 2, 2, 3];", "it must be [number of images, 3, 2, 2]."),
    at("serve/tensors.py:_as_floats", lambda: infer([1e39] * 12),
       "The data has NaN, infinity or a number outside the range of FP32;", "send finite numbers."),
    at("serve/tensors.py:_as_pixels", lambda: infer([256] * 12, name="pixels", datatype="UINT8"),
       "The data has numbers that are not UINT8;", "pixels are whole numbers from 0 to 255."),
    at("serve/open_inference.py:_unstacked", lambda: _unstacked(np.zeros((1, 3, 2, 2), np.uint8), of_16_bits()),
       "This model's pixels have values up to 65535, not 255;", "send images, normalised, in FP32."),
    at("serve/tensors.py:_numbers#1", lambda: infer(["1"] * 12),
       "The data has values that are not numbers, or uneven lists;", "send all numbers in one list."),
    at("serve/tensors.py:_numbers#2", lambda: infer([0.0]), "The data has 1 number;", "the shape [1, 3, 2, 2] needs 12."),
    at("serve/tensors.py:_numbers#3", lambda: infer([[[[0.0] * 3] * 2] * 2]),
       "The lists in the data have the shape [1, 2, 2, 3];", "send [1, 3, 2, 2] or one flat list."),
    at("serve/tensors.py:_from_binary", lambda: infer(parameters={"binary_data_size": 5}, binary=bytes(5)),
       "The binary data has 5 bytes;", "the shape [1, 3, 2, 2] in FP32 needs 48."),
    # Starting, models and workers
    at("serve/server.py:_bind#2", busy_port, "Cannot open 127.0.0.1, port", "Address already in use. Choose another with --port."),
    at("serve/server.py:_bind#2", lambda: _bind("192.0.2.1", 0),  # an address for documentation: no machine has it
       "Cannot open 192.0.2.1, port 0: Cannot assign requested address.", "Check --host."),
    at("serve/service.py:Service.worker", lambda: service().worker("other"), "There is no model 'other'.", "Use one of: tiny."),
    at("serve/service.py:Service.compute", lambda: ask("POST", "/v1/embeddings", {"input": []}),
       "The request has no image;", "send at least one."),
    at("serve/service.py:models_of#1", lambda: models_of(["my pets=model"], None),
       "'my pets' cannot be the name of a model in URLs:", "use letters, digits and - _ . +, as in model=model."),
    at("serve/service.py:models_of#2", lambda: models_of(["a=model", "a=zero-head"], None),
       "Two models have the name 'a';", "give one of them another name, as in other=zero-head."),
    at("serve/settings.py:ServeSettings.__post_init__#1", lambda: ServeSettings(max_batch=0),
       "--max-batch is 0;", "it must be above 0 and finite."),
    at("serve/settings.py:ServeSettings.__post_init__#2", lambda: ServeSettings(max_upload=5, max_bytes=10),
       "--max-upload is 5;", "it must be at least --max-bytes, which is 10."),
    at("serve/settings.py:ServeSettings.__post_init__#3", lambda: ServeSettings(decode_in="thread"),  # type: ignore[arg-type]
       "--decode-in is 'thread';", "it must be auto, threads or processes."),
    at("serve/settings.py:ServeSettings.__post_init__#4", lambda: ServeSettings(decode_in="processes"),
       "--decode-in is 'processes', which this system (Windows) cannot do;", "it must be auto or threads.", patch=no_readv),
    at("serve/settings.py:ServeSettings.__post_init__#5", lambda: ServeSettings(decoders=0),
       "--decoders is 0;", "it must be at least 1."),
    at("serve/worker.py:ModelWorker.check_head", lambda: service("zero-head").workers["tiny"].check_head(),
       "The head is all zeros: zero-head is only a backbone", "Fine-tune it on your classes"),
    at("serve/worker.py:ModelWorker._as_answer#1", lambda: answer_to(vitrail.VitrailError("A has no head. Fine-tune it.")),
       "A has no head.", "Fine-tune it."),
    at("serve/worker.py:ModelWorker._as_answer#2", lambda: answer_to(RuntimeError("cuBLAS failed")),
       "The image could not be computed;", "the server's log says more."),
)
# fmt: on
