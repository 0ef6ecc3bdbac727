"""Evaluating a checkpoint: exact for any batch size, workers and ranks; clear messages where it cannot be done."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn import metrics as sk

from tests.evaluate.conftest import CLASSES, tiny_model, write_images
from vitrail.checkpoints import Bundle, load, save
from vitrail.data import open_source, preset
from vitrail.data.sources.files import FileSplit
from vitrail.errors import VitrailError
from vitrail.evaluate import EvalContext, EvalResult, evaluate
from vitrail.evaluate.real_labels import read_real, real_hits
from vitrail.evaluate.report import check_output_folder, write_report
from vitrail.train.parallel import World


def test_metrics_equal_a_plain_loop(bundle: Bundle, photos: Path) -> None:
    result = evaluate(bundle, f"folder:{photos}")
    split = open_source(f"folder:{photos}").split("val")
    assert bundle.preprocess is not None
    images = torch.stack([bundle.preprocess(split.payload(i)) for i in range(len(split))])
    with torch.no_grad():
        logits = bundle.model(images)
    assert result.predictions is not None and result.images == result.total == len(split) == 36
    assert result.metrics["accuracy"] == pytest.approx(sk.accuracy_score(split.targets, logits.argmax(1)))
    assert result.metrics["balanced_accuracy"] == pytest.approx(sk.balanced_accuracy_score(split.targets, logits.argmax(1)))
    assert result.metrics["nll"] == pytest.approx(sk.log_loss(split.targets, logits.double().softmax(1)), rel=1e-4)
    assert 0.5 < result.metrics["accuracy"] < 1  # better than chance, but with some errors


@pytest.mark.slow
@pytest.mark.parametrize(("batch", "workers"), [(1, 0), (5, 0), (7, 2), (64, 1)])
def test_batch_size_and_workers_do_not_change_results(bundle: Bundle, photos: Path, batch: int, workers: int) -> None:
    plain = evaluate(bundle, f"folder:{photos}", context=EvalContext(batch=36, workers=0))
    other = evaluate(bundle, f"folder:{photos}", context=EvalContext(batch=batch, workers=workers))
    assert plain.predictions is not None and other.predictions is not None
    assert (plain.predictions.indices == other.predictions.indices).all() and (
        plain.predictions.predicted == other.predictions.predicted
    ).all()
    assert other.images == other.total == 36
    assert plain.metrics == pytest.approx(other.metrics, abs=1e-6)


class Threads(World):
    """A rank that is a thread: gather waits at a barrier."""

    def __init__(self, rank: int, ranks: int, barrier: threading.Barrier, table: dict[int, Any]) -> None:
        super().__init__(torch.device("cpu"), rank, ranks, ranks)
        object.__setattr__(self, "_barrier", (barrier, table))

    def gather(self, value: Any) -> list[Any]:
        barrier, table = self._barrier  # type: ignore[attr-defined]
        table[self.rank] = value
        barrier.wait(60)
        found = [table[rank] for rank in range(self.ranks)]
        barrier.wait(60)
        return found


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_ranks_do_not_change_results(bundle: Bundle, photos: Path, ranks: int) -> None:
    alone = evaluate(bundle, f"folder:{photos}")
    barrier, table = threading.Barrier(ranks), dict[int, Any]()

    def one(rank: int) -> EvalResult:
        context = EvalContext(world=Threads(rank, ranks, barrier, table), batch=4, workers=0)
        return evaluate(copy.deepcopy(bundle), f"folder:{photos}", context=context)

    with ThreadPoolExecutor(ranks) as pool:
        results = list(pool.map(one, range(ranks)))
    for result in results:
        assert result.images == result.total == 36 and result.metrics == pytest.approx(alone.metrics, abs=1e-6)
        assert result.predictions is not None and (result.predictions.indices == np.arange(36)).all()


@pytest.mark.slow
def test_two_processes_give_the_same_metrics(bundle: Bundle, checkpoint: Path, photos: Path) -> None:
    words = ["vitrail", "eval", str(checkpoint), "--data", f"folder:{photos}", "--device", "cpu", "--workers", "0", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", *words],
        capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["results"][0]
    assert found["images"] == found["total_images"] == 36
    assert found["metrics"] == pytest.approx(evaluate(bundle, f"folder:{photos}").metrics, abs=1e-6)


def test_several_sizes_leave_the_model_unchanged(bundle: Bundle, photos: Path) -> None:
    before = {name: value.clone() for name, value in bundle.model.state_dict().items()}
    large = evaluate(bundle, f"folder:{photos}", image_size=48)
    same = evaluate(bundle, f"folder:{photos}", image_size=32)
    assert large.size == (48, 48) and large.preprocess.size == (48, 48)
    assert same.metrics == evaluate(bundle, f"folder:{photos}").metrics
    assert all(torch.equal(value, before[name]) for name, value in bundle.model.state_dict().items())
    with pytest.raises(VitrailError, match="not a multiple of patch 8"):
        evaluate(bundle, f"folder:{photos}", image_size=33)


def test_a_bad_image_is_an_error_or_is_skipped(bundle: Bundle, photos: Path, tmp_path: Path) -> None:
    write_images(tmp_path, {"val": 3})
    (tmp_path / "val" / "red" / "broken.jpg").write_bytes(b"not an image")
    with pytest.raises(VitrailError, match=r"broken\.jpg"):
        evaluate(bundle, f"folder:{tmp_path}")
    result = evaluate(bundle, f"folder:{tmp_path}", context=EvalContext(bad_images="skip", batch=4))
    assert (result.images, result.total) == (12, 13) and [Path(one.name).name for one in result.bad] == ["broken.jpg"]


def test_a_class_missing_from_the_data_keeps_its_index(bundle: Bundle, photos: Path, tmp_path: Path) -> None:
    write_images(tmp_path, {"val": 4})
    for file in (tmp_path / "val" / "blue").iterdir():
        file.unlink()
    (tmp_path / "val" / "blue").rmdir()
    result = evaluate(bundle, f"folder:{tmp_path}")
    assert result.predictions is not None and set(result.predictions.targets) == {1, 2, 3} and result.classes == CLASSES


def test_mismatched_data_gives_a_clear_message(bundle: Bundle, backbone: Path, photos: Path, tmp_path: Path) -> None:
    with pytest.raises(VitrailError, match="only a backbone"):
        evaluate(load(backbone), f"folder:{photos}")
    write_images(tmp_path / "more", {"val": 2})
    Image.new("RGB", (40, 40)).save(tmp_path / "more" / "val" / "red" / "x.png")
    (tmp_path / "more" / "val" / "violet").mkdir()
    Image.new("RGB", (40, 40)).save(tmp_path / "more" / "val" / "violet" / "x.png")
    with pytest.raises(VitrailError, match="'violet', which the model does not have"):
        evaluate(bundle, f"folder:{tmp_path / 'more'}")
    with pytest.raises(VitrailError, match="no labels to compare with"):
        evaluate(bundle, f"folder:{photos}?labels=none")
    nameless = dataclasses.replace(bundle, classes=None)
    with pytest.raises(VitrailError, match=r"4 outputs without names, the dataset has 5 classes"):
        evaluate(nameless, f"folder:{tmp_path / 'more'}")
    assert "matched by order" in evaluate(nameless, f"folder:{photos}").notes[0]
    without = dataclasses.replace(bundle, preprocess=None)
    with pytest.raises(VitrailError, match=r"No preprocessing is stored in .*--preprocess google-vit"):
        evaluate(without, f"folder:{photos}")
    with torch.no_grad():
        bundle.model.norm.weight[0] = float("nan")
    with pytest.raises(VitrailError, match="contains NaN"):
        evaluate(bundle, f"folder:{photos}")


def test_multilabel_and_regression(photos: Path, tmp_path: Path) -> None:
    files = sorted((photos / "val").rglob("*.jpg"))
    rows = [f"{file},{'red|warm' if 'red' in file.name else 'warm' if 'yellow' in file.name else 'cold'}" for file in files]
    (tmp_path / "labels.csv").write_text("image,labels\n" + "\n".join(rows) + "\n")
    model = tiny_model(outputs=3)
    torch.nn.init.normal_(model.head.weight, std=0.5, generator=torch.Generator().manual_seed(0))  # type: ignore[union-attr, arg-type]
    source = open_source(f"csv:{tmp_path / 'labels.csv'}?task=multilabel&val=0.5")
    thresholds = {"task": {"kind": "multilabel", "thresholds": [0.4, 0.5, 0.6]}}
    save(
        tmp_path / "labels",
        model,
        preprocess=preset("google-vit", size=32),
        classes=source.classes,
        task="multilabel",
        provenance=thresholds,
    )
    result = evaluate(load(tmp_path / "labels"), source.split("val"))
    assert result.outputs is not None and result.truth is not None and "saved with the checkpoint" in result.notes[0]
    assert result.metrics["map"] == pytest.approx(sk.average_precision_score(result.truth, result.outputs, average="macro"))
    decided = result.outputs >= np.array([0.4, 0.5, 0.6])
    assert result.metrics["f1_micro"] == pytest.approx(sk.f1_score(result.truth, decided, average="micro"))

    rows = [f"{file},{len(file.name)}.5,{number}" for number, file in enumerate(files)]
    (tmp_path / "numbers.csv").write_text("image,length,number\n" + "\n".join(rows) + "\n")
    source = open_source(f"csv:{tmp_path / 'numbers.csv'}?task=regress&targets=length,number&val=0.5")
    model = tiny_model(outputs=2)
    torch.nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(0))  # type: ignore[union-attr, arg-type]
    save(tmp_path / "numbers", model, preprocess=preset("google-vit", size=32), classes=source.classes, task="regress")
    result = evaluate(load(tmp_path / "numbers"), source.split("val"))
    assert result.metrics["mae"] == pytest.approx(sk.mean_absolute_error(result.truth, result.outputs), rel=1e-5)
    write_report(tmp_path / "report", [result], source.split("val"), {"checkpoint": "numbers", "data": "numbers.csv"})
    assert "mean absolute error" in (tmp_path / "report" / "report.html").read_text()
    assert (tmp_path / "report" / "per-target.csv").read_text().count("\n") == 3


def test_reassessed_labels(bundle: Bundle, photos: Path, tmp_path: Path) -> None:
    split = open_source(f"folder:{photos}").split("val")
    names = [split.image_name(i) for i in range(len(split))]
    right = {
        name: ["red", "yellow"] if "red" in name else [] if "blue" in name else [int(split.targets[i])]
        for i, name in enumerate(names)
    }
    (tmp_path / "own.json").write_text(json.dumps(right))
    sets = read_real(tmp_path / "own.json", split, CLASSES)
    assert sets[names.index(next(n for n in names if "red" in n))] == {2, 3}
    result = evaluate(bundle, split, real=lambda one: read_real(tmp_path / "own.json", one, CLASSES))
    assert result.predictions is not None
    kept = [(p, s) for p, s in zip(result.predictions.predicted, sets, strict=True) if s]
    assert len(kept) == 27 and result.metrics["real_accuracy"] == pytest.approx(np.mean([p in s for p, s in kept]))
    assert "images with labels: 27; without labels, skipped: 9" in result.notes[0]
    (tmp_path / "own.json").write_text(json.dumps({**right, names[0]: ["violet"]}))
    with pytest.raises(VitrailError, match="'violet'"):
        read_real(tmp_path / "own.json", split, CLASSES)


def test_the_published_file_uses_image_numbers_and_sorted_wordnet_ids(tmp_path: Path) -> None:
    wordnet = ["n03", "n01", "n02"]
    wordnet = [f"{name}000000" for name in wordnet]
    for number, name in enumerate((*wordnet, wordnet[0]), start=1):
        folder = tmp_path / "data" / "val" / name
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8)).save(folder / f"ILSVRC2012_val_{number:08d}.JPEG")
    split = open_source(f"folder:{tmp_path / 'data'}", classes=tuple(wordnet)).split("val")
    (tmp_path / "real.json").write_text(json.dumps([[2], [0, 1], [], [0]]))  # image 1: class 2 of the sorted IDs, which is n03
    sets = dict(
        zip(
            (int(re.findall(r"\d{8}", split.image_name(i))[-1]) for i in range(4)),
            read_real(tmp_path / "real.json", split, wordnet),
            strict=True,
        )
    )
    assert sets == {1: {0}, 2: {1, 2}, 3: frozenset(), 4: {1}}
    assert real_hits(np.array([0, 0]), [frozenset({0, 1}), frozenset()]) == (1, 1, 1)
    (tmp_path / "real.json").write_text("[[0]]")
    with pytest.raises(VitrailError, match="lists 1 image of ImageNet's validation set"):
        read_real(tmp_path / "real.json", split, wordnet)


@pytest.mark.parametrize(
    ("classes", "fits"),
    [
        (("bee", "cat", "dog"), False),  # the alphabetical order of words is not ImageNet's
        (("goldfish", "great white shark", "tench"), False),
        (("tench, Tinca tinca", "goldfish, Carassius auratus", "great_white_shark"), True),
        (("0", "1", "2"), True),
    ],
)
def test_the_published_file_refuses_words_in_another_order(classes: tuple[str, ...], fits: bool, tmp_path: Path) -> None:
    files = ["ILSVRC2012_val_00000001.JPEG"]
    split = FileSplit("val", "classify", tmp_path, files, np.zeros(1, np.int64), classes)
    (tmp_path / "real.json").write_text("[[2]]")
    if fits:
        assert read_real(tmp_path / "real.json", split, classes) == [{2}]
    else:
        with pytest.raises(VitrailError, match="order of their WordNet IDs"):
            read_real(tmp_path / "real.json", split, classes)


@pytest.mark.parametrize("entry", [5, "01", [[1]], {"0": 1}, None, [None], [1.0]])
@pytest.mark.parametrize("published", [False, True])
def test_labels_that_are_not_lists_are_refused(entry: Any, published: bool, tmp_path: Path) -> None:
    """ "01" was read as the classes "0" and "1"."""
    name = "ILSVRC2012_val_00000001.JPEG"
    split = FileSplit("val", "classify", tmp_path, [name], np.zeros(1, np.int64), ("0", "1"))
    (tmp_path / "real.json").write_text(json.dumps([entry] if published else {name: entry}))
    with pytest.raises(VitrailError, match=r"expected a (list of class names|class name)|no entry"):
        read_real(tmp_path / "real.json", split, ("0", "1"))


@pytest.mark.parametrize("text", ["[" * 10_000 + "]" * 10_000, "[[", "5"])
def test_labels_that_are_not_json_lists_are_refused(text: str, tmp_path: Path) -> None:
    split = FileSplit("val", "classify", tmp_path, ["a.png"], np.zeros(1, np.int64), ("0", "1"))
    (tmp_path / "real.json").write_text(text)
    with pytest.raises(VitrailError, match=r"real\.json"):
        read_real(tmp_path / "real.json", split, ("0", "1"))


def test_the_report_page_is_self_contained(bundle: Bundle, photos: Path, tmp_path: Path) -> None:
    split = open_source(f"folder:{photos}").split("val")
    results = [evaluate(bundle, split), evaluate(bundle, split, image_size=48)]
    write_report(tmp_path / "report", results, split, {"checkpoint": "<b>colours</b>", "data": "photos"})
    page = (tmp_path / "report" / "report.html").read_text()
    assert not re.search(r"(?:src|href)='(?!data:)", page) and "http" not in page.replace("http-equiv", "")
    assert "&lt;b&gt;colours" in page and "<b>colours" not in page
    assert "evaluated 36/36 unique images" in page and "48×48" in page and page.count("data:image/jpeg") > 3
    matrix = [row.split(",") for row in (tmp_path / "report" / "confusion.csv").read_text().splitlines()]
    assert matrix[0][1:] == list(CLASSES) and sum(int(n) for row in matrix[1:] for n in row[1:]) == 36
    assert Image.open(tmp_path / "report" / "confusion.png").size[0] > 300
    assert len((tmp_path / "report" / "predictions.csv").read_text().splitlines()) == 37
    saved = json.loads((tmp_path / "report" / "metrics.json").read_text())
    assert saved["results"][0]["metrics"]["accuracy"] == results[0].metrics["accuracy"]


def test_only_a_report_is_overwritten(tmp_path: Path) -> None:
    check_output_folder(tmp_path / "new", overwrite=False)
    (tmp_path / "report.html").write_text("old")
    with pytest.raises(VitrailError, match=r"contains a report. Pass --overwrite"):
        check_output_folder(tmp_path, overwrite=False)
    check_output_folder(tmp_path, overwrite=True)
    (tmp_path / "report.html").rename(tmp_path / "thesis.tex")
    with pytest.raises(VitrailError, match=r"other files \(thesis\.tex\)"):
        check_output_folder(tmp_path, overwrite=True)


def test_half_precision_weights_get_half_precision_images(checkpoint: Path, photos: Path) -> None:
    low = evaluate(load(checkpoint, dtype=torch.bfloat16), f"folder:{photos}")
    assert low.images == 36 and low.metrics["accuracy"] == pytest.approx(
        evaluate(load(checkpoint), f"folder:{photos}").metrics["accuracy"], abs=0.15
    )


def test_torch_threads_are_restored(bundle: Bundle, photos: Path) -> None:
    before = torch.get_num_threads()
    evaluate(bundle, f"folder:{photos}", context=EvalContext(batch=4))
    assert torch.get_num_threads() == before


def test_sequential_and_threaded_passes_agree(bundle: Bundle, photos: Path) -> None:
    split = open_source(f"folder:{photos}").split("val")
    assert bundle.preprocess is not None
    context = EvalContext(batch=5, workers=2)
    threaded = list(context.run(split, bundle.preprocess, bundle.model, bundle.model.__call__))
    sequential = list(context.run(split, bundle.preprocess, bundle.model, bundle.model.__call__)._sequential())
    assert len(threaded) == len(sequential) == 8
    for (ours, batch), (theirs, same) in zip(threaded, sequential, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5) and torch.equal(batch.images, same.images)
        assert torch.equal(batch.indices, same.indices) and torch.equal(batch.targets, same.targets)
