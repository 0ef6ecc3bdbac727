"""Images decoded in processes: the same bits and messages as in threads, and nothing is lost when a process crashes or hangs."""

from __future__ import annotations

import asyncio
import functools
import io
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from tests.serve.conftest import running, until
from vitrail.checkpoints import Bundle
from vitrail.data import embedded
from vitrail.data.preprocess import PRESETS, Preprocess, preset
from vitrail.errors import VitrailError
from vitrail.serve.decoders import Decoders
from vitrail.serve.errors import ServiceError
from vitrail.serve.images import Decoded
from vitrail.serve.limits import PixelLimit
from vitrail.serve.model_input import ModelInput
from vitrail.serve.settings import ServeSettings

pytestmark = pytest.mark.slow
TIMM = preset("timm", size=32)


@functools.cache
def photo() -> bytes:
    return embedded.photo("cat")


class Running:
    """Decoders, and an event loop in a thread that they are used from."""

    def __init__(self, **settings: Any) -> None:
        self.settings = ServeSettings(**settings)
        self.pixels = PixelLimit(self.settings.max_pixels)
        self.decoders = Decoders(self.settings, self.pixels)
        self.decoders.prepare()
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function in the event loop."""

        async def here() -> Any:
            return function(*arguments)

        return asyncio.run_coroutine_threadsafe(here(), self.loop).result(30)

    def send(self, data: bytes, preprocess: Preprocess = TIMM, seconds: float = 60.0) -> Future[Tensor]:
        """Decode and normalise."""
        result: Future[Tensor] = Future()

        def done(found: Decoded | BaseException) -> None:
            if isinstance(found, Decoded):
                result.set_result(ModelInput(preprocess, torch.device("cpu"), 1)([found.pixels], 1)[0])
            else:
                result.set_exception(found)

        result.job = self.call(self.decoders.decode, data, preprocess, time.monotonic() + seconds, done)  # type: ignore[attr-defined]
        return result

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self.decoders.processes is not None
        process = self.decoders.processes._processes[0]._process
        assert process is not None
        return process

    def close(self) -> None:
        processes = self.decoders.processes._processes if self.decoders.processes is not None else []
        running = [one._process for one in processes if one._process is not None]
        self.call(self.decoders.close)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)
        self.loop.close()
        assert self.pixels.held == 0 and all(process.wait(10) is not None for process in running)


@pytest.fixture(scope="module")
def shared() -> Iterator[Running]:
    yield from _running(2)


@pytest.fixture
def single() -> Iterator[Running]:
    yield from _running(1)


def _running(count: int) -> Iterator[Running]:
    found = Running(decode_in="processes", decoders=count)
    yield found
    found.close()


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_the_pixels_are_those_of_the_preprocessing(name: str, shared: Running) -> None:
    preprocess = preset(name, size=32)
    found = shared.send(photo(), preprocess).result(60)
    assert torch.equal(found, preprocess(photo())) and found.dtype == torch.float32


@pytest.mark.parametrize("name", ["truncated.jpg", "text.jpg", "empty"])
def test_a_bad_image_gets_the_message_of_threads_and_the_next_one_is_decoded(name: str, shared: Running) -> None:
    data = b"" if name == "empty" else photo()[:900] if name == "truncated.jpg" else b"a text"
    threads = Running(decode_in="threads")
    errors = []
    for running_decoders in (shared, threads):
        with pytest.raises(ServiceError) as caught:
            running_decoders.send(data).result(60)
        errors.append((caught.value.status, caught.value.message))
    threads.close()
    assert errors[0] == errors[1]
    assert torch.equal(shared.send(photo()).result(60), TIMM(photo()))


@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
@pytest.mark.parametrize("number, status", [(signal.SIGKILL, 503), (signal.SIGSEGV, 422)])
def test_a_process_that_ends_fails_one_image(number: signal.Signals, status: int, single: Running) -> None:
    single.send(photo()).result(60)
    process = single.process
    process.send_signal(signal.SIGSTOP)
    waiting = single.send(photo())
    time.sleep(0.1)
    process.send_signal(number)
    process.send_signal(signal.SIGCONT)
    with pytest.raises(ServiceError) as caught:
        waiting.result(30)
    assert caught.value.status == status
    assert torch.equal(single.send(photo()).result(60), TIMM(photo()))
    assert single.process.pid != process.pid


@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
def test_a_process_that_ended_between_images_is_started_again(single: Running) -> None:
    single.send(photo()).result(60)
    single.process.kill()
    single.process.wait()
    assert torch.equal(single.send(photo()).result(60), TIMM(photo()))


@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
def test_a_process_that_hangs_is_ended_at_the_deadline(single: Running) -> None:
    single.send(photo()).result(60)
    process = single.process
    process.send_signal(signal.SIGSTOP)
    with pytest.raises(ServiceError, match="not decoded before its deadline") as caught:
        single.send(photo(), seconds=0.3).result(30)
    assert caught.value.status == 503 and process.wait(10) == -signal.SIGKILL
    assert torch.equal(single.send(photo()).result(60), TIMM(photo()))


def test_processes_wait_for_the_pixels_of_the_service(shared: Running) -> None:
    limit = shared.pixels
    with limit.hold(limit.most):
        waiting = shared.send(photo())
        time.sleep(0.3)
        assert not waiting.done()
    assert torch.equal(waiting.result(30), TIMM(photo()))
    assert limit.held == 0
    with pytest.raises(ServiceError):
        shared.send(photo()[:900]).result(60)
    assert limit.held == 0


def test_images_sent_at_the_same_time_are_not_mixed(shared: Running) -> None:
    sizes = [preset("timm", size=16 + 4 * number) for number in range(8)]
    found = [shared.send(photo(), one) for one in sizes for _ in range(4)]
    expected = [one(photo()) for one in sizes for _ in range(4)]
    assert all(torch.equal(one.result(60), other) for one, other in zip(found, expected, strict=True))


def test_a_service_answers_the_same(bundle: Bundle) -> None:
    answers = []
    for how in ("threads", "processes"):
        with running(lambda: bundle, decode_in=how, decoders=2) as client:
            answers.append(client.call("POST", "/v1/predict", photo()))
            decoders = client.service.decoders
        assert (decoders.processes is not None) == (how == "processes")
        assert decoders.processes is None or all(process._process is None for process in decoders.processes._processes)
    assert answers[0][:2] == answers[1][:2] and answers[0][0] == 200


def test_processes_are_used_where_many_images_are_decoded() -> None:
    found = [Decoders(ServeSettings(decoders=count), PixelLimit(1)) for count in (4, 5)]
    assert [one.processes is not None for one in found] == [False, True]
    with pytest.raises(VitrailError, match="--decode-in is 'process'; it must be auto, threads or processes"):
        ServeSettings(decode_in="process")  # type: ignore[arg-type]


def test_no_preprocessing_needs_torch_in_a_process() -> None:
    """It takes seconds, which the first image would wait for in each process, and 0.5 GB in each."""
    script = """
