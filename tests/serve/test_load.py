"""The service under load, with clients that leave or are slow, with hostile uploads, and while it loads or ends."""

from __future__ import annotations

import base64
import json
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.serve.conftest import Client, error_text, process_running, running, until
from vitrail.checkpoints import Bundle
from vitrail.errors import VitrailError
from vitrail.serve import engine as engine_module
from vitrail.serve import worker as worker_module
from vitrail.serve.process import Refused


def form_of(images: list[bytes]) -> tuple[bytes, str]:
    """Return a form of files and its type."""
    parts = b"".join(b'--x\r\nContent-Disposition: form-data; name="f"; filename="f"\r\n\r\n%s\r\n' % one for one in images)
    return parts + b"--x--\r\n", "multipart/form-data; boundary=x"


class Gate(threading.Event):
    """Computation waits for this event; `entered` tells that it does."""

    def __init__(self) -> None:
        super().__init__()
        self.entered = threading.Event()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    event = Gate()
    original = engine_module._outputs

    def waiting(*arguments: Any) -> Any:
        event.entered.set()
        assert event.wait(10)
        return original(*arguments)

    monkeypatch.setattr(engine_module, "_outputs", waiting)
    return event


def batches(client: Client) -> dict[str, float]:
    lines = client.service.metrics.text().splitlines()
    return {line.split()[0]: float(line.split()[-1]) for line in lines if line.startswith("vitrail_batch_size")}


def test_images_of_several_requests_are_one_batch(bundle: Bundle, jpegs: list[bytes], gate: Gate) -> None:
    with running(lambda: bundle) as client, ThreadPoolExecutor(6) as pool:
        first = pool.submit(client.call, "POST", "/v1/predict", jpegs[0])
        worker = client.service.workers["tiny"]
        assert gate.entered.wait(5)
        others = [pool.submit(client.call, "POST", "/v1/predict", one) for one in jpegs[1:]]
        assert until(lambda: len(worker._jobs) == 5)
        gate.set()
        for call, data in zip([first, *others], jpegs, strict=True):
            status, answer, _ = call.result()
            assert status == 200
            assert answer["results"][0]["predictions"][0]["label"] == bundle.predict([data], top=1)[0][0].label
        found = batches(client)
        assert found['vitrail_batch_size_count{model="tiny"}'] == 2 and found['vitrail_batch_size_sum{model="tiny"}'] == 6
        assert worker._in_flight == 0


def test_a_full_queue_answers_at_once(bundle: Bundle, jpegs: list[bytes], gate: Gate) -> None:
    with running(lambda: bundle, queue=2) as client, ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(client.call, "POST", "/v1/predict", one) for one in jpegs[:2]]
        assert until(lambda: client.service.workers["tiny"]._in_flight == 2)
        status, answer, headers = client.call("POST", "/v1/predict", jpegs[2])
        assert status == 429 and int(headers["retry-after"]) >= 1 and "full" in answer["error"]
        assert not any(call.done() for call in calls)
        gate.set()
        assert [call.result()[0] for call in calls] == [200, 200]
        assert client.call("POST", "/v1/predict", jpegs[2])[0] == 200


def test_more_images_than_the_queue_has_places_for_are_too_many(bundle: Bundle, jpegs: list[bytes]) -> None:
    """429 would let the client try for ever."""
    with running(lambda: bundle, queue=2) as client:
        for count, expected in ((2, 200), (3, 413)):
            form, content_type = form_of(jpegs[:1] * count)
            answer = client.call("POST", "/v1/predict", form, content_type=content_type)
            assert answer[0] == expected, answer
        assert "more than 2" in answer[1]["error"] and client.service.workers["tiny"]._in_flight == 0


def test_images_that_would_miss_their_deadline_are_refused_at_once(bundle: Bundle, jpegs: list[bytes], gate: Gate) -> None:
    with running(lambda: bundle, deadline=4) as client, ThreadPoolExecutor(2) as pool:
        worker = client.service.workers["tiny"]
        worker._seconds_per_image = 2.0
        calls = [pool.submit(client.call, "POST", "/v1/predict", one) for one in jpegs[:2]]
        assert until(lambda: worker._in_flight == 2)
        status, _, headers = client.call("POST", "/v1/predict", jpegs[2])
        assert status == 429 and headers["retry-after"] == "4"
        gate.set()
        assert [call.result()[0] for call in calls] == [200, 200]


