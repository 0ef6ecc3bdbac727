"""Send requests that are wrong in every way to `vitrail serve`: from its OpenAPI description, mutated images, mutated bytes.

    python -m benchmarks.fuzz_service --requests 20000 --seed 0     # with the included model: about ten minutes on one free core

A third of the requests is made by schemathesis, half are mutated images in all the ways an image can be sent, the rest are mutated
HTTP requests on a bare socket. Every answer must be a success, a 4xx or a 503; an error must be JSON with the key `error`, and must
not contain a stack trace. At the end the server must be alive and ready, with no image left in it, without an unexpected error in
its log, and no larger than after the first quarter of the requests; then it must end with status 0.

Prints a table and, with --results, writes it to a CSV file with hardware and versions.
"""

from __future__ import annotations

import argparse
import base64
import csv
import http.client
import io
import json
import os
import platform
import random
import re
import socket
import struct
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.serving_load import Server

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
_HEAD = re.compile(rb"(?:HTTP/1\.1 100 [^\r]*\r\n\r\n)*HTTP/1\.1 (\d{3}) [^\r]*\r\n(.*?)\r\n\r\n", re.DOTALL)
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
Outcome = Counter[str]


def check(status: int, body: bytes, content_type: str, what: str) -> str:
    """Return the status as text, or raise an error if the answer is not one that the service may give."""
    problem = None
    if status >= 500 and status != 503:
        problem = "a failure of the server"
    elif b"Traceback" in body or b'File "' in body or b".py" in body:
        problem = "a stack trace"
    elif status >= 400:
        try:
            if "json" not in content_type or list(json.loads(body)) != ["error"]:
                problem = "an error without the key error"
        except ValueError:
            problem = "an error that is not JSON"
    if problem:
        raise AssertionError(f"{what}: {problem}: {status} {content_type} {body[:300]!r}")
    return str(status)


