"""The helper process that decodes images, and the messages between it and the service.

A process sends one message when it has started, and then one for each image, or two: if the image has more pixels than it may
decode without asking, it asks first. So neither side ever sends while the other does. What comes from the process is a fixed head
and plain bytes, nothing that the service would have to trust: a crafted file might control the process that decodes it.
"""

from __future__ import annotations

import functools
import io
import math
import pickle
import struct
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from PIL import Image

from vitrail.data.preprocess import Preprocess
from vitrail.serve.errors import ServiceError, unavailable
from vitrail.serve.images import Decoded, decode
from vitrail.serve.limits import PixelLimit
from vitrail.serve.settings import ServeSettings

REQUEST = struct.Struct("<IIQ")
"""Before each image: bytes of the pickled (preprocess, settings), bytes of the file, pixels that may be decoded without asking."""
ANSWER = struct.Struct("<c?3IQ")
"""Before each answer: kind; of an image whether it is rotated, its channels, height, width; bytes that follow, or pixels."""
READY, IMAGE, ERROR, ASKS = b"R", b"I", b"E", b"P"
GRANTED, DENIED = b"\n", b"\0"


def main() -> None:
    """Decode the images that come in from standard input, until it ends."""
    ignore_warnings()
    _import_all()
    _send(READY)
    while head := sys.stdin.buffer.read(REQUEST.size):
        pickled, length, pixels = REQUEST.unpack(head)
        preprocess, settings = _unpickled(sys.stdin.buffer.read(pickled))
        data = sys.stdin.buffer.read(length)
        try:
            found = decode(data, preprocess, settings, _Permission(pixels))
        except ServiceError as error:
            message = error.message.encode()
            _send(ERROR, (error.status, 0, 0), message)
        else:
            _send(IMAGE, found.pixels.shape, found.pixels, found.rotated)


class _Permission(PixelLimit):
    """In the process: the pixels that may be decoded. For more the service is asked; it takes them back with the answer."""

    @contextmanager
    def hold(self, count: int) -> Iterator[None]:
        if count > self.most:
            _send(ASKS, count=count)
            answer = sys.stdin.buffer.read(1)
            if not answer:
                raise SystemExit
            if answer == DENIED:
                raise unavailable("The image was given up before there was space for its pixels.")
        yield


def _send(kind: bytes, shape: Any = (0, 0, 0), content: Any = b"", rotated: bool = False, count: int = 0) -> None:
    content = memoryview(content).cast("B")
    sys.stdout.buffer.write(b"".join((ANSWER.pack(kind, rotated, *shape, count or len(content)), content)))  # in one piece
    sys.stdout.buffer.flush()


@functools.lru_cache(8)
def _unpickled(content: bytes) -> tuple[Preprocess, ServeSettings]:
    found: tuple[Preprocess, ServeSettings] = pickle.loads(content)
    return found


def answered_image(shape: Sequence[int], content: bytearray, rotated: bool) -> Decoded:
    """Return the image in the bytes of an answer, whose length tells its type."""
    kind = np.uint8 if len(content) == math.prod(shape) else np.float32
    return Decoded(np.frombuffer(content, kind).reshape(shape), rotated)


def ignore_warnings() -> None:
    """Pillow warns of large images and of corrupted metadata. Both are answered, not logged."""
    warnings.filterwarnings("ignore", module=r"PIL\.")
    warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)


def _import_all() -> None:
    """Decode a small image, which imports what the first one would wait for."""
    stream = io.BytesIO()
    Image.new("RGB", (8, 8)).save(stream, "JPEG")
    decode(stream.getvalue(), Preprocess(size=(4, 4)), ServeSettings(), PixelLimit(64))
