"""Images of any data source into shards, and neighbours in shards."""

from __future__ import annotations

import functools
import http.server
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.spatial.distance import cdist

from tests.data.test_sources_tars import Ranges, write_tar
from vitrail.checkpoints import Bundle, load
from vitrail.cli import main
from vitrail.data.sources import read_ahead
from vitrail.data.sources.read_ahead import ReadAhead
from vitrail.errors import VitrailError
from vitrail.evaluate import embed, load_embeddings, nearest
from vitrail.evaluate.embeddings import Embeddings, ShardedEmbeddings, open_embeddings
from vitrail.evaluate.predictor import find_images
from vitrail.evaluate.shards import embed_shards


@pytest.fixture(scope="module")
def files(photos: Path) -> list[Path]:
    return sorted((photos / "val").rglob("*.jpg"))[:20]


@pytest.fixture(scope="module")
def tars(files: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tars")
    for number in range(2):
        members = {file.name: file.read_bytes() for file in files[10 * number : 10 * number + 10]}
        write_tar(folder / f"part-{number}.tar", members)
    return folder


class Counted(Ranges):
    """Count requests for ranges, and refuse some of them."""

    requests = 0
    refused: tuple[int, ...] = ()

    def do_GET(self) -> None:
        if self.headers.get("Range"):
            Counted.requests += 1
            if Counted.requests in Counted.refused:
                self.send_error(503)
                return
        super().do_GET()


@pytest.fixture
def server(tars: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    pytest.importorskip("aiohttp")
    monkeypatch.setattr(read_ahead, "_PAUSES", (0.01, 0.01))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Counted, directory=str(tars))) as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()
        thread.join()


def names(folder: Path) -> list[str]:
    return [Path(name).name for name in load_embeddings(folder).names]