import dataclasses, io, itertools, sys
from typing import get_args
from PIL import Image
from vitrail.data.preprocess import PRESETS, preset
from vitrail.data.resize import Interpolation
from vitrail.serve.decoder import decode
from vitrail.serve.limits import PixelLimit
from vitrail.serve.settings import ServeSettings

stream = io.BytesIO()
Image.new("RGB", (300, 200), (9, 99, 199)).save(stream, "JPEG")
for name, interpolation, antialias in itertools.product(PRESETS, get_args(Interpolation), (True, False)):
    how = dataclasses.replace(preset(name), interpolation=interpolation, antialias=antialias)
    decode(stream.getvalue(), how, ServeSettings(), PixelLimit(1 << 20))
    assert "torch" not in sys.modules, how
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_process_does_not_import_torch_and_ends_with_the_service(tmp_path: Path) -> None:
    script = (
        "import sys, time, vitrail.serve.decoder as d; from vitrail.serve.process import start; "
        "assert 'torch' not in sys.modules; print(start('vitrail.serve.decoder').pid)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    pid, end = int(done.stdout), time.monotonic() + 30
    while _runs(pid) and time.monotonic() < end:
        time.sleep(0.05)
    assert not _runs(pid)


def _runs(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and ") Z " not in stat.read_text()


@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
def test_a_process_that_is_nearly_done_at_the_deadline_is_kept(single: Running) -> None:
    """To start another takes longer than most images, so that under load few would be decoded at all."""
    single.send(photo()).result(60)
    process = single.process
    process.send_signal(signal.SIGSTOP)
    late = single.send(photo(), seconds=0.1)
    time.sleep(0.3)
    process.send_signal(signal.SIGCONT)
    assert torch.equal(late.result(60), TIMM(photo())) and single.process is process


def test_a_process_whose_image_waits_for_pixels_is_kept_at_the_deadline() -> None:
    """When there is space, an image that was given up meanwhile is not decoded."""
    found = Running(decode_in="processes", decoders=2, max_pixels=200_000)
    stream = io.BytesIO()
    Image.new("RGB", (400, 400)).save(stream, "PNG")  # more than half of what all may have, so the process asks
    try:
        with found.pixels.hold(100_000):
            waiting = found.send(stream.getvalue(), seconds=0.1)
            assert found.decoders.processes is not None
            (process,) = (one for one in found.decoders.processes._processes if one._image is not None)
            before = process._process
            time.sleep(2.5)
            assert not waiting.done() and not found.call(waiting.job.cancel)  # type: ignore[attr-defined]
        with pytest.raises(ServiceError, match="given up before there was space for its pixels"):
            waiting.result(10)
        assert process._process is before
        assert torch.equal(found.send(stream.getvalue()).result(60), TIMM(stream.getvalue()))
    finally:
        found.close()


def test_closing_does_not_wait_for_a_process_that_decodes(single: Running) -> None:
    single.send(photo()).result(60)
    single.process.send_signal(signal.SIGSTOP)
    waiting = single.send(photo())
    time.sleep(0.1)
    single.call(single.decoders.close)
    with pytest.raises(ServiceError):
        waiting.result(10)


def test_an_image_that_waits_can_be_given_up_and_one_that_is_decoded_cannot(single: Running) -> None:
    single.send(photo()).result(60)
    single.process.send_signal(signal.SIGSTOP)
    first, second, third = (single.send(photo()) for _ in range(3))
    assert single.call(second.job.cancel) and not single.call(first.job.cancel)  # type: ignore[attr-defined]
    single.process.send_signal(signal.SIGCONT)
    assert torch.equal(first.result(60), third.result(60)) and not second.done()


@pytest.mark.parametrize("decode_in", ["threads", "processes"])
def test_the_bytes_of_an_image_that_was_given_up_are_freed_before_its_turn(decode_in: str) -> None:
    """Otherwise clients that send and leave could fill the memory while one image takes long."""
    found = Running(decode_in=decode_in, decoders=1, max_pixels=100)
    stream = io.BytesIO()
    Image.new("RGB", (10, 10)).save(stream, "PNG")
    try:
        with found.pixels.hold(100):
            first, large = found.send(stream.getvalue()), bytes(1 << 20)
            references = sys.getrefcount(large)
            second = found.send(large)
            assert found.call(second.job.cancel)  # type: ignore[attr-defined]
            assert until(lambda: sys.getrefcount(large) == references)
        assert torch.equal(first.result(60), TIMM(stream.getvalue()))
    finally:
        found.close()


@pytest.mark.parametrize("how", ["large", "keep-aspect"])
def test_an_image_of_another_size_than_the_last_is_whole(how: str, single: Running) -> None:
    """Its first bytes were read into space for the last one, and one of many pixels asks for them."""
    stream = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (70, 90, 3), np.uint8)).save(stream, "PNG")
    preprocess = preset("timm", size=500) if how == "large" else preset("timm", size=48).keep_aspect((8, 8))
    for _ in range(2):
        assert torch.equal(single.send(stream.getvalue(), preprocess).result(60), preprocess(stream.getvalue()))
        assert torch.equal(single.send(photo()).result(60), TIMM(photo()))


