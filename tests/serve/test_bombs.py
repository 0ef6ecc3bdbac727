"""Small files that take much memory or time to decode are refused, and a decoder that takes long does not keep the process."""

from __future__ import annotations

import io
import os
import signal
import struct
import time
import tracemalloc
import zlib

import pytest
from PIL import Image, PngImagePlugin

from tests.serve.conftest import Client, error_text, process_running, until
from vitrail.checkpoints import Bundle
from vitrail.data.preprocess import Preprocess
from vitrail.serve.base64_text import bytes_of_text
from vitrail.serve.errors import ServiceError
from vitrail.serve.images import count_scans, decode, tile_of_tiff
from vitrail.serve.limits import PixelLimit
from vitrail.serve.settings import ServeSettings


def tiff(*tiles: tuple[int, int], big: bool = False, order: str = "<") -> bytes:
    """Return a TIFF of 16 × 16 grey pixels in one tile, whose size is given, perhaps more than once."""
    data = zlib.compress(bytes(min(tiles[0][0] * tiles[0][1], 1 << 20)))
    sizes = [(322, width) for width, _ in tiles] + [(323, height) for _, height in tiles]
    fields = [(256, 16), (257, 16), (258, 8), (259, 8), (262, 1), (277, 1), *sizes, (324, 0), (325, len(data))]
    head = (16 + 8 + 20 * len(fields) + 8) if big else (8 + 2 + 12 * len(fields) + 4)
    entry = order + ("HHQI4x" if big else "HHII")
    entries = b"".join(struct.pack(entry, tag, 4, 1, head if tag == 324 else value) for tag, value in fields)
    start = b"II" if order == "<" else b"MM"
    if big:
        start += struct.pack(f"{order}HHHQQ", 43, 8, 0, 16, len(fields))
        return start + entries + bytes(8) + data
    return start + struct.pack(f"{order}HIH", 42, 8, len(fields)) + entries + bytes(4) + data


def progressive(side: int, more: int, after: bytes = b"") -> bytes:
    """Return a progressive JPEG whose last scan is repeated."""
    stream = io.BytesIO()
    Image.linear_gradient("L").resize((side, side)).save(stream, "JPEG", progressive=True)
    data = stream.getvalue()
    last = data.rindex(b"\xff\xda")
    return data[:-2] + data[last:-2] * more + data[-2:] + after


@pytest.mark.parametrize(("big", "order"), [(False, "<"), (False, ">"), (True, "<")])
def test_tiles_are_measured_as_libtiff_reads_them(client: Client, big: bool, order: str) -> None:
    good = tiff((64, 48), big=big, order=order)
    with Image.open(io.BytesIO(good)) as image:
        image.load()
    assert tile_of_tiff(good) == (64, 48)
    assert client.call("POST", "/v1/predict", good)[0] == 200
    for tiles in (((30_000, 30_000),), ((30_000, 30_000), (16, 16)), ((16, 16), (30_000, 30_000))):
        status, answer, _ = client.call("POST", "/v1/predict", tiff(*tiles, big=big, order=order))
        assert status == 422 and "30000 × 30000 pixels" in answer["error"]


def test_scans_of_a_jpeg_are_limited(client: Client) -> None:
    assert count_scans(progressive(64, 0)) == 6 and count_scans(progressive(64, 50)) == 56
    assert count_scans(progressive(64, 1000)) == 101  # counted no further
    assert count_scans(progressive(64, 0, after=b"\xff\xda\0\2" * 1000)) == 6  # phones append videos
    assert count_scans(b"\x89PNG" + b"\xff\xda" * 200) == 0
    for data, expected in ((progressive(64, 50), 200), (progressive(64, 150), 422), (progressive(4000, 80), 422)):
        status, answer, _ = client.call("POST", "/v1/predict", data)
        assert status == expected and (status == 200 or "scans" in answer["error"])