def test_remote_tars_are_read_ahead_and_retried(
    bundle: Bundle, files: list[Path], tars: Path, server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = f"wds:{server}/part-{{0..1}}.tar?index={tmp_path / 'index'}"
    split = find_images([reference])
    assert len(split) == 20
    monkeypatch.setattr(Counted, "requests", 0)
    monkeypatch.setattr(Counted, "refused", (1, 3))
    result = embed_shards(bundle, split, tmp_path / "out", shard_size=8)
    assert result is not None and result.bad_images == 0
    assert Counted.requests <= 8  # 3 shards, one of which has a part of both tars: 4 ranges and 2 retries, not 20
    assert names(tmp_path / "out") == [file.name for file in files]
    assert np.array_equal(load_embeddings(tmp_path / "out").features[:8], embed(bundle, files[:8]).features)
    monkeypatch.setattr(Counted, "refused", range(10_000))
    with pytest.raises(VitrailError, match=r"part-0\.tar cannot be read .* run the same command again"):
        embed_shards(bundle, find_images([reference]), tmp_path / "failed", shard_size=8)
    assert not list((tmp_path / "failed").glob("shard-*"))  # nothing is recorded as a bad image
    monkeypatch.setattr(Counted, "refused", ())
    assert embed_shards(bundle, find_images([reference]), tmp_path / "failed", shard_size=8) is not None
    for file in (tmp_path / "out").iterdir():
        assert file.read_bytes() == (tmp_path / "failed" / file.name).read_bytes()


def test_adjacent_ranges_are_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    content, asked = bytes(range(256)) * 4000, list[tuple[str, int, int]]()

    def read(file: str, offset: int, size: int) -> bytes:
        asked.append((file, offset, size))
        return content[offset : offset + size]

    ahead = ReadAhead(read)
    spans = [("a", 0, 100), ("a", 512, 100), ("a", 900_000, 50), ("b", 7, 9), ("a", 10, 5)]
    ahead.start(spans)
    ahead.start(spans[:2])  # they are requested already
    for file, offset, size in spans:
        assert ahead.take((file, offset, size)) == content[offset : offset + size]
    assert ahead.take(spans[0]) is None
    assert sorted(asked) == [("a", 0, 612), ("a", 10, 5), ("a", 900_000, 50), ("b", 7, 9)]
    monkeypatch.setattr(read_ahead, "_MAX_WAITING", 3)
    ahead.start(("c", k << 20, 1) for k in range(5))
    assert ahead.take(("c", 0, 1)) is None and ahead.take(("c", 4 << 20, 1)) is not None


def test_all_kinds_of_sources(bundle: Bundle, photos: Path, files: list[Path], tars: Path, tmp_path: Path) -> None:
    table = tmp_path / "table.csv"
    table.write_text("path\n" + "".join(f"{file}\n" for file in files[:3]) + "gone.jpg\n")
    result = embed_shards(bundle, [table, f"wds:{tars}/part-0.tar?index={tmp_path}", files[5]], tmp_path / "mixed", shard_size=4)
    assert result is not None and [(one.index, one.name) for one in result.bad()] == [(3, "gone.jpg")]
    found = load_embeddings(tmp_path / "mixed")
    assert found.names[:3] == tuple(map(str, files[:3])) and found.names[3] == f"part-0.tar/{files[0].name}"
    assert found.names[-1] == str(files[5]) and len(found.names) == 14
    assert np.array_equal(found.features[0], found.features[3])  # the same image, from a file and from a tar
    folder = find_images([f"folder:{photos}"])
    assert len(folder) == 84 and Path(folder.image_name(0)).is_file()
    with pytest.raises(VitrailError, match="1 of 1 tar not found"):
        find_images([f"wds:{tars}/none.tar"])
    with pytest.raises(VitrailError, match="There is no file or folder foo:bar"):
        find_images(["foo:bar"])


def test_a_source_is_not_the_checkpoint_of_predict(
    capsys: pytest.CaptureFixture[str], tars: Path, tmp_path: Path, checkpoint: Path
) -> None:
    for words in ([f"wds:{tars}/part-1.tar?index={tmp_path}"], [str(checkpoint), str(tars / "part-1.tar")]):
        with pytest.raises(SystemExit) as ended:
            main(["predict", *words, "--csv", "-"])
        assert ended.value.code == 0 and len(capsys.readouterr().out.splitlines()) == 11


def search(embeddings: Any, queries: list[int], metric: Any) -> tuple[list[list[int]], list[Any]]:
    order, values = embeddings.nearest(queries, 6, metric)
    return [rows.tolist() for rows in order], values


@pytest.mark.parametrize("format_", ["safetensors", "parquet"])
def test_neighbours_in_shards_are_exact(
    bundle: Bundle, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format_: Any
) -> None:
    monkeypatch.setattr("vitrail.evaluate.sharded_embeddings._BLOCK", 3 * 48 * 4)  # three rows at a time
    (tmp_path / "bad.jpg").write_text("")
    assert embed_shards(bundle, [tmp_path / "bad.jpg", photos], tmp_path / "out", shard_size=10, format=format_) is not None
    sharded, loaded = open_embeddings(tmp_path / "out"), load_embeddings(tmp_path / "out")
    assert isinstance(sharded, ShardedEmbeddings) and len(sharded.names) == 84 and tuple(sharded.names) == loaded.names
    for metric in ("cosine", "euclidean"):
        distance = cdist(loaded.features.astype(np.float64), loaded.features, metric)  # type: ignore[call-overload]
        expected = [[k for k in np.argsort(distance[q], kind="stable").tolist() if k != q][:6] for q in (0, 50)]
        for one in (sharded, loaded):
            rows, values = search(one, [0, 50], metric)
            assert rows == expected
            shown = np.array([distance[q][found] for q, found in zip((0, 50), rows, strict=True)])
            assert np.allclose(values, 1 - shown if metric == "cosine" else shown, atol=1e-5)
    other = tmp_path / "other.jpg"
    other.write_bytes(Path(loaded.names[3]).read_bytes())
    assert sharded.row_of_file(loaded.names[3]) == 3 == sharded.find("/".join(Path(loaded.names[3]).parts[-3:]))
    with_query = sharded.with_images([str(other)])
    assert with_query.names[84] == str(other) and len(with_query.names) == 85
    order, values = with_query.nearest([84], 3, among=84)
    assert order[0][0] == 3 and values[0][0] == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("use_faiss", [False, True])
@pytest.mark.parametrize("metric", ["cosine", "euclidean"])
def test_equal_rows_are_in_order_whatever_searches_them(monkeypatch: pytest.MonkeyPatch, use_faiss: bool, metric: Any) -> None:
    if use_faiss:
        pytest.importorskip("faiss")
    else:
        monkeypatch.setattr(nearest, "_search", lambda: nearest._with_numpy)
    random = np.random.default_rng(0)
    rows = random.normal(size=(500, 33)).astype(np.float32)
    rows[100:400] = rows[7]  # more equal rows than candidates
    whole = Embeddings(rows, tuple(map(str, range(500)))).nearest([7, 100, 3], 10, metric)
    assert whole[0][0].tolist() == list(range(100, 110)) and whole[0][1].tolist() == [7, *range(101, 110)]
    blocks = [(first, rows[first : first + 77]) for first in range(0, 500, 77)]
    order, values = nearest.nearest_rows(blocks, rows[[7, 100, 3]], [7, 100, 3], 10, metric)
    assert [one.tolist() for one in order] == [one.tolist() for one in whole[0]]
    assert all(np.array_equal(one, two) for one, two in zip(values, whole[1], strict=True))


@pytest.mark.parametrize("metric", ["cosine", "euclidean"])
@pytest.mark.parametrize("use_faiss", [False, True])
def test_rows_that_are_not_finite_hide_no_neighbour(monkeypatch: pytest.MonkeyPatch, use_faiss: bool, metric: Any) -> None:
    if use_faiss:
        pytest.importorskip("faiss")
    else:
        monkeypatch.setattr(nearest, "_search", lambda: nearest._with_numpy)
    rows = np.random.default_rng(0).normal(size=(400, 8)).astype(np.float32)
    good = np.r_[0:100, 300:400]
    expected, scores = nearest.nearest_rows([(0, rows[good])], rows[:2], [0, 1], 5, metric)
    rows[100:300] = np.nan
    rows[200, 1:] = np.inf
    found, theirs = nearest.nearest_rows([(0, rows[:250]), (250, rows[250:])], rows[:2], [0, 1], 5, metric)
    assert [one.tolist() for one in found] == [good[one].tolist() for one in expected]
    assert all(np.array_equal(one, two) for one, two in zip(theirs, scores, strict=True))
    with pytest.raises(VitrailError, match="The features of row 150 contain NaN"):
        nearest.nearest_rows([(0, rows)], rows[150:151], [150], 5, metric)


def test_the_command_searches_a_folder(
    capsys: pytest.CaptureFixture[str], checkpoint: Path, files: list[Path], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert embed_shards(load(checkpoint), files, out, shard_size=6) is not None
    with pytest.raises(SystemExit) as ended:
        main(["neighbours", str(out), files[2].name, "--count", "3", "--sheet", str(tmp_path / "s.png")])
    assert ended.value.code == 0 and "contact sheet" in capsys.readouterr().out and (tmp_path / "s.png").is_file()
    with pytest.raises(SystemExit) as ended:
        main(["neighbours", str(out), "none.jpg"])
    assert ended.value.code == 2 and "There is no image 'none.jpg'" in capsys.readouterr().err