def test_images_that_would_not_be_decoded_in_time_are_refused_at_once(
    bundle: Bundle, jpegs: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise each image would be decoded when its deadline has nearly passed, and thrown away: few would be answered."""
    from vitrail.serve import decoders

    event, original = threading.Event(), decoders.decode
    monkeypatch.setattr(decoders, "decode", lambda *given: event.wait(10) and original(*given))
    with running(lambda: bundle, deadline=4, decoders=1) as client, ThreadPoolExecutor(2) as pool:
        worker = client.service.workers["tiny"]
        worker.decoding._seconds = 2.0
        calls = [pool.submit(client.call, "POST", "/v1/predict", one) for one in jpegs[:2]]
        assert until(lambda: worker.decoding.images == 2)
        status, _, headers = client.call("POST", "/v1/predict", jpegs[2])
        assert status == 429 and headers["retry-after"] == "4"
        event.set()
        assert [call.result()[0] for call in calls] == [200, 200]
        assert client.call("POST", "/v1/predict", b"GIF89a")[0] == 415 and worker.decoding.images == 0


def test_the_time_of_decoding_is_that_between_two_images(monkeypatch: pytest.MonkeyPatch) -> None:
    found, times = worker_module.DecodingTime(images=8), iter((12.0, 12.5, 13.0, 13.5, 30.0))
    monkeypatch.setattr(worker_module.time, "monotonic", lambda: next(times))
    for _ in range(4):  # eight came at 10 s; four decoders take 2 s for each
        found.ended(10.0, 4)
    assert found.images == 4 and found.wait == pytest.approx(4 * 0.5)
    found.ended(29.0, 4)  # alone
    assert found.wait == pytest.approx(3 * (0.8 * 0.5 + 0.2 * 0.25))


def test_a_client_that_leaves_frees_its_place(bundle: Bundle, jpegs: list[bytes], gate: Gate) -> None:
    with running(lambda: bundle, queue=2) as client:
        worker = client.service.workers["tiny"]
        blocking, leaving = client.connect(), client.connect()
        blocking.request("POST", "/v1/predict", jpegs[0])
        assert gate.entered.wait(5)
        leaving.request("POST", "/v1/predict", jpegs[1])
        assert until(lambda: len(worker._jobs) == 1)
        leaving.close()
        assert until(lambda: len(worker._jobs) == 0 and worker._in_flight == 1)
        gate.set()
        assert blocking.getresponse().status == 200
        assert until(lambda: worker._in_flight == 0)
        assert batches(client)['vitrail_batch_size_sum{model="tiny"}'] == 1


def test_an_image_that_waits_too_long_is_given_up(bundle: Bundle, jpegs: list[bytes], gate: Gate) -> None:
    with running(lambda: bundle, deadline=0.2) as client, ThreadPoolExecutor(2) as pool:
        worker = client.service.workers["tiny"]
        first = pool.submit(client.call, "POST", "/v1/predict", jpegs[0])
        assert gate.entered.wait(5)
        second = pool.submit(client.call, "POST", "/v1/predict", jpegs[1])
        assert until(lambda: len(worker._jobs) == 1)
        time.sleep(0.3)
        gate.set()
        assert first.result()[0] == 200
        status, answer, headers = second.result()
        assert status == 503 and "deadline" in answer["error"] and "retry-after" in headers


def test_a_protocol_without_an_answer_per_image_says_which_failed_and_when_to_try_again(
    bundle: Bundle, jpegs: list[bytes], gate: Gate
) -> None:
    texts = [base64.b64encode(one).decode() for one in jpegs[:2]]
    infer = {"inputs": [{"name": "encoded_images", "shape": [2], "datatype": "BYTES", "data": texts}]}
    with running(lambda: bundle, deadline=0.3) as client, ThreadPoolExecutor(3) as pool:
        blocking = pool.submit(client.call, "POST", "/v1/predict", jpegs[0])
        assert gate.entered.wait(5)
        calls = [("/v2/models/tiny/infer", infer), ("/v1/embeddings", {"input": texts})]
        late = [pool.submit(client.call, "POST", path, body) for path, body in calls]
        for call in late:
            status, answer, headers = call.result()
            assert status == 503 and error_text(answer).startswith("image 0: ") and headers["retry-after"] == "1"
        gate.set()
        assert blocking.result()[0] == 200


def test_images_given_up_before_they_are_decoded_are_counted(
    bundle: Bundle, jpegs: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vitrail.serve import decoders

    event, original = threading.Event(), decoders.decode
    monkeypatch.setattr(decoders, "decode", lambda *given: event.wait(10) and original(*given))

    def given_up(client: Client) -> str:
        lines = client.service.metrics.text().splitlines()
        return next((line for line in lines if line.startswith("vitrail_images_given_up_total{")), "none")

    with running(lambda: bundle, decoders=1, deadline=1.0) as client:
        worker = client.service.workers["tiny"]
        leaving = client.connect()
        leaving.request("POST", "/v1/predict", jpegs[0])
        assert until(lambda: worker._in_flight == 1)
        leaving.close()
        assert until(lambda: given_up(client).endswith(" 1")), given_up(client)
        assert client.call("POST", "/v1/predict", jpegs[1])[0] == 503  # at its deadline
        assert given_up(client).endswith(" 2")
        event.set()
        assert until(lambda: worker._in_flight == 0) and worker.decoding.images == 0
        assert client.call("POST", "/v1/predict", b"GIF89a")[0] == 415 and client.call("POST", "/v1/predict", jpegs[1])[0] == 200
        assert given_up(client).endswith(" 2")  # a bad image is not given up


def test_too_large(bundle: Bundle, jpegs: list[bytes]) -> None:
    with running(lambda: bundle, max_bytes=1000, max_images=2) as client:
        assert client.call("POST", "/v1/predict", b"x" * 1001)[0] == 413
        connection = client.connect()
        connection.request(
            "POST", "/v1/predict", iter([b"x" * 600] * 2), encode_chunked=True, headers={"Transfer-Encoding": "chunked"}
        )
        assert connection.getresponse().status == 413
        form, content_type = form_of([b"a"] * 3)
        answer = client.call("POST", "/v1/predict", form, content_type=content_type)
        assert answer[0] == 413 and "The form has 3 files; send at most 2" in answer[1]["error"]


def png(width: int, height: int) -> bytes:
    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    rows = zlib.compress(b"\0" * 4 * 64)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def test_hostile_images(client: Client) -> None:
    for data, status in ((png(60_000, 60_000), 422), (png(2**31 - 1, 2**31 - 1), 422), (png(64, 64), 422), (b"<svg/>", 415)):
        found, answer, _ = client.call("POST", "/v1/predict", data)
        assert found == status and list(answer) == ["error"], answer
    assert client.call("POST", "/v1/predict", png(1, 1))[0] == 200
    assert client.call("GET", "/v2/health/ready")[0] == 200


@pytest.mark.slow
def test_slow_clients_are_cut_off(bundle: Bundle, jpegs: list[bytes]) -> None:
    with running(lambda: bundle, upload_seconds=0.3) as client:
        for sent in (b"", b"GET /v1/models HTT", b"POST /v1/predict HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nabc"):
            with socket.create_connection(("127.0.0.1", client.port), timeout=5) as connection:
                connection.sendall(sent)
                answer = b""
                while data := connection.recv(4096):
                    answer += data
            assert answer.startswith(b"HTTP/1.1 408") and b'{"error"' in answer, sent
        connection = client.connect()  # a connection that is kept open has its time again for each request
        for _ in range(3):
            time.sleep(0.2)
            connection.request("POST", "/v1/predict", jpegs[0])
            answered = connection.getresponse()
            assert answered.status == 200 and answered.read()


def test_the_connection_of_a_refused_client_that_has_left_ends(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its body is not read any more, so that nothing but the refusal could notice it. Such connections piled up to the limit."""
    from vitrail.serve.guard import Guard
    from vitrail.serve.protocol import GuardedProtocol

    check, lost, ended = Guard._check, GuardedProtocol.connection_lost, list[GuardedProtocol]()

    def slowly(guard: Guard, scope: Any) -> None:
        time.sleep(0.2)  # the event loop learns nothing meanwhile
        check(guard, scope)

    def noted(protocol: GuardedProtocol, error: Exception | None) -> None:
        ended.append(protocol)
        lost(protocol, error)

    monkeypatch.setattr(Guard, "_check", slowly)
    monkeypatch.setattr(GuardedProtocol, "connection_lost", noted)
    with running(lambda: bundle, token="secret") as client:
        with socket.create_connection(("127.0.0.1", client.port)) as connection:
            head = b"POST /v1/predict HTTP/1.1\r\nHost: x\r\nContent-Length: 3000000\r\n\r\n"
            connection.sendall(head + 200_000 * b"x")  # more than is read ahead
        assert until(lambda: len(ended) == 1)


def test_a_refused_client_that_closes_leaves_no_error(bundle: Bundle, caplog: pytest.LogCaptureFixture) -> None:
    with running(lambda: bundle, token="secret") as client:
        with socket.create_connection(("127.0.0.1", client.port), timeout=10) as connection:
            connection.sendall(b"POST /v1/predict HTTP/1.1\r\nHost: x\r\nContent-Length: 3000000\r\n\r\n" + 1000 * b"x")
            assert connection.recv(1000).startswith(b"HTTP/1.1 401")
        assert client.call("GET", "/v2/health/ready")[0] == 200
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []


def test_a_token_is_needed_where_one_is_set(bundle: Bundle) -> None:
    with running(lambda: bundle, token="secret") as client:
        assert client.call("GET", "/v2/health/ready")[0] == 200
        status, _, headers = client.call("GET", "/v1/models")
        assert status == 401 and headers["www-authenticate"] == "Bearer"
        assert client.call("GET", "/v1/models", authorization="Bearer wrong")[0] == 401
        assert client.call("GET", "/v1/models", authorization="Bearer secret")[0] == 200


def test_while_loading(bundle: Bundle, jpegs: list[bytes]) -> None:
    loaded = threading.Event()

    def load() -> Bundle:
        assert loaded.wait(10)
        return bundle

    with running(load, wait=False) as client:
        assert client.call("GET", "/v2/health/live")[0] == 200
        for call in (("GET", "/v2/health/ready"), ("GET", "/v2/models/tiny"), ("POST", "/v1/predict", jpegs[0])):
            status, answer, headers = client.call(*call)
            assert status == 503 and "loading" in answer["error"] and "retry-after" in headers
        loaded.set()
        assert until(lambda: client.call("GET", "/v2/health/ready")[0] == 200)


def test_a_worker_that_hangs_is_not_ready(bundle: Bundle, jpegs: list[bytes], gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitrail.serve.service.PING_SECONDS", 0.2)
    with running(lambda: bundle) as client, ThreadPoolExecutor(1) as pool:
        call = pool.submit(client.call, "POST", "/v1/predict", jpegs[0])
        assert gate.entered.wait(5)
        assert client.call("GET", "/v2/health/ready")[0] == 503
        gate.set()
        assert call.result()[0] == 200 and client.call("GET", "/v2/health/ready")[0] == 200


def test_one_failed_computation_does_not_fail_the_others(
    bundle: Bundle, jpegs: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    original, calls = engine_module._outputs, []

    def failing(model: Any, work: Any, images: Any) -> Any:
        calls.append(len(images))
        if len(images) > 1:
            raise RuntimeError("out of memory")
        return original(model, work, images)

    monkeypatch.setattr(engine_module, "_outputs", failing)
    with running(lambda: bundle) as client:
        form, content_type = form_of(jpegs)
        status, answer, _ = client.call("POST", "/v1/predict", form, content_type=content_type)
        assert status == 200 and all("predictions" in one for one in answer["results"])


def test_what_a_failed_computation_has_made_is_freed_before_its_halves_are_computed(
    bundle: Bundle, jpegs: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    original, made, left = engine_module._outputs, list[weakref.ref[torch.Tensor]](), list[int]()

    def failing(model: Any, work: Any, images: Any) -> Any:
        left.append(sum(one() is not None for one in made))
        activations = images.clone()
        made.append(weakref.ref(activations))
        if len(images) > 1:
            raise torch.OutOfMemoryError("out of memory")
        return original(model, work, activations)

    monkeypatch.setattr(engine_module, "_outputs", failing)
    with running(lambda: bundle) as client:
        form, content_type = form_of(jpegs)
        status, answer, _ = client.call("POST", "/v1/predict", form, content_type=content_type)
        assert status == 200 and all("predictions" in one for one in answer["results"])
    assert len(left) > len(jpegs) and not any(left)


def test_too_little_memory_is_no_fault_of_the_image(bundle: Bundle, jpegs: list[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: Any, **__: Any) -> Any:
        raise MemoryError

    def refused(client: Client) -> None:
        status, answer, headers = client.call("POST", "/v1/predict", jpegs[0])
        assert status == 503 and "not enough memory" in answer["error"] and headers["retry-after"] == "1"

    with running(lambda: bundle) as client:
        for place in ("vitrail.data.decode._pillow_pixels", "vitrail.data.preprocess.resize"):
            with monkeypatch.context() as patch:
                patch.setattr(place, none)
                refused(client)
        monkeypatch.setattr(engine_module, "_outputs", lambda *_: torch.empty(1 << 50))
        refused(client)


def test_a_process_says_when_to_try_again() -> None:
    assert Refused(503, "No memory.").error().headers == {"Retry-After": "1"} and not Refused(422, "Not an image.").error().headers


def test_a_failed_load_is_an_error() -> None:
    from vitrail.serve.server import serve
    from vitrail.serve.service import Service
    from vitrail.serve.settings import ServeSettings

    def load() -> Bundle:
        raise VitrailError("There is no checkpoint.")

    with pytest.raises(VitrailError, match="no checkpoint"):
        serve(Service({"x": load}, ServeSettings()), host="127.0.0.1", port=0, token=None, cors=(), announce=lambda address: None)


@pytest.mark.slow
def test_sigterm_answers_what_was_accepted_and_ends_with_status_0(bundle: Bundle, jpegs: list[bytes]) -> None:
    script = (
        "import sys, time, vitrail.serve.engine as w\n"
        "original = w._outputs\n"
        "w._outputs = lambda *given: (time.sleep(1.0), original(*given))[1]\n"
        "from vitrail.cli import main\n"
        f"main(['serve', {bundle.report.source!r}, '--port', '0'])\n"
    )
    with process_running(script) as (process, client), ThreadPoolExecutor(3) as pool:
        assert until(lambda: client.call("GET", "/v2/health/ready")[0] == 200, 60)
        calls = [pool.submit(client.call, "POST", "/v1/predict", one) for one in jpegs[:3]]
        time.sleep(0.5)
        process.send_signal(signal.SIGTERM)
        assert [call.result()[0] for call in calls] == [200, 200, 200]
        assert process.wait(20) == 0


def test_a_request_that_the_service_does_not_wait_for_any_longer_is_answered(
    bundle: Bundle, jpegs: list[bytes], gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vitrail.serve.server._drain_seconds", lambda _: 1)
    with running(lambda: bundle, deadline=8.0) as client, ThreadPoolExecutor(1) as pool:
        call = pool.submit(client.call, "POST", "/v1/predict", jpegs[0])
        assert gate.entered.wait(10)
        client.service.workers["tiny"]._on_failure()  # asks the server to end
        try:
            status, answer, headers = call.result(9)
        finally:
            gate.set()
    assert status == 503 and "shutting down" in answer["error"] and headers["retry-after"]


@pytest.mark.slow
def test_nothing_but_json_is_logged_until_the_end(bundle: Bundle) -> None:
    command = [sys.executable, "-m", "vitrail", "serve", bundle.report.source, "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            while '"ready"' not in (line := process.stderr.readline()):
                assert line
            process.send_signal(signal.SIGTERM)
            rest = process.stderr.read().splitlines()
            assert process.wait(30) == 0 and all(line.startswith("{") for line in rest), rest
            assert [json.loads(line)["message"] for line in rest] == ["shutting down", "stopped"]
        finally:
            process.kill()


@pytest.mark.slow
def test_an_upload_that_is_slow_is_answered_at_the_end(bundle: Bundle, jpegs: list[bytes]) -> None:
    head = f"POST /v1/predict HTTP/1.1\r\nHost: x\r\nContent-Length: {len(jpegs[0])}\r\n\r\n".encode()
    with running(lambda: bundle, deadline=1.0) as client:
        with socket.create_connection(("127.0.0.1", client.port), timeout=15) as connection:
            connection.sendall(head + jpegs[0][:100])
            assert until(lambda: client.service.bytes.held == 100)
            client.service.workers["tiny"]._on_failure()  # asks the server to end
            time.sleep(7)
            connection.sendall(jpegs[0][100:])
            answer = b""
            while data := connection.recv(4096):
                answer += data
        assert answer.startswith(b"HTTP/1.1 200") and b'"predictions"' in answer, answer


def test_results_of_the_load_benchmark_as_a_table(tmp_path: Path) -> None:
    from benchmarks.serving import markdown
    from benchmarks.serving_load import quantile, write_rows

    rows = [("half load, even: p99", 408.4712, "ms"), ("overload: status 429", 1049, "answers")]
    write_rows(tmp_path / "a.csv", rows, {"cpu": "AMD EPYC", "server_cores": 1, "command": "python -m benchmarks.serving"})
    lines = markdown(tmp_path / "a.csv").splitlines()
    assert lines[0] == "`python -m benchmarks.serving`, cpu AMD EPYC, server cores 1:"
    assert lines[-2:] == ["| half load, even: p99 | 408.47 | ms |", "| overload: status 429 | 1049 | answers |"]
    assert quantile([3.0, 1.0, 2.0, 4.0], 0.5) == 3.0 and quantile(range(1, 101), 0.99) == 100