def test_blocks_between_the_scans_of_a_jpeg_are_limited(client: Client) -> None:
    data = progressive(64, 0)
    last = data.rindex(b"\xff\xda")
    for blocks, expected in ((1000, 200), (100_001, 422)):
        status, answer, _ = client.call("POST", "/v1/predict", data[:last] + b"\xff\xe0\0\2" * blocks + data[last:])
        assert status == expected and (status == 200 or "too many blocks" in answer["error"])


def test_every_byte_255_may_follow_a_scan() -> None:
    noise = Image.frombytes("RGB", (256, 256), os.urandom(3 * 256 * 256))
    for options in ({}, {"restart_marker_blocks": 3}, {"progressive": True}):
        stream = io.BytesIO()
        noise.save(stream, "JPEG", quality=95, **options)
        assert count_scans(stream.getvalue()) == (10 if "progressive" in options else 1)


def directory(fields: int, blob: int, *more: tuple[int, int, int]) -> bytes:
    """Return a TIFF directory of `fields` fields, of which all but `more` (tag, count, value) name the same `blob` bytes."""
    entries = [(tag, 4, count, value) for tag, count, value in more]
    entries += [(1000 + number, 7, blob, None) for number in range(fields - len(more))]
    start = 8 + 2 + 12 * fields + 4
    packed = b"".join(struct.pack("<HHII", tag, kind, count, start if at is None else at) for tag, kind, count, at in entries)
    return struct.pack("<2sHIH", b"II", 42, 8, fields) + packed + bytes(4) + bytes(blob)


def files_of_large_directories() -> dict[str, bytes]:
    """Return files of 0.3 MB whose metadata Pillow reads as 260 MB, since many fields name the same bytes."""
    exif = directory(1000, 1 << 18)
    values = {256: 16, 257: 16, 258: 8, 259: 1, 262: 1, 273: 8, 277: 1, 278: 16, 279: 256}
    files = {"TIFF": directory(1000, 1 << 18, *((tag, 1, value) for tag, value in values.items()))}
    for kind, options in (("PNG", {}), ("WEBP", {"lossless": True})):
        stream = io.BytesIO()
        Image.new("RGB", (16, 16)).save(stream, kind, exif=exif, **options)
        files[kind] = stream.getvalue()
    jpeg = io.BytesIO()
    Image.new("RGB", (16, 16)).save(jpeg, "JPEG")
    parts = [b"Exif\0\0" + exif[start : start + 60_000] for start in range(0, len(exif), 60_000)]
    segments = b"".join(b"\xff\xe1" + struct.pack(">H", len(part) + 2) + part for part in parts)
    return {**files, "JPEG": jpeg.getvalue()[:2] + segments + jpeg.getvalue()[2:]}


@pytest.mark.parametrize("kind", ["TIFF", "PNG", "WEBP", "JPEG"])
def test_metadata_are_not_larger_than_their_file(client: Client, kind: str) -> None:
    tracemalloc.start()
    status, answer, _ = client.call("POST", "/v1/predict", files_of_large_directories()[kind])
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert status == 422 and "metadata are larger than the file" in answer["error"]
    assert most < 32e6


def test_strips_are_not_there_more_than_once(client: Client) -> None:
    def strips(count: int) -> bytes:
        fields = [(256, 4, 64), (257, 4, 64), (258, 4, 8), (259, 4, 1), (262, 4, 1), (273, 1, None), (277, 4, 1), (278, 4, 1)]
        start = 8 + 2 + 12 * len(fields) + 4
        packed = b"".join(
            struct.pack("<HHII", tag, kind, count if value is None else 1, start if value is None else value)
            for tag, kind, value in fields
        )
        return struct.pack("<2sHIH", b"II", 42, 8, len(fields)) + packed + bytes(4) + b"\x08" * count + bytes(64)

    assert client.call("POST", "/v1/predict", strips(64))[0] == 200
    for count, reason in ((64 * 6, "more than once"), (400_000, "too many strips")):
        status, answer, _ = client.call("POST", "/v1/predict", strips(count))
        assert status == 422 and reason in answer["error"]


