"""`DecoderProcesses`: helper processes that decode images, and what the event loop exchanges with them.

Python runs one thread of a process at a time, so a thread that waits for each process would wait for the others and for the event
loop, too. Here the event loop itself writes and reads the pipes, which never block: two system calls per image.
"""

from __future__ import annotations

import asyncio
import functools
import math
import os
import pickle
import select
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from vitrail.data.preprocess import Preprocess
from vitrail.serve.decoder import ANSWER, ASKS, DENIED, ERROR, GRANTED, IMAGE, READY, REQUEST, answered_image
from vitrail.serve.errors import ServiceError, unavailable
from vitrail.serve.images import Decoded
from vitrail.serve.limits import PixelLimit
from vitrail.serve.process import Refused, start
from vitrail.serve.settings import ServeSettings

Done = Callable[[Decoded | ServiceError], None]
_PIPE_BYTES = 1 << 20
_START_SECONDS = 60.0
_PATIENCE = 2.0  # seconds after the deadline: to end a process and start another takes longer than to decode most images
_MOST_MESSAGE, _STATUSES = 1 << 16, range(400, 600)  # bytes of an error, and what it can be


class Decoding:
    """An image on its way through a process."""

    __slots__ = ("asked", "begun", "cancelled", "data", "deadline", "done", "preprocess")

    def __init__(self, data: bytes, preprocess: Preprocess, deadline: float, done: Done) -> None:
        self.data, self.preprocess, self.deadline, self.done = data, preprocess, deadline, done
        self.asked = self.begun = self.cancelled = False

    def cancel(self) -> bool:
        """Give the image up; False if a process has it, whose end is still told."""
        self.cancelled = True
        if not self.begun:
            self.data = b""
        return not self.begun


