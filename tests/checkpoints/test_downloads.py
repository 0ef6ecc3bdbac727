"""Weights by name and by URL, against a server on this machine with the Hub's layout."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from email.message import Message
from pathlib import Path
from typing import Any

import pytest
import torch

import vitrail
from tests.checkpoints.hub_server import COMMIT, HubServer, hub_server
from tests.checkpoints.small_models import KINDS, assert_same_model, bundle_of, images_for
from vitrail.checkpoints import download, hub, published, url
from vitrail.checkpoints.bundle import Bundle
from vitrail.checkpoints.conversion import write
from vitrail.errors import VitrailError

NAME = "ViT-B/16@augreg-in21k-ft-in1k"
REPOSITORY = "timm/vit_base_patch16_224.augreg_in21k_ft_in1k"
CONFIG = dataclasses.replace(KINDS["plain"], outputs=1000)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    monkeypatch.setenv("no_proxy", "127.0.0.1,localhost")
    monkeypatch.setattr(download, "PAUSE", 0.01)
    with hub_server() as running:
        monkeypatch.setenv("HF_ENDPOINT", running.address)
        yield running


@pytest.fixture
def bundle(server: HubServer, tmp_path: Path) -> Bundle:
    """A small model in timm's format under the name of published weights."""
    made = bundle_of(CONFIG)
    write(made, tmp_path / "repository", "timm")
    (tmp_path / "repository" / "pytorch_model.bin").write_bytes(b"x" * 5000)  # must not be downloaded
    (tmp_path / "repository" / "README.md").write_text("not needed")
    server.repositories[REPOSITORY] = tmp_path / "repository"
    return made


def blobs(tmp_path: Path) -> Path:
    return tmp_path / "home" / "hub" / f"models--{REPOSITORY.replace('/', '--')}" / "blobs"