def bmp(width: int, height: int, data: bytes) -> bytes:
    """Return a BMP of 8 bits with a palette, compressed by run lengths."""
    start = 14 + 40 + 1024
    header = struct.pack("<IiiHHIIiiII", 40, width, height, 1, 8, 1, len(data), 0, 0, 256, 0)
    return b"BM" + struct.pack("<IHHI", start + len(data), 0, 0, start) + header + bytes(1024) + data


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (bmp(8_000_000, 1, b"\0\2\xff\xff\xff\xff"), "run lengths"),  # 2 GB of zeros
        (bmp(8_000_000, 8, b"\1\1\0\0" * 8), "run lengths"),  # 64 million zeros one by one
        (b"P3 100 100 255\n" + b"#\n" * (1 << 20), "PPM file of text"),  # each comment is a copy of the rest
        (b"P6 #" + b"x" * (8 << 20) + b"\n1 1 255\nabc", "not an image of a known format"),  # read byte by byte
    ],
)
def test_what_pillow_decodes_in_python_is_refused(client: Client, data: bytes, expected: str) -> None:
    began = time.process_time()
    _, answer, _ = client.call("POST", "/v1/predict", data)
    assert expected in answer["error"] and time.process_time() - began < 1


def encoded(image: Image.Image, kind: str) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind)
    return stream.getvalue()