def from_schema(port: int, model: str, count: int, seed: int) -> Iterator[str]:
    """Send what schemathesis makes of the OpenAPI description, right and wrong alike."""
    import schemathesis
    from schemathesis import GenerationMode

    address = f"http://127.0.0.1:{port}"
    with urllib.request.urlopen(f"{address}/openapi.json") as answer:
        description = json.load(answer)
    known = {"name": [model], "version": ["1", "2"], "number": [0, 1, 99], "key": [_analysed(address), "nothing"]}
    for operations_of_path in description["paths"].values():
        for described in operations_of_path.values():
            for parameter in described.get("parameters", []):
                if parameter["in"] == "path":  # otherwise nearly all would be unknown models and images
                    parameter["schema"]["enum"] = known[parameter["name"]]
    operations = [found.ok() for found in schemathesis.openapi.from_dict(description).get_all_operations()]
    each = max(1, count // (2 * len(operations)))
    for operation in operations:
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
            yield from _from_operation(operation.as_strategy(generation_mode=mode), address, each, seed)


def _analysed(address: str) -> str:
    """Let the explorer analyse an image, and return its id."""
    with urllib.request.urlopen(f"{address}/explorer/images/0") as answer:
        image = answer.read()
    with urllib.request.urlopen(urllib.request.Request(f"{address}/explorer/analyse", image)) as answer:
        key: str = json.load(answer)["id"]
    return key


def _from_operation(strategy: Any, address: str, count: int, seed: int) -> list[str]:
    import hypothesis

    statuses: list[str] = []

    def send(case: Any) -> None:
        answer = case.call(base_url=address, timeout=30)
        kind = answer.headers.get("content-type", [""])[0]
        statuses.append(check(answer.status_code, answer.content, kind, f"{case.method} {case.formatted_path}"))

    settings = hypothesis.settings(
        max_examples=count,
        deadline=None,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=[hypothesis.Phase.generate],
    )
    with suppress(hypothesis.errors.Unsatisfiable):  # an operation without parameters cannot be called wrongly
        hypothesis.seed(seed)(settings(hypothesis.given(strategy)(send)))()
    return statuses


def pictures() -> list[bytes]:
    """Return small images of every format, mode and kind that decoders treat differently."""
    values = np.random.default_rng(0).integers(0, 256, (24, 30, 3), dtype=np.uint8)
    found = []
    for format in FORMATS:
        for mode in ("RGB", "L", "P", "CMYK", "RGBA", "I;16"):
            stream = io.BytesIO()
            try:
                image = (
                    Image.fromarray(values[..., 0].astype(np.uint16) * 257)
                    if mode == "I;16"
                    else Image.fromarray(values).convert(mode)
                )
                image.save(stream, format)
            except (OSError, ValueError, KeyError):
                continue  # this format has no such mode
            found.append(stream.getvalue())
    stream = io.BytesIO()
    Image.fromarray(values).save(
        stream, "JPEG", progressive=True, exif=b"Exif\0\0II*\0\x08\0\0\0\1\0\x12\1\3\0\1\0\0\0\6\0\0\0\0\0\0\0"
    )
    return [*found, stream.getvalue()]


def mutate(data: bytes, generator: random.Random) -> bytes:
    """Flip bits, overwrite, cut, repeat or insert, up to eight times, mostly near the start, where headers are."""
    changed = bytearray(data)
    for _ in range(generator.randint(1, 8)):
        if not changed:
            break
        limit = len(changed) if generator.random() < 0.5 else min(len(changed), 64)
        at, length = generator.randrange(limit), generator.choice((1, 1, 2, 4, 16, 300))
        kind = generator.randrange(7)
        if kind == 0:
            changed[at] ^= 1 << generator.randrange(8)
        elif kind == 1:
            changed[at : at + length] = generator.randbytes(length)
        elif kind == 2:
            changed[at : at + 4] = struct.pack(
                generator.choice((">I", "<I")), generator.choice((0, 1, 255, 65535, 2**31 - 1, 2**32 - 1))
            )
        elif kind == 3:
            del changed[at : at + length]
        elif kind == 4:
            del changed[at + generator.randint(1, len(changed)) :]
        elif kind == 5:
            changed[at:at] = changed[at : at + length] * generator.randint(1, 20)
        else:
            changed[at:at] = generator.choice((b"\r\n", b"\0", b'"', b"%00", b"\xff\xd8", b"--", b"{", b"\xf0\x9f\x98\x80"))
    return bytes(changed)


def from_images(port: int, model: str, count: int, seed: int) -> Iterator[str]:
    """Send mutated images: as a body, in forms, as data: URIs and in tensors."""
    generator, good = random.Random(seed), pictures()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    for _ in range(count):
        method, path, body, headers = _image_request(generator, good, model)
        try:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            yield check(answer.status, answer.read(), answer.getheader("content-type", ""), f"{path} {body[:80]!r}")
        except (http.client.RemoteDisconnected, ConnectionError):
            connection.close()
            yield "closed"
    connection.close()


def _image_request(generator: random.Random, good: list[bytes], model: str) -> tuple[str, str, bytes, dict[str, str]]:
    images = [mutate(data, generator) if generator.random() < 0.9 else data for data in generator.choices(good, k=3)]
    kind = generator.randrange(6)
    if kind <= 2:
        path = "/v1/predict" if kind < 2 else f"/v1/attention?format={generator.choice(('png', 'json'))}"
        return "POST", path, images[0], {"Content-Type": generator.choice(("image/jpeg", "application/octet-stream", "", "text/x"))}
    if kind == 3:
        parts = [b'--b\r\nContent-Disposition: form-data; name="f"; filename="x"\r\n\r\n%s\r\n' % one for one in images]
        body = b"".join([*parts, b"--b--\r\n"])
        body = mutate(body, generator) if generator.random() < 0.3 else body
        return "POST", "/v1/predict", body, {"Content-Type": "multipart/form-data; boundary=b"}
    texts = [base64.b64encode(one).decode() for one in images]
    if kind == 4:
        value: Any = {"input": [f"data:image/png;base64,{text}" for text in texts[: generator.randint(1, 3)]]}
        path = "/v1/embeddings"
    else:
        value = {"inputs": [{"name": "encoded_images", "shape": [3], "datatype": "BYTES", "data": texts}]}
        path = f"/v2/models/{model}/infer"
    body = json.dumps(value).encode()
    body = mutate(body, generator) if generator.random() < 0.3 else body
    return "POST", path, body, {"Content-Type": "application/json"}


def from_bytes(port: int, model: str, count: int, seed: int) -> Iterator[str]:
    """Send mutated requests on a bare socket. A connection that is closed without an answer is right, too."""
    generator, picture = random.Random(seed), pictures()[0]
    form = b'--b\r\nContent-Disposition: form-data; name="f"; filename="x"\r\n\r\n%s\r\n--b--\r\n' % picture
    good = [
        b"GET /v1/models HTTP/1.1\r\nHost: a\r\n\r\n" * 2,
        b"GET /v2/models/%s HTTP/1.0\r\n\r\n" % model.encode(),
        b"POST /v1/predict?top=3 HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%s" % (len(picture), picture),
        b"POST /v1/predict HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n"
        % (len(picture), picture),
        b"POST /v1/predict HTTP/1.1\r\nHost: a\r\nContent-Type: multipart/form-data; boundary=b\r\nContent-Length: %d\r\n\r\n%s"
        % (len(form), form),
        b'POST /v1/embeddings HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 13\r\n\r\n{"input": ""}',
    ]
    for _ in range(count):
        data = mutate(generator.choice(good), generator)
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
                connection.sendall(data)
                time.sleep(0.002)  # a half-closed connection counts as one that its client has left
                connection.shutdown(socket.SHUT_WR)
                answer = b""
                while part := connection.recv(65536):
                    answer += part
        except ConnectionError:
            yield "closed"
            continue
        yield _check_answers(answer, data)


def _check_answers(answer: bytes, sent: bytes) -> str:
    status, start = "closed", 0
    while found := _HEAD.match(answer, start):
        length = re.search(rb"content-length: (\d+)", found[2])
        kind = re.search(rb"content-type: ([^\r]*)", found[2])
        start = found.end() + (int(length[1]) if length else 0)
        body = answer[found.end() : start]
        if not sent.startswith(b"HEAD"):
            status = check(int(found[1]), body, kind[1].decode() if kind else "", repr(sent[:200]))
    if start == 0 and answer and answer != _CONTINUE:
        raise AssertionError(f"{sent[:200]!r}: not an HTTP answer: {answer[:300]!r}")
    return status


@contextmanager
def no_proxy() -> Iterator[None]:
    before = os.environ.get("NO_PROXY")
    os.environ["NO_PROXY"] = "127.0.0.1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["NO_PROXY"]
        else:
            os.environ["NO_PROXY"] = before


def fuzz(port: int, model: str, requests: int, seed: int, watch: Callable[[int], None] = lambda done: None) -> dict[str, Outcome]:
    """Send about so many requests of all kinds, alternating between them; return the statuses by kind."""
    outcomes: dict[str, Outcome] = {"OpenAPI": Counter(), "images": Counter(), "bytes": Counter()}
    done = 0
    with no_proxy():
        for name, answers in (
            ("images", from_images(port, model, requests // 2, seed)),
            ("OpenAPI", from_schema(port, model, requests // 3, seed)),
            ("bytes", from_bytes(port, model, requests - requests // 2 - requests // 3, seed)),
        ):
            for status in answers:
                outcomes[name][status] += 1
                done += 1
                watch(done)
        missing = requests - done  # schemathesis makes fewer where there is little to vary
        for status in from_images(port, model, max(0, missing), seed + 1):
            outcomes["images"][status] += 1
            done += 1
            watch(done)
    return outcomes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        log, began = Path(folder) / "log", time.monotonic()
        server = Server(["-m", "vitrail", "serve", "--upload-seconds", "5"], log, cores=None)
        memory: list[int] = []

        def watch(done: int) -> None:
            if done % 100 == 0:
                assert server.process.poll() is None, f"the server has ended: {log.read_text(errors='replace')[-3000:]}"
                memory.append(server.memory())
            if done % 1000 == 0:
                print(f"{done} requests, {memory[-1] / 1e6:.0f} MB", flush=True)

        try:
            model = json.loads(server.get("/v1/models")[1])["data"][0]["id"]
            outcomes = fuzz(server.port, model, options.requests, options.seed, watch)
            assert server.get("/v2/health/ready")[0] == 200
            metrics = server.get("/metrics")[1]
            assert re.search(r"vitrail_images_in_flight\{[^}]*\} 0\n", metrics), "images are left in the service"
        finally:
            status = server.stop()
        assert status == 0, f"exit status {status}"
        text = log.read_text(errors="replace")
        assert '"level": "error"' not in text, text[text.index('"level": "error"') - 200 :][:3000]
        early, late = max(memory[: len(memory) // 4 or 1]), max(memory)
        assert late < 1.25 * early + (64 << 20), f"memory grew from {early / 1e6:.0f} to {late / 1e6:.0f} MB"
        report(options, outcomes, early, late, time.monotonic() - began)


def report(options: argparse.Namespace, outcomes: dict[str, Outcome], early: int, late: int, seconds: float) -> None:
    rows = [{"kind": kind, "requests": sum(found.values()), **dict(sorted(found.items()))} for kind, found in outcomes.items()]
    for row in rows:
        print(row)
    total = sum(sum(found.values()) for found in outcomes.values())
    print(f"{total} requests in {seconds:.0f} s, memory {early / 1e6:.0f} MB after a quarter, at most {late / 1e6:.0f} MB")
    if options.results is None:
        return
    facts = {
        "hardware": f"{platform.machine()}, {os.cpu_count()} cores",
        **{name: version(name) for name in ("vitrail", "torch", "pillow", "fastapi", "uvicorn", "schemathesis")},
        "seed": options.seed,
        "seconds": round(seconds),
        "memory_early_mb": early // 10**6,
        "memory_most_mb": late // 10**6,
    }
    statuses = sorted({status for found in outcomes.values() for status in found})
    with options.results.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["kind", "requests", *statuses, *facts], restval=0)
        writer.writeheader()
        writer.writerows({**row, **facts} for row in rows)


if __name__ == "__main__":
    main()
