"""Requests that are wrong on purpose: each is refused with a sentence, and the service stays as it was."""

from __future__ import annotations

import base64
import http.client
import io
import json
import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.serve.conftest import Client, error_text, running, until
from tests.serve.test_answers import data_uri, form
from vitrail.checkpoints import Bundle
from vitrail.errors import VitrailError
from vitrail.serve.form import files_of_form
from vitrail.serve.limits import PixelLimit
from vitrail.serve.service import models_of


def raw(client: Client, data: bytes, *, half_close: bool = False, seconds: float = 10) -> bytes:
    """Send bytes and return all that comes back."""
    with socket.create_connection(("127.0.0.1", client.port), timeout=seconds) as connection:
        connection.sendall(data)
        if half_close:
            connection.shutdown(socket.SHUT_WR)
        answer = b""
        while part := connection.recv(65536):
            answer += part
    return answer


@pytest.fixture(autouse=True)
def stays_ready(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "client" in request.fixturenames:
        client: Client = request.getfixturevalue("client")
        assert client.call("GET", "/v2/health/ready")[0] == 200
        assert until(lambda: client.service.workers["tiny"]._in_flight == 0 and client.service.bytes.held == 0)


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
        b"\0" * 100_000,
        b"GET / HTTP/1.1\r\nHost: x\r\n" + b"X: y\r\n" * 200_000,
        b"POST /v1/predict HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef",
        b"POST /v1/predict HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"POST /v1/predict HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nabc\r\n",
        b"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabcdefgh",
        b"POST /v1/predict HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 100_000,
    ],
)
def test_what_is_not_http_gets_a_json_error(client: Client, data: bytes) -> None:
    head, _, body = raw(client, data).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400") and list(json.loads(body)) == ["error"], head


@pytest.mark.parametrize(("size", "count"), [(10, 1000), (300, 5000)])
def test_a_body_may_come_in_many_chunks(client: Client, size: int, count: int) -> None:
    connection = client.connect()
    connection.request("POST", "/v1/predict", iter([b"x" * size] * count), {"Transfer-Encoding": "chunked"}, encode_chunked=True)
    assert connection.getresponse().status == 415
    connection.close()


@pytest.mark.parametrize("host", ["[", "a b", "x:99999999", "\x7f"])
@pytest.mark.parametrize("path", ["/nothing", "/v1/models/", "/%ff%00", "//v1//models", "/v2/models/..%2f..%2fetc"])
def test_odd_hosts_and_paths(client: Client, host: str, path: str) -> None:
    data = f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode("latin-1")
    head, _, body = raw(client, data).partition(b"\r\n\r\n")
    assert head.startswith((b"HTTP/1.1 404", b"HTTP/1.1 400")) and list(json.loads(body)) == ["error"]


def test_pipelined_requests_are_answered_in_order(client: Client, jpegs: list[bytes]) -> None:
    one = b"POST /v1/predict HTTP/1.1\r\nHost: x\r\nX-Request-Id: %d\r\nContent-Length: %d\r\n\r\n%s"
    sent = b"".join(one % (number, len(data), data) for number, data in enumerate(jpegs[:3]))
    last = b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    answer = raw(client, sent + last)
    assert answer.count(b"HTTP/1.1 200") == 4
    assert [answer.index(b"x-request-id: %d" % n) for n in range(3)] == sorted(
        answer.index(b"x-request-id: %d" % n) for n in range(3)
    )


def test_connections_are_kept(client: Client, jpegs: list[bytes]) -> None:
    connection = client.connect()
    for method, path, body in (
        ("GET", "/v1/models", None),
        ("POST", "/v1/predict", b"no image"),
        ("POST", "/nothing", jpegs[0]),
    ) * 2:
        connection.request(method, path, body)
        answer = connection.getresponse()
        assert answer.read() and answer.getheader("connection") != "close"
        assert connection.sock is not None
    connection.close()


