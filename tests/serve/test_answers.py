"""What the service answers: the same as the library, in three conventions."""

from __future__ import annotations

import base64
import copy
import dataclasses
import gzip
import hashlib
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import vitrail
from tests.serve.conftest import Client, error_text, running
from vitrail.checkpoints import Bundle
from vitrail.checkpoints.pretrained import DEFAULT
from vitrail.data import open_source
from vitrail.data.eval_reader import EvalReader, eval_slices
from vitrail.inspect.rollout import rollout
from vitrail.serve.explorations import example_images
from vitrail.serve.images import decode
from vitrail.serve.limits import PixelLimit
from vitrail.serve.metrics import Metrics
from vitrail.serve.model_input import ModelInput
from vitrail.serve.settings import ServeSettings


def data_uri(data: bytes) -> str:
    return "data:image/jpeg;base64," + base64.b64encode(data).decode()


def form(parts: list[bytes]) -> tuple[bytes, str]:
    lines = b"".join(
        b'--xyz\r\nContent-Disposition: form-data; name="f%d"; filename="../../etc/passwd"\r\n\r\n%s\r\n' % (n, part)
        for n, part in enumerate(parts)
    )
    return lines + b"--xyz--\r\n", "multipart/form-data; boundary=xyz"


def test_predictions_are_those_of_the_bundle(client: Client, bundle: Bundle, jpegs: list[bytes]) -> None:
    status, answer, _ = client.call("POST", "/v1/predict?top=3", jpegs[0], content_type="image/jpeg")
    (expected,) = bundle.predict([jpegs[0]], top=3)
    found = answer["results"][0]["predictions"]
    assert status == 200 and answer["model"] == "tiny"
    assert [one["label"] for one in found] == [one.label for one in expected]
    assert [one["probability"] for one in found] == pytest.approx([one.score for one in expected], abs=1e-4)


def test_golden_predictions_of_the_included_model() -> None:
    """Decoding, resizing, normalisation, model and words, against numbers that were written down once."""
    golden = {
        "cat": {"tabby": 0.441626, "Egyptian cat": 0.404628, "Persian cat": 0.049756},
        "coffee": {"espresso": 0.938884, "potter's wheel": 0.002101, "wooden spoon": 0.001937},
    }
    included = vitrail.load(DEFAULT)
    with running(lambda: included) as client:
        for image in example_images():
            _, answer, _ = client.call("POST", "/v1/predict?top=3", image.data)
            found = {one["label"]: one["probability"] for one in answer["results"][0]["predictions"]}
            assert found == pytest.approx(golden[image.name], abs=5e-4)


def test_images_are_preprocessed_as_in_evaluation(tmp_path: Path, bundle: Bundle, jpegs: list[bytes]) -> None:
    for number, data in enumerate(jpegs):
        folder = tmp_path / "val" / bundle.classes[number % 2]  # type: ignore[index]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number}.jpg").write_bytes(data)
    split, preprocess = open_source(f"folder:{tmp_path}").split("val"), bundle.stored_preprocess()
    (every,) = eval_slices(len(split), len(jpegs), 0, 1)
    evaluated = preprocess.normalise(EvalReader(split, preprocess, skip_bad=False, num_buffers=1)[every].images)
    limit = PixelLimit(10_000_000)
    decoded = [decode(split.payload(n), preprocess, ServeSettings(), limit).pixels for n in range(len(split))]
    served = ModelInput(preprocess, torch.device("cpu"), len(decoded))(decoded, len(decoded))
    assert len(served) == len(jpegs) and torch.equal(served, evaluated)


