"""What the explorer sends: the same numbers as vitrail.inspect, within the stated error, in pieces of at most 2 MB."""

from __future__ import annotations

import copy
import dataclasses
import functools
import io
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import vitrail
from tests.serve.conftest import Client, running
from vitrail import inspect
from vitrail.checkpoints import Bundle
from vitrail.checkpoints.native import save
from vitrail.data.preprocess import Preprocess
from vitrail.models import create_model
from vitrail.serve import exploration as compute
from vitrail.serve.byte_maps import MAX_REPLY, ByteMaps, signed_to_bytes
from vitrail.serve.explorations import Explorations, NamedImage, example_images

ViT = {"width": 32, "depth": 2, "heads": 2, "mlp": 64}


def make(folder: Path, name: str = "ViT-Ti/16", *, head: bool = True, task: str = "classify", **changes: Any) -> Bundle:
    torch.manual_seed(0)
    size = changes.setdefault("image_size", (48, 32))
    model = create_model(name, outputs=changes.pop("outputs", 4), seed=0, **changes)
    for module in model.modules():
        if isinstance(module, (nn.LayerNorm, nn.GroupNorm)):
            nn.init.normal_(module.bias, std=0.1)
    if head and isinstance(model.head, nn.Linear):
        nn.init.normal_(model.head.weight, std=0.5)
    save(folder, model, preprocess=Preprocess(size=size), classes=list("abcd") if model.config.outputs else None, task=task)
    return vitrail.load(folder)