def test_an_image_of_many_pixels_asks_for_them_and_waits_alone() -> None:
    running_decoders = Running(decode_in="processes", decoders=2, max_pixels=200_000)
    stream = io.BytesIO()
    Image.new("RGB", (400, 400)).save(stream, "PNG")  # more than half of what all may have
    try:
        found = [running_decoders.send(stream.getvalue()) for _ in range(6)]
        assert all(torch.equal(one.result(60), TIMM(stream.getvalue())) for one in found)
    finally:
        running_decoders.close()


@pytest.mark.parametrize("answer", [b"?" * 30, struct.pack("<c?3IQ", b"I", False, 3, 1 << 20, 1 << 20, 1 << 42), b"short"])
def test_what_a_process_may_not_answer_ends_it(answer: bytes, single: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """A crafted file might control its decoder: that must not take memory of the service, or confuse it."""
    single.send(photo()).result(60)
    single.process.kill()
    ready = struct.pack("<c?3IQ", b"R", False, 0, 0, 0, 0)
    _speaks(monkeypatch, f"import os, sys; os.write(1, {ready!r}); sys.stdin.buffer.read(20); os.write(1, {answer!r})")
    with pytest.raises(ServiceError, match="The process that decoded the image has ended"):
        single.send(photo()).result(60)
    monkeypatch.undo()
    assert torch.equal(single.send(photo()).result(60), TIMM(photo()))


def _speaks(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Let every process that is started run this script."""
    monkeypatch.setattr(
        "vitrail.serve.decoder_processes.start",
        lambda *_, **__: subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE),
    )


@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
@pytest.mark.parametrize("given_up", [False, True])
def test_a_process_that_ends_does_not_fail_an_image_that_it_was_not_sent(given_up: bool, single: Running) -> None:
    """The image waits for pixels. If it was given up, nothing is told again: its place in the service would be freed twice."""
    single.send(photo()).result(60)
    assert single.decoders.processes is not None
    (process,) = single.decoders.processes._processes
    with single.pixels.hold(single.pixels.most):
        waiting = single.send(photo())
        assert not given_up or single.call(waiting.job.cancel)  # type: ignore[attr-defined]
        single.process.kill()
        end = time.monotonic() + 30
        while process._process is not None and time.monotonic() < end:
            time.sleep(0.02)
        assert process._process is None and not waiting.done()
    assert torch.equal(single.send(photo()).result(60), TIMM(photo()))
    assert not waiting.done() if given_up else torch.equal(waiting.result(60), TIMM(photo()))


def test_a_process_that_asks_for_pixels_twice_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both questions would be granted, and the pixels of one never given back."""
    ready, one, two = (struct.pack("<c?3IQ", kind, False, 0, 0, 0, count) for kind, count in ((b"R", 0), (b"P", 501), (b"P", 1)))
    rest = f"sys.stdin.buffer.read(20); os.write(1, {one!r}); time.sleep(0.3); os.write(1, {two!r}); sys.stdin.read()"
    _speaks(monkeypatch, f"import os, sys, time; os.write(1, {ready!r}); {rest}")
    found = Running(decode_in="processes", decoders=2, max_pixels=1000)
    try:
        with found.pixels.hold(500):
            waiting = found.send(photo())
            with pytest.raises(ServiceError, match="The process that decoded the image has ended"):
                waiting.result(20)
    finally:
        found.close()


def test_a_process_that_cannot_start_is_not_the_fault_of_the_image(single: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    single.send(photo()).result(60)
    single.process.kill()
    single.process.wait()
    _speaks(monkeypatch, "raise SystemExit(3)")
    with pytest.raises(ServiceError, match="ended with status 3 while it started") as caught:
        single.send(photo()).result(60)
    assert caught.value.status == 503
    monkeypatch.undo()
    assert torch.equal(single.send(photo()).result(60), TIMM(photo()))


@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
def test_nothing_is_lost_when_processes_end_and_clients_leave(bundle: Bundle) -> None:
    """Every place, pixel, byte, process and connection is free again."""
    stream = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (400, 400, 3), np.uint8)).save(stream, "JPEG")
    photos = [photo(), photo()[:900], 1_200_000 * b"x", stream.getvalue()]  # of a large body that is refused, the rest is not read
    head = "POST /v1/predict HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: image/jpeg\r\nContent-Length: {}\r\n\r\n"
    settings: dict[str, Any] = {"decoders": 2, "deadline": 0.5, "max_pixels": 300_000, "queue": 4}  # so that images wait for all
    with running(lambda: bundle, decode_in="processes", **settings) as client:
        service, statuses, end = client.service, set[bytes](), time.monotonic() + 6
        assert service.decoders.processes is not None
        processes = service.decoders.processes

        def send(seed: int) -> None:
            generator = random.Random(seed)
            while time.monotonic() < end:
                body = generator.choice(photos)
                with suppress(ConnectionError), socket.create_connection(("127.0.0.1", client.port), timeout=20) as connection:
                    connection.sendall(head.format(len(body)).encode() + body)
                    if generator.random() < 0.7:
                        statuses.add(connection.recv(1000)[9:12])

        def kill() -> None:
            generator = random.Random(0)
            while time.monotonic() < end:
                time.sleep(0.5 * generator.random())
                process = generator.choice(processes._processes)._process
                if process is not None:
                    process.send_signal(generator.choice((signal.SIGKILL, signal.SIGSEGV, signal.SIGSTOP)))

        threads = [threading.Thread(target=send, args=(seed,)) for seed in range(6)] + [threading.Thread(target=kill)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        worker = service.workers["tiny"]

        def left() -> tuple[int, ...]:
            return worker._in_flight, worker.decoding.images, service.pixels.held, service.bytes.held, 2 - len(processes._idle)

        assert until(lambda: not any(left())), left()  # a process that is stopped has the time of an image
        assert len(set(processes._idle)) == 2 and statuses >= {b"200", b"429"}