def test_an_icon_is_not_decoded_when_it_is_opened(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[object] = []
    original = PngImagePlugin.PngImageFile.load_prepare
    monkeypatch.setattr(PngImagePlugin.PngImageFile, "load_prepare", lambda self: (loaded.append(self.size), original(self))[1])
    png = encoded(Image.new("L", (2000, 2000)), "PNG")
    icon = struct.pack("<HHHBBBBHHII", 0, 1, 1, 0, 0, 0, 0, 1, 32, len(png), 22) + png
    status, answer, _ = client.call("POST", "/v1/predict", icon)
    assert status == 415 and "not an image of a known format" in answer["error"] and loaded == []
    assert client.call("POST", "/v1/predict", png)[0] == 200 and loaded == [(2000, 2000)]


SIZE = 30 << 20


@pytest.mark.parametrize(
    ("start", "piece", "status"),
    [
        (b"%!PS-Adobe-3.0 EPSF-3.0\n", b"%%A: b\n", 415),
        (b"/* XPM */\n", b"\n", 415),
        (b"", b"Name: a\r\n", 415),  # IM
        (b"\xff\xd8", b"\xff\xe5\0\2", 422),  # empty segments
        (b"\xff\xd8", b"\xff\xd8", 422),  # markers without a length
        (b"\xff\xd8", b"\xff", 422),
        (b"\xff\xd8\xff\xe0\0\2", b"\0", 422),
        (b"\x89PNG\r\n\x1a\n", struct.pack(">I4sI", 0, b"teXt", zlib.crc32(b"teXt")), 422),
        (b"GIF89a\1\0\1\0\0\0\0", b"\0", 422),
        (b"GIF89a\1\0\1\0\0\0\0!\xf9", b"\1a", 422),
    ],
)
def test_pieces_that_pillow_reads_one_by_one_are_limited(start: bytes, piece: bytes, status: int) -> None:
    data = start + piece * (SIZE // len(piece))
    began = time.process_time()
    with pytest.raises(ServiceError) as found:
        decode(data, Preprocess(size=(32, 32)), ServeSettings(), PixelLimit(1 << 26))
    assert found.value.status == status and time.process_time() - began < 1


@pytest.mark.slow
def test_pieces_of_ordinary_files_are_few(client: Client) -> None:
    noise = Image.frombytes("RGB", (1200, 1200), os.urandom(3 * 1200 * 1200))
    jpeg = encoded(noise, "JPEG")
    segments = b"".join(b"\xff\xe2" + struct.pack(">H", 65535) + bytes(65533) for _ in range(300))  # a profile of 20 MB
    for data in (jpeg, jpeg[:2] + segments + jpeg[2:], encoded(noise, "PNG"), encoded(noise, "GIF")):
        assert client.call("POST", "/v1/predict", data)[0] == 200


def test_comments_of_a_gif_are_limited(client: Client) -> None:
    stream = io.BytesIO()
    Image.linear_gradient("L").save(stream, "GIF")
    data = stream.getvalue()
    picture = 13 + 3 * 256

    def commented(blocks: int) -> bytes:
        return data[:picture] + b"!\xfe" + (b"\xff" + b"x" * 255) * blocks + b"\0" + data[picture:]

    assert client.call("POST", "/v1/predict", commented(200))[0] == 200
    began = time.process_time()
    status, answer, _ = client.call("POST", "/v1/predict", commented(60_000))
    assert status == 422 and "too many comments" in answer["error"] and time.process_time() - began < 1


def test_a_narrow_image_is_not_resized_to_a_huge_one(bundle: Bundle) -> None:
    preprocess = Preprocess(size=(64, 64), resize="short-side", resize_to=73)
    limit = PixelLimit(1)
    stream = io.BytesIO()
    Image.new("RGB", (33_000, 1)).save(stream, "PNG")
    with pytest.raises(ServiceError, match="33000 × 1 pixels, and 175,857,000 while it is resized"):
        decode(stream.getvalue(), preprocess, ServeSettings(), limit)
    assert decode(stream.getvalue(), Preprocess(size=(64, 64)), ServeSettings(), limit).pixels.shape == (3, 64, 64)


def test_a_data_uri_of_many_parameters_takes_no_memory() -> None:
    text = "data:" + ";a" * 1_000_000
    tracemalloc.start()
    with pytest.raises(ServiceError, match="not a data: URI"):
        bytes_of_text(text)
    assert tracemalloc.get_traced_memory()[1] < 1e6
    tracemalloc.stop()
    assert bytes_of_text("data:image/jpeg;charset=utf-8;base64,aGk=") == b"hi"


@pytest.mark.slow
def test_sigterm_ends_the_process_while_an_image_is_decoded(bundle: Bundle, jpegs: list[bytes]) -> None:
    script = (
        "import time, vitrail.data.preprocess as p\n"
        "p.Preprocess.pixels = lambda *given, **options: time.sleep(60)\n"
        "from vitrail.cli import main\n"
        f"main(['serve', {bundle.report.source!r}, '--port', '0', '--deadline', '1', '--decode-in', 'threads'])\n"
    )
    with process_running(script) as (process, client):
        assert until(lambda: client.call("GET", "/v2/health/ready")[0] == 200, 60)
        assert client.call("POST", "/v1/predict", jpegs[0])[0] == 503
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


@pytest.mark.parametrize("value", [b"[]", b"{}", b"1", b'""'])
def test_json_of_millions_of_values_is_refused_before_it_is_parsed(client: Client, value: bytes) -> None:
    many = b",".join([value] * (3 << 20))
    infer = b'{"inputs": [{"name": "images", "shape": [1, 3, 32, 32], "datatype": "FP32", "data": [' + many + b"]}]}"
    for path, body in (("/v2/models/tiny/infer", infer), ("/v1/embeddings", b'{"input": [' + many + b"]}")):
        began = time.monotonic()
        status, answer, _ = client.call("POST", path, body)
        assert status == 413 and "too many values" in error_text(answer)
        assert time.monotonic() - began < 1


def test_a_full_request_of_nested_numbers_is_read(client: Client) -> None:
    images = [[[[0.5] * 32] * 32] * 3] * 64
    given = {"name": "images", "shape": [64, 3, 32, 32], "datatype": "FP32", "data": images}
    status, answer, _ = client.call("POST", "/v2/models/tiny/infer", {"inputs": [given]})
    assert status == 200 and answer["outputs"][0]["shape"] == [64, 4]
