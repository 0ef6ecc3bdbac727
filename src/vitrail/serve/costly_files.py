"""Small files that Pillow would read with gigabytes of memory or minutes of time, refused before that."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator
from typing import IO, Any, cast

from PIL import Image, JpegImagePlugin, TiffImagePlugin

from vitrail.serve.errors import ServiceError

PPM_HEADER = 4096
"""Bytes of a PPM in which its header has to end: Pillow reads it byte by byte."""
_SLOW_DECODERS = {
    "bmp_rle": "a BMP file compressed by run lengths",
    "ppm_plain": "a PPM file of text",
}  # written in Python: a file of 1 KB takes minutes and gigabytes with the first, comments take quadratic time with the second
_MAX_STRIPS = 300_000  # a TIFF of 64 million pixels has 250,000 tiles of the smallest usual size, 16 × 16
_OFFSETS = (273, 324)  # the fields of a TIFF that say where its strips or tiles are
_BYTES_PER_VALUE = {3: 2, 4: 4, 13: 4, 16: 8}  # by type; others are counted as one byte
_MAX_COMMENTS = 4000  # blocks of up to 255 bytes; Pillow adds each to a copy of all before
MAX_BLOCKS = 100_000
"""Most pieces of a file; a PNG of 32 MB has 4,000 chunks of the usual size."""
_MARKER = re.compile(rb"\xff[^\x00\xff]")
_START_OF_SCAN = 0xFFDA
_MOST_BANDS = 5  # a TIFF may store each band in tiles of its own


def check_opened(image: Image.Image) -> None:
    """Refuse what takes long to decode, however few its pixels are."""
    tiles: list[Any] = getattr(image, "tile", [])
    slow = next((_SLOW_DECODERS[tile[0]] for tile in tiles if tile[0] in _SLOW_DECODERS), None)
    if slow is not None:
        raise ServiceError(422, f"This is {slow}, which takes long to decode. Save it as PNG or JPEG.")
    if len(tiles) > 1:  # a TIFF may name the same strip millions of times
        area = sum((right - left) * (bottom - top) for left, top, right, bottom in (tile[1] for tile in tiles))
        if area > _MOST_BANDS * math.prod(image.size):
            raise _corrupted("it has its pixels more than once")


def check_blocks(data: bytes) -> None:
    """Refuse a file in more pieces than any program writes: Pillow reads them one by one, in Python, while other threads wait.

    32 MB of empty segments of a JPEG take 8 seconds and a gigabyte.
    """
    count = 0
    for blocks in _blocks(data):
        count += blocks
        if count > MAX_BLOCKS:
            raise too_many_blocks()


def too_many_blocks() -> ServiceError:
    return _corrupted("it has too many blocks of metadata")


def _blocks(data: bytes) -> Iterator[int]:
    """Yield how many steps Pillow takes through each piece of a JPEG, PNG or GIF up to its pixels; of a PNG, to its end."""
    if data.startswith(b"\xff\xd8"):
        return _segments_of_jpeg(data)
    if data.startswith(b"\x89PNG"):
        return _chunks_of_png(data)
    return _blocks_of_gif(data) if data.startswith((b"GIF87a", b"GIF89a")) and len(data) >= 13 else iter(())


def _segments_of_jpeg(data: bytes) -> Iterator[int]:
    position = 2
    while True:
        found = _MARKER.search(data, position)
        yield 1 + (found.start() if found else len(data)) - position  # what is between segments is skipped byte by byte
        kind = int.from_bytes(found[0], "big") if found else 0
        if not found or kind == _START_OF_SCAN or kind not in JpegImagePlugin.MARKER:  # of the latter, it reads no more
            return
        position = found.end()
        if JpegImagePlugin.MARKER[kind][2] is not None:
            position += max(2, int.from_bytes(data[position : position + 2], "big"))


def _chunks_of_png(data: bytes) -> Iterator[int]:
    position = 8
    while position < len(data):
        yield 1
        position += 12 + int.from_bytes(data[position : position + 4], "big")


def _blocks_of_gif(data: bytes) -> Iterator[int]:
    """Refuse more comments before the first picture than a person writes, too."""
    position = 13 + (3 << (data[10] & 7) + 1 if data[10] & 128 else 0)
    comments = 0
    while position < len(data) and data[position] not in b",;":
        yield 1
        if data[position] != ord("!"):
            position += 1
            continue
        is_comment = data[position + 1 : position + 2] == b"\xfe"
        position += 2
        while position < len(data) and data[position]:
            yield 1
            comments += is_comment
            position += 1 + data[position]
        if comments > _MAX_COMMENTS:
            raise _corrupted("it has too many comments")
        position += 1


@functools.cache
def limit_directories() -> None:
    """Let Pillow read directories of metadata (TIFF, EXIF) only as far as they are not much longer than their file.

    Each of 65,535 fields may name the same bytes, so 1 MB becomes 65 GB. Pillow has no option for this and reads EXIF in several
    places, in JPEG files already when they are opened, so its method is wrapped, once, in the process of the service.
    """
    load = TiffImagePlugin.ImageFileDirectory_v2.load

    @functools.wraps(load)
    def limited(self: TiffImagePlugin.ImageFileDirectory_v2, fp: Any) -> None:
        load(self, cast("IO[bytes]", _Limited(fp)))
        for tag in _OFFSETS:
            count = len(self._tagdata.get(tag, b"")) // _BYTES_PER_VALUE.get(self.tagtype.get(tag, 0), 1)
            if count > _MAX_STRIPS:
                raise _corrupted("it has too many strips or tiles")

    TiffImagePlugin.ImageFileDirectory_v2.load = limited  # type: ignore[method-assign]


class _Limited:
    """A file of which at most twice its length is read."""

    def __init__(self, file: Any) -> None:
        here = file.tell()
        self._left, self._file = 2 * file.seek(0, 2) + (1 << 16), file
        file.seek(here)

    def read(self, size: int = -1) -> bytes:
        found: bytes = self._file.read(size)
        self._left -= len(found)
        if self._left < 0:
            raise _corrupted("its metadata are larger than the file")
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def _corrupted(reason: str) -> ServiceError:
    return ServiceError(422, f"The image is not decoded, because {reason}. Save it again, for instance as PNG.")