def test_other_origins_may_call_only_if_they_are_named(client: Client, bundle: Bundle, jpegs: list[bytes]) -> None:
    asked = {"origin": "https://example.org", "access_control_request_method": "POST"}
    status, _, headers = client.call("OPTIONS", "/v1/predict", **asked)
    assert status == 405 and "access-control-allow-origin" not in headers
    _, _, headers = client.call("POST", "/v1/predict", jpegs[0], origin="https://example.org")
    assert "access-control-allow-origin" not in headers
    with running(lambda: bundle, cors=("https://example.org",)) as named:
        status, _, headers = named.call("OPTIONS", "/v1/predict", **asked)
        assert status == 200 and headers["access-control-allow-origin"] == "https://example.org"
        zeros = {"name": "images", "shape": [1, 3, 32, 32], "datatype": "FP32", "data": [0.0] * 3072}
        body = {"inputs": [zeros], "parameters": {"binary_data_output": True}}
        _, _, headers = named.call("POST", "/v2/models/tiny/infer", body, origin="https://example.org", x_request_id="7")
        readable = {name.strip().lower() for name in headers["access-control-expose-headers"].split(",")}
        assert {"inference-header-content-length", "x-request-id"} <= readable & set(headers)
        status, answer, headers = named.call("OPTIONS", "/v1/predict", **{**asked, "origin": "https://example.com"})
        assert status == 400 and "access-control-allow-origin" not in headers and list(answer) == ["error"]