def test_a_name_is_downloaded_once_and_predicts_with_words(
    server: HubServer, bundle: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loaded = vitrail.load("ViT-B/16")
    assert_same_model(loaded.model, bundle.model, CONFIG)
    assert loaded.classes is not None and loaded.classes[0] == "tench" and not loaded.classes_assumed
    assert loaded.report.source == NAME and loaded.provenance["licence"] == "apache-2.0"
    assert not any("class names" in text for text in loaded.report.assumptions)
    assert f"downloading {NAME} from 127.0.0.1" in capsys.readouterr().err
    got = {path.rpartition("/")[2] for method, path, _ in server.requests if method == "GET" and "/resolve/" in path}
    assert got <= {"config.json"} and len(server.ranges()) == 1  # and the weights, from the CDN
    asked = len(server.requests)
    assert_same_model(vitrail.load(NAME).model, bundle.model, CONFIG)
    assert len(server.requests) == asked
    # The cache is the Hub's own: its library finds the file there.
    from huggingface_hub import try_to_load_from_cache

    file = try_to_load_from_cache(REPOSITORY, "model.safetensors", cache_dir=tmp_path / "home" / "hub", revision=COMMIT)
    assert isinstance(file, str) and Path(file).resolve().parent == blobs(tmp_path)


def test_an_interrupted_download_is_resumed(server: HubServer, bundle: Bundle, tmp_path: Path) -> None:
    size = (tmp_path / "repository" / "model.safetensors").stat().st_size
    server.cut_after = [size // 2]
    vitrail.load("ViT-B/16")
    assert server.ranges() == ["", f"bytes={size // 2}-"]


def test_a_later_call_resumes_where_the_first_gave_up(server: HubServer, bundle: Bundle, tmp_path: Path) -> None:
    size = (tmp_path / "repository" / "model.safetensors").stat().st_size
    server.cut_after = [size // 3, *[0] * download.ATTEMPTS]
    with pytest.raises(VitrailError, match=rf"ended after {size // 3:,} of {size:,} bytes.*run again to resume"):
        vitrail.load("ViT-B/16")
    assert not [file for file in blobs(tmp_path).iterdir() if len(file.name) == 64]
    server.requests.clear()
    assert vitrail.load("ViT-B/16").head == "set"
    assert server.ranges() == [f"bytes={size // 3}-"]
    assert not list(blobs(tmp_path).glob("*.part*"))


def test_a_corrupted_download_is_refused_and_deleted(server: HubServer, bundle: Bundle, tmp_path: Path) -> None:
    server.corrupt = True
    with pytest.raises(VitrailError, match=r"corrupted: its SHA256 is not [0-9a-f]{64}\. It was deleted; run again"):
        vitrail.load("ViT-B/16")
    assert not [file for file in blobs(tmp_path).iterdir() if file.stat().st_size > 5000]
    server.corrupt = False
    assert vitrail.load("ViT-B/16").head == "set"


def test_a_corrupted_file_in_the_cache_is_found(server: HubServer, bundle: Bundle, tmp_path: Path) -> None:
    vitrail.load("ViT-B/16")
    blob = next(file for file in blobs(tmp_path).iterdir() if len(file.name) == 64)
    content = bytearray(blob.read_bytes())
    content[-1] ^= 1
    blob.write_bytes(content)
    with pytest.raises(VitrailError, match=r"model.safetensors of ViT-B/16.* in the cache is corrupted"):
        vitrail.load("ViT-B/16")
    assert vitrail.load("ViT-B/16").head == "set"  # downloaded anew
    assert hashlib.sha256(blob.read_bytes()).hexdigest() == blob.name


def test_offline(server: HubServer, bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(VitrailError) as raised:
        vitrail.load("ViT-B/16")
    text = str(raised.value)
    assert f"{NAME} is not in the local cache" in text and "HF_HUB_OFFLINE" in text
    assert f"`hf download {REPOSITORY} config.json model.safetensors --local-dir {REPOSITORY[5:]}`" in text
    assert not server.requests
    monkeypatch.delenv("HF_HUB_OFFLINE")
    vitrail.load("ViT-B/16")
    server.requests.clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert vitrail.load("ViT-B/16").classes and vitrail.load(f"hf:{REPOSITORY}").classes and not server.requests


def test_offline_advice_names_all_files(server: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(VitrailError, match="is not in the local cache") as raised:
        vitrail.load("hf:owner/vit@v2")
    files = "config.json preprocessor_config.json model.safetensors"
    assert f"`hf download owner/vit {files} --revision v2 --local-dir vit`" in str(raised.value)
    assert "model.safetensors.index.json" in str(raised.value)


def test_the_cache_is_complete_only_with_all_shards_and_the_preprocessing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    folder = tmp_path / "models--owner--vit" / "snapshots" / COMMIT
    folder.mkdir(parents=True)
    (folder.parents[1] / "refs").mkdir()
    (folder.parents[1] / "refs" / "main").write_text(COMMIT)
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    files = {
        "config.json": '{"model_type": "vit"}',
        "model.safetensors.index.json": json.dumps({"weight_map": {"a": shards[0], "b": shards[1]}}),
        shards[0]: "",
        shards[1]: "",
        "preprocessor_config.json": "{}",
    }
    for name, text in files.items():
        assert hub.cached("owner/vit") is None, name
        (folder / name).write_text(text)
    assert hub.cached("owner/vit") == folder
    (folder / "preprocessor_config.json").unlink()
    (folder / "config.json").write_text('{"architecture": "vit_base_patch16_224"}')  # timm's
    assert hub.cached("owner/vit") == folder


def test_the_folder_that_the_message_asks_for_works(server: HubServer, bundle: Bundle, tmp_path: Path) -> None:
    config = tmp_path / "repository" / "config.json"
    config.write_text(config.read_text().replace('"custom_load"', '"tag": "augreg_in21k_ft_in1k", "custom_load"'))
    loaded = vitrail.load(tmp_path / "repository")
    assert loaded.classes is not None and loaded.classes[1] == "goldfish" and not loaded.classes_assumed
    assert not server.requests


def test_no_server(server: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nothing listens there
    with pytest.raises(VitrailError, match=r"is not in the local cache .*the Hub cannot be reached.*hf download timm/"):
        vitrail.load("ViT-B/16")


def test_missing_and_gated_repositories(server: HubServer, bundle: Bundle) -> None:
    with pytest.raises(VitrailError, match="There is no repository 'someone/absent' on the Hub"):
        vitrail.load("hf:someone/absent")
    with pytest.raises(VitrailError, match=f"hf:{REPOSITORY} has no revision 'v9'"):
        vitrail.load(f"hf:{REPOSITORY}@v9")
    server.gated.add(REPOSITORY)
    with pytest.raises(VitrailError, match="is gated: accept its terms on the Hub and log in"):
        vitrail.load("ViT-B/16")


def test_repositories_without_safetensors_still_load(server: HubServer, bundle: Bundle, tmp_path: Path) -> None:
    folder = tmp_path / "repository"
    state = {name: tensor.clone() for name, tensor in _safe_tensors(folder).items()}
    (folder / "model.safetensors").unlink()
    torch.save(state, folder / "pytorch_model.bin")
    assert_same_model(vitrail.load(f"hf:{REPOSITORY}").model, bundle.model, CONFIG)


def _safe_tensors(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


# Files of Google's


@pytest.fixture
def bucket(server: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bundle:
    """A small BiT under the URL of a published one."""
    made = bundle_of(dataclasses.replace(KINDS["bit"], outputs=1000))
    write(made, tmp_path / "small.npz", "bit")
    server.files["/bucket/BiT-S-R50x1.npz"] = (tmp_path / "small.npz").read_bytes()
    there = [
        dataclasses.replace(one, source=f"{server.address}/bucket/BiT-S-R50x1.npz")
        if one.reference == "BiT-R50x1@goog-in1k"
        else one
        for one in published.published_weights()
    ]
    monkeypatch.setattr(published, "published_weights", lambda: tuple(there))
    return made


def test_a_file_of_googles_by_name(server: HubServer, bucket: Bundle, tmp_path: Path) -> None:
    loaded = vitrail.load("BiT-R50x1@goog-in1k")
    images = images_for(bucket.model.config)
    torch.testing.assert_close(loaded.model(images), bucket.model(images))
    assert loaded.classes is not None and loaded.classes[0] == "tench" and not loaded.classes_assumed
    server.requests.clear()
    assert vitrail.load("BiT-R50x1@goog-in1k").classes and not server.requests
    assert list((tmp_path / "cache" / "weights").rglob("BiT-S-R50x1.npz"))


def test_a_url_is_resumed_and_verified(server: HubServer, bucket: Bundle, tmp_path: Path) -> None:
    address, size = f"{server.address}/bucket/BiT-S-R50x1.npz", len(server.files["/bucket/BiT-S-R50x1.npz"])
    server.cut_after = [1000, *[0] * download.ATTEMPTS]
    with pytest.raises(VitrailError, match=rf"ended after 1,000 of {size:,} bytes.*run again to resume.*or give the path"):
        vitrail.load(address)
    server.requests.clear()
    server.corrupt = True
    with pytest.raises(VitrailError, match="corrupted: its MD5 is not"):
        vitrail.load(address)
    assert server.ranges() == ["bytes=1000-"]
    server.corrupt = False
    assert vitrail.load(address).classes
    with pytest.raises(VitrailError, match=r"there is no such file \(HTTP 404\)"):
        vitrail.load(f"{server.address}/bucket/other.npz")


def test_a_url_offline_says_where_to_put_the_file(
    server: HubServer, bucket: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(VitrailError, match="downloads are disabled") as raised:
        vitrail.load("BiT-R50x1@goog-in1k")
    target = Path(str(raised.value).partition("copy it to ")[2].partition(";")[0])
    target.parent.mkdir(parents=True)
    target.write_bytes(server.files["/bucket/BiT-S-R50x1.npz"])
    assert vitrail.load("BiT-R50x1@goog-in1k").head == "set" and not server.requests


@pytest.mark.parametrize("honours_if_range", [True, False])
def test_a_file_that_changed_on_the_server_is_not_continued(server: HubServer, tmp_path: Path, honours_if_range: bool) -> None:
    server.honours_if_range, server.sends_hash = honours_if_range, False  # nothing else would show the change
    target, address = tmp_path / "x.bin", f"{server.address}/bucket/x.bin"
    server.files["/bucket/x.bin"] = bytes(9000)
    server.cut_after = [4000, *[0] * download.ATTEMPTS]
    with pytest.raises(VitrailError, match="run again to resume"):
        download.fetch(address, target)
    server.files["/bucket/x.bin"] = b"\x01" * 9000  # another content, so another ETag
    server.requests.clear()
    assert download.fetch(address, target).read_bytes() == b"\x01" * 9000
    assert server.ranges() == (["bytes=4000-"] if honours_if_range else ["bytes=4000-", ""])
    assert sorted(file.name for file in tmp_path.glob("x.bin*")) == ["x.bin"]


def test_a_part_of_an_unknown_version_is_not_continued(server: HubServer, tmp_path: Path) -> None:
    server.files["/bucket/x.bin"] = bytes(9000)
    (tmp_path / "x.bin.part").write_bytes(b"\x01" * 4000)
    assert download.fetch(f"{server.address}/bucket/x.bin", tmp_path / "x.bin").read_bytes() == bytes(9000)
    assert server.ranges() == [""]


def test_a_new_version_never_has_old_bytes(server: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupted right after the version is stored, the part must not have the bytes of the old one."""
    server.files["/bucket/x.bin"] = bytes(9000)
    part = tmp_path / "x.bin.part"
    part.write_bytes(b"\x01" * 4000)
    part.with_name("x.bin.part.version").write_text('"old"')

    def killed(part: Path, needed: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(download, "_check_space", killed)
    with pytest.raises(KeyboardInterrupt):
        download.fetch(f"{server.address}/bucket/x.bin", tmp_path / "x.bin")
    assert part.read_bytes() == b"" and part.with_name("x.bin.part.version").read_text() != '"old"'


def test_a_server_that_sends_another_range(server: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server.files["/bucket/x.bin"] = content = bytes(range(250)) * 40
    server.sends_hash = False
    server.cut_after = [4000]
    original = download._describe
    ranges: list[str] = []

    def shifted(headers: Message, start: int) -> object:
        if "Content-Range" in headers:
            ranges.append(headers["Content-Range"])
            headers.replace_header("Content-Range", f"bytes 3000-9999/{len(content)}")
        return original(headers, start)

    monkeypatch.setattr(download, "_describe", shifted)
    assert download.fetch(f"{server.address}/bucket/x.bin", tmp_path / "x.bin").read_bytes() == content
    assert len(ranges) == 1 and server.ranges() == ["", "bytes=4000-", ""]


def test_a_full_disk_is_not_an_error_of_the_network(server: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server.files["/bucket/x.bin"] = bytes(9000)

    def full(self: Path, *args: Any, **named: Any) -> Any:
        if self.name.endswith(".part") and args == ("ab",):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original(self, *args, **named)

    original = Path.open
    monkeypatch.setattr(Path, "open", full)
    monkeypatch.setattr(download.time, "sleep", lambda seconds: pytest.fail("tried again"))
    with pytest.raises(VitrailError, match=r"Cannot write .*x\.bin: No space left on device"):
        download.fetch(f"{server.address}/bucket/x.bin", tmp_path / "x.bin")
    assert len(server.ranges()) == 1


def test_bytes_are_on_the_disk_before_the_file_has_its_name(
    server: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.files["/bucket/x.bin"] = bytes(9000)
    synced: list[bool] = []
    monkeypatch.setattr(os, "fsync", lambda number: synced.append((tmp_path / "x.bin").exists()))
    download.fetch(f"{server.address}/bucket/x.bin", tmp_path / "x.bin")
    assert synced == [False] and not (tmp_path / "cache" / "locks").exists()


def test_a_hash_that_is_not_base64_is_ignored() -> None:
    headers = Message()
    headers["x-goog-hash"] = "md5=a"
    assert download._describe(headers, 0).checksum is None


def test_a_login_is_not_sent_to_the_target_of_a_redirect(server: HubServer, tmp_path: Path) -> None:
    server.files["/bucket/x.bin"] = bytes(100)
    server.redirects["/bucket/old.bin"] = f"http://localhost:{server.server_port}/bucket/x.bin"
    download.fetch(f"{server.address}/bucket/old.bin", tmp_path / "x.bin", headers={"authorization": "Bearer hf_secret"})
    assert [one.get("Authorization") for one in server.headers] == ["Bearer hf_secret", None]
    server.headers.clear()
    with_login = server.address.replace("://", "://me:pass%20word@")
    download.fetch(f"{with_login}/bucket/old.bin", tmp_path / "y.bin")
    assert [one.get("Authorization") for one in server.headers] == ["Basic bWU6cGFzcyB3b3Jk", None]


def test_two_queries_are_two_files(server: HubServer, bucket: Bundle) -> None:
    address = f"{server.address}/bucket/BiT-S-R50x1.npz"
    paths = [download.cached_url(f"{address}{query}") for query in ("", "?v=1", "?v=2")]
    assert len(set(paths)) == 3 and {path.suffix for path in paths} == {".npz"}
    assert paths[1].name == f"BiT-S-R50x1-{hashlib.sha256(b'v=1').hexdigest()[:12]}.npz"
    first = url.download(f"{address}?v=1").read_bytes()
    server.files["/bucket/BiT-S-R50x1.npz"] = b"other"
    assert url.download(f"{address}?v=2").read_bytes() == b"other" != first == url.download(f"{address}?v=1").read_bytes()
    cached = download.cached_url
    assert cached("https://h/w.npz") != cached("http://h/w.npz") and cached("https://h/a/../w") == cached("https://h/w")
    assert cached("https://me:secret@h/w.npz") == cached("https://h/w.npz#part") and cached("https://h/a:b") != cached(
        "https://h/a_b"
    )


def test_messages_and_provenance_show_no_secrets(server: HubServer, bucket: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    host = server.address.removeprefix("http://")
    loaded = vitrail.load(f"http://me:secret@{host}/bucket/BiT-S-R50x1.npz?signature=secret")
    assert loaded.report.source == loaded.provenance["source"] == f"http://{host}/bucket/BiT-S-R50x1.npz?…"
    for path in ("absent.npz", ""):
        with pytest.raises(VitrailError, match=r"there is no such file|is not the URL") as raised:
            vitrail.load(f"http://me:secret@{host}/{path}?signature=secret")
        assert "secret" not in str(raised.value)
    server.cut_after = [10, *[0] * download.ATTEMPTS]
    with pytest.raises(VitrailError, match="run again to resume") as raised:
        vitrail.load(f"http://{host}/bucket/BiT-S-R50x1.npz?signature=secret2")
    assert "secret2" not in str(raised.value)
    assert download.hide_secrets("403 for url 'https://u:p@h/x?sig=1'") == "403 for url 'https://h/x?…'"


def test_progress_is_reported_in_bytes(server: HubServer, tmp_path: Path) -> None:
    server.files["/bucket/y.bin"] = bytes(3 << 20)
    seen: list[tuple[str, int, int | None]] = []
    download.fetch(f"{server.address}/bucket/y.bin", tmp_path / "y.bin", progress=lambda *step: seen.append(step))
    assert seen[0] == ("y.bin", 0, 3 << 20) and seen[-1] == ("y.bin", 3 << 20, 3 << 20)
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)


@pytest.mark.slow
def test_the_environment_of_a_process(server: HubServer, bundle: Bundle, tmp_path: Path) -> None:
    """Two processes at once download one file once, and a third is offline."""
    code = "import vitrail; print(vitrail.load('ViT-B/16').classes[0])"
    command = [sys.executable, "-c", code]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    for process in both:
        out, err = process.communicate(timeout=300)
        assert out == "tench\n", err
    assert len(server.ranges()) == 1
    server.requests.clear()
    done = subprocess.run(
        command, env={**os.environ, "HF_HUB_OFFLINE": "1"}, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.stdout == "tench\n" and not server.requests, done.stderr


def test_names_are_found_in_the_cache_without_loading(server: HubServer, bundle: Bundle) -> None:
    assert hub.cached(REPOSITORY) is None
    vitrail.load("ViT-B/16")
    assert hub.cached(REPOSITORY) is not None


@pytest.mark.slow
def test_fine_tuning_and_prediction_by_name(
    server: HubServer, bundle: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first thing that a user types."""
    from PIL import Image

    from vitrail.cli import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["vitrail"])
    words = "finetune --from ViT-B/16 --data digits --check-images none --steps 2 --schedule.warmup 0 --out run --device cpu"
    with pytest.raises(SystemExit) as done:
        main(words.split())
    assert not done.value.code, capsys.readouterr().err
    tuned = vitrail.load(tmp_path / "run")
    assert tuned.model.config.outputs == 10 and tuned.model.config.to_dict()["width"] == 32
    Image.new("RGB", (40, 40), "red").save("x.png")
    with pytest.raises(SystemExit):
        main(["predict", "ViT-B/16", "x.png", "--workers", "0"])
    label = bundle_label(bundle, tmp_path / "x.png")
    assert f"x.png: {label} " in capsys.readouterr().out
    assert len(server.ranges()) == 1


def bundle_label(bundle: Bundle, image: Path) -> str:
    from vitrail.data.imagenet import labels

    return labels("1k")[vitrail.Bundle.of(bundle).predict(image, top=1)[0][0].index]
