"""Parts of the service that a wrong answer would not show at once."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fastapi import Request, Response

from tests.serve.conftest import running
from vitrail.checkpoints import Bundle
from vitrail.data.preprocess import PRESETS, preset
from vitrail.errors import VitrailError
from vitrail.models import create_model
from vitrail.serve.engine import Engine
from vitrail.serve.errors import ServiceError
from vitrail.serve.exploration import masked
from vitrail.serve.images import decode
from vitrail.serve.known_queries import KnownQueries
from vitrail.serve.limits import PixelLimit
from vitrail.serve.metrics import Metrics
from vitrail.serve.model_input import ModelInput
from vitrail.serve.own import _one_map
from vitrail.serve.settings import ServeSettings, token_of_environment
from vitrail.serve.worker import Job, Kind, ModelWorker


def test_a_batch_has_images_of_one_kind(bundle: Bundle) -> None:
    worker = ModelWorker("x", lambda: bundle, ServeSettings(), Metrics())
    kinds: tuple[Kind, ...] = ("logits", "embedding", "logits", "embedding", "embedding")
    loop = asyncio.new_event_loop()
    jobs = [Job(kind, torch.zeros(1), time.monotonic() + 60, print, loop) for kind in kinds]
    worker._jobs.extend(jobs)
    assert worker._take() == [jobs[0], jobs[2]]
    assert worker._take() == [jobs[1], jobs[3], jobs[4]]
    assert worker._take() == []
    loop.close()


def test_a_batch_has_images_of_one_type_and_shape(bundle: Bundle) -> None:
    worker, loop = ModelWorker("x", lambda: bundle, ServeSettings(), Metrics()), asyncio.new_event_loop()
    pixels: list[Any] = [np.zeros(size, kind) for size, kind in ((1, np.uint8), (1, np.uint8), (1, np.float32), (2, np.uint8))]
    images = [pixels[0], torch.zeros(1), *pixels[1:]]
    jobs = [Job("logits", image, time.monotonic() + 60, print, loop) for image in images]
    worker._jobs.extend(jobs)
    assert [worker._take() for _ in range(5)] == [[jobs[0], jobs[2]], [jobs[1]], [jobs[3]], [jobs[4]], []]
    loop.close()


@pytest.mark.parametrize("name", PRESETS)
def test_the_models_input_is_that_of_the_preprocessing(name: str, jpegs: list[bytes]) -> None:
    preprocess = preset(name, size=32)
    decoded = [decode(one, preprocess, ServeSettings(), PixelLimit(10_000_000)).pixels for one in jpegs]
    batch = ModelInput(preprocess, torch.device("cpu"), 8)(decoded, len(decoded))
    assert torch.equal(batch, torch.stack([preprocess(one) for one in jpegs])) and batch.is_contiguous()


def test_batches_are_filled_up_in_two_places_by_turns(jpegs: list[bytes]) -> None:
    preprocess = preset("timm", size=32)
    decoded = [decode(one, preprocess, ServeSettings(), PixelLimit(10_000_000)).pixels for one in jpegs]
    expected = torch.stack([preprocess(one) for one in jpegs])
    made = ModelInput(preprocess, torch.device("cpu"), 8)
    for first, count, size in ((0, 3, 4), (3, 1, 1), (1, 5, 8)):
        batch = made(decoded[first : first + count], size)
        assert batch.shape == (size, 3, 32, 32) and torch.equal(batch[:count], expected[first : first + count])
    one, two, three = (made([image], 2) for image in expected[:3])  # normalised already: the memory itself
    assert one.dtype == torch.float32 and one.data_ptr() == three.data_ptr() != two.data_ptr()
    assert torch.equal(two[0], expected[1]) and torch.equal(three[0], expected[2])
    four = made([expected[3], expected[4]], 2)
    assert four.data_ptr() == two.data_ptr() and torch.equal(three[0], expected[2]) and torch.equal(four, expected[3:5])


def test_an_analysis_may_keep_its_image(bundle: Bundle) -> None:
    """An explorer keeps what it has analysed, while other images are predicted."""
    engine = Engine(bundle, ServeSettings(max_batch=2, device="cpu"))
    ones, zeros = torch.ones(3, 32, 32), torch.zeros(3, 32, 32)
    kept = engine.analyse(lambda _, image: image, ones)
    for _ in range(2):
        engine.launch("logits", [zeros])
    assert kept.equal(torch.ones(3, 32, 32))


def test_a_query_that_was_validated_is_known_and_another_is_not(bundle: Bundle, jpegs: list[bytes]) -> None:
    with running(lambda: bundle) as client:
        long = 300 * "top=2&" + "top=1"
        refused = [("top=0", 400, 0), ("top=1&model=x", 404, 0), ("top=1&x=1", 400, 0)]
        good = [
            ("top=1", 200, 1),
            ("top=2", 200, 2),
            ("top=1&model=tiny", 200, 1),
            ("top=%31", 200, 1),
            (long, 200, 1),
            ("", 200, 4),
        ]
        for query, status, count in (*good, *refused, *good, *refused):
            found, answer, _ = client.call("POST", f"/v1/predict?{query}", jpegs[0])
            assert found == status, (query, answer)
            assert status != 200 or len(answer["results"][0]["predictions"]) == count


def test_few_queries_are_kept() -> None:
    async def endpoint(request: Request, top: int = 5) -> Response:
        return Response()

    route: Any = KnownQueries("/x", endpoint)
    for query in (*(b"top=%d" % number for number in range(250)), b"top=1&x=" + 1000 * b"y"):
        asyncio.run(route.endpoint(SimpleNamespace(scope={"query_string": query}), top=1))
    assert set(route.endpoint.known) == {b"top=%d" % number for number in range(200, 250)}


def test_everything_but_health_and_the_page_needs_the_token(bundle: Bundle) -> None:
    with running(lambda: bundle, token="secret") as client:
        for path in ("/metrics", "/openapi.json", "/v1/models", "/v2", "/v2/models/tiny", "/explorer/start", "/nothing"):
            assert client.call("GET", path)[0] == 401, path
            assert client.call("GET", path, authorization="Bearer secret")[0] == (404 if path == "/nothing" else 200), path


def test_an_empty_token_does_not_open_the_service() -> None:
    assert token_of_environment({}) is None
    assert token_of_environment({"VITRAIL_TOKEN": "secret\n"}) == "secret"
    for empty in ("", " \n"):
        with pytest.raises(VitrailError, match="is set but empty"):
            token_of_environment({"VITRAIL_TOKEN": empty})


@pytest.mark.parametrize("size", [(32, 32), (16, 32)])
def test_patches_off_are_counted_by_row(size: tuple[int, int]) -> None:
    found = masked(torch.ones(3, *size), (size[0] // 8, size[1] // 8), {1})
    expected = torch.ones(3, *size)
    expected[:, 0:8, 8:16] = 0
    assert torch.equal(found, expected)


def test_buckets_of_a_histogram_are_cumulative() -> None:
    metrics = Metrics()
    for size in (1, 2, 2, 300):
        metrics.observe("vitrail_batch_size", size, model="x")
    lines = metrics.text().splitlines()
    for limit, count in (("1", 1), ("2", 3), ("256", 3), ("+Inf", 4)):
        assert f'vitrail_batch_size_bucket{{model="x",le="{limit}"}} {count}' in lines
    assert 'vitrail_batch_size_count{model="x"} 4' in lines and 'vitrail_batch_size_sum{model="x"} 305' in lines


def test_a_resnet_has_no_attention_whatever_the_layer() -> None:
    model = create_model("R50x1", device="meta")
    for layer in (-1, 0, 5):
        with pytest.raises(VitrailError, match="is a ResNet: it has no attention"):
            _one_map(SimpleNamespace(model=model), torch.zeros(1, 3, 32, 32, device="meta"), layer, None, 0)  # type: ignore[arg-type]


def test_a_model_that_could_not_be_loaded_is_named_so(bundle: Bundle) -> None:
    worker = ModelWorker("x", lambda: bundle, ServeSettings(), Metrics())
    for state, words in (("loading", "x is loading."), ("failed", "x could not be loaded."), ("stopped", "x has stopped.")):
        worker.state = state  # type: ignore[assignment]
        with pytest.raises(ServiceError, match=f"{words} Try again later."):
            worker.admit(1)


@pytest.mark.slow
def test_every_line_of_the_log_is_json() -> None:
    code = (
        "import logging, warnings; from vitrail.serve.server import log_as_json; log_as_json()\n"
        "log = logging.getLogger('vitrail.serve')\n"
        "log.info('request', extra={'path': 'a\\nb\\u2028', 'seconds': 0.5})\n"
        "try: 1 / 0\n"
        "except ZeroDivisionError: log.exception('failed')\n"
        "warnings.warn('untrained')\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    request, failure, warning = map(json.loads, found.stderr.splitlines())
    assert request["path"] == "a\nb\u2028" and request["seconds"] == 0.5 and request["level"] == "info"
    assert failure["level"] == "error" and "ZeroDivisionError" in failure["traceback"]
    assert warning["level"] == "warning" and "untrained" in warning["message"]


@pytest.mark.slow
def test_a_page_is_saved_without_the_libraries_of_the_service(tmp_path: Path) -> None:
    hidden = "import sys; sys.modules.update(dict.fromkeys(('fastapi', 'starlette', 'uvicorn', 'pydantic')))"
    code = f"{hidden}; from vitrail.cli import main; main(['explore', '--save', 'page.html', '--device', 'cpu'])"
    found = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)
    assert found.returncode == 0, found.stderr
    assert (tmp_path / "page.html").stat().st_size > 100_000
