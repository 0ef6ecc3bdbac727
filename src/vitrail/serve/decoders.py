"""Decode images in threads of the service, or in helper processes.

Python runs one thread of a process at a time, and of decoding a photo about a fifth is Python. So on many cores threads wait for
each other and for the event loop. A process decodes on a core of its own, and one that crashes or hangs takes no other image with
it. Each has a thread that waits for it; the service's limit on pixels holds for all of them together.
"""

from __future__ import annotations

import functools
import io
import pickle
import select
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from queue import SimpleQueue
from typing import IO, TYPE_CHECKING, Any

from PIL import Image

from vitrail.cpus import usable_cpus
from vitrail.data.preprocess import Preprocess
from vitrail.serve.errors import ServiceError, unavailable
from vitrail.serve.images import decode
from vitrail.serve.limits import PixelLimit
from vitrail.serve.process import Refused, start
from vitrail.serve.settings import ServeSettings

if TYPE_CHECKING:
    from torch import Tensor

_MOST = 16
_FEW = 4  # so many threads seldom wait for each other
_PIPE_BYTES = 1 << 20
_START_SECONDS = 60.0


class Decoders:
    """The threads that decode, and their processes."""

    def __init__(self, settings: ServeSettings, pixels: PixelLimit) -> None:
        count = settings.decoders or min(_MOST, usable_cpus())
        self.in_processes = settings.decode_in == "processes" or (settings.decode_in == "auto" and count > _FEW)
        self.threads = ThreadPoolExecutor(count, thread_name_prefix="decode", initializer=_ignore_warnings)
        self._settings, self._pixels = settings, pixels
        self._processes = [_Process() for _ in range(count if self.in_processes else 0)]
        self._free: SimpleQueue[_Process] = SimpleQueue()
        for process in self._processes:
            self._free.put(process)

    def prepare(self, preprocess: Preprocess) -> None:
        """Start the processes, and let each import what this preprocessing needs: seconds that the first images would wait."""
        if not self._processes:
            return

        def decode_small(process: _Process) -> None:
            with suppress(ServiceError):  # too small for this preprocessing, or the service ends
                process.decode(_small_image(), preprocess, self._settings, self._pixels, time.monotonic() + _START_SECONDS)

        with ThreadPoolExecutor(len(self._processes)) as threads:
            list(threads.map(decode_small, self._processes))

    def decode(self, data: bytes, preprocess: Preprocess, deadline: float) -> Future[Tensor]:
        """Decode a file to the model's input; raises a `ServiceError`. `deadline` is a time of `time.monotonic`."""
        return self.threads.submit(self._decode, data, preprocess, deadline)

    def close(self) -> None:
        self.threads.shutdown(wait=False, cancel_futures=True)
        for process in self._processes:
            process.stop()

    def _decode(self, data: bytes, preprocess: Preprocess, deadline: float) -> Tensor:
        import torch

        if not self.in_processes:
            return torch.from_numpy(decode(data, preprocess, self._settings, self._pixels))
        process = self._free.get()  # there are as many as threads
        try:
            return process.decode(data, preprocess, self._settings, self._pixels, deadline)
        finally:
            self._free.put(process)


class _Process:
    """A process that decodes one image at a time, and is started again when it has ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._stopped = False

    def _start(self) -> subprocess.Popen[bytes]:
        if self._stopped:
            raise unavailable("The service is shutting down.")
        if self._process is None or self._process.poll() is not None:
            self._process = start("vitrail.serve.decoders", OMP_NUM_THREADS="1")
            if hasattr(select, "poll"):
                _enlarge(self._process)
        return self._process

    def stop(self) -> None:
        self._stopped = True
        self._kill()

    def decode(self, data: bytes, preprocess: Preprocess, settings: ServeSettings, pixels: PixelLimit, deadline: float) -> Tensor:
        with self._lock:
            process = self._start()
            try:
                return self._answer(process, pickle.dumps((preprocess, settings, len(data))), data, pixels, deadline)
            except ServiceError:
                raise
            except (EOFError, OSError, pickle.UnpicklingError) as error:
                self._kill()
                raise _ended(process.wait()) from error
            except BaseException:
                self._kill()  # or it would send this answer to the next image
                raise

    def _answer(self, process: subprocess.Popen[bytes], request: bytes, data: bytes, pixels: PixelLimit, deadline: float) -> Tensor:
        import torch

        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(request)
        process.stdin.write(data)
        process.stdin.flush()
        with ExitStack() as held:
            while isinstance(found := self._load(process.stdout, deadline), int):  # it is about to decode so many pixels
                held.enter_context(pixels.hold(found))
                process.stdin.write(b"\n")
                process.stdin.flush()
            if isinstance(found, Refused):
                raise found.error()
            tensor = torch.empty(found)
            _read_into(process.stdout, tensor.numpy().data.cast("B"))
        return tensor

    def _load(self, stream: IO[bytes], deadline: float) -> Any:
        if not _has_bytes(stream, deadline - time.monotonic()):
            self._kill()
            raise unavailable("The image was not decoded before its deadline.")
        return pickle.load(stream)

    def _kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()


def _ignore_warnings() -> None:
    """Pillow warns of large images and of corrupted metadata. Both are answered, not logged."""
    warnings.filterwarnings("ignore", module=r"PIL\.")
    warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)


@functools.cache
def _small_image() -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (8, 8)).save(stream, "PNG")
    return stream.getvalue()


def _ended(status: int) -> ServiceError:
    if status in (-9, 0):  # it was ended by the system or an operator
        return unavailable("The process that decoded the image has ended.")
    return ServiceError(422, "The image cannot be decoded: its decoder crashed. Send an intact JPEG or PNG file.")


def _has_bytes(stream: IO[bytes], seconds: float) -> bool:
    if not hasattr(select, "poll"):
        return True  # on Windows pipes cannot be waited for in this way
    poll = select.poll()
    poll.register(stream.fileno(), select.POLLIN)
    return bool(poll.poll(max(0.0, 1000 * seconds)))


def _read_into(stream: IO[bytes], target: memoryview) -> None:
    done = 0
    while done < len(target):
        count = stream.readinto(target[done:])  # type: ignore[attr-defined]
        if not count:
            raise EOFError
        done += count


def _enlarge(process: subprocess.Popen[bytes]) -> None:
    """Let a photo and the model's input go through the pipes in few pieces, where the system allows it."""
    import fcntl

    for stream in (process.stdin, process.stdout):
        try:
            fcntl.fcntl(stream.fileno(), fcntl.F_SETPIPE_SZ, _PIPE_BYTES)  # type: ignore[union-attr]
        except (AttributeError, OSError):
            return


class _Permission(PixelLimit):
    """In the process: ask the service for the pixels to decode. They are given back there, with the answer."""

    def __init__(self) -> None:
        super().__init__(0)

    @contextmanager
    def hold(self, count: int) -> Iterator[None]:
        _send(count)
        if not sys.stdin.buffer.read(1):
            raise SystemExit
        yield


def main() -> None:
    """Decode the images that come in from standard input, until it ends."""
    _ignore_warnings()
    limit = _Permission()
    while True:
        try:
            preprocess, settings, length = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            found = decode(sys.stdin.buffer.read(length), preprocess, settings, limit)
        except ServiceError as error:
            _send(Refused(error))
            continue
        _send(found.shape)
        sys.stdout.buffer.write(found.data)
        sys.stdout.buffer.flush()


def _send(found: Any) -> None:
    pickle.dump(found, sys.stdout.buffer, protocol=5)
    sys.stdout.buffer.flush()
