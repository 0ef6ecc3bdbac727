from __future__ import annotations

import functools
import http.server
import io
import json
import pickle
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.data.image_files import encoded, picture
from vitrail.data import open_source
from vitrail.data.decode import decode
from vitrail.data.sources.tars import _braces
from vitrail.data.types import BadImage, Split
from vitrail.errors import VitrailError


def write_tar(file: Path, members: dict[str, bytes], kind: str = "w") -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(file, kind) as archive:  # type: ignore[call-overload]
        for name, content in members.items():
            about = tarfile.TarInfo(name)
            about.size = len(content)
            archive.addfile(about, io.BytesIO(content))
    return file


def samples(first: int, count: int, classes: int = 3) -> dict[str, bytes]:
    members = {}
    for k in range(first, first + count):
        members[f"s{k:04d}.jpg"] = encoded(picture(k), "JPEG")
        members[f"s{k:04d}.cls"] = str(k % classes).encode()
    return members


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    for k in range(3):
        write_tar(tmp_path / f"train-{k:03d}.tar", samples(10 * k, 10))
    write_tar(tmp_path / "val-000.tar", samples(100, 5))
    return tmp_path


def wds(folder: Path, tail: str = "") -> str:
    return f"{tail}{'&' if '?' in tail else '?'}index={folder / 'cache'}"


def all_of(split: Split) -> list[tuple[str, bytes, int]]:
    return [(split.image_name(k), bytes(split.payload(k)), int(split.targets[k])) for k in range(len(split))]


def test_tars_are_read_in_any_order(shards: Path) -> None:
    source = open_source(f"wds:{shards}/" + wds(shards, "train-{000..002}.tar"))
    split = source.splits["train"]
    assert (len(split), source.classes, source.detail) == (30, ("0", "1", "2"), "3 tars")
    for k in (29, 0, 13):
        assert split.payload(k) == encoded(picture(k), "JPEG")
        assert split.image_name(k) == f"train-{k // 10:03d}.tar/s{k:04d}.jpg"
        assert split.targets[k] == k % 3
    again = pickle.loads(pickle.dumps(split.subset([13, 2])))
    assert again.payload(0) == split.payload(13)


def test_splits_come_from_the_names_of_the_tars_or_from_options(shards: Path) -> None:
    by_name = open_source(f"wds:{shards}/" + wds(shards, "*.tar"))
    named = open_source(f"wds:?train={shards}/train-{{000..002}}.tar&val={shards}/val-000.tar&index={shards}/cache")
    for source in (by_name, named):
        assert {name: len(split) for name, split in source.splits.items()} == {"train": 30, "val": 5}
    assert all_of(by_name.splits["val"]) == all_of(named.splits["val"])


def test_a_bare_path_to_a_tar_is_recognised(shards: Path) -> None:
    assert open_source(f"wds:{shards}/" + wds(shards, "val-000.tar")).kind == "wds"


