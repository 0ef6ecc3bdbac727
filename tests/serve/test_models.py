"""Models other than a classifying ViT: without a head, without attention, of other tasks; and a process that is ended early."""

from __future__ import annotations

import base64
import dataclasses
import io
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import vitrail
from tests.serve.conftest import process_running, running, until
from vitrail.checkpoints import Bundle
from vitrail.checkpoints.native import save
from vitrail.commands.serve import run_and_end
from vitrail.data.preprocess import Preprocess
from vitrail.models import create_model
from vitrail.serve.engine import Engine
from vitrail.serve.server import serve
from vitrail.serve.service import Service
from vitrail.serve.settings import ServeSettings


def saved(folder: Path, name: str, *, head: bool = True, preprocess: Preprocess | None = None, **options: Any) -> Bundle:
    model = create_model(name, outputs=4, seed=0, **options)
    if head:
        nn.init.normal_(model.head.weight, std=0.5, generator=torch.Generator().manual_seed(0))
    save(folder, model, preprocess=preprocess or Preprocess(size=model.config.image_size), classes=["a", "b", "c", "d"])
    return vitrail.load(folder)


TINY = {"width": 32, "depth": 2, "heads": 2, "mlp": 64, "patch": 8, "image_size": 32}


def test_a_model_without_a_head_has_embeddings_only(tmp_path: Path, jpegs: list[bytes]) -> None:
    from tests.serve.test_answers import data_uri

    bundle = saved(tmp_path / "x", "ViT-Ti/16", head=False, **TINY)
    with running(lambda: bundle) as client:
        encoded = {"name": "encoded_images", "shape": [1], "datatype": "BYTES", "data": ["eA=="]}
        for path, body in (("/v1/predict", jpegs[0]), ("/v2/models/tiny/infer", {"inputs": [encoded]})):
            status, answer, _ = client.call("POST", path, body)
            assert status == 422 and "only a backbone" in answer["error"]
        assert client.call("POST", "/v1/embeddings", {"input": data_uri(jpegs[0])})[0] == 200


