"""Folders of shards: every image once, the same bytes for any number of ranks, killed processes and restarts."""

from __future__ import annotations

import copy
import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.evaluate.test_evaluator import Threads
from vitrail import files
from vitrail.checkpoints import Bundle, load
from vitrail.cli import main
from vitrail.data.types import Payload, Split
from vitrail.errors import VitrailError
from vitrail.evaluate import EvalContext, FeatureSpec, embed, load_embeddings, open_embeddings, shards
from vitrail.evaluate.embeddings import embed_tensor
from vitrail.evaluate.predictor import predict, predict_tensor
from vitrail.evaluate.shard_folder import ShardFolder
from vitrail.evaluate.shard_output import _FeatureShard
from vitrail.evaluate.shards import ShardResult, embed_shards, predict_shards
from vitrail.train.parallel import World

SIZE = 5


class Ranks(Threads):
    """A rank that is a thread: what all ranks exchange passes through a barrier."""

    def broadcast(self, value: Any) -> Any:
        return self.gather(value)[0]

    def barrier(self) -> None:
        self.gather(None)


def on_ranks(ranks: int, call: Callable[[World, dist.Store], Any]) -> list[Any]:
    """Call a function on each rank, with the store that torchrun's process group would have."""
    barrier, table, store = threading.Barrier(ranks), dict[int, Any](), dist.HashStore()
    with ThreadPoolExecutor(ranks) as pool:
        calls = [pool.submit(call, Ranks(rank, ranks, barrier, table), store) for rank in range(ranks)]
    return [one.result() if one.exception() is None else one.exception() for one in calls]


