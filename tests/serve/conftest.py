"""A service around a small model, with a real server on a loopback port."""

from __future__ import annotations

import http.client
import io
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch
from torch import nn

import vitrail
from tests.serve.chromium import chromium
from vitrail.checkpoints import Bundle
from vitrail.checkpoints.native import save
from vitrail.checkpoints.pretrained import DEFAULT
from vitrail.data.preprocess import Preprocess
from vitrail.export.verify import sample_photos
from vitrail.models import create_model
from vitrail.serve.server import serve
from vitrail.serve.service import Service
from vitrail.serve.settings import ServeSettings

DESKTOP = {"width": 1280, "height": 800}


@pytest.fixture(scope="session")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    torch.manual_seed(0)
    model = create_model("ViT-Ti/16", outputs=4, seed=0, width=32, depth=2, heads=2, mlp=64, patch=8, image_size=32)
    nn.init.normal_(model.head.weight, std=0.5)
    folder: Path = tmp_path_factory.mktemp("serve") / "tiny"
    save(folder, model, preprocess=Preprocess(size=(32, 32)), classes=["ant", "bee", "cat", "dog"])
    return vitrail.load(folder)


@pytest.fixture(scope="session")
def jpegs() -> list[bytes]:
    def encoded(photo: Any) -> bytes:
        stream = io.BytesIO()
        photo.save(stream, "JPEG")
        return stream.getvalue()

    return [encoded(photo) for photo in sample_photos(6)]


@dataclass
class Client:
    """A server's address, and how to call it."""

    service: Service
    port: int

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)

    def call(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any, dict[str, str]]:
        connection = self.connect()
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        if isinstance(body, dict):
            body, names["content-type"] = json.dumps(body), "application/json"
        connection.request(method, path, body, names)
        answer = connection.getresponse()
        data = answer.read()
        found = {name.lower(): value for name, value in answer.getheaders()}
        connection.close()
        return answer.status, json.loads(data) if "json" in found.get("content-type", "") else data, found


def error_text(answer: Any) -> str:
    """Return the text of an error, which is an object at the addresses that OpenAI's clients call."""
    assert list(answer) == ["error"], answer
    error = answer["error"]
    return error if isinstance(error, str) else error["message"]  # type: ignore[no-any-return]


@contextmanager
def running(
    load: Callable[[], Bundle],
    *,
    second: Callable[[], Bundle] | None = None,
    token: str | None = None,
    cors: tuple[str, ...] = (),
    wait: bool = True,
    **settings: Any,
) -> Iterator[Client]:
    """Run a server in a thread until the block ends."""
    models = {"tiny": load} if second is None else {"tiny": load, "second": second}
    service = Service(models, ServeSettings(**settings))
    address: list[str] = []
    failure: list[BaseException] = []
    servers: list[Any] = []
    original = service.start

    def start(on_failure: Callable[[], None]) -> None:
        servers.append(on_failure)  # it asks the server to end
        original(on_failure)

    service.start = start  # type: ignore[method-assign]

    def run() -> None:
        try:
            serve(service, host="127.0.0.1", port=0, token=token, cors=cors, announce=address.append)
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    end = time.monotonic() + 10
    while not address and thread.is_alive() and time.monotonic() < end:
        time.sleep(0.005)
    client = Client(service, int(address[0].rpartition(":")[2]))
    while wait and service.workers["tiny"].state == "loading" and time.monotonic() < end:
        time.sleep(0.005)
    try:
        yield client
    finally:
        servers[0]()
        thread.join(15)
        assert not thread.is_alive()


@contextmanager
def process_running(script: str) -> Iterator[tuple[subprocess.Popen[str], Client]]:
    """Run a script that serves in a process of its own, until the block ends."""
    with subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            port = int(process.stderr.readline().split(" at http://127.0.0.1:")[1].split()[0])
            threading.Thread(target=process.stderr.read, daemon=True).start()  # a full pipe would stop it
            yield process, Client(None, port)  # type: ignore[arg-type]
        finally:
            process.kill()  # if a check has failed: the end of `with` waits for the process


@pytest.fixture(scope="module")
def client(bundle: Bundle) -> Iterator[Client]:
    with running(lambda: bundle) as one:
        yield one


def until(condition: Callable[[], bool], seconds: float = 5.0) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.005)
    return condition()


@pytest.fixture(scope="module")
def included() -> Bundle:
    return vitrail.load(DEFAULT)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Any]:
    """Open a page; at the end it must have asked only its own origin, and have had no error in its console."""
    contexts, problems = [], []

    def open_(address: str, viewport: dict[str, int] | None = None, *, expected: tuple[str, ...] = (), **options: Any) -> Any:
        context = browser.new_context(viewport=viewport or DESKTOP, accept_downloads=True, **options)
        contexts.append(context)
        page = context.new_page()
        own = urlsplit(address)

        def requested(request: Any) -> None:
            asked = urlsplit(request.url)
            if (asked.scheme, asked.netloc) != (own.scheme, own.netloc) and asked.scheme not in ("blob", "data"):
                problems.append(f"asked for {request.url}")
            if own.scheme == "file" and request.url.partition("#")[0] != address.partition("#")[0] and asked.scheme != "blob":
                problems.append(f"a saved page asked for {request.url}")

        page.on("request", requested)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on(
            "console", lambda line: problems.append(line.text) if line.type == "error" and not _any(line.text, expected) else None
        )
        page.goto(address)
        return page

    yield open_
    for context in contexts:
        context.close()
    assert not problems


def _any(text: str, parts: tuple[str, ...]) -> bool:
    return any(part in text for part in parts)