def test_requests_do_not_read_the_weights_of_the_head(bundle: Bundle, jpegs: list[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU that would make the event loop wait for the batch that is being computed."""
    read: list[str] = []
    found = Bundle.head
    monkeypatch.setattr(Bundle, "head", property(lambda self: read.append("head") or found.fget(self)))  # type: ignore[attr-defined]
    with running(lambda: bundle) as client:
        at_loading = len(read)
        assert client.call("POST", "/v1/predict", jpegs[0])[0] == 200
    assert len(read) == at_loading > 0


def test_a_model_without_attention_says_so(tmp_path: Path, jpegs: list[bytes]) -> None:
    bundle = saved(tmp_path / "x", "BiT-R50x1", image_size=32, layers=(1, 1))
    with running(lambda: bundle) as client:
        assert client.call("POST", "/v1/predict", jpegs[0])[0] == 200
        for query in ("", "?method=attention"):
            status, answer, _ = client.call("POST", f"/v1/attention{query}", jpegs[0])
            assert status == 422 and list(answer) == ["error"], answer


def test_attention_of_images_that_keep_their_aspect_ratio(tmp_path: Path, jpegs: list[bytes]) -> None:
    preprocess = Preprocess(size=(32, 32), resize="keep-aspect", resize_to=32, max_size=64, multiple=(8, 8))
    bundle = saved(tmp_path / "x", "ViT-Ti/16", preprocess=preprocess, any_size=True, **TINY)
    stream = io.BytesIO()
    Image.open(io.BytesIO(jpegs[0])).resize((60, 40)).save(stream, "PNG")
    image = bundle.stored_preprocess()(stream.getvalue())
    with running(lambda: bundle) as client, torch.no_grad():
        for query in ("", "&method=attention&layer=1"):
            status, answer, _ = client.call("POST", f"/v1/attention?format=json{query}", stream.getvalue())
            assert status == 200 and answer["shape"] == [4, 6]
        ((_, weights),) = bundle.model.attention(image[None], [1])
        np.testing.assert_allclose(answer["map"], weights[0].mean(0)[0, 1:].reshape(4, 6), atol=1e-6)
        _, picture, _ = client.call("POST", "/v1/attention?format=png&method=attention", stream.getvalue())
        assert Image.open(io.BytesIO(picture)).size == (48, 32)  # that of the model's input


def test_other_tasks(bundle: Bundle, jpegs: list[bytes]) -> None:
    several = dataclasses.replace(bundle, task="multilabel")
    with running(lambda: several) as client:
        found = client.call("POST", "/v1/predict", jpegs[0])[1]["results"][0]["predictions"]
        (expected,) = several.predict([jpegs[0]])
        assert [(one["label"], one["chosen"]) for one in found] == [(one.label, one.chosen) for one in expected]
    values = dataclasses.replace(bundle, task="regress")
    with running(lambda: values) as client:
        found = client.call("POST", "/v1/predict", jpegs[0])[1]["results"][0]["predictions"]
        (expected,) = values.predict([jpegs[0]])
        assert [one["value"] for one in found] == pytest.approx([one.score for one in expected], abs=1e-4)


@pytest.mark.parametrize(("channels", "bits"), [(1, 8), (1, 16)])
def test_grey_and_16_bit_models(tmp_path: Path, jpegs: list[bytes], channels: int, bits: int) -> None:
    preprocess = Preprocess(size=(32, 32), channels=channels, bits=bits, mean=(0.5,), std=(0.5,))
    bundle = saved(tmp_path / "x", "ViT-Ti/16", preprocess=preprocess, channels=channels, **TINY)
    with running(lambda: bundle) as client:
        found = client.call("POST", "/v1/predict", jpegs[0])[1]["results"][0]["predictions"]
        (expected,) = bundle.predict([jpegs[0]])
        assert [one["probability"] for one in found] == pytest.approx([one.score for one in expected], abs=1e-4)


def test_a_resnet_takes_tensors_of_the_size_that_its_preprocessing_makes(tmp_path: Path, jpegs: list[bytes]) -> None:
    """Its config has a size, too, but a ResNet accepts others, and the preprocessing decides what it sees."""
    bundle = saved(tmp_path / "x", "BiT-R50x1", layers=(1,), image_size=32, preprocess=Preprocess(size=(64, 48)))
    with running(lambda: bundle) as client:
        assert client.call("GET", "/v2/models/tiny")[1]["inputs"][0]["shape"] == [-1, 3, 64, 48]
        image = bundle.stored_preprocess()(jpegs[0])[None]
        tensor = {"name": "images", "shape": list(image.shape), "datatype": "FP32", "data": image.flatten().tolist()}
        encoded = {"name": "encoded_images", "shape": [1], "datatype": "BYTES", "data": [base64.b64encode(jpegs[0]).decode()]}
        answers = [client.call("POST", "/v2/models/tiny/infer", {"inputs": [one]})[1] for one in (tensor, encoded)]
    assert answers[0]["outputs"][0]["data"] == pytest.approx(answers[1]["outputs"][0]["data"], abs=1e-5)


def test_arrays_of_many_channels(tmp_path: Path) -> None:
    """Image formats end at four channels; .npy files do not, and training reads them."""
    preprocess = Preprocess(size=(32, 32), channels=13, mean=(0.5,) * 13, std=(0.5,) * 13, exif=False)
    bundle = saved(tmp_path / "x", "ViT-Ti/16", channels=13, preprocess=preprocess, **TINY)

    def npy(array: Any) -> bytes:
        stream = io.BytesIO()
        np.save(stream, array, allow_pickle=True)
        return stream.getvalue()

    good = npy(np.random.default_rng(0).integers(0, 256, (40, 50, 13), np.uint8))
    ((expected, *_),) = bundle.predict([good])
    with running(lambda: bundle, max_pixels=20_000) as client:
        found = client.call("POST", "/v1/predict", good)[1]["results"][0]["predictions"][0]
        assert found["probability"] == pytest.approx(expected.score, abs=1e-5)
        status, info, _ = client.call("POST", "/explorer/analyse", good)
        assert status == 200 and info["grid"] == [4, 4] and not info["photo"]
        assert client.call("GET", f"/explorer/{info['id']}/picture")[0] == 200
        wrong = (npy(np.zeros((40, 50, 12), np.uint8)), npy(np.array([{}])), npy(np.zeros((40, 50, 13))), good[:-1], good[:20])
        large = npy(np.zeros((200, 101, 13), np.uint8)), npy(np.zeros((80, 80, 13), np.uint8))  # in pixels of three channels
        for data in (*wrong, *large):
            status, answer, _ = client.call("POST", "/v1/predict", data)
            assert status == 422 and list(answer) == ["error"], answer


def test_two_models_side_by_side(tmp_path: Path, bundle: Bundle, jpegs: list[bytes]) -> None:
    other = saved(tmp_path / "x", "ViT-Ti/16", **{**TINY, "image_size": (32, 48)})
    with running(lambda: bundle, second=lambda: other) as client:
        assert until(lambda: client.call("GET", "/v2/health/ready")[0] == 200)
        for name, expected in (("tiny", bundle), ("second", other)):
            found = client.call("POST", f"/v1/predict?model={name}&top=1", jpegs[0])[1]
            assert found["model"] == name
            assert found["results"][0]["predictions"][0]["label"] == expected.predict([jpegs[0]], top=1)[0][0].label
        assert client.call("GET", "/v2/models/second")[1]["inputs"][0]["shape"] == [-1, 3, 32, 48]


def test_models_are_warmed_up_one_after_the_other(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    busy, together = threading.Lock(), []

    def warm_up(_: Engine) -> float:
        if not busy.acquire(blocking=False):
            together.append(True)
            return 0.1
        time.sleep(0.3)
        busy.release()
        return 0.1

    monkeypatch.setattr(Engine, "warm_up", warm_up)
    with running(lambda: bundle, second=lambda: bundle) as client:
        assert until(lambda: client.call("GET", "/v2/health/ready")[0] == 200)
    assert not together


@pytest.mark.slow
@pytest.mark.parametrize("loading", ["time.sleep(30)", "[torch.randn(600, 600) @ torch.randn(600, 600) for _ in range(10**7)]"])
def test_sigterm_while_loading_ends_with_status_0(bundle: Bundle, loading: str) -> None:
    script = (
        "import time, torch, vitrail.serve.service as s\n"
        f"s.load = lambda *given, **options: {loading}\n"
        "from vitrail.cli import main\n"
        f"main(['serve', {bundle.report.source!r}, '--port', '0'])\n"
    )
    with process_running(script) as (process, client):
        assert until(lambda: client.call("GET", "/v2/health/ready")[0] == 503)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0


@pytest.mark.slow
def test_a_failed_load_ends_with_status_2(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "vitrail", "serve", str(tmp_path / "nothing"), "--port", "0"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2 and "vitrail: " in done.stderr and "Traceback" not in done.stderr


def test_an_unexpected_failure_is_shown_while_another_model_loads(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The process then ends without Python's own report of the exception."""
    loading, ended = threading.Event(), []

    def load_slowly() -> Bundle:
        assert loading.wait(10)
        return bundle

    def fail() -> Bundle:
        raise ZeroDivisionError("in the loader")

    monkeypatch.setattr("vitrail.commands.serve.os._exit", ended.append)
    service = Service({"slow": load_slowly, "broken": fail}, ServeSettings())
    run_and_end(service, lambda: serve(service, host="127.0.0.1", port=0, token=None, cors=(), announce=lambda address: None))
    loading.set()
    assert ended == [2] and "ZeroDivisionError: in the loader" in capsys.readouterr().err
    assert until(lambda: not service.has_threads)


def test_a_gpu_that_computes_nothing_any_more_ends_the_service(
    bundle: Bundle, jpegs: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an illegal access every later call fails, too, while the thread still gives signs of life."""

    def fails(*_: Any) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be")

    with running(lambda: bundle) as client:
        worker = client.service.workers["tiny"]
        monkeypatch.setattr("vitrail.serve.engine._outputs", fails)
        assert client.call("POST", "/v1/predict", jpegs[0])[0] == 500 and client.call("GET", "/v2/health/ready")[0] == 200
        monkeypatch.setattr(torch.cuda, "current_stream", fails)
        monkeypatch.setattr(worker._engine, "_model", SimpleNamespace(device=torch.device("cuda")))
        assert client.call("POST", "/v1/predict", jpegs[0])[0] == 503
        assert until(lambda: worker.error is not None) and "an illegal memory access was encountered)" in str(worker.error)


def test_a_worker_that_dies_ends_the_service(bundle: Bundle, jpegs: list[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    with running(lambda: bundle) as client:

        def die(*arguments: Any) -> None:
            raise SystemExit("worker")

        monkeypatch.setattr(Engine, "launch", die)
        status, answer, _ = client.call("POST", "/v1/predict", jpegs[0])
        assert status == 503 and list(answer) == ["error"]
        assert until(lambda: client.service.workers["tiny"].error is not None)