def test_a_bad_image_among_several_fails_alone(client: Client, bundle: Bundle, jpegs: list[bytes]) -> None:
    body, kind = form([jpegs[0], b"no picture", jpegs[1], jpegs[2][: len(jpegs[2]) // 2], b""])
    status, answer, _ = client.call("POST", "/v1/predict?top=1", body, content_type=kind)
    results = answer["results"]
    expected = bundle.predict([jpegs[0], jpegs[1]], top=1)
    assert status == 200 and [results[k]["predictions"][0]["label"] for k in (0, 2)] == [one[0].label for one in expected]
    assert [results[k]["status"] for k in (1, 3, 4)] == [415, 422, 422]


def test_open_inference_protocol(client: Client, bundle: Bundle, jpegs: list[bytes]) -> None:
    assert client.call("GET", "/v2/health/live")[0] == client.call("GET", "/v2/health/ready")[0] == 200
    assert client.call("GET", "/v2")[1]["name"] == "vitrail"
    status, described, _ = client.call("GET", "/v2/models/tiny/versions/1")
    assert status == 200 and described["inputs"][0]["shape"] == [-1, 3, 32, 32]
    assert client.call("GET", "/v2/models/tiny/ready")[1] == {"name": "tiny", "ready": True}
    images = torch.stack([bundle.stored_preprocess()(one) for one in jpegs[:2]])
    with torch.no_grad():
        expected = bundle.model(images).numpy()
    tensor = {"name": "images", "shape": [2, 3, 32, 32], "datatype": "FP32", "data": images.flatten().tolist()}
    texts = [base64.b64encode(one).decode() for one in jpegs[:2]]
    encoded = {"name": "encoded_images", "shape": [2], "datatype": "BYTES", "data": texts}
    columns = {**encoded, "shape": [2, 1], "data": [[text] for text in texts]}
    for given in (tensor, encoded, columns, {**tensor, "data": images.tolist()}):
        status, answer, _ = client.call("POST", "/v2/models/tiny/infer", {"id": "7", "inputs": [given]})
        output = answer["outputs"][0]
        assert status == 200 and answer["id"] == "7" and output["shape"] == [2, 4] and output["datatype"] == "FP32"
        assert np.abs(np.reshape(output["data"], (2, 4)) - expected).max() < 1e-4


def test_pixels_are_normalised_by_the_service(client: Client, bundle: Bundle, jpegs: list[bytes]) -> None:
    preprocess = bundle.stored_preprocess()
    pixels = np.stack([preprocess.pixels(one, name="image").transpose(2, 0, 1) for one in jpegs[:3]])
    assert pixels.dtype == np.uint8
    with torch.no_grad():
        expected = bundle.model(torch.stack([preprocess(one) for one in jpegs[:3]])).numpy()
    tensor: dict[str, Any] = {"name": "pixels", "shape": [3, 3, 32, 32], "datatype": "UINT8"}
    status, answer, _ = client.call("POST", "/v2/models/tiny/infer", {"inputs": [{**tensor, "data": pixels.tolist()}]})
    assert status == 200 and np.abs(np.reshape(answer["outputs"][0]["data"], (3, 4)) - expected).max() < 1e-4
    tensor["parameters"] = {"binary_data_size": pixels.nbytes}
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    status, found, _ = client.call(
        "POST", "/v2/models/tiny/infer", head + pixels.tobytes(), inference_header_content_length=str(len(head))
    )
    assert status == 200 and np.abs(np.frombuffer(found[-48:], "<f4").reshape(3, 4) - expected).max() < 1e-4


def test_pixels_of_another_range_are_refused(bundle: Bundle) -> None:
    deep = dataclasses.replace(bundle, preprocess=dataclasses.replace(bundle.stored_preprocess(), bits=16))
    zeros = {"name": "pixels", "shape": [1, 3, 32, 32], "datatype": "UINT8", "data": [0] * 3072}
    with running(lambda: deep) as client:
        status, answer, _ = client.call("POST", "/v2/models/tiny/infer", {"inputs": [zeros]})
    assert status == 400 and "up to 65535, not 255" in answer["error"]


def test_null_stands_for_what_a_client_leaves_out(client: Client) -> None:
    zeros = {"name": "images", "shape": [1, 3, 32, 32], "datatype": "FP32", "data": [0.0] * 3072, "parameters": None}
    for outputs in (None, [{"name": "logits", "parameters": None}]):
        given = {"id": None, "inputs": [zeros], "outputs": outputs, "parameters": None}
        status, answer, _ = client.call("POST", "/v2/models/tiny/infer", given)
        assert status == 200 and len(answer["outputs"][0]["data"]) == 4, answer


def test_an_output_says_whether_it_is_binary_whatever_the_request_says(client: Client) -> None:
    zeros = {"name": "images", "shape": [1, 3, 32, 32], "datatype": "FP32", "data": [0.0] * 3072}
    for general, own, binary in ((True, None, True), (True, False, False), (False, True, True), (False, None, False)):
        parameters = {} if own is None else {"binary_data": own}
        outputs = [{"name": "logits", "parameters": parameters}]
        given = {"inputs": [zeros], "outputs": outputs, "parameters": {"binary_data_output": general}}
        status, _, headers = client.call("POST", "/v2/models/tiny/infer", given)
        assert status == 200 and ("inference-header-content-length" in headers) == binary


def test_head_is_answered_as_get_without_a_body(client: Client) -> None:
    for path in ("/v2/health/ready", "/", "/metrics", "/v1/models"):
        connection = client.connect()
        for method in ("HEAD", "GET"):  # on one connection
            connection.request(method, path)
            answer = connection.getresponse()
            assert answer.status == 200 and bool(answer.read()) == (method == "GET")
            assert int(answer.headers["content-length"]) > 0
        connection.close()


def test_a_compressed_body_is_named(client: Client, jpegs: list[bytes]) -> None:
    for path in ("/v1/predict", "/v2/models/tiny/infer", "/v1/embeddings"):
        status, answer, _ = client.call("POST", path, gzip.compress(jpegs[0]), content_encoding="gzip")
        assert status == 415 and "Content-Encoding: gzip" in error_text(answer)
    assert client.call("POST", "/v1/predict", jpegs[0], content_encoding="identity")[0] == 200


@pytest.mark.parametrize(
    "given",
    [
        {"shape": [1, 3, 8, 8], "datatype": "FP32", "data": [0.0] * 192},
        {"shape": [10**6, 3, 32, 32], "datatype": "FP32", "data": [0.0]},
        {"shape": [1, 3, 32, 32], "datatype": "FP32", "data": [0.0]},
        {"shape": [1, 3, 32, 32], "datatype": "FP32", "data": ["x"] * 3072},
        {"shape": [1, 3, 32, 32], "datatype": "INT8", "data": [0] * 3072},
        {"shape": [1, 3, 32, 32], "datatype": "FP32", "data": ["1"] * 3072},
        {"shape": [1, 3, 32, 32], "datatype": "FP32", "data": [None] * 3072},
        {"shape": [1, 3, 32, 32], "datatype": "FP32", "data": [True] * 3072},
        {"shape": [1, 3, 32, 32], "datatype": "FP32", "data": [1e39] * 3072},
        {"shape": [1, 3, 32, 32], "datatype": "FP32", "data": [float("nan")] * 3072},
        {"shape": [1, 3, 32, 32], "datatype": "FP32", "data": np.zeros((1, 32, 32, 3)).tolist()},
        {"shape": [1, 3, 32, 32], "datatype": "FP32", "data": np.zeros((3, 32, 32)).tolist()},
        {"shape": [-1, 3, 32, 32], "datatype": "FP32", "data": []},
        {"shape": [1, 3, 32, 32], "datatype": "FP32"},
        {"name": "input", "shape": [1, 3, 32, 32], "datatype": "FP32", "data": [0.0] * 3072},
        {"name": "pixels", "shape": [1, 3, 32, 32], "datatype": "FP32", "data": [0.0] * 3072},
        {"name": "pixels", "shape": [1, 3, 32, 32], "datatype": "UINT8", "data": [256] * 3072},
        {"name": "pixels", "shape": [1, 3, 32, 32], "datatype": "UINT8", "data": [-1] * 3072},
        {"name": "pixels", "shape": [1, 3, 32, 32], "datatype": "UINT8", "data": [0.5] * 3072},
        {"name": "pixels", "shape": [1, 3, 32, 32], "datatype": "UINT8", "data": [float("nan")] * 3072},
        {"name": "pixels", "shape": [1, 32, 32, 3], "datatype": "UINT8", "data": [0] * 3072},
        {"name": "encoded_images", "shape": [1], "datatype": "BYTES", "data": [5]},
        {"name": "encoded_images", "shape": [1], "datatype": "BYTES", "data": ["%%%"]},
        {"name": "encoded_images", "shape": [2], "datatype": "BYTES", "data": ["eA=="]},
        {"name": "encoded_images", "shape": [2, 1], "datatype": "BYTES", "data": [["eA==", "eA=="]]},
        {"name": "encoded_images", "shape": [1], "datatype": "BYTES", "data": ["http://example.org/a.jpg"]},
    ],
)
def test_wrong_tensors_are_refused(client: Client, given: dict[str, Any]) -> None:
    status, answer, _ = client.call("POST", "/v2/models/tiny/infer", {"inputs": [{"name": "images", **given}]})
    assert status == (413 if given["shape"][0] > 64 else 400) and list(answer) == ["error"]


def test_classes_instead_of_logits_are_refused(client: Client) -> None:
    """Triton's extension answers with texts; numbers in their place would be read as something else."""
    zeros = {"name": "images", "shape": [1, 3, 32, 32], "datatype": "FP32", "data": [0.0] * 3072}
    outputs = [{"name": "logits", "parameters": {"classification": 3}}]
    status, answer, _ = client.call("POST", "/v2/models/tiny/infer", {"inputs": [zeros], "outputs": outputs})
    assert status == 400 and "no parameter classification" in answer["error"] and "/v1/predict" in answer["error"]


def test_a_model_is_described_as_in_the_list(client: Client) -> None:
    (listed,) = client.call("GET", "/v1/models")[1]["data"]
    assert client.call("GET", "/v1/models/tiny")[:2] == (200, listed)
    assert client.call("GET", "/v1/models/other")[0] == 404


def test_base64_as_programs_write_it(client: Client, jpegs: list[bytes]) -> None:
    """`base64 cat.jpg` breaks lines, and so does MIME; the scheme of a URI has no case; null is what a client leaves out."""
    expected = client.call("POST", "/v1/embeddings", {"input": data_uri(jpegs[0])})[1]["data"]
    lines = base64.encodebytes(jpegs[0]).decode()
    uris = f"data:image/jpeg;base64,{lines}", data_uri(jpegs[0]).replace("data:", "DATA:")
    for text in (lines, lines.replace("\n", "\r\n"), *uris):
        status, answer, _ = client.call("POST", "/v1/embeddings", {"input": text, "encoding_format": None, "dimensions": None})
        assert status == 200 and answer["data"] == expected


def test_embeddings(client: Client, bundle: Bundle, jpegs: list[bytes]) -> None:
    assert [one["id"] for one in client.call("GET", "/v1/models")[1]["data"]] == ["tiny"]
    images = torch.stack([bundle.stored_preprocess()(one) for one in jpegs[:2]])
    with torch.no_grad():
        expected = bundle.model.eval().features(images).pre_logits.numpy()
    body: dict[str, Any] = {"model": "tiny", "input": [data_uri(jpegs[0]), {"image_url": {"url": data_uri(jpegs[1])}}]}
    status, answer, _ = client.call("POST", "/v1/embeddings", body)
    assert status == 200 and answer["object"] == "list" and [one["index"] for one in answer["data"]] == [0, 1]
    assert np.abs(np.array([one["embedding"] for one in answer["data"]]) - expected).max() < 1e-4
    body = {"input": data_uri(jpegs[0]), "encoding_format": "base64"}
    text = client.call("POST", "/v1/embeddings", body)[1]["data"][0]["embedding"]
    assert np.abs(np.array(struct.unpack("<32f", base64.b64decode(text))) - expected[0]).max() < 1e-4


@pytest.mark.parametrize(
    "address", ["http://127.0.0.1/a.jpg", "https://example.org/x.png", "file:///etc/passwd", "data:text/plain,hello"]
)
def test_addresses_are_never_fetched(client: Client, address: str) -> None:
    status, answer, _ = client.call("POST", "/v1/embeddings", {"input": address})
    assert status == 400 and ("not fetched" in error_text(answer) or "data: URI" in error_text(answer))


def test_errors_are_objects_where_openai_clients_call(client: Client, jpegs: list[bytes]) -> None:
    """The clients show `message` of the object `error`, and nothing of an error that is a text."""
    for status, method, path, body, text in (
        (400, "POST", "/v1/embeddings", {"input": "hello"}, "not valid base64"),
        (400, "POST", "/v1/embeddings", {"input": [1, 2]}, "input: Send an image as a data: URI or as base64, or a list of such"),
        (404, "POST", "/v1/embeddings", {"input": data_uri(jpegs[0]), "model": "other"}, "There is no model 'other'"),
        (404, "GET", "/v1/models/other", None, "There is no model 'other'"),
        (404, "POST", "/v1/chat/completions", {"model": "tiny"}, "There is nothing at /v1/chat/completions"),
        (413, "POST", "/v1/embeddings", bytes(client.service.settings.max_bytes + 1), "The request is larger than"),
    ):
        found, answer, _ = client.call(method, path, body)
        error = {"message": error_text(answer), "type": "invalid_request_error", "param": None, "code": None}
        assert found == status and answer == {"error": error} and text in error["message"]
    assert client.call("POST", "/v1/predict", b"hello")[1]["error"].startswith("This is not an image")
    assert client.call("GET", "/v2/models/other")[1]["error"].startswith("There is no model 'other'")


def test_attention(client: Client, bundle: Bundle, jpegs: list[bytes]) -> None:
    image = bundle.stored_preprocess()(jpegs[0])[None]
    found = client.call("POST", "/v1/attention", jpegs[0])[1]
    assert np.abs(np.array(found["map"]) - rollout(bundle.model, image)[0]).max() < 1e-5
    found = client.call("POST", "/v1/attention?method=attention&layer=0&head=1&query=3", jpegs[0])[1]
    with torch.no_grad():
        ((_, weights),) = list(bundle.model.attention(image, [0]))
    assert np.abs(np.array(found["map"]).ravel() - weights[0, 1, 3, 1:].numpy()).max() < 1e-5
    status, picture, headers = client.call("POST", "/v1/attention?format=png", jpegs[0])
    assert status == 200 and picture[:4] == b"\x89PNG" and headers["content-type"] == "image/png"
    for wrong in ("method=attention&layer=2", "method=attention&head=2", "method=attention&query=17"):
        assert client.call("POST", f"/v1/attention?{wrong}", jpegs[0])[0] == 422


def test_attention_that_is_not_finite_is_an_error(bundle: Bundle, jpegs: list[bytes]) -> None:
    broken = copy.deepcopy(bundle)
    with torch.no_grad():
        next(iter(broken.model.parameters())).fill_(float("nan"))
    with running(lambda: broken) as client:
        for path in ("?method=attention", "?method=attention&format=png", ""):
            status, answer, _ = client.call("POST", f"/v1/attention{path}", jpegs[0])
            assert status == 422 and "error" in answer, path


def test_every_error_is_json(client: Client) -> None:
    for method, path, expected in (("GET", "/nothing", 404), ("DELETE", "/v1/predict", 405), ("POST", "/v1/predict?top=0", 400)):
        status, answer, _ = client.call(method, path)
        assert status == expected and list(answer) == ["error"]
    assert client.call("POST", "/v1/predict?model=other", b"x")[0] == 404
    assert client.call("POST", "/v2/models/tiny/infer", "{not json", content_type="application/json")[0] == 400
    assert client.call("GET", "/openapi.json")[0] == 200


def test_metrics_count_what_was_done(client: Client, jpegs: list[bytes]) -> None:
    def images() -> float:
        text = client.call("GET", "/metrics")[1].decode()
        return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith('vitrail_images_total{model="tiny"}'))

    before = images()
    body, kind = form(jpegs[:3])
    client.call("POST", "/v1/predict", body, content_type=kind)
    assert images() == before + 3
    text = client.call("GET", "/metrics")[1].decode()
    assert 'vitrail_images_in_flight{model="tiny"} 0' in text and 'vitrail_batch_size_bucket{model="tiny",le="+Inf"}' in text


def test_the_reference_page_has_every_operation_and_loads_nothing(client: Client) -> None:
    status, page, headers = client.call("GET", "/docs")
    text = page.decode()
    assert status == 200 and headers["content-type"].startswith("text/html")
    paths = client.call("GET", "/openapi.json")[1]["paths"]
    assert {"/v1/predict", "/v2/models/{name}/infer", "/metrics"} <= set(paths)
    assert all(f"<code>{path}</code>" in text for path in paths)
    assert "mean of all heads" in text and "default: rollout" in text  # descriptions and defaults of parameters
    assert "<p>Tell whether the worker of one model answers.</p>" in text and "<p>Model Ready</p>" not in text
    assert "<script" not in text and "://" not in text
    style = text.partition("<style>")[2].partition("</style>")[0]
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert headers["content-security-policy"].startswith(f"default-src 'none'; style-src 'sha256-{digest}'")


def test_numbers_of_metrics_have_all_digits() -> None:
    metrics = Metrics()
    metrics.count("vitrail_images_total", 12_345_678, model="x")
    metrics.count("vitrail_images_total", model="x")
    for seconds in (1_234_567.0, 0.25):
        metrics.observe("vitrail_compute_seconds", seconds, model="x")
    lines = metrics.text().splitlines()
    assert 'vitrail_images_total{model="x"} 12345679' in lines
    assert 'vitrail_compute_seconds_sum{model="x"} 1234567.25' in lines


def test_a_misspelled_parameter_is_refused(client: Client, jpegs: list[bytes]) -> None:
    for path in ("/v1/predict?topk=1", "/v1/attention?top=1", "/v1/predict?top=1&Top=2"):
        status, answer, _ = client.call("POST", path, jpegs[0])
        assert status == 400 and "There is no parameter" in answer["error"], path
    assert client.call("POST", "/v1/predict?top=1&model=tiny", jpegs[0])[0] == 200