def test_a_client_that_sends_too_much_can_read_why(client: Client) -> None:
    with socket.create_connection(("127.0.0.1", client.port), timeout=10) as connection:
        connection.sendall(b"POST /v1/predict HTTP/1.1\r\nHost: x\r\nContent-Length: 40000000\r\n\r\n")
        for _ in range(100):  # 10 MB, without looking for an answer
            connection.sendall(b"x" * 100_000)
        answer = b""
        while part := connection.recv(65536):
            answer += part
    assert answer.startswith(b"HTTP/1.1 413") and b"larger than" in answer


def test_a_client_that_asks_first_is_refused_before_it_sends(client: Client) -> None:
    sent = b"POST /v1/predict HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 40000000\r\n\r\n"
    answer = raw(client, sent, half_close=True)
    assert answer.startswith(b"HTTP/1.1 413") and b"100 Continue" not in answer


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v2/models/tiny/infer"])
def test_limits_hold_for_json_too(bundle: Bundle, path: str) -> None:
    with running(lambda: bundle, max_bytes=1000, upload_seconds=0.3) as client:
        connection = client.connect()
        connection.request("POST", path, iter([b"[" * 600] * 2), {"Transfer-Encoding": "chunked"}, encode_chunked=True)
        assert connection.getresponse().status == 413
        answer = raw(client, b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n[" % path.encode())
        assert answer.startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[" * 1_000_000,
        b'{"inputs": ' * 100_000,
        b'{"inputs":[{"name":"images","shape":[1,3,32,32],"datatype":"FP32","data":' + b"[" * 5000 + b"]" * 5000 + b"}]}",
        b'{"id":"\\ud800","inputs":[{"name":"\\udfff","shape":[1],"datatype":"BYTES","data":[""]}]}',
        b'{"id":"\xff\xfe","inputs":[]}',
        b'{"inputs":[{"name":"images","shape":[' + b"9" * 5000 + b'],"datatype":"FP32","data":[]}]}',
        b'{"inputs":[{"name":"images","shape":[1,3,32,32],"datatype":"FP32","data":[' + b"9" * 400 + b"]}]}",
        b'{"inputs":[{"name":"images","shape":[1,3,32,32],"datatype":"FP32","data":[[1,2],[3]]}]}',
        b'{"inputs":[{"name":"images","shape":[1,3,32,32],"datatype":"FP32","data":[{}]}]}',
        b'{"inputs":[{"name":"encoded_images","shape":[1],"datatype":"BYTES","data":["eA=="]}],"outputs":[{"name":"x"}]}',
        b"null",
        b"NaN",
    ],
)
def test_hostile_json(client: Client, body: bytes) -> None:
    for path in ("/v2/models/tiny/infer", "/v1/embeddings"):
        status, answer, _ = client.call("POST", path, body, content_type="application/json")
        assert status == (413 if "too many values" in error_text(answer) and len(body) > 100_000 else 400)
        assert len(error_text(answer)) < 500, answer


def test_an_output_that_is_not_finite_fails_alone(client: Client) -> None:
    values = np.zeros((2, 3, 32, 32), np.float32)
    values[1] = 3e38
    given = {"name": "images", "shape": [2, 3, 32, 32], "datatype": "FP32", "data": values.ravel().tolist()}
    status, answer, _ = client.call("POST", "/v2/models/tiny/infer", {"inputs": [given]})
    assert status == 422 and answer["error"].startswith("image 1:")


def test_binary_tensors(client: Client, bundle: Bundle, jpegs: list[bytes]) -> None:
    images = torch.stack([bundle.stored_preprocess()(one) for one in jpegs[:2]])
    with torch.no_grad():
        expected = bundle.model(images).numpy()
    files = b"".join(struct.pack("<I", len(one)) + one for one in jpegs[:2])
    cases = [
        ({"name": "images", "shape": [2, 3, 32, 32], "datatype": "FP32"}, images.numpy().tobytes()),
        ({"name": "encoded_images", "shape": [2], "datatype": "BYTES"}, files),
    ]
    for given, data in cases:
        given["parameters"] = {"binary_data_size": len(data)}
        for outputs in ([], [{"name": "logits", "parameters": {"binary_data": True}}]):
            head = json.dumps({"inputs": [given], "outputs": outputs}).encode()
            length = {"inference_header_content_length": str(len(head))}
            status, answer, headers = client.call("POST", "/v2/models/tiny/infer", head + data, **length)
            assert status == 200
            if outputs:
                size = int(headers["inference-header-content-length"])
                found = np.frombuffer(answer[size:], "<f4")
                assert json.loads(answer[:size])["outputs"][0]["parameters"] == {"binary_data_size": 32}
            else:
                found = np.array(answer["outputs"][0]["data"])
            assert np.abs(found.reshape(2, 4) - expected).max() < 1e-4
        for wrong in ("-1", "99999999", "x", str(len(head) - 1)):
            status, answer, _ = client.call("POST", "/v2/models/tiny/infer", head + data, inference_header_content_length=wrong)
            assert status == 400 and list(answer) == ["error"]
        status, answer, _ = client.call("POST", "/v2/models/tiny/infer", head + data[:-1], **length)
        assert status == 400 and "the JSON part is followed by" in answer["error"]


def test_millions_of_empty_images_are_not_even_split(client: Client) -> None:
    """32 MB of them took five seconds of the event loop."""
    data = bytes(8_000_000)
    given = {"name": "encoded_images", "shape": [1], "datatype": "BYTES", "parameters": {"binary_data_size": len(data)}}
    head = json.dumps({"inputs": [given]}).encode()
    began = time.process_time()
    status, answer, _ = client.call("POST", "/v2/models/tiny/infer", head + data, inference_header_content_length=str(len(head)))
    assert status == 413 and "too many images" in answer["error"] and time.process_time() - began < 0.25


def encoded(image: Image.Image, format: str, **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, format, **options)
    return stream.getvalue()


def picture(mode: str = "RGB", size: tuple[int, int] = (50, 40)) -> Image.Image:
    values = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(values).resize(size).convert(mode)


def images() -> dict[str, bytes]:
    exif = Image.Exif()
    exif[0x0112] = 6
    deep = Image.fromarray(np.random.default_rng(0).integers(0, 65536, (40, 50), dtype=np.uint16))
    return {
        "rotated": encoded(picture(), "JPEG", exif=exif),
        "CMYK": encoded(picture("CMYK"), "JPEG"),
        "16 bits": encoded(deep, "PNG"),
        "palette": encoded(picture("P"), "GIF"),
        "alpha": encoded(picture("RGBA"), "WEBP"),
        "grey": encoded(picture("L"), "PNG"),
        "bilevel": encoded(picture("1"), "TIFF"),
        "1 pixel": encoded(picture(size=(1, 1)), "BMP"),
        "wide": encoded(picture(size=(2000, 1)), "PNG"),
        "frames": encoded(picture(), "GIF", save_all=True, append_images=[picture("L")] * 3),
    }


@pytest.mark.parametrize("name", images())
def test_every_kind_of_image_is_predicted_as_the_library_does(client: Client, bundle: Bundle, name: str) -> None:
    data = images()[name]
    status, answer, _ = client.call("POST", "/v1/predict", data)
    (expected,) = bundle.predict([data])
    assert status == 200
    assert [one["probability"] for one in answer["results"][0]["predictions"]] == pytest.approx(
        [one.score for one in expected], abs=1e-5
    )


def test_forms() -> None:
    body, kind = form([b"a\r\n--xy", b"", b"\r\n\r\n"])
    assert files_of_form(body, kind, 3) == [b"a\r\n--xy", b"", b"\r\n\r\n"]
    assert files_of_form(
        b"preamble\r\n" + body.replace(b"--xyz\r\n", b"--xyz \t\r\n") + b"epilogue", kind.upper().replace("XYZ", "xyz"), 3
    )
    assert files_of_form(body, 'multipart/form-data; charset=x; boundary="xyz"', 3)
    field = b'--xyz\r\nContent-Disposition: form-data; name="top"\r\n\r\n5\r\n'
    assert len(files_of_form(field + body, kind, 3)) == 3


def test_mistakes_with_curl_are_named(client: Client, bundle: Bundle, jpegs: list[bytes]) -> None:
    changed = jpegs[0].translate(None, b"\0\r\n")  # what `curl -d @cat.jpg` sends
    for body in (changed, b"cat.jpg"):
        status, answer, _ = client.call("POST", "/v1/predict", body, content_type="application/x-www-form-urlencoded")
        assert status == 415 and "use curl --data-binary @FILE" in answer["error"]
        status, answer, _ = client.call("POST", "/explorer/analyse", body, content_type="application/x-www-form-urlencoded")
        assert status == 415 and "use curl --data-binary @FILE" in answer["error"]
    for name in ("grey.ppm", "P6 without line ends"):
        data = encoded(picture(), "PPM") if name == "grey.ppm" else b"P6 1 1 255 " + b"\xff" * 3
        status, answer, _ = client.call("POST", "/v1/predict", data, content_type="application/x-www-form-urlencoded")
        assert status == 200, answer
    field = b'--xyz\r\nContent-Disposition: form-data; name="image"\r\n\r\ncat.jpg\r\n--xyz--\r\n'
    status, answer, _ = client.call("POST", "/v1/predict", field, content_type="multipart/form-data; boundary=xyz")
    assert status == 400 and "curl -F image=@cat.jpg" in answer["error"]


def test_wrong_forms(client: Client, jpegs: list[bytes]) -> None:
    body, kind = form([jpegs[0]])
    many = form([b"x"] * 5000)[0]
    cases = [
        (body, "multipart/form-data", 400),
        (body, "multipart/form-data; boundary=other", 400),
        (body[:-6], kind, 400),
        (b"--xyz\r\n\r\nx\r\n--xyz--\r\n", kind, 400),
        (b"--xyz\r\n" + b"A: " + b"x" * 100_000 + b"\r\n\r\nx\r\n--xyz--\r\n", kind, 400),
        (b'--xyz\r\nContent-Disposition: form-data; name="a"\r\n\r\nx\r\n--xyz--\r\n', kind, 400),
        (b"--xyz--\r\n", kind, 400),
        (many, kind, 413),
        (b"\r\n--xyz" * 1_000_000, kind, 413),
    ]
    for data, content_type, expected in cases:
        status, answer, _ = client.call("POST", "/v1/predict", data, content_type=content_type)
        assert status == expected and list(answer) == ["error"], (data[:60], answer)


def test_a_slow_reader_is_cut_off(bundle: Bundle) -> None:
    with running(lambda: bundle, upload_seconds=0.3) as client:
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect(("127.0.0.1", client.port))
            request = b"GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n"
            connection.sendall(request * 10_000)

            def cut_off() -> bool:
                try:
                    connection.sendall(request)
                except OSError:
                    return True
                return False

            assert until(cut_off)
        assert client.call("GET", "/v2/health/ready")[0] == 200


def test_too_many_connections_and_bytes(bundle: Bundle, jpegs: list[bytes]) -> None:
    with running(lambda: bundle, max_connections=5, max_bytes=100_000, max_upload=100_000) as client:
        kept = [socket.create_connection(("127.0.0.1", client.port)) for _ in range(4)]
        kept[0].sendall(b"POST /v1/predict HTTP/1.1\r\nHost: x\r\nContent-Length: 90000\r\n\r\n" + b"x" * 80_000)
        assert until(lambda: client.service.bytes.held == 80_000)
        status, _, headers = client.call("POST", "/v1/predict", b"x" * 30_000)
        assert status == 429 and "retry-after" in headers
        kept.append(socket.create_connection(("127.0.0.1", client.port)))
        for size in (0, 100, 200_000) * 5:  # also while it still sends, a client can read the answer
            status, answer, headers = client.call("POST", "/v1/predict", b"x" * size)
            assert status == 503 and "connections" in answer["error"] and "retry-after" in headers
        for one in kept:
            one.close()
        assert until(lambda: client.service.bytes.held == 0)
        assert client.call("POST", "/v1/predict", jpegs[0])[0] == 200


def test_large_images_are_decoded_one_at_a_time() -> None:
    limit, most, lock = PixelLimit(100), 0, threading.Lock()

    def decode(pixels: int) -> None:
        nonlocal most
        with limit.hold(pixels):
            with lock:
                most = max(most, limit.held)
            time.sleep(0.005)

    threads = [threading.Thread(target=decode, args=(pixels,)) for pixels in (10, 90, 60, 60, 5, 100, 30)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(5)
    assert limit.held == 0 and 90 <= most <= 100


def test_an_image_that_is_not_decoded_in_time_is_given_up(
    bundle: Bundle, jpegs: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = threading.Event()
    monkeypatch.setattr("vitrail.serve.decoders.decode", lambda *arguments: waiting.wait(5))
    with running(lambda: bundle, deadline=0.2, decode_in="threads") as client:
        began = time.monotonic()
        status, answer, _ = client.call("POST", "/v1/predict", jpegs[0])
        assert status == 503 and "deadline" in answer["error"] and time.monotonic() - began < 2
        assert client.service.workers["tiny"]._in_flight == 1  # a thread still has it
        waiting.set()
        assert until(lambda: client.service.workers["tiny"]._in_flight == 0)


def test_names_of_models(tmp_path: Any) -> None:
    folder = tmp_path / "lr=0.1"
    folder.mkdir()
    assert list(
        models_of([str(tmp_path), "ViT-B/16", "hf:google/vit-base-patch16-224", "a=ViT-S/16", "weights/x.1.npz"], None)
    ) == [
        tmp_path.name,
        "ViT-B-16",
        "vit-base-patch16-224",
        "a",
        "weights-x.1",
    ]
    with pytest.raises(VitrailError, match=r"'lr=0.1' cannot be the name.*as in model="):
        models_of([str(folder)], None)
    for wrong in ("=x", "a b=x", "..=x", "é/=x"):
        with pytest.raises(VitrailError):
            models_of([wrong, wrong], None)
    with pytest.raises(VitrailError, match="Two models have the name 'a'"):
        models_of(["a=x", "a=y"], None)


def test_unknown_dimensions_and_options_without_effect_are_refused(client: Client, jpegs: list[bytes]) -> None:
    body = {"input": data_uri(jpegs[0]), "dimensions": 32}
    assert client.call("POST", "/v1/embeddings", body)[0] == 200
    assert client.call("POST", "/v1/embeddings", {**body, "dimensions": 7})[0] == 400
    assert client.call("POST", "/v1/attention?layer=1", jpegs[0])[0] == 400


def test_no_connection_is_lost_to_a_body_that_is_not_read(bundle: Bundle) -> None:
    with running(lambda: bundle, token="secret") as client:
        connection: http.client.HTTPConnection = client.connect()
        for _ in range(3):
            connection.request("POST", "/v1/predict", base64.b64encode(b"x" * 300_000))
            answer = connection.getresponse()
            assert answer.status == 401 and answer.read()


def test_a_file_of_two_formats_is_measured_as_it_is_decoded(client: Client) -> None:
    """As a TIFF it has one pixel, as an IM file 169 million, which is what would be decoded."""
    header = b"Image type: RGB\r\nImage size (x*y): 13000*13000\r\nFile size (no of images): 1\r\n"
    status, found, _ = client.call("POST", "/v1/predict", header.ljust(511, b"\0") + b"\x1a" + b"\0" * 600)
    assert status == 415 and "not an image of a known format" in found["error"]


def test_what_is_often_sent_instead_of_an_image_is_named(client: Client, jpegs: list[bytes]) -> None:
    for data, text in (
        (b"\0\0\0\x18ftypheic" + bytes(100), "a HEIC photo, which is not read; convert it to JPEG or PNG"),
        (json.dumps({"image": base64.b64encode(jpegs[0]).decode()}).encode(), "JSON, not an image"),
        (b"{nothing", "not an image of a known format"),
    ):
        status, answer, _ = client.call("POST", "/v1/predict", data)
        assert status == 415 and text in answer["error"], answer


def test_a_wrong_method_says_which_is_right(client: Client) -> None:
    connection = client.connect()
    connection.request("GET", "/v1/predict")
    response = connection.getresponse()
    assert response.status == 405 and response.headers["Allow"] == "POST"
    connection.close()