def test_the_index_is_made_once_and_again_when_the_tar_changes(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = f"wds:{shards}/" + wds(shards, "val-000.tar")
    before = all_of(open_source(reference).splits["val"])

    def unreadable(*_: object) -> None:
        raise AssertionError("the tar was read again")

    with monkeypatch.context() as patch:
        patch.setattr("vitrail.data.sources.tars._samples", unreadable)
        assert all_of(open_source(reference).splits["val"]) == before
    write_tar(shards / "val-000.tar", samples(200, 7))
    assert len(open_source(reference).splits["val"]) == 7


def test_class_names_come_from_a_file(shards: Path) -> None:
    (shards / "names.txt").write_text("ant\nbee\ncat\ndog\n")
    source = open_source(f"wds:{shards}/" + wds(shards, f"*.tar?classes={shards}/names.txt"))
    assert source.classes == ("ant", "bee", "cat", "dog")
    assert [source.classes[k] for k in source.splits["train"].targets[:3]] == ["ant", "bee", "cat"]
    (shards / "names.txt").write_text('["ant", "bee"]')
    with pytest.raises(VitrailError, match=r"label '2', but .*names.txt has 2 names, numbered from 0"):
        open_source(f"wds:{shards}/" + wds(shards, f"*.tar?classes={shards}/names.txt"))


def test_class_names_and_labels_that_no_file_has_are_sentences(shards: Path) -> None:
    reference = f"wds:{shards}/" + wds(shards, f"*.tar?classes={shards}/names.txt")
    (shards / "names.txt").write_text("[" * 100_000)
    with pytest.raises(VitrailError, match=r"Cannot read the class names .* nested too deeply"):
        open_source(reference)
    (shards / "names.txt").write_text("ant\nbee\ncat\n")
    write_tar(shards / "val-000.tar", {"a.jpg": encoded(picture(1), "JPEG"), "a.cls": b"9" * 5000})
    with pytest.raises(VitrailError, match=r"label '9{40}', but .* has 3 names"):
        open_source(reference)


def test_labels_in_json_and_folders_in_keys(tmp_path: Path) -> None:
    members = {
        "x/1.a.json": b"{}",  # the key ends at the first dot of the last part
        "x/1.png": encoded(picture(1)),
        "x/1.json": json.dumps({"label": "cat", "tags": ["b", "a"], "age": 1.5}).encode(),
        "y/1.png": encoded(picture(2)),
        "y/1.json": json.dumps({"label": "dog", "tags": ["a"], "age": 2}).encode(),
    }
    write_tar(tmp_path / "t.tar", members)
    by_label = open_source(f"wds:{tmp_path}/" + wds(tmp_path, "t.tar"))
    assert by_label.classes == ("cat", "dog")
    assert [by_label.splits["train"].image_name(k) for k in range(2)] == ["t.tar/x/1.png", "t.tar/y/1.png"]
    tags = open_source(f"wds:{tmp_path}/" + wds(tmp_path, "t.tar?label=json.tags"))
    assert (tags.task, tags.splits["train"].targets.tolist()) == ("multilabel", [[1, 1], [1, 0]])
    age = open_source(f"wds:{tmp_path}/" + wds(tmp_path, "t.tar?label=json.age"))
    assert (age.task, age.splits["train"].targets.tolist()) == ("regress", [[1.5], [2]])
    with pytest.raises(VitrailError, match=r"no image has a label 'json.size'"):
        open_source(f"wds:{tmp_path}/" + wds(tmp_path, "t.tar?label=json.size"))


def test_the_case_of_suffixes_does_not_matter(tmp_path: Path) -> None:
    content = {"1.PNG": encoded(picture(1)), "1.CLS": b"0", "2.png": encoded(picture(2)), "2.cls": b"1"}
    write_tar(tmp_path / "t.tar", content)
    for options in ("", "?image=PNG", "?label=CLS"):
        split = open_source(f"wds:{tmp_path}/" + wds(tmp_path, f"t.tar{options}")).splits["train"]
        assert (split.classes, split.targets.tolist()) == (("0", "1"), [0, 1]), options


def test_images_without_labels(tmp_path: Path) -> None:
    write_tar(tmp_path / "t.tar", {"1.png": encoded(picture(1)), "2.webp": encoded(picture(2), "WEBP")})
    split = open_source(f"wds:{tmp_path}/" + wds(tmp_path, "t.tar")).splits["train"]
    assert (split.task, split.targets.shape) == ("unlabelled", (2, 0))
    assert decode(split.payload(1), channels=3).shape == (40, 48, 3)


def test_each_problem_is_named(tmp_path: Path) -> None:
    whole = write_tar(tmp_path / "t.tar", samples(0, 4)).read_bytes()
    (tmp_path / "cut.tar").write_bytes(whole[: len(whole) // 3])
    (tmp_path / "text.tar").write_text("hello " * 400)
    write_tar(tmp_path / "t.tar.gz", samples(0, 2), "w:gz")
    write_tar(tmp_path / "none.tar", {"a.txt": b"no image"})
    write_tar(tmp_path / "part.tar", {"1.png": encoded(picture(1)), "1.cls": b"3", "2.png": encoded(picture(2))})
    cases = {
        "cut.tar": "cut.tar cannot be read as a tar: .*copy it again",
        "text.tar": "text.tar cannot be read as a tar",
        "t.tar.gz": "decompress it to a plain .tar",
        "none.tar": "no images in .*none.tar",
        "part.tar": r"part.tar: 2.png: the label is empty",
        "t-{0..3}.tar": "4 of 4 tars not found, for example .*t-0.tar",
        "zz*.tar": "no tars found",
        "t-{3..1}.tar": "the second number must be the larger",
    }
    for tail, words in cases.items():
        with pytest.raises(VitrailError, match=words):
            open_source(f"wds:{tmp_path}/" + wds(tmp_path, tail))
    with pytest.raises(VitrailError, match="expected one pattern"):
        open_source("wds:")


def test_a_missing_tar_gives_bad_images(shards: Path) -> None:
    split = open_source(f"wds:{shards}/" + wds(shards, "val-000.tar")).splits["val"]
    (shards / "val-000.tar").write_bytes((shards / "val-000.tar").read_bytes()[:3000])
    with pytest.raises(BadImage, match="ends before the image is complete"):
        split.payload(4)
    (shards / "val-000.tar").unlink()
    with pytest.raises(BadImage, match="cannot be read"):
        split.payload(0)


def test_braces() -> None:
    assert _braces("a-{08..11}.tar") == ["a-08.tar", "a-09.tar", "a-10.tar", "a-11.tar"]
    assert _braces("{x,y}-{0..1}") == ["x-0", "x-1", "y-0", "y-1"]
    assert _braces("plain.tar") == ["plain.tar"]
    with pytest.raises(VitrailError, match="1,200 pairs of braces"):
        open_source(f"wds:{'{a}' * 1200}.tar")


class Ranges(http.server.SimpleHTTPRequestHandler):
    """Serve files with byte ranges, which Python's own server does not support."""

    def do_GET(self) -> None:
        content = Path(self.translate_path(self.path)).read_bytes()
        span = self.headers.get("Range")
        if span:
            first, last = span.removeprefix("bytes=").split("-")
            part = content[int(first) : int(last) + 1 if last else None]
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {first}-{int(first) + len(part) - 1}/{len(content)}")
        else:
            part = content
            self.send_response(200)
        self.send_header("Content-Length", str(len(part)))
        self.send_header("Accept-Ranges", "bytes")
        self.end_headers()
        self.wfile.write(part)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(shards: Path) -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Ranges, directory=str(shards))) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()
        thread.join()


def test_tars_at_a_url_give_the_same_images(shards: Path, server: str) -> None:
    local = open_source(f"wds:{shards}/" + wds(shards, "train-{000..002}.tar")).splits["train"]
    remote = open_source(f"wds:{server}/" + wds(shards, "train-{000..002}.tar")).splits["train"]
    assert all_of(local) == all_of(remote)
    with pytest.raises(VitrailError, match=r"nothing.tar cannot be reached"):
        open_source(f"wds:{server}/" + wds(shards, "nothing.tar"))
