"""Images decoded in processes: the same bits and messages as in threads, and nothing is lost when a process crashes or hangs."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.serve.conftest import running
from vitrail.checkpoints import Bundle
from vitrail.data import embedded
from vitrail.data.preprocess import PRESETS, preset
from vitrail.errors import VitrailError
from vitrail.serve.decoders import Decoders
from vitrail.serve.errors import ServiceError
from vitrail.serve.limits import PixelLimit
from vitrail.serve.settings import ServeSettings

pytestmark = pytest.mark.slow
TIMM = preset("timm", size=32)


@functools.cache
def photo() -> bytes:
    return embedded.photo("cat")


@pytest.fixture(scope="module")
def shared() -> Iterator[Decoders]:
    yield from _decoders(2)


@pytest.fixture
def single() -> Iterator[Decoders]:
    yield from _decoders(1)


def _decoders(count: int) -> Iterator[Decoders]:
    settings = ServeSettings(decode_in="processes", decoders=count)
    decoders = Decoders(settings, PixelLimit(settings.max_pixels))
    yield decoders
    processes = [one._process for one in decoders._processes if one._process is not None]
    decoders.close()
    assert all(process.wait(10) is not None for process in processes)


def send(decoders: Decoders, data: bytes, seconds: float = 30.0) -> Future[Tensor]:
    return decoders.decode(data, TIMM, time.monotonic() + seconds)


def process_of(decoders: Decoders) -> subprocess.Popen[bytes]:
    process = decoders._processes[0]._process
    assert process is not None
    return process


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_the_pixels_are_those_of_the_preprocessing(name: str, shared: Decoders) -> None:
    preprocess = preset(name, size=32)
    found = shared.decode(photo(), preprocess, time.monotonic() + 60).result()
    assert torch.equal(found, preprocess(photo())) and found.dtype == torch.float32


@pytest.mark.parametrize("name", ["truncated.jpg", "text.jpg", "empty"])
def test_a_bad_image_gets_the_message_of_threads_and_the_next_one_is_decoded(name: str, shared: Decoders) -> None:
    data = b"" if name == "empty" else photo()[:900] if name == "truncated.jpg" else b"a text"
    threads = Decoders(ServeSettings(decode_in="threads"), PixelLimit(1 << 20))
    errors = []
    for decoders in (shared, threads):
        with pytest.raises(ServiceError) as caught:
            send(decoders, data).result()
        errors.append((caught.value.status, caught.value.message))
    threads.close()
    assert errors[0] == errors[1]
    assert torch.equal(send(shared, photo()).result(), TIMM(photo()))


@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
@pytest.mark.parametrize("number, status", [(signal.SIGKILL, 503), (signal.SIGSEGV, 422)])
def test_a_process_that_ends_fails_one_image(number: signal.Signals, status: int, single: Decoders) -> None:
    send(single, photo()).result()
    process = process_of(single)
    process.send_signal(signal.SIGSTOP)
    waiting = send(single, photo())
    time.sleep(0.1)
    process.send_signal(number)
    process.send_signal(signal.SIGCONT)
    with pytest.raises(ServiceError) as caught:
        waiting.result(30)
    assert caught.value.status == status
    assert torch.equal(send(single, photo()).result(), TIMM(photo()))
    assert process_of(single).pid != process.pid


@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
def test_a_process_that_ended_between_images_is_started_again(single: Decoders) -> None:
    send(single, photo()).result()
    process_of(single).kill()
    process_of(single).wait()
    assert torch.equal(send(single, photo()).result(), TIMM(photo()))


@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
def test_a_process_that_hangs_is_ended_at_the_deadline(single: Decoders) -> None:
    send(single, photo()).result()
    process = process_of(single)
    process.send_signal(signal.SIGSTOP)
    with pytest.raises(ServiceError, match="not decoded before its deadline") as caught:
        send(single, photo(), seconds=0.3).result(30)
    assert caught.value.status == 503 and process.wait(10) == -signal.SIGKILL
    assert torch.equal(send(single, photo()).result(), TIMM(photo()))


def test_processes_wait_for_the_pixels_of_the_service(shared: Decoders) -> None:
    limit = shared._pixels
    with limit.hold(limit.most):
        waiting = send(shared, photo())
        time.sleep(0.3)
        assert not waiting.done()
    assert torch.equal(waiting.result(30), TIMM(photo()))
    assert limit.held == 0
    with pytest.raises(ServiceError):
        send(shared, photo()[:900]).result()
    assert limit.held == 0


def test_images_sent_at_the_same_time_are_not_mixed(shared: Decoders) -> None:
    sizes = [preset("timm", size=16 + 4 * number) for number in range(8)]
    found = [shared.decode(photo(), one, time.monotonic() + 60) for one in sizes for _ in range(4)]
    expected = [one(photo()) for one in sizes for _ in range(4)]
    assert all(torch.equal(one.result(), other) for one, other in zip(found, expected, strict=True))


def test_a_service_answers_the_same(bundle: Bundle) -> None:
    answers = []
    for how in ("threads", "processes"):
        with running(lambda: bundle, decode_in=how, decoders=2) as client:
            answers.append(client.call("POST", "/v1/predict", photo()))
            decoders = client.service.decoders
        assert decoders.in_processes == (how == "processes")
        assert all(process._process is None for process in decoders._processes)
    assert answers[0][:2] == answers[1][:2] and answers[0][0] == 200


def test_processes_are_used_where_many_images_are_decoded() -> None:
    found = [Decoders(ServeSettings(decoders=count), PixelLimit(1)) for count in (4, 5)]
    assert [one.in_processes for one in found] == [False, True]
    with pytest.raises(VitrailError, match="--decode-in is 'process'; it must be auto, threads or processes"):
        ServeSettings(decode_in="process")  # type: ignore[arg-type]


def test_a_process_does_not_import_torch_and_ends_with_the_service(tmp_path: Path) -> None:
    script = (
        "import sys, time, vitrail.serve.decoders as d; from vitrail.serve.process import start; "
        "assert 'torch' not in sys.modules; print(start('vitrail.serve.decoders').pid)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    pid, end = int(done.stdout), time.monotonic() + 30
    while _runs(pid) and time.monotonic() < end:
        time.sleep(0.05)
    assert not _runs(pid)


def _runs(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and ") Z " not in stat.read_text()


def test_closing_does_not_wait_for_a_process_that_decodes(single: Decoders) -> None:
    send(single, photo()).result()
    process_of(single).send_signal(signal.SIGSTOP)
    waiting = send(single, photo())
    time.sleep(0.1)
    closing = threading.Thread(target=single.close)
    closing.start()
    closing.join(10)
    assert not closing.is_alive()
    with pytest.raises(ServiceError):
        waiting.result(10)