class DecoderProcesses:
    """Processes that decode one image each at a time, in the order in which images come."""

    def __init__(self, count: int, settings: ServeSettings, pixels: PixelLimit) -> None:
        self._processes = [_Process(self, settings, pixels, settings.max_pixels // count) for _ in range(count)]
        self._idle = list(self._processes)
        self._waiting: deque[Decoding] = deque()
        self._preparing, self._prepared = threading.Lock(), False

    def prepare(self) -> None:
        """Start the processes, and wait until they have imported what they need: seconds that the first images would wait."""
        with self._preparing:  # each model's thread asks for it
            if not self._prepared:
                for process in self._processes:
                    process.start()
                end = time.monotonic() + _START_SECONDS
                for process in self._processes:
                    process.wait(end)
            self._prepared = True

    def decode(self, data: bytes, preprocess: Preprocess, deadline: float, done: Done) -> Decoding:
        image = Decoding(data, preprocess, deadline, done)
        self._waiting.append(image)
        self._next()
        return image

    def close(self) -> None:
        waiting, self._waiting = self._waiting, deque()
        for image in waiting:
            if not image.cancelled:
                image.done(unavailable("The service is shutting down."))
        for process in self._processes:
            process.stop()

    def free(self, process: _Process) -> None:
        self._idle.append(process)
        self._next()

    def _next(self) -> None:
        while self._idle and self._waiting:
            image = self._waiting.popleft()
            if not image.cancelled:
                self._idle.pop().take(image)


class _Process:
    """A process that decodes one image at a time, and is started again when it has ended.

    An image may have `share` pixels without asking. They are taken before it is sent, so that most images need no question.
    """

    def __init__(self, pool: DecoderProcesses, settings: ServeSettings, pixels: PixelLimit, share: int) -> None:
        self._pool, self._settings, self._pixels, self._share = pool, settings, pixels, share
        self._process: subprocess.Popen[bytes] | None = None
        self._starting = threading.Lock()
        self._ready = self._stopped = False
        self._loop: asyncio.AbstractEventLoop | None = None  # the one that watches the pipes
        self._image: Decoding | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._held = 0  # pixels
        self._unsent: list[memoryview] = []
        self._head, self._content, self._received = bytearray(ANSWER.size), bytearray(), 0
        self._usual = 0  # bytes of the last image

    def start(self) -> None:
        """Start the process if it does not run."""
        with self._starting:
            if self._stopped:
                raise unavailable("The service is shutting down.")
            if self._process is not None and self._process.poll() is None:
                return
            self._forget()
            self._process = process = start("vitrail.serve.decoder", OMP_NUM_THREADS="1")
            for number in _pipes(process):
                _enlarge(number)
                os.set_blocking(number, False)

    def wait(self, end: float) -> None:
        """Wait until the process is ready. Called in a thread, before it has decoded anything."""
        process, poll = self._process, select.poll()
        if process is None or self._ready:
            return
        _, output = _pipes(process)
        poll.register(output, select.POLLIN)
        if poll.poll(max(0.0, 1000 * (end - time.monotonic()))):
            self._ready = os.read(output, ANSWER.size)[:1] == READY

    def stop(self) -> None:
        with self._starting:
            self._stopped = True
            self._forget()
        if self._image is not None:
            self._finish(unavailable("The service is shutting down."))

    def take(self, image: Decoding) -> None:
        """Decode an image as soon as there is space for its pixels. This and all that follows runs in the event loop."""
        self._image = image
        self._take_pixels(self._share, self._begin)

    def _begin(self) -> None:
        image, loop = self._image, asyncio.get_running_loop()
        if image is None or image.cancelled:
            self._finish()
            return
        image.begun = True
        self._watch(image)
        try:
            self.start()
        except ServiceError as error:
            loop.call_soon(self._finish, error)
            return
        except OSError as error:
            loop.call_soon(self._finish, unavailable(f"No process that decodes images can be started: {error.strerror}."))
            return
        if self._loop is not loop:
            self._loop = loop
            loop.add_reader(_pipes(self._process)[1], self._readable)
        if self._ready:
            self._send_image(image)

    def _send_image(self, image: Decoding) -> None:
        how = _pickled(image.preprocess, self._settings)
        self._send(REQUEST.pack(len(how), len(image.data), self._share), how, image.data)

    def _send(self, *parts: bytes) -> None:
        self._unsent += map(memoryview, parts)
        self._write()
        if self._unsent and self._loop is not None:
            self._loop.add_writer(_pipes(self._process)[0], self._write)

    def _write(self) -> None:
        number, _ = _pipes(self._process)
        try:
            count = os.writev(number, self._unsent)
        except BlockingIOError:
            return
        except OSError:
            self._ended()
            return
        while self._unsent and count >= len(self._unsent[0]):
            count -= len(self._unsent.pop(0))
        if self._unsent:
            self._unsent[0] = self._unsent[0][count:]
        elif self._loop is not None:
            self._loop.remove_writer(number)

    def _readable(self) -> None:
        """Read what there is of an answer: usually all of it, straight to where its content belongs."""
        if not self._content:
            self._content = bytearray(self._usual)
        place = self._received - ANSWER.size
        content, head = memoryview(self._content), memoryview(self._head)
        buffers = [content[place:]] if place >= 0 else [head[self._received :], content]
        try:
            count = os.readv(_pipes(self._process)[1], buffers)
        except BlockingIOError:
            return
        except OSError:
            count = 0
        self._received += count
        if not count:
            self._ended()
        elif self._received >= ANSWER.size:
            self._understand()

    def _understand(self) -> None:
        kind, rotated, *shape, count = ANSWER.unpack(self._head)
        size = 0 if kind in (READY, ASKS) else count
        if not self._is_expected(kind, shape, size) or self._received > ANSWER.size + size:
            self._ended()
            return
        if size and len(self._content) != size:  # an error, or an image of another size than the last
            self._content = self._content[:size].ljust(size, b"\0")
        if self._received < ANSWER.size + size:
            return
        self._received = 0
        if kind == READY:
            self._ready = True
            if self._image is not None:
                self._send_image(self._image)
        elif kind == ASKS and self._image is not None:
            self._image.asked = True
            self._stop_timer()  # while it waits it is not late
            self._release_pixels()
            self._take_pixels(count, self._answer_question)
        else:
            content, self._content = self._content, bytearray()
            if kind == ERROR:
                self._finish(Refused(shape[0], content.decode(errors="replace")).error())
            else:
                self._usual = size
                self._finish(answered_image(shape, content, rotated))

    def _answer_question(self) -> None:
        """Let the image be decoded, unless it was given up: then others need not wait for it."""
        image = self._image
        assert image is not None
        self._watch(image)
        if image.cancelled:
            self._release_pixels()
        self._send(DENIED if image.cancelled else GRANTED)

    def _is_expected(self, kind: bytes, shape: list[int], size: int) -> bool:
        if kind == READY:
            return not self._ready
        if self._image is None or not self._image.begun or not self._ready or self._unsent:
            return False
        if kind == ERROR:
            return shape[0] in _STATUSES and size <= _MOST_MESSAGE
        how = self._image.preprocess
        same = shape[1:] == list(how.size) or (how.resize == "keep-aspect" and 0 < max(shape[1:]) <= (how.max_size or 0))
        pixels = math.prod(shape)
        if kind == ASKS:  # once: pixels of an earlier question would be lost
            return not self._image.asked
        return kind == IMAGE and shape[0] == how.channels and same and size in (pixels, 4 * pixels)

    def _watch(self, image: Decoding) -> None:
        """End the process if it is not done soon after the image's deadline."""
        seconds = max(0.0, image.deadline - time.monotonic()) + _PATIENCE
        self._timer = asyncio.get_running_loop().call_later(seconds, self._late)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        self._forget()
        self._finish(unavailable("The image was not decoded before its deadline."))

    def _ended(self) -> None:
        """The process has ended, or what it sends is no answer. An image that still waits for pixels gets the next process."""
        was_ready, status = self._ready, self._forget()
        if self._image is not None and self._image.begun:
            self._finish(crashed(status) if was_ready else not_started(status))

    def _finish(self, found: Decoded | ServiceError | None = None) -> None:
        image, self._image = self._image, None
        if image is None:  # already told; a process that is idle twice would get two images
            return
        self._stop_timer()
        self._release_pixels()
        self._pool.free(self)
        if found is not None and (image.begun or not image.cancelled):
            image.done(found)

    def _forget(self) -> int:
        """End the process, and return its status."""
        process, self._process, self._ready, self._received = self._process, None, False, 0
        self._unsent.clear()
        if process is None:
            return 0
        if self._loop is not None and not self._loop.is_closed():
            to_it, from_it = _pipes(process)
            self._loop.remove_writer(to_it)
            self._loop.remove_reader(from_it)
        self._loop = None
        process.kill()
        return process.wait()

    def _take_pixels(self, count: int, then: Callable[[], None]) -> None:
        image, loop = self._image, asyncio.get_running_loop()

        def taken() -> None:
            if self._image is not image:  # it has been given up meanwhile
                self._pixels.release(count)
                return
            self._held = count
            then()

        def later() -> None:  # in the thread that has released them
            try:
                loop.call_soon_threadsafe(taken)
            except RuntimeError:  # the loop is closed: the service has ended
                self._pixels.release(count)

        if self._pixels.take(count, later):
            taken()

    def _release_pixels(self) -> None:
        count, self._held = self._held, 0
        if count:
            self._pixels.release(count)


def crashed(status: int) -> ServiceError:
    if status in (-9, 0):  # it was ended by the system or an operator
        return unavailable("The process that decoded the image has ended.")
    return ServiceError(422, "The image cannot be decoded: its decoder crashed. Send an intact JPEG or PNG file.")


def not_started(status: int) -> ServiceError:
    return unavailable(f"The process that decodes images ended with status {status} while it started.")


def _pipes(process: subprocess.Popen[bytes] | None) -> tuple[int, int]:
    assert process is not None and process.stdin is not None and process.stdout is not None
    return process.stdin.fileno(), process.stdout.fileno()


@functools.lru_cache(8)
def _pickled(preprocess: Preprocess, settings: ServeSettings) -> bytes:
    return pickle.dumps((preprocess, settings))


def _enlarge(pipe: int) -> None:
    """Let a photo and the model's input go through the pipes in one piece, where the system allows it."""
    with suppress(ImportError, AttributeError, OSError):
        import fcntl

        fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
