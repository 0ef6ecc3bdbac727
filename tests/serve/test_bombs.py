"""Small files that take much memory or time to decode are refused, and a decoder that takes long does not keep the process."""

from __future__ import annotations

import io
import os
import signal
import struct
import subprocess
import sys
import threading
import time
import zlib

import pytest
from PIL import Image

from tests.serve.conftest import Client, until
from vitrail.checkpoints import Bundle
from vitrail.serve.images import count_scans, tile_of_tiff


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


def test_every_byte_255_may_follow_a_scan() -> None:
    noise = Image.frombytes("RGB", (256, 256), os.urandom(3 * 256 * 256))
    for options in ({}, {"restart_marker_blocks": 3}, {"progressive": True}):
        stream = io.BytesIO()
        noise.save(stream, "JPEG", quality=95, **options)
        assert count_scans(stream.getvalue()) == (10 if "progressive" in options else 1)


@pytest.mark.slow
def test_sigterm_ends_the_process_while_an_image_is_decoded(bundle: Bundle, jpegs: list[bytes]) -> None:
    script = (
        "import time, vitrail.data.preprocess as p\n"
        "p.Preprocess.__call__ = lambda *given, **options: time.sleep(60)\n"
        "from vitrail.cli import main\n"
        f"main(['serve', {bundle.report.source!r}, '--port', '0', '--deadline', '1'])\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        port = int(process.stderr.readline().split(" at http://127.0.0.1:")[1].split()[0])
        reader = threading.Thread(target=process.stderr.read, daemon=True)
        reader.start()
        client = Client(None, port)  # type: ignore[arg-type]
        assert until(lambda: client.call("GET", "/v2/health/ready")[0] == 200, 60)
        assert client.call("POST", "/v1/predict", jpegs[0])[0] == 503
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        try:
            assert process.wait(20) == 0 and time.monotonic() - began < 15
        finally:
            process.kill()


@pytest.mark.parametrize("value", [b"[]", b"{}", b"1", b'""'])
def test_json_of_millions_of_values_is_refused_before_it_is_parsed(client: Client, value: bytes) -> None:
    many = b",".join([value] * (3 << 20))
    infer = b'{"inputs": [{"name": "images", "shape": [1, 3, 32, 32], "datatype": "FP32", "data": [' + many + b"]}]}"
    for path, body in (("/v2/models/tiny/infer", infer), ("/v1/embeddings", b'{"input": [' + many + b"]}")):
        began = time.monotonic()
        status, answer, _ = client.call("POST", path, body)
        assert status == 413 and "too many values" in answer["error"]
        assert time.monotonic() - began < 1


def test_a_full_request_of_nested_numbers_is_read(client: Client) -> None:
    images = [[[[0.5] * 32] * 32] * 3] * 64
    given = {"name": "images", "shape": [64, 3, 32, 32], "datatype": "FP32", "data": images}
    status, answer, _ = client.call("POST", "/v2/models/tiny/infer", {"inputs": [given]})
    assert status == 200 and answer["outputs"][0]["shape"] == [64, 4]