@pytest.fixture(scope="module")
def registers(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return make(tmp_path_factory.mktemp("explorer") / "m", patch=8, registers=2, **ViT)


@pytest.fixture(scope="module")
def served(registers: Bundle) -> Iterator[Client]:
    with running(lambda: registers) as client:
        yield client


@pytest.fixture(scope="module")
def info(served: Client, jpegs: list[bytes]) -> dict[str, Any]:
    status, found, _ = served.call("POST", "/explorer/analyse", jpegs[0])
    assert status == 200
    return found


@pytest.fixture(scope="module")
def images(registers: Bundle, jpegs: list[bytes]) -> torch.Tensor:
    return registers.stored_preprocess()(jpegs[0])[None]


def read(client: Client, info: dict[str, Any], path: str) -> bytes:
    status, found, _ = client.call("GET", f"/explorer/{info['id']}/{path}")
    assert status == 200 and len(found) <= MAX_REPLY
    return found


def weights(content: bytes, rows: int, tokens: int) -> np.ndarray[Any, Any]:
    scales = np.frombuffer(content[: 4 * rows], "<f4")
    return np.frombuffer(content[4 * rows :], np.uint8).reshape(rows, tokens) * scales[:, None] / 255


def test_description(info: dict[str, Any], registers: Bundle, jpegs: list[bytes]) -> None:
    assert info["prefix"] == ["class", "register 1", "register 2"] and info["grid"] == [6, 4] and info["image_size"] == [48, 32]
    expected = registers.predict(jpegs[0], top=4)[0]
    assert [(one["label"], pytest.approx(one["score"], abs=1e-5)) for one in info["predictions"]] == [
        (one.label, one.score) for one in expected
    ]


def test_attention_is_within_its_error(served: Client, info: dict[str, Any], registers: Bundle, images: torch.Tensor) -> None:
    tokens, error = 27, info["attention"]["max_error"]
    for layer, expected in registers.model.attention(images):
        found = weights(read(served, info, f"attention?layer={layer}"), 2 * tokens, tokens).reshape(2, tokens, tokens)
        scale = expected[0].amax(-1, keepdim=True).numpy()
        assert (abs(found - expected[0].numpy()) <= scale / 510 + 1e-6).all()
        assert abs(found - expected[0].numpy()).max() <= error + 1e-6
    heads = inspect.head_attention(registers.model, images, (3, 2))[0]
    query = weights(read(served, info, f"attention?query={3 + 3 * 4 + 2}"), 4, tokens)[:, 3:].reshape(2, 2, 6, 4)
    np.testing.assert_allclose(query, heads, atol=error + 1e-6)


@pytest.mark.parametrize("fusion", ["mean", "max", "min"])
@pytest.mark.parametrize("residual", [True, False])
def test_rollout(
    served: Client, info: dict[str, Any], registers: Bundle, images: torch.Tensor, fusion: Any, residual: bool
) -> None:
    found = json.loads(json.dumps(served.call("GET", f"/explorer/{info['id']}/rollout?fusion={fusion}&residual={residual}")[1]))
    expected = inspect.rollout(registers.model, images, fusion=fusion, residual=residual)[0].flatten()
    np.testing.assert_allclose(found["weights"], expected, rtol=1e-5, atol=1e-8)
    direct = torch.eye(27)[0]
    for _, attention in reversed(list(registers.model.attention(images))):
        fused = {"mean": attention[0].mean(0), "max": attention[0].amax(0), "min": attention[0].amin(0)}[fusion]
        fused = fused / fused.sum(-1, keepdim=True)
        direct = direct @ (0.5 * fused + 0.5 * torch.eye(27) if residual else fused)
    np.testing.assert_allclose(found["weights"], direct[3:].numpy(), rtol=1e-4, atol=1e-7)


def test_read_out_ends_with_the_prediction(info: dict[str, Any], registers: Bundle, images: torch.Tensor) -> None:
    model = registers.model.eval()
    with torch.no_grad():
        kept = model.features(images, [0, 1])
        first = model.head(model.norm(kept.layers[0])[:, 0]).softmax(1)[0]
        last = model(images).softmax(1)[0]
    order = [one["index"] for one in info["predictions"]]
    np.testing.assert_allclose(info["read_out"]["scores"], [first[order].tolist(), last[order].tolist()], atol=1e-5)


def test_features(served: Client, info: dict[str, Any], registers: Bundle, images: torch.Tensor) -> None:
    found = np.frombuffer(read(served, info, "similarity?layer=1"), np.uint8).reshape(27, 27) / 127.5 - 1
    expected = inspect.token_similarity(registers.model, images, (2, 1))[0].flatten()
    np.testing.assert_allclose(found[3 + 2 * 4 + 1, 3:], expected, atol=1 / 255 + 1e-6)
    row = np.frombuffer(read(served, info, "similarity?layer=1&query=12"), np.uint8) / 127.5 - 1
    np.testing.assert_array_equal(row, found[12])
    colours = np.frombuffer(read(served, info, "colours"), np.uint8).reshape(2, 24, 3)
    features = inspect.layer_features(registers.model, images)[0]
    np.testing.assert_allclose(colours[1] / 255, inspect.feature_colours(features[1, 3:]), atol=1 / 500)
    # The colours are the components: the first varies along the direction of largest variance.
    centred = features[1, 3:] - features[1, 3:].mean(0)
    direction = np.linalg.svd(centred)[2][0]
    assert abs(np.corrcoef(centred @ direction, colours[1, :, 0])[0, 1]) > 0.95


def test_distance_and_positions(served: Client, info: dict[str, Any], registers: Bundle, images: torch.Tensor) -> None:
    status, found, _ = served.call("GET", f"/explorer/{info['id']}/distance")
    assert status == 200
    np.testing.assert_allclose(found["distance"], inspect.attention_distance(registers.model, images), rtol=1e-6)
    assert found["uniform"] == inspect.uniform_distance(registers.model.config)
    values = np.frombuffer(read(served, info, "positions"), np.uint8).reshape(6, 4, 6, 4) / 127.5 - 1
    np.testing.assert_allclose(values, inspect.position_similarity(registers.model), atol=1 / 255 + 1e-6)


def test_patches_off(served: Client, info: dict[str, Any], registers: Bundle, images: torch.Tensor) -> None:
    status, found, _ = served.call("POST", f"/explorer/{info['id']}/masked", {"patches": [0, 5, 23]})
    changed = images.clone()
    changed[:, :, :8, :8] = changed[:, :, 8:16, 8:16] = changed[:, :, 40:, 24:] = 0
    expected = {one.index: one.score for one in registers.predict(changed, top=4)[0]}
    assert status == 200 and {one["index"]: pytest.approx(one["score"], abs=1e-5) for one in found["predictions"]} == expected
    for patches, expected_status in (([24], 422), ([-1], 422), ([0] * 400_000, 413), (["a"], 400), ({}, 400)):
        began = time.monotonic()
        assert served.call("POST", f"/explorer/{info['id']}/masked", {"patches": patches})[0] == expected_status
        assert time.monotonic() - began < 5


def test_patches_off_are_computed_as_the_first_predictions_in_any_precision(registers: Bundle, jpegs: list[bytes]) -> None:
    with running(lambda: registers, precision="int8") as client:
        info = client.call("POST", "/explorer/analyse", jpegs[0])[1]
        found = client.call("POST", f"/explorer/{info['id']}/masked", {"patches": []})[1]
    before, after = ({one["index"]: one["score"] for one in part["predictions"]} for part in (info, found))
    assert before.keys() == after.keys() and after == pytest.approx(before, abs=1e-6)


def test_files_of_this_machine_are_shown_to_this_machine_only(registers: Bundle, jpegs: list[bytes]) -> None:
    """A web page can let its own name point to 127.0.0.1 (DNS rebinding)."""
    with running(lambda: registers) as client:
        client.service.explorer_images = (NamedImage("private.jpg", jpegs[0]),)
        for host, expected in (("localhost", 200), (f"127.0.0.1:{client.port}", 200), ("[::1]:80", 200), ("evil.example", 421)):
            connection = client.connect()
            connection.request("GET", "/explorer/images/0", headers={"Host": host})
            assert connection.getresponse().status == expected
            connection.close()


def test_a_photo_that_stays_rotated_is_mentioned(registers: Bundle, jpegs: list[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    threads: set[str] = set()  # Pillow decodes a whole PNG to find its orientation: a second in which the event loop would wait
    original = Preprocess.leaves_rotated

    def leaves_rotated(preprocess: Preprocess, image: object) -> bool:
        threads.add(threading.current_thread().name.partition("_")[0])
        return original(preprocess, image)

    monkeypatch.setattr(Preprocess, "leaves_rotated", leaves_rotated)
    exif = Image.Exif()
    exif[0x0112] = 6
    stream = io.BytesIO()
    Image.open(io.BytesIO(jpegs[0])).save(stream, "JPEG", exif=exif)
    assert registers.preprocess is not None
    for ignored in (True, False):
        bundle = dataclasses.replace(registers, preprocess=dataclasses.replace(registers.preprocess, exif=not ignored))
        with running(lambda bundle=bundle: bundle) as client:  # type: ignore[misc]
            result = client.call("POST", "/v1/predict", stream.getvalue())[1]["results"][0]
            notes = client.call("POST", "/explorer/analyse", stream.getvalue())[1]["notes"]
        assert ("warning" in result) is ignored and any("stored rotated" in note for note in notes) is ignored
    assert threads == {"decode"}


def test_errors_are_sentences(served: Client, info: dict[str, Any]) -> None:
    calls = [
        ("POST", "/explorer/analyse", b"this is not an image", 415),
        ("POST", "/explorer/analyse?model=other", b"", 404),
        ("GET", "/explorer/unknown/attention?layer=0", None, 404),
        ("GET", f"/explorer/{info['id']}/attention?layer=2", None, 422),
        ("GET", f"/explorer/{info['id']}/attention?query=27", None, 422),
        ("GET", f"/explorer/{info['id']}/similarity?layer=2", None, 422),
        ("GET", f"/explorer/{info['id']}/rollout?fusion=sum", None, 400),
        ("GET", "/explorer/images/99", None, 404),
        ("GET", "/page/other.js", None, 404),
        ("GET", f"/page/{quote('../app.py', safe='')}", None, 404),
    ]
    for method, path, body, status in calls:
        answer = served.call(method, path, body)
        assert answer[0] == status and answer[1]["error"].endswith("."), (path, answer)


def test_page_and_policy(served: Client) -> None:
    status, page, headers = served.call("GET", "/")
    assert status == 200 and b"<h1>" in page and headers["content-security-policy"].startswith("default-src 'self'")
    for name, kind in (("main.js", "text/javascript"), ("style.css", "text/css"), ("icon.svg", "image/svg+xml")):
        status, _, headers = served.call("GET", f"/page/{name}")
        assert status == 200 and headers["content-type"].startswith(kind) and headers["x-content-type-options"] == "nosniff"
    assert b"style=" not in page and b"http" not in page.replace(b"http-equiv", b"")


def test_the_page_is_open_and_its_data_needs_the_token(registers: Bundle, jpegs: list[bytes]) -> None:
    with running(lambda: registers, token="secret") as client:
        assert client.call("GET", "/")[0] == client.call("GET", "/page/main.js")[0] == 200
        assert client.call("GET", "/explorer/start")[0] == client.call("POST", "/explorer/analyse", jpegs[0])[0] == 401
        assert client.call("GET", "/explorer/start", authorization="Bearer secret")[0] == 200


def test_few_images_are_kept() -> None:
    def one(size: int) -> compute.Exploration:
        return compute.Exploration(torch.zeros(1), {}, np.zeros(size, np.uint8), None)

    kept = Explorations(images=3, size=1000)
    for name in "abcd":
        kept.add(name, one(10))
    assert kept.find("a") is None and len(kept) == 3
    kept.find("b")
    kept.add("e", one(980))
    assert len(kept) == 2 and kept.find("e") is not None and kept.find("b") is not None
    kept.add("f", one(5000))
    assert len(kept) == 1 and kept.find("f") is not None


def test_examples_are_images() -> None:
    assert [image.name for image in example_images()] == ["cat", "coffee"]
    assert all(image.data.startswith(b"\xff\xd8") for image in example_images())


@pytest.mark.parametrize(
    ("name", "changes", "kind"),
    [
        (
            "ViT-Ti/16",
            {"patch": 8, "class_token": False, "pooling": "mean", "position": "relative", "position_prefix": False, **ViT},
            "ViT",
        ),
        ("ViT-Ti/16", {"patch": 8, "class_token": False, "pooling": "map", **ViT}, "ViT"),
        ("ViT-Ti/16", {"patch": 8, "distill_token": True, "attention": "axial", **ViT}, "ViT"),
        ("R+ViT-Ti/16", {"image_size": (64, 32), **ViT}, "hybrid"),
        ("BiT-R50x1", {"layers": (1,), "multiplier": 0.5, "image_size": (32, 48)}, "ResNet"),
        ("ViT-Ti/16", {"patch": 8, "outputs": 0, **ViT}, "ViT"),
        ("ViT-Ti/16", {"patch": 8, "task": "regress", **ViT}, "ViT"),
        ("ViT-Ti/16", {"patch": 8, "task": "multilabel", **ViT}, "ViT"),
        ("ViT-Ti/16", {"patch": 8, "head": False, **ViT}, "ViT"),
    ],
    ids="relative map axial hybrid bit headless regress multilabel zero-head".split(),
)
def test_any_model(name: str, changes: dict[str, Any], kind: str, tmp_path: Path, jpegs: list[bytes]) -> None:
    from vitrail.serve.explorations import NamedImage
    from vitrail.serve.saved_page import saved_page

    bundle = make(tmp_path / "m", name, **changes)
    found = compute.analyse(bundle, bundle.stored_preprocess()(jpegs[0]))
    assert found.info["kind"] == kind and bool(found.info["predictions"]) == (bundle.head == "set")
    assert (found.info["attention"] is None) == (kind == "ResNet")
    json.dumps(found.info)
    rows, columns = found.info["grid"]
    assert found.features.shape[1] == rows * columns + len(found.info["prefix"])
    assert found.colours().shape == (len(found.features), rows * columns, 3)
    if bundle.task == "regress":
        expected = [one.score for one in bundle.predict(jpegs[0])[0]]
        assert [one["score"] for one in found.info["predictions"]] == pytest.approx(expected, abs=1e-5)
    page, notes = saved_page({"m": bundle}, [NamedImage("</script>.jpg", jpegs[0])])
    assert not notes and page.count("</script>") == 2 and "connect-src 'none'" in page


def test_the_photo_of_a_narrow_image_has_no_more_pixels_than_may_be_decoded(tmp_path: Path) -> None:
    """Twice the model's size, and resized by its short side, it has more pixels on the way than for the model."""
    bundle = make(tmp_path / "m", patch=8, image_size=(32, 32), **ViT)
    bundle.preprocess = Preprocess(size=(32, 32), resize="short-side", resize_to=64)
    with running(lambda: bundle, max_pixels=100_000) as client:
        for width, has_photo in ((400, True), (900, False)):  # 128 × 640 pixels on the way, and 128 × 1440
            stream = io.BytesIO()
            Image.new("RGB", (width, 80), (9, 99, width % 255)).save(stream, "PNG")
            for image in (stream.getvalue(), rotated_left(stream.getvalue())):
                status, info, _ = client.call("POST", "/explorer/analyse", image)
                assert (status, info["photo"]) == (200, has_photo), (width, info)


def rotated_left(data: bytes) -> bytes:
    stream = io.BytesIO()
    Image.open(io.BytesIO(data)).rotate(90, expand=True).save(stream, "PNG")
    return stream.getvalue()


def test_an_image_of_another_size(tmp_path: Path) -> None:
    """Where the model accepts any size, the grid, the maps and the position similarity are those of the image."""
    model = create_model("ViT-Ti/16", outputs=4, seed=0, image_size=32, patch=8, any_size=True, **ViT)
    nn.init.normal_(model.head.weight, std=0.5)
    nn.init.normal_(model.norm.bias, std=0.1)
    preprocess = Preprocess(size=(32, 32)).keep_aspect((8, 8))
    save(tmp_path / "m", model, preprocess=preprocess, classes=list("abcd"))
    bundle = vitrail.load(tmp_path / "m")
    stream = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (200, 300, 3), np.uint8)).save(stream, "PNG")
    with running(lambda: bundle) as client:
        info = client.call("POST", "/explorer/analyse", stream.getvalue())[1]
        assert info["image_size"] == [32, 48] and info["grid"] == [4, 6]
        assert info["attention"]["bytes_per_layer"] == 2 * 25 * 29
        images = preprocess(stream.getvalue())[None]
        found = weights(read(client, info, "attention?layer=1"), 2 * 25, 25).reshape(2, 25, 25)
        (expected,) = [w for _, w in bundle.model.attention(images, [1])]
        np.testing.assert_allclose(found, expected[0].numpy(), atol=info["attention"]["max_error"] + 1e-6)
        values = np.frombuffer(read(client, info, "positions"), np.uint8).reshape(4, 6, 4, 6) / 127.5 - 1
        uniform = inspect.uniform_distance(bundle.model.config.replace(image_size=(32, 48)))
        assert client.call("GET", f"/explorer/{info['id']}/distance")[1]["uniform"] == pytest.approx(uniform)
        assert client.call("POST", f"/explorer/{info['id']}/masked", {"patches": [23]})[0] == 200
    expected = inspect.position_similarity(bundle.model, image_size=(32, 48))
    np.testing.assert_allclose(values, expected, atol=1 / 255 + 1e-6)
    bundle.model.resize((32, 48))
    np.testing.assert_allclose(inspect.position_similarity(bundle.model), expected, atol=1e-6)


def test_large_layers_are_sent_by_query(tmp_path: Path, jpegs: list[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    """As ViT-B/16 at 384 pixels: 577 tokens and 12 heads are 4 MB per layer."""
    bundle = make(tmp_path / "m", patch=8, image_size=(192, 192), width=48, depth=2, heads=12, mlp=16)
    with running(lambda: bundle) as client:
        info = client.call("POST", "/explorer/analyse", jpegs[0])[1]
        assert info["attention"]["send"] == "query" and info["attention"]["bytes_per_layer"] > MAX_REPLY
        assert client.call("GET", f"/explorer/{info['id']}/attention?layer=0")[0] == 413
        whole = weights(read(client, info, "attention?query=300"), 24, 577)
        monkeypatch.setattr(compute, "MAX_ATTENTION", 1)  # as of a much larger model: nothing is kept
        info = client.call("POST", "/explorer/analyse", jpegs[1])[1]
        assert info["attention"]["send"] == "query of a layer"
        assert client.call("GET", f"/explorer/{info['id']}/attention?query=300")[0] == 422
        row = weights(read(client, info, "attention?layer=1&query=300"), 12, 577)
    (expected,) = [w for _, w in bundle.model.attention(bundle.stored_preprocess()(jpegs[1])[None], [1])]
    np.testing.assert_allclose(row, expected[0, :, 300].numpy(), atol=1 / 510)
    assert whole.shape == (24, 577) and np.allclose(whole.sum(1), 1, atol=0.2)


def test_one_query_of_many_tokens_is_computed_alone(tmp_path: Path, jpegs: list[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    """The page asks for it at every move of the pointer. All tokens would take a second with 2305 of them, /8 at 384 pixels."""
    bundle = make(tmp_path / "m", patch=8, image_size=(312, 312), width=32, depth=1, heads=1, mlp=8)
    size, tokens, sizes = (312, 312), 1 + 39 * 39, list[int]()
    encode = signed_to_bytes
    for module in ("exploration", "page_files"):
        monkeypatch.setattr(f"vitrail.serve.{module}.signed_to_bytes", lambda values: sizes.append(values.size) or encode(values))
    with running(lambda: bundle) as client:
        info = client.call("POST", "/explorer/analyse", jpegs[1])[1]
        for path in ("similarity?layer=0", "positions"):
            status, answer, _ = client.call("GET", f"/explorer/{info['id']}/{path}")
            assert status == 413 and "Ask for single queries" in answer["error"] and not sizes
        similar = np.frombuffer(read(client, info, "similarity?layer=0&query=300"), np.uint8) / 127.5 - 1
        positions = np.frombuffer(read(client, info, "positions?query=299"), np.uint8) / 127.5 - 1
    assert sizes == [tokens, tokens - 1]
    features = inspect.layer_features(bundle.model, bundle.stored_preprocess()(jpegs[1])[None])[0, 0]
    np.testing.assert_allclose(similar, inspect.feature_similarity(features)[300], atol=1 / 255 + 1e-6)
    expected = inspect.position_similarity(bundle.model, image_size=size).reshape(tokens - 1, -1)[299]
    np.testing.assert_allclose(positions, expected, atol=1 / 255 + 1e-6)


def test_layers_that_are_computed_later_count_as_memory(
    tmp_path: Path, jpegs: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compute, "MAX_ATTENTION", 1)
    monkeypatch.setattr("vitrail.serve.explorer.Explorations", functools.partial(Explorations, size=700_000))
    bundle = make(tmp_path / "m", patch=8, image_size=(128, 128), **ViT)
    with running(lambda: bundle) as client:
        first, second = (client.call("POST", "/explorer/analyse", one)[1]["id"] for one in jpegs[:2])
        assert client.call("GET", f"/explorer/{first}/picture")[0] == 200
        for key in (first, second):  # 134 kB each, next to 262 kB of the image and its features
            assert client.call("GET", f"/explorer/{key}/attention?layer=0&query=1")[0] == 200
        assert client.call("GET", f"/explorer/{first}/picture")[0] == 404
        assert client.call("GET", f"/explorer/{second}/picture")[0] == 200


def test_a_saved_page_of_a_large_model_says_which_layers_it_has(tmp_path: Path, jpegs: list[bytes], monkeypatch: Any) -> None:
    from vitrail.serve import saved_page as module
    from vitrail.serve.explorations import NamedImage

    monkeypatch.setattr(module, "MAX_MAPS", 1)
    bundle = make(tmp_path / "m", patch=8, **(ViT | {"depth": 3}))
    page, notes = module.saved_page({"m": bundle}, [NamedImage("a", jpegs[0])])
    assert notes == ["m: the page includes the maps of 2 of 3 layers (0, 2)."]
    assert "attention?layer=2" in page and "attention?layer=1" not in page


def test_arrays_are_saved_too(registers: Bundle) -> None:
    from vitrail.serve.saved_page import saved_page

    stream = io.BytesIO()
    np.save(stream, np.random.default_rng(0).integers(0, 255, (200, 300, 3), np.uint8))
    page, _ = saved_page({"m": registers}, [NamedImage("photo.npy", stream.getvalue())])
    assert '"photo": true' in page and "photo.npy" in page


def test_values_that_are_not_finite_are_an_error(registers: Bundle, jpegs: list[bytes]) -> None:
    broken = dataclasses.replace(registers, model=copy.deepcopy(registers.model))
    with running(lambda: broken) as client:
        info = client.call("POST", "/explorer/analyse", jpegs[0])[1]
        with torch.no_grad():
            broken.model.norm.bias.fill_(float("inf"))
        for path, body in (("analyse", jpegs[1]), (f"{info['id']}/masked", {"patches": [0]})):
            status, answer, _ = client.call("POST", f"/explorer/{path}", body)
            assert status == 422 and any(word in answer["error"] for word in ("NaN or infinity", "not finite")), (path, answer)


def test_bytes_round_trip() -> None:
    values = np.random.default_rng(0).dirichlet(np.ones(50) * 0.1, size=(3, 4)).astype(np.float32)
    maps = ByteMaps.of(values)
    assert abs(maps.weights() - values).max() <= maps.max_error + 1e-7
    assert ByteMaps.of(np.zeros((2, 3), np.float32)).weights().max() == 0
    signed = np.linspace(-1, 1, 999)
    assert abs(signed_to_bytes(signed) / 127.5 - 1 - signed).max() <= 1 / 255