def content(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


@pytest.fixture(scope="module")
def images(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """36 images, and two bad ones: one alone in the last shard."""
    folder = tmp_path_factory.mktemp("many")
    for number, file in enumerate(sorted((photos / "val").rglob("*.jpg"))):
        shutil.copy(file, folder / f"{number:03d}.jpg")
    (folder / "007b.jpg").write_text("no image")
    for name in ("900.jpg", "901.jpg", "902.jpg", "903.jpg"):
        (folder / name).write_bytes(b"")
    return folder


@pytest.fixture(scope="module")
def features(checkpoint: Path, images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one process writes without interruption."""
    folder = tmp_path_factory.mktemp("features") / "alone"
    assert embed_shards(load(checkpoint), [images], folder, shard_size=SIZE) is not None
    return folder


def test_shards_hold_what_one_file_would(bundle: Bundle, images: Path, features: Path) -> None:
    expected, found = embed(bundle, [images]), load_embeddings(features)
    assert found.names == expected.names and len(found.names) == 36
    assert np.abs(found.features - expected.features).max() < 2e-5 and found.about == expected.about
    manifest = json.loads((features / "manifest.json").read_text())
    assert (manifest["images"], manifest["bad_images"], len(manifest["shards"])) == (41, 5, 9)
    assert [one["images"] for one in manifest["shards"]] == [5] * 8 + [1] and manifest["shards"][-1]["bad"] == 1
    bad = json.loads((features / "shard-00001.json").read_text())["bad"]
    assert [(one["index"], Path(one["name"]).name) for one in bad] == [(8, "007b.jpg")] and "text file" in bad[0]["reason"]


@pytest.mark.parametrize("ranks", [2, 3])
def test_bytes_do_not_depend_on_ranks(bundle: Bundle, images: Path, features: Path, tmp_path: Path, ranks: int) -> None:
    done: list[int] = []

    def call(world: World, store: dist.Store) -> ShardResult | None:
        context = EvalContext(world=world, bad_images="skip")
        count = lambda images, total: done.append(images)  # noqa: E731
        return embed_shards(
            copy.deepcopy(bundle), [images], tmp_path / "out", None, context, shard_size=SIZE, progress=count, store=store
        )

    main_result, *others = on_ranks(ranks, call)
    assert content(tmp_path / "out") == content(features)
    assert others == [None] * (ranks - 1) and (main_result.computed_shards, main_result.computed_images) == (9, 41)
    assert max(done) <= 41


def test_an_interrupted_job_resumes_on_other_ranks_without_repeating_shards(
    bundle: Bundle, images: Path, features: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"

    def stop(done: int, total: int) -> None:
        if done >= 21:
            raise KeyboardInterrupt

    context = EvalContext(workers=1, batch=8, bad_images="skip")
    with pytest.raises(KeyboardInterrupt):
        embed_shards(bundle, [images], out, None, context, shard_size=SIZE, progress=stop)
    finished = {file.name: file.stat().st_mtime_ns for file in out.glob("shard-*")}
    assert 2 < len(finished) < 18 and not (out / "manifest.json").exists()
    with pytest.raises(VitrailError, match="not finished: run the same command again"):
        load_embeddings(out)
    (out / ".shard-00007.safetensors.0123abcd.safetensors").write_bytes(b"left by a killed process")

    def call(world: World, store: dist.Store) -> ShardResult | None:
        return embed_shards(copy.deepcopy(bundle), [images], out, None, replace(context, world=world), shard_size=SIZE, store=store)

    result = on_ranks(2, call)[0]
    assert result.computed_shards == 9 - len(finished) // 2 and content(out) == content(features)
    assert {name: (out / name).stat().st_mtime_ns for name in finished} == finished


def test_rank_0_finishes_the_shards_of_a_dead_rank(
    bundle: Bundle, images: Path, features: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shards, "PATIENCE", 0.3)
    died = threading.Event()

    def call(world: World, store: dist.Store) -> ShardResult | None:
        def progress(done: int, total: int) -> None:
            if not world.main:
                died.set()
                raise RuntimeError("this rank dies")
            died.wait(10)

        context = EvalContext(world=world, workers=1, bad_images="skip")
        return embed_shards(
            copy.deepcopy(bundle), [images], tmp_path / "out", None, context, shard_size=SIZE, progress=progress, store=store
        )

    result, error = on_ranks(2, call)
    assert isinstance(error, RuntimeError) and result.images == 41 and content(tmp_path / "out") == content(features)
    assert "no progress" in caplog.text


def test_other_settings_images_or_weights_are_refused(bundle: Bundle, images: Path, features: Path, tmp_path: Path) -> None:
    before = content(features)
    with pytest.raises(VitrailError, match=r"1 setting differs:\n  shard_size: 5 there, 6 now"):
        embed_shards(bundle, [images], features, shard_size=6)
    with pytest.raises(VitrailError, match=r"features.feature: pre_logits there, mean now"):
        embed_shards(bundle, [images], features, FeatureSpec(feature="mean"), shard_size=SIZE)
    with pytest.raises(VitrailError, match=r"file_format: safetensors there, parquet now"):
        embed_shards(bundle, [images], features, shard_size=SIZE, format="parquet")
    with pytest.raises(VitrailError, match=r"input.images: 41 there, 1 now"):
        embed_shards(bundle, [images / "000.jpg"], features, shard_size=SIZE)
    with pytest.raises(VitrailError, match=r"batch: 8 there, 3 now"):
        embed_shards(bundle, [images], features, context=EvalContext(batch=3, bad_images="skip"), shard_size=SIZE)
    with pytest.raises(VitrailError, match="command: embed there, predict now"):
        predict_shards(bundle, [images], features, shard_size=SIZE)
    other = copy.deepcopy(bundle)
    with torch.no_grad():
        next(other.model.parameters()).add_(1e-6)
    with pytest.raises(VitrailError, match="weights_sha256"):
        embed_shards(other, [images], features, shard_size=SIZE)
    renamed = replace(bundle, classes=tuple(reversed(bundle.classes or ())))  # the same weights with other labels
    assert shards.fingerprint(renamed) != shards.fingerprint(bundle)
    assert content(features) == before
    with pytest.raises(VitrailError, match=r"has no settings.json, so it is not a folder of shards"):
        embed_shards(bundle, [images], images)
    (tmp_path / "file").write_text("")
    with pytest.raises(VitrailError, match="is a file"):
        embed_shards(bundle, [images], tmp_path / "file")
    with pytest.raises(VitrailError, match="shard size is 0"):
        embed_shards(bundle, [images], tmp_path / "new", shard_size=0)


@pytest.mark.parametrize("deletes", [False, True])
def test_of_two_jobs_that_start_at_once_one_is_refused(deletes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = (
        ShardFolder(folder=tmp_path / "out", images=4, shard_size=2, suffix=".csv", settings={"top": top}) for top in (1, 2)
    )
    fsync, opened = files.fsync, list[Path]()

    def meanwhile(path: Path) -> None:  # the second job opens the folder after the first found it empty
        if not opened:
            opened.append(path)
            hidden = path.rename(tmp_path / "hidden") if not deletes else None
            two.open()
            if hidden is not None:  # the second job was too early to see, and delete, the file of the first
                hidden.rename(path)
        fsync(path)

    monkeypatch.setattr(files, "fsync", meanwhile)
    with pytest.raises(VitrailError, match=r"holds shards of another job; 1 setting differs:\n  top: 2 there, 1 now"):
        one.open()
    assert opened and [file.name for file in (tmp_path / "out").iterdir()] == ["settings.json"]
    two.open()


def test_ranks_that_disagree_are_refused(bundle: Bundle, images: Path, tmp_path: Path) -> None:
    def call(world: World, store: dist.Store) -> ShardResult | None:
        context = EvalContext(world=world, bad_images="skip", precision="fp32" if world.main else "bf16")
        return embed_shards(copy.deepcopy(bundle), [images], tmp_path / "out", None, context, shard_size=SIZE, store=store)

    barrier, table, store = threading.Barrier(2), dict[int, Any](), dist.HashStore()
    with ThreadPoolExecutor(2) as pool:
        one, two = (pool.submit(call, Ranks(rank, 2, barrier, table), store) for rank in range(2))
        with pytest.raises(VitrailError, match=r"Rank 1 does not agree with rank 0 \(precision: fp32 there, bf16 now\)"):
            raise two.exception() or AssertionError
        barrier.abort()
        assert one.exception() is not None


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("shard-00003.safetensors", lambda content: content[:-1]),
        ("shard-00003.safetensors", lambda content: content[:-9] + b"\x01" + content[-8:]),
        ("shard-00003.json", lambda content: content[:40]),
        ("shard-00003.json", lambda content: b"{}"),
        ("manifest.json", lambda content: b"[" + content),
    ],
)
def test_corrupted_files_are_computed_again(
    bundle: Bundle, images: Path, features: Path, tmp_path: Path, name: str, damage: Callable[[bytes], bytes]
) -> None:
    out = tmp_path / "out"
    shutil.copytree(features, out)
    (out / name).write_bytes(damage((out / name).read_bytes()))
    result = embed_shards(bundle, [images], out, shard_size=SIZE)
    assert result is not None and result.computed_shards == (0 if name == "manifest.json" else 1)
    assert content(out) == content(features)


def test_a_folder_that_is_not_finished_has_no_manifest(
    bundle: Bundle, images: Path, features: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    shutil.copytree(features, out)
    (out / "shard-00003.safetensors").unlink()

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(shards._Worker, "_write", stop)
    with pytest.raises(KeyboardInterrupt):
        embed_shards(bundle, [images], out, shard_size=SIZE)
    assert not (out / "manifest.json").exists()
    assert {file.name for file in features.iterdir()} - {file.name for file in out.iterdir()} == {
        *("manifest.json", "shard-00003.json", "shard-00003.safetensors")
    }


def test_a_second_job_in_a_folder_stops_the_first_with_a_sentence(
    bundle: Bundle, images: Path, features: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, real = tmp_path / "out", _FeatureShard.write

    def write(self: _FeatureShard, path: Path, *rest: Any) -> None:
        real(self, path, *rest)
        monkeypatch.setattr(_FeatureShard, "write", real)
        assert embed_shards(bundle, [images], out, shard_size=SIZE) is not None  # the second job, from begin to end

    monkeypatch.setattr(_FeatureShard, "write", write)
    with pytest.raises(VitrailError, match=r"was deleted while shard 0 was written\. If another job"):
        embed_shards(bundle, [images], out, shard_size=SIZE)
    assert content(out) == content(features)


def test_corrupted_folders_are_sentences(features: Path, bundle: Bundle, images: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(features, out)
    (out / "shard-00000.safetensors").write_bytes(b"nothing")
    with pytest.raises(VitrailError, match=r"shard-00000\.safetensors cannot be read .* computes what is corrupted"):
        load_embeddings(out)
    manifest = json.loads((out / "manifest.json").read_text())
    for change in ({"images": -9}, {"bad": SIZE + 1}, {"images": "5"}):
        (out / "manifest.json").write_text(json.dumps({**manifest, "shards": [{**manifest["shards"][0], **change}]}))
        with pytest.raises(VitrailError, match=r"manifest\.json is corrupted \(a shard has .* bad ones\)"):
            open_embeddings(out)
    (out / "manifest.json").write_text("{}")
    with pytest.raises(VitrailError, match="written anew, without computing"):
        load_embeddings(out)
    (out / "settings.json").write_text("{")
    with pytest.raises(VitrailError, match=r"settings\.json cannot be read"):
        embed_shards(bundle, [images], out, shard_size=SIZE)
    with pytest.raises(VitrailError, match="it was not written by `vitrail embed`"):
        load_embeddings(images)


def test_predictions_in_shards_are_those_of_one_table(
    capsys: pytest.CaptureFixture[str], checkpoint: Path, images: Path, tmp_path: Path
) -> None:
    words = ["predict", str(checkpoint), str(images), "--precision", "fp32", "--top", "2"]
    for more in (["--csv", str(tmp_path / "one.csv")], ["--out", str(tmp_path / "csv"), "--shard-size", "7"]):
        with pytest.raises(SystemExit) as ended:
            main([*words, *more])
        assert ended.value.code == 1
    shown = capsys.readouterr()
    assert "5 of 41 images could not be read" in shown.err and "predictions of 36 images in 6 shards" in shown.out
    with (tmp_path / "one.csv").open() as file:
        header, *expected = csv.reader(file)
    rows = []
    for shard in sorted((tmp_path / "csv").glob("shard-*.csv")):
        with shard.open() as file:
            ours, *more_rows = csv.reader(file)
        assert ours == header
        rows += more_rows
    numbers = [header.index(name) for name in header if name.startswith("probability")]
    for one, two in zip(rows, expected, strict=True):
        for k, (a, b) in enumerate(zip(one, two, strict=True)):
            assert a == b or (k in numbers and abs(float(a) - float(b)) <= 2e-6)
    parquet = pytest.importorskip("pyarrow.parquet")
    assert predict_shards(load(checkpoint), [images], tmp_path / "p", top=2, format="parquet", shard_size=40) is not None
    table = parquet.read_table(tmp_path / "p" / "shard-00000.parquet").to_pydict()
    assert list(table) == header and table["image"] == [row[0] for row in expected[:40]]
    assert table["error"][8].startswith("a text file") and table["label_1"][8] is None and table["label_1"][0] == expected[0][1]


def test_the_command_writes_resumes_and_says_what_it_did(
    capsys: pytest.CaptureFixture[str],
    checkpoint: Path,
    images: Path,
    features: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "out"
    words = ["embed", str(checkpoint), str(images), "--out", str(out), "--shard-size", str(SIZE)]

    def run(*more: str) -> tuple[Any, str, str]:
        with pytest.raises(SystemExit) as ended:
            main([*words, *more])
        shown = capsys.readouterr()
        return ended.value.code, shown.out, shown.err

    status, text, err = run("--json")
    summary = json.loads(text)
    assert status == 1 and "007b.jpg: a text file" in err and "5 of 41 images could not be read" in err
    assert (summary["images"], summary["bad_images"], summary["shards"], summary["computed_images"]) == (41, 5, 9, 41)
    assert summary["images_per_second"] > 0 and content(out) == content(features)
    status, text, _ = run()
    assert status == 1 and "of 36 images in 9 shards; all of them were finished before" in text
    (out / "shard-00002.json").unlink()
    assert "8 shards of them finished before" in run()[1]
    status, _, err = run("--bad-images", "error")
    assert status == 1  # nothing was left to read
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit):
        main([*words[:3], "--out", str(tmp_path / "one.npz")])
    assert "one.npz is one file; under torchrun every rank writes its own shards" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["predict", str(checkpoint), str(images)])
    assert "The output is one stream" in capsys.readouterr().err


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such names")
def test_names_that_are_not_unicode_and_names_given_twice(bundle: Bundle, images: Path, tmp_path: Path) -> None:
    odd = tmp_path / os.fsdecode(b"caf\xe9.jpg")
    shutil.copy(images / "000.jpg", odd)
    given = [images / "001.jpg", odd, images / "900.jpg", images / "001.jpg", images / "900.jpg"]
    expected = tuple(str(given[k]) for k in (0, 1, 3))
    for kind in ("safetensors", "parquet"):
        out = tmp_path / os.fsdecode(b"\xff") / kind
        result = embed_shards(bundle, given, out, format=kind, shard_size=2)  # type: ignore[arg-type]
        assert result is not None and load_embeddings(out).names == expected
        assert [(one.index, one.name) for one in result.bad()] == [(2, str(given[2])), (4, str(given[4]))]
    result = predict_shards(bundle, given, tmp_path / os.fsdecode(b"\xfe"), format="parquet", shard_size=2)
    assert result is not None and result.bad_images == 2


def test_images_of_any_size(bundle: Bundle, images: Path, tmp_path: Path) -> None:
    context = EvalContext(any_size=True, bad_images="skip")
    assert embed_shards(bundle, [images], tmp_path / "out", None, context, shard_size=15) is not None
    found, expected = load_embeddings(tmp_path / "out"), embed(bundle, [images], context=context)
    assert found.names == expected.names and found.about == expected.about
    assert np.abs(found.features - expected.features).max() < 2e-5
    with pytest.raises(VitrailError, match="grids of any size"):
        embed_shards(bundle, [images], tmp_path / "patches", FeatureSpec(feature="patches"), context)


class Endless(Split):
    """Images of noise that exist only while they are read."""

    def __init__(self, images: int) -> None:
        self.name, self.task, self.classes, self.targets = "endless", "unlabelled", (), np.empty((images, 0), np.float32)

    def image_name(self, index: int) -> str:
        return f"image-{index:09d}"

    def payload(self, index: int) -> Payload:
        return np.full((32, 32, 3), index % 256, np.uint8)


@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_images(bundle: Bundle, tmp_path: Path) -> None:
    spec = FeatureSpec(feature="patches")  # 3 kB per image: 3 MB in all

    def peak(images: int) -> int:
        tracemalloc.start()
        assert embed_shards(bundle, Endless(images), tmp_path / str(images), spec, shard_size=50) is not None
        used = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return used

    peak(100)
    assert peak(1000) < peak(200) + 600_000


@pytest.mark.slow
def test_a_killed_process_loses_its_open_shard_only(bundle: Bundle, checkpoint: Path, images: Path, tmp_path: Path) -> None:
    listed = sorted(file for file in map(str, images.glob("0*.jpg")))
    (tmp_path / "list.txt").write_text("\n".join(listed * 60))
    words = ["embed", str(checkpoint), str(tmp_path / "list.txt"), "--shard-size", "40", "--workers", "1", "--out"]
    out = tmp_path / "killed"
    process = subprocess.Popen([sys.executable, "-m", "vitrail", *words, str(out)])
    while process.poll() is None and not (out / "shard-00002.json").exists():
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    finished = {file.name: file.stat().st_mtime_ns for file in out.glob("shard-*.json")}
    assert 3 <= len(finished) < 56 and not (out / "manifest.json").exists()
    context = EvalContext(bad_images="skip", workers=1)
    resumed = embed_shards(bundle, [tmp_path / "list.txt"], out, None, context, shard_size=40)
    assert resumed is not None and resumed.computed_shards == len(resumed.manifest["shards"]) - len(finished)
    assert {name: (out / name).stat().st_mtime_ns for name in finished} == finished
    assert embed_shards(bundle, [tmp_path / "list.txt"], tmp_path / "alone", None, context, shard_size=40) is not None
    assert content(out) == content(tmp_path / "alone")


def test_outputs_that_are_not_finite_are_refused(bundle: Bundle, images: Path, tmp_path: Path) -> None:
    broken = copy.deepcopy(bundle)
    with torch.no_grad():
        broken.model.norm.bias.fill_(float("nan"))
    text = r"The model's output for .*000\.jpg contains NaN or infinity"
    with pytest.raises(VitrailError, match=text):
        embed_shards(broken, [images], tmp_path / "embed", shard_size=SIZE)
    with pytest.raises(VitrailError, match=text):
        predict_shards(broken, [images], tmp_path / "predict", shard_size=SIZE)
    with pytest.raises(VitrailError, match=text):
        embed(broken, [images])
    with pytest.raises(VitrailError, match=text):
        next(predict(broken, [images]))
    with pytest.raises(VitrailError, match="output for image 0 contains NaN"):
        predict_tensor(broken, torch.zeros(1, 3, 32, 32))
    with pytest.raises(VitrailError, match="output for image 0 contains NaN"):
        embed_tensor(broken, torch.zeros(1, 3, 32, 32))
