"""JSON of many numbers is parsed in a process of its own, with the same answers, and no other client waits for it."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from tests.serve.conftest import error_text, running, until
from vitrail.checkpoints import Bundle
from vitrail.serve.errors import ServiceError
from vitrail.serve.json_process import MANY_BYTES, MANY_VALUES, JsonProcess
from vitrail.serve.protocol import GuardedProtocol
from vitrail.serve.tensors import InferRequest, answer, read_images

SHAPE = [3, 32, 32]


def body(data: Any, shape: tuple[int, ...] = (16, 3, 32, 32), **changes: Any) -> bytes:
    given = {"name": "images", "shape": list(shape), "datatype": "FP32", "data": data, **changes}
    return json.dumps({"id": "7", "inputs": [given], "parameters": {"binary_data_output": True}}).encode()


def parsed(process: JsonProcess, given: bytes) -> Any:
    """Parse in the other process, however small the JSON is."""
    return asyncio.run(process.run(read_images, given, len(given), SHAPE, 64, length=len(given), values=MANY_VALUES))


@pytest.fixture(scope="module")
def process() -> Any:
    one = JsonProcess(1 << 20)
    yield one
    one.close()


@pytest.mark.parametrize(
    "given",
    [
        body([0.25] * (16 * 3072)),
        body([[[[1] * 32] * 32] * 3] * 16),
        body([[0.5] * 3072, [0.5] * 3071]),
        body(["a"] * (16 * 3072)),
        body([1e300] * (16 * 3072)),
        body([0.5] * (16 * 3072), shape=(17, 3, 32, 32)),
        body(["/w=="] * 70, shape=(70,), name="encoded_images", datatype="BYTES"),
        body([1] * 20_000, shape=(20_000,), name="encoded_images", datatype="BYTES"),
        body([0.5] * (16 * 3072))[:-2],
        b"[" * 200_000,
    ],
)
def test_the_other_process_reads_what_this_one_does(process: JsonProcess, given: bytes) -> None:
    def result(read: Any) -> Any:
        try:
            request, images = read()
        except ServiceError as error:
            return error.status, error.message
        return request, images if isinstance(images, list) else (images.shape, images.dtype, images.tolist())

    assert result(lambda: parsed(process, given)) == result(lambda: read_images(given, len(given), SHAPE, 64))


def test_a_process_that_was_ended_is_started_again(process: JsonProcess) -> None:
    given = body([0.25] * (16 * 3072))
    parsed(process, given)
    assert process._process is not None
    process._process.terminate()  # as a service manager does with all processes; what was accepted is still read
    parsed(process, given)
    assert process._process.poll() is None
    process._process.kill()
    process._process.wait()
    request, images = parsed(process, given)
    assert request.id == "7" and len(images) == 16


def test_a_process_that_ends_while_it_reads_is_an_answer(process: JsonProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    process._stop()
    command = [sys.executable, "-c", "import sys; sys.stdin.buffer.read(10)"]
    monkeypatch.setattr(
        "vitrail.serve.json_process.start", lambda _: subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    )
    with pytest.raises(ServiceError, match="has ended") as caught:
        parsed(process, b"{}")
    assert caught.value.status == 503 and caught.value.headers["Retry-After"]


def test_more_than_four_full_requests_do_not_wait(process: JsonProcess) -> None:
    process._waiting.take(4 << 20)
    with pytest.raises(ServiceError) as caught:
        parsed(process, b"{}")
    process._waiting.release(4 << 20)
    assert caught.value.status == 429


def test_an_answer_that_cannot_be_read_is_not_mixed_with_the_next(process: JsonProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    given = body([0.25] * (16 * 3072))
    expected = parsed(process, given)[1]
    monkeypatch.setattr("pickle.load", lambda stream: {}[stream.read(10)])  # any error, after a part of the answer
    with pytest.raises(ServiceError, match="has ended"):
        parsed(process, given)
    monkeypatch.undo()
    assert (parsed(process, given)[1] == expected).all()
    assert until(lambda: process._waiting.held == 0)


def test_a_process_that_does_not_answer_has_a_deadline(bundle: Bundle) -> None:
    given, path = body([0.25] * (16 * 3072)), "/v2/models/tiny/infer"
    with running(lambda: bundle, deadline=1.0) as client, ThreadPoolExecutor(2) as thread:
        assert until(lambda: client.call("POST", path, given)[0] == 200, 20)  # on a busy machine the process starts slowly
        process = client.service.json._process
        assert process is not None
        os.kill(process.pid, signal.SIGSTOP)
        for status, found, headers in [one.result(8) for one in [thread.submit(client.call, "POST", path, given) for _ in "12"]]:
            assert status == 503 and ("before its deadline" in found["error"] or "has ended" in found["error"])
            assert headers["retry-after"]
        assert process.wait(5) is not None and until(lambda: client.service.json._waiting.held == 0)
        assert until(lambda: client.call("POST", path, given)[0] == 200)


def test_a_client_that_leaves_is_not_read(bundle: Bundle) -> None:
    given, path = body([0.25] * (16 * 3072)), "/v2/models/tiny/infer"
    with running(lambda: bundle) as client:
        assert client.call("POST", path, given)[0] == 200
        service, process = client.service.json, client.service.json._process
        assert process is not None
        os.kill(process.pid, signal.SIGSTOP)
        connections = [client.connect() for _ in range(3)]
        for number, connection in enumerate(connections, 1):
            connection.request("POST", path, given)
            assert until(lambda: service._waiting.held == number * len(given))  # noqa: B023
        for connection in connections:
            connection.close()
        assert until(lambda: client.call("GET", "/metrics")[1].count(b'status="499"} 3') == 1)
        assert service._waiting.held == 3 * len(given)  # the thread still has them
        os.kill(process.pid, signal.SIGCONT)
        assert until(lambda: service._waiting.held == 0)
        assert client.call("POST", path, given)[0] == 200


def test_a_process_that_does_not_answer_is_ended_even_if_its_client_has_left(bundle: Bundle) -> None:
    given, path = body([0.25] * (16 * 3072)), "/v2/models/tiny/infer"
    with running(lambda: bundle, deadline=1.0) as client:
        assert until(lambda: client.call("POST", path, given)[0] == 200, 20)
        service, process = client.service.json, client.service.json._process
        assert process is not None
        os.kill(process.pid, signal.SIGSTOP)
        connection = client.connect()
        connection.request("POST", path, given)
        assert until(lambda: service._waiting.held == len(given))
        connection.close()
        assert until(lambda: process.poll() is not None and service._waiting.held == 0)
        assert until(lambda: client.call("POST", path, given)[0] == 200, 20)


def test_others_are_answered_while_numbers_are_read(bundle: Bundle) -> None:
    """The process that reads is held by a signal; meanwhile a second client is answered."""
    given = body([0.25] * (16 * 3072))
    assert given.count(b",") >= MANY_VALUES
    with running(lambda: bundle) as client, ThreadPoolExecutor(1) as thread:
        path = "/v2/models/tiny/infer"
        assert client.call("POST", path, given)[0] == 200
        process = client.service.json._process
        assert process is not None
        os.kill(process.pid, signal.SIGSTOP)
        waiting = thread.submit(client.call, "POST", path, given)
        assert until(lambda: client.service.json._waiting.held > 0)
        assert client.call("GET", "/v2/health/live")[0] == 200
        assert not waiting.done()
        os.kill(process.pid, signal.SIGCONT)
        assert waiting.result(10)[0] == 200
        small = body([0.25] * 3072, (1, 3, 32, 32), parameters={})
        assert client.call("POST", path, small)[0] == 200
    assert process.wait(5) is not None  # it has ended with the service


def test_a_body_does_not_wait_for_the_acknowledgement_of_its_headers(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    original = GuardedProtocol.connection_made

    def connection_made(self: GuardedProtocol, transport: Any) -> None:
        original(self, transport)
        found.append(transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

    monkeypatch.setattr(GuardedProtocol, "connection_made", connection_made)
    with running(lambda: bundle) as client:
        client.call("GET", "/v2/health/live")
    assert found and all(found)


def test_large_images_in_base64_are_read_in_the_other_process(bundle: Bundle, jpegs: list[bytes]) -> None:
    padded = jpegs[0] + bytes(MANY_BYTES)  # decoders ignore what follows the image
    text = base64.b64encode(padded).decode()
    with running(lambda: bundle) as client:
        expected = client.call("POST", "/v1/embeddings", {"input": base64.b64encode(jpegs[0]).decode()})[1]
        assert client.service.json._process is None
        status, found, _ = client.call("POST", "/v1/embeddings", {"input": [text, "data:image/jpeg;base64," + text]})
        assert status == 200 and client.service.json._process is not None
        assert [one["embedding"] for one in found["data"]] == [expected["data"][0]["embedding"]] * 2
        status, found, _ = client.call("POST", "/v1/embeddings", {"input": text[:-4] + "%%%%"})
        assert status == 400 and "not valid base64" in error_text(found)
        given = {"name": "encoded_images", "shape": [1], "datatype": "BYTES", "data": [text]}
        assert client.call("POST", "/v2/models/tiny/infer", {"inputs": [given]})[0] == 200


def test_the_other_process_does_not_import_torch() -> None:
    code = "import sys; from vitrail.serve import embeddings_body, json_process, tensors; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.slow
def test_others_are_answered_while_many_logits_are_written() -> None:
    rows = np.random.default_rng(0).standard_normal((64, 21_843)).astype(np.float32)
    request = InferRequest.model_validate({"id": "a", "inputs": [{"name": "images", "shape": [64], "datatype": "FP32"}]})
    waits: list[float] = []

    async def written() -> bytes:
        task = asyncio.ensure_future(answer("tiny", "1", request, rows))
        while not task.done():
            began = time.thread_time()  # on a busy machine the clock would count other programs, too
            await asyncio.sleep(0)
            waits.append(time.thread_time() - began)
        return bytes((await task).body)

    found = json.loads(asyncio.run(written()))
    assert list(found) == ["model_name", "model_version", "id", "outputs"] and len(waits) >= 64 and max(waits) < 0.3
    assert np.array_equal(np.float32(found["outputs"][0].pop("data")), rows.ravel())
    assert found["outputs"] == [{"name": "logits", "datatype": "FP32", "shape": [64, 21_843]}]
