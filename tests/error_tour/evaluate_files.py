"""Errors of what evaluation reads and writes: embeddings, shards, ImageNet's test sets, labels, and the tasks of suites."""

from __future__ import annotations

import dataclasses
import json
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

import vitrail
from tests.error_tour.case import at
from tests.error_tour.evaluate_models import bundle, split
from tests.error_tour.files import scratch
from vitrail.data import imagenet
from vitrail.data.preprocess import preset
from vitrail.evaluate import suite_run
from vitrail.evaluate.context import EvalContext
from vitrail.evaluate.embeddings import Embeddings, check_extension, embed, embed_tensor, load_embeddings
from vitrail.evaluate.imagenet_sets import SETS, ImageNetSet, corruption_folders, open_set
from vitrail.evaluate.nearest import check_vectors
from vitrail.evaluate.real_labels import read_real
from vitrail.evaluate.reproduction import reproduce
from vitrail.evaluate.settings import SuiteSettings
from vitrail.evaluate.shard_folder import ShardFolder, read_manifest, read_settings
from vitrail.evaluate.sharded_embeddings import Shard, ShardNames, open_shards
from vitrail.evaluate.shards import _Taken, _Worker, embed_shards, predict_shards
from vitrail.evaluate.suite_layouts import _json, _read_matrix, open_layout
from vitrail.evaluate.suite_run import find_tasks, run_task
from vitrail.evaluate.suite_sources import TaskData, _first, _require, open_task
from vitrail.evaluate.suites import VTAB, tasks_of
from vitrail.train.parallel import World

IDS = imagenet.wordnet_ids("1k")
NOT_IN_A = IDS[next(k for k in range(1000) if k not in imagenet.subset("a"))]
TASKS = {task.name: task for task in VTAB}
AGAIN = "Run the command that wrote it again."


def embeddings(value: float = 1.0, **about: Any) -> Embeddings:
    return Embeddings(np.full((3, 4), value, np.float32), ("a/cat.jpg", "b/cat.jpg", "dog.jpg"), about)


def without_checkpoint() -> object:
    found = embed(bundle(), ["cat.jpg"])
    return dataclasses.replace(found, about={**found.about, "checkpoint": "gone.npz"}).with_images(["photos/val/cat/v0.jpg"])


def of_another_size() -> object:
    return dataclasses.replace(embed(bundle(), ["cat.jpg"]), features=np.zeros((1, 7), np.float32)).with_images(["cat.jpg"])


def folder(**files: str | bytes) -> Path:
    """Return a new folder with files; `__` in a name stands for a dot."""
    root = scratch()
    for name, content in files.items():
        file = root / name.replace("__", ".")
        file.write_bytes(content.encode() if isinstance(content, str) else content)
    return root


def manifest(**content: Any) -> Path:
    return folder(manifest__json=json.dumps({"format": 1, "shards": [], **content}))


def job(place: Path, **settings: Any) -> ShardFolder:
    return ShardFolder(folder=place, images=2, shard_size=2, suffix=".csv", settings=settings)


def of_two_shapes() -> object:
    root = scratch()
    for width in (2, 3):
        save_file({"features": np.zeros((1, width), np.float32)}, root / f"{width}.safetensors")
    return ShardNames([Shard(root / "2.safetensors", 1), Shard(root / "3.safetensors", 1)]).shape()


class _OtherPrecision(World):
    """A rank that gets other settings from rank 0."""

    def broadcast(self, value: Any) -> Any:
        return {**value, "precision": "bf16"}


def on_rank_1() -> object:
    return embed_shards(bundle(), split(), scratch(), context=EvalContext(world=_OtherPrecision(torch.device("cpu"), rank=1)))


def write_shard(images: int) -> object:
    """Write a shard of two images, of which so many were computed, while its temporary file is deleted."""

    def write(path: Path, *_: Any) -> None:
        raise FileNotFoundError(2, "No such file or directory", ".shard-00000.csv")

    worker: Any = _Worker(EvalContext(), split(), preset("imagenet"), bundle().model, SimpleNamespace(), job(scratch()))  # type: ignore[arg-type]
    return worker._write(_Taken(0, SimpleNamespace(write=write), images), SimpleNamespace(bad_at={}, bad={}))  # type: ignore[arg-type]


def classes(*names: str, image: str = "") -> Path:
    """Return a new folder with class folders; each has `image`."""
    root = scratch()
    for name in names:
        (root / name).mkdir(parents=True)
        if image:
            (root / name / "0.jpg").write_bytes(Path(image).read_bytes())
    return root


@cache
def of_imagenet() -> vitrail.Bundle:
    small = {"width": 32, "depth": 1, "heads": 2, "mlp": 32, "patch": 16, "image_size": 32}
    model = vitrail.create_model("ViT-Ti/16", outputs=1000, seed=0, **small)
    torch.nn.init.normal_(model.head.weight)
    vitrail.save("of-imagenet", model, preprocess=preset("imagenet", size=32), classes=imagenet.labels("1k"))
    return vitrail.load("of-imagenet")


def one_image(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(SETS, "imagenet", ImageNetSet("ImageNet", 1))


def unreadable_imagenet() -> object:
    return reproduce(
        "of-imagenet",
        {"imagenet": classes(IDS[0], image="text.jpg")},
        load_bundle=of_imagenet,
        context=EvalContext(bad_images="skip"),
    )


def no_severity() -> object:
    return reproduce("of-imagenet", {"c": classes("fog")}, load_bundle=of_imagenet)


def real(content: Any, names: tuple[str, ...] = ("0", "1")) -> object:
    return read_real(folder(real__json=json.dumps(content)) / "real.json", split(), names)


def kitti(rand: str | None) -> object:
    root = scratch()
    (root / "label_2").mkdir()
    (root / "label_2" / "000000.txt").write_text("")
    if rand is not None:
        (root / "mapping").mkdir()
        (root / "mapping" / "train_mapping.txt").write_text("2011_09_26 drive_0001 0000000000\n")
        (root / "mapping" / "train_rand.txt").write_text(rand)
    return open_layout(TASKS["kitti_distance"], root)


def lists(**files: str) -> object:
    root = scratch()
    (root / "svhn").mkdir()
    (root / "svhn" / "train800val200.txt").write_text("images/0.jpg 0\n")
    for name, content in files.items():
        (root / "svhn" / f"{name}.txt").write_text(content)
    return open_task(TASKS["svhn"], root)


def broken(layout: str, name: str, content: bytes) -> object:
    root = scratch()
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_bytes(content)
    return open_layout(TASKS[layout], root)


def run_svhn(seeds: int = 1) -> object:
    data = TaskData(split(classes=tuple("0123456789")), split(3, classes=tuple("0123456789")), "svhn", official=False)
    return run_task(TASKS["svhn"], data, "model", scratch(), SuiteSettings(image_size=32, steps=1, seeds=seeds, device="cpu"))


def trained(patch: pytest.MonkeyPatch, ended_by: int | None = None) -> None:
    """Training ends at once: two of three test images were evaluated."""
    ended = SimpleNamespace(ended_by=ended_by, steps=40, metrics={"images": 2.0, "accuracy": 0.5})
    patch.setattr(suite_run, "train", lambda *_, **__: ended)


LINE = "expected a path and a label, such as images/0001.jpg 3."

CASES = (
    # embeddings and neighbours
    at("evaluate/embeddings.py:NamedRows.find#1", lambda: embeddings().find("cat.jpg"),
       "'cat.jpg' matches 2 images, such as a/cat.jpg and b/cat.jpg.", "Give more of the path."),
    at("evaluate/embeddings.py:NamedRows.find#2", lambda: embeddings().find("dig.jpg"),
       "There is no image 'dig.jpg' among the 3 embeddings, and no file of this name.", "Did you mean dog.jpg?",
       "Give an image that was embedded, or the path of a file."),
    at("evaluate/embeddings.py:NamedRows._embed_files#1", lambda: embeddings().with_images(["cat.jpg"]),
       "cat.jpg was not embedded, and cannot be now: the checkpoint and settings of the others are not stored.",
       "Embed it together with the others, or give an image that was embedded."),
    at("evaluate/embeddings.py:NamedRows._embed_files#1", without_checkpoint,
       "v0.jpg was not embedded, and cannot be now: There is no checkpoint 'gone.npz'.", "Embed it together with the others"),
    at("evaluate/embeddings.py:NamedRows._embed_files#2", of_another_size,
       "model now has features of size 32, those of this file are of size 7.", "embed all images again."),
    at("evaluate/embeddings.py:embed_tensor", lambda: embed_tensor(bundle(), torch.zeros(0, 3, 32, 32)),
       "The tensor has no images;", "give at least one."),
    at("evaluate/embeddings.py:load_embeddings#1", lambda: load_embeddings("nowhere.npz"),
       "Cannot read the embeddings nowhere.npz: No such file or directory.", "Check the path."),
    at("evaluate/embeddings.py:load_embeddings#2", lambda: load_embeddings("numbers.npz"),
       "numbers.npz is not an embeddings file (it has no 'about').", "Make one with `vitrail embed`."),
    at("evaluate/parquet.py:import_pyarrow", lambda: check_extension(Path("cats.parquet")),
       "Parquet files need pyarrow:", "pip install 'vitrail[hub]'. Or use .npz.", hidden="pyarrow"),
    at("evaluate/nearest.py:check_vectors", lambda: check_vectors((2, 2, 4)),
       "these features have the shape [2, 2, 4].", "Neighbours need one vector per image;", "Embed again with the feature mean."),
    at("evaluate/nearest.py:nearest_rows", lambda: embeddings(float("nan")).nearest([2], 1),
       "The features of row 2 contain NaN or infinity;", "they have no neighbours. Embed again."),
    at("evaluate/settings.py:check_choice", lambda: embeddings().nearest([0], 1, "cos"),  # type: ignore[arg-type]
       "metric is 'cos';", "it can be cosine, euclidean. Did you mean cosine?"),
    # folders of shards
    at("evaluate/settings.py:check_choice", lambda: embed_shards(bundle(), split(), "out", format="csv"),  # type: ignore[arg-type]
       "format is 'csv';", "it can be safetensors, parquet."),
    at("evaluate/settings.py:check_choice", lambda: predict_shards(bundle(), split(), "out", format="json"),  # type: ignore[arg-type]
       "format is 'json';", "it can be csv, parquet."),
    at("evaluate/shards.py:_Job._run#1", lambda: embed_shards(bundle(), split(), "out", shard_size=0),
       "The shard size is 0;", "use 1 or more."),
    at("evaluate/shards.py:_Job._run#2", lambda: embed_shards(bundle(), split(0), "out"),
       "The split 'val' has no images.", "Choose another one."),
    at("evaluate/shards.py:_Job._open_folder", on_rank_1,
       "Rank 1 does not agree with rank 0 (precision: bf16 there, fp32 now).",
       "All machines need the same checkpoint, images and options;", "a precision of auto may differ between them, so choose one."),
    at("evaluate/shards.py:_Worker._write#1", lambda: write_shard(1),
       "Shard 0 has 1 image and 0 bad ones, 2 are expected.", "This is a bug in Vitrail; please report it."),
    at("evaluate/shards.py:_Worker._write#2", lambda: write_shard(2),
       ".shard-00000.csv was deleted while shard 0 was written.",
       "If another job has begun", "otherwise run the same command again."),
    at("evaluate/shard_folder.py:ShardFolder.open", lambda: job(Path("notes.txt")).open(),
       "notes.txt is a file;", "--out needs a folder for shards. Choose another name."),
    at("evaluate/shard_folder.py:ShardFolder.check", lambda: job(Path("out"), top=5, size=8).check({"top": 1, "size": 8}),
       "out holds shards of another job; 1 setting differs: top: 1 there, 5 now",
       "Use the same settings and images to resume it, or another folder."),
    at("evaluate/shard_folder.py:ShardFolder.write_manifest", lambda: job(Path("empty")).write_manifest(),
       "empty/shard-00000.json is missing or corrupted.", "Run the same command again."),
    at("evaluate/shard_folder.py:read_settings#1", lambda: read_settings(Path("photos")),
       "photos is not empty and has no settings.json, so it is not a folder of shards.", "Choose a new folder for --out."),
    at("evaluate/shard_folder.py:read_settings#2", lambda: read_settings(folder(settings__json="{")),
       "settings.json cannot be read (", "Choose a new folder for --out."),
    at("evaluate/shard_folder.py:read_settings#3", lambda: read_settings(folder(settings__json='{"format": 2}')),
       "has shards of format 2;", "this version of Vitrail needs 1.", "Choose a new folder for --out."),
    at("evaluate/shard_folder.py:read_manifest#1", lambda: read_manifest(Path("photos")),
       "photos has no manifest.json;", "it was not written by `vitrail embed`."),
    at("evaluate/shard_folder.py:read_manifest#1", lambda: read_manifest(folder(settings__json="{}")),
       "has no manifest.json;", "its job is not finished: run the same command again."),
    at("evaluate/shard_folder.py:read_manifest#2", lambda: read_manifest(folder(manifest__json='{"format": 1}')),
       "manifest.json cannot be read (it has no 'shards').", "Run the same command again; it is written anew"),
    at("evaluate/shard_folder.py:read_manifest#2", lambda: read_manifest(manifest(format=2)),
       "manifest.json cannot be read (its format is 2, not 1).", "Run the same command again; it is written anew"),
    at("evaluate/sharded_embeddings.py:Shard._reading",
       lambda: Shard(folder(shard__safetensors="hello") / "shard.safetensors", 1).names(),
       "shard.safetensors cannot be read (SafetensorError:", "it computes what is corrupted or missing."),
    at("evaluate/sharded_embeddings.py:ShardNames.shape", of_two_shapes,
       "The shards have features of different shapes: [(2,), (3,)].", "Embed the images again."),
    at("evaluate/sharded_embeddings.py:open_shards#1", lambda: open_shards(manifest(command="predict")),
       "holds the shards of `vitrail predict`;", "a folder of `vitrail embed` is needed."),
    at("evaluate/sharded_embeddings.py:open_shards#2", lambda: open_shards(manifest(command="embed")),
       "manifest.json is corrupted (it has no 'checkpoint').", AGAIN),
    # ImageNet's test sets and labels
    at("evaluate/imagenet_sets.py:_checked", lambda: open_set("imagenet", "nowhere"),
       "--imagenet: nowhere does not exist;", "a folder is expected."),
    at("evaluate/imagenet_sets.py:_checked", lambda: corruption_folders("notes.txt"),
       "--c: notes.txt is a file;", "a folder is expected."),
    at("evaluate/imagenet_sets.py:corruption_folders", lambda: corruption_folders("photos"),
       "it has train, val.", "photos has no corruption of ImageNet-C, such as gaussian_noise/1/n01440764;"),
    at("evaluate/imagenet_sets.py:_top", lambda: open_set("imagenet", "photos/train"),
       "photos/train has training images;", "ImageNet is evaluated on 50,000 others", "Give their folder"),
    at("evaluate/imagenet_sets.py:_class_folders#1", lambda: open_set("imagenet", "photos"),
       "photos/val is not ImageNet in its usual layout:", "class folders are WordNet IDs such as n01440764, it has cat, dog."),
    at("evaluate/imagenet_sets.py:_class_folders#1", lambda: open_set("v2", "empty"),
       "empty is not ImageNet-V2 in its usual layout:", "class folders are the numbers 0 to 999, it has no folders."),
    at("evaluate/imagenet_sets.py:_class_folders#2", lambda: open_set("a", classes(NOT_IN_A)),
       f"has 1 class that ImageNet-A does not have ({NOT_IN_A}).", "Give the folder of ImageNet-A."),
    at("evaluate/imagenet_sets.py:_class_folders#3", lambda: open_set("imagenet", classes(IDS[0])),
       "has class folders, but no images in them.", "Copy or unpack the images."),
    at("evaluate/imagenet_sets.py:_class_folders#4", lambda: open_set("imagenet", classes(*IDS[:2], image="cat.jpg")),
       "has 2 images, but ImageNet has 1.", "Does it have training images or copies?", patch=one_image),
    at("evaluate/reproduction.py:check_classifier", lambda: reproduce("ViT-B/16@mae", {"imagenet": "photos"}),
       "ViT-B/16@mae has no head, so it cannot classify ImageNet-1k.", "Use ViT-B/16@augreg-in21k-ft-in1k"),
    at("evaluate/reproduction.py:_check_folders#1", lambda: reproduce("model", {"imagnet": "photos"}),
       "There is no set 'imagnet'.", "The sets are imagenet, v2, a, r, sketch and c."),
    at("evaluate/reproduction.py:_check_folders#3", lambda: reproduce("model", {"v2": "photos"}, real="real.json"),
       "--real has labels of ImageNet's validation images;", "pass these, too: --imagenet DIR."),
    at("evaluate/reproduction.py:_Run.__init__", lambda: reproduce("model", {"imagenet": classes(IDS[0], image="cat.jpg")}),
       "model does not have the classes of ImageNet-1k.", "`vitrail eval` takes any classes."),
    at("evaluate/reproduction.py:_Run.predict", unreadable_imagenet,
       "No image of ImageNet could be read.", "a text file, not an image", "Repair or replace the images."),
    at("evaluate/reproduction.py:_corruptions", no_severity,
       "--c: fog of ImageNet-C has no severity;", "folders 1 to 5 with class folders are expected"),
    at("evaluate/real_labels.py:read_real#1", lambda: read_real("nowhere.json", split(), ("0", "1")),
       "Cannot read the labels nowhere.json: No such file or directory.", "Check the path."),
    at("evaluate/real_labels.py:read_real#2", lambda: read_real("notes.txt", split(), ("0", "1")),
       "notes.txt is not valid JSON", "The published file is real.json."),
    at("evaluate/real_labels.py:read_real#3", lambda: real(5),
       "real.json contains only 5;", "expected a list as in real.json, or an object that maps image names to labels."),
    at("evaluate/real_labels.py:_published", lambda: real([[0]]),
       "lists 1 image of ImageNet's validation set by number, but the name '000000' has no ILSVRC2012_val_",
       "Use that set, or a JSON object that maps image names to labels."),
    at("evaluate/real_labels.py:_output_of_class", lambda: real([[0]], ("cat", "dog")),
       "the classes here are names in another order (cat, dog, …).", "Name the class folders by WordNet IDs (n01440764, …)"),
    at("evaluate/real_labels.py:_by_name", lambda: real({}),
       "real.json has no entry for '000000' or its file name;", "use [] for an image without labels."),
    at("evaluate/real_labels.py:_labels", lambda: real({"000000": 3}),
       "real.json has '3' for '000000';", "expected a list of class names or integers, such as [3, 7]"),
    at("evaluate/real_labels.py:_check_index", lambda: real({"000000": [7]}),
       "real.json has the label 7 for '000000';", "expected a class name or an integer from 0 to 1."),
    # suites of tasks
    at("evaluate/suites.py:tasks_of", lambda: tasks_of("vtab", ("kitti",)),
       "There is no task 'kitti' in vtab.", "Did you mean kitti_distance?", "The tasks are caltech101, cifar100"),
    at("evaluate/suite_run.py:find_tasks", lambda: find_tasks(VTAB, Path("empty"), {"mnist": "digits"}),
       "--source: 'mnist' is not a task.", "The tasks are caltech101, cifar100"),
    at("evaluate/suite_run.py:run_task", lambda: run_svhn(seeds=0), "seeds is 0;", "use 1 or more."),
    at("evaluate/suite_run.py:_run_once#1", run_svhn,
       "SVHN was interrupted at step 40.", "Run the same command again to resume.", patch=lambda patch: trained(patch, 15)),
    at("evaluate/suite_run.py:_run_once#2", run_svhn,
       "SVHN: only 2 of 3 test images were evaluated, so the score is not valid.",
       "`vitrail data check` lists images that cannot be read.", patch=trained),
    at("evaluate/suite_sources.py:_find", lambda: open_task(TASKS["clevr_count"], Path("empty")),
       "Clevr count was not found:", "put it in empty/clevr_count (CLEVR_v1.0 with images/ and scenes/)",
       "--source clevr_count=hf:OWNER/NAME."),
    at("evaluate/suite_sources.py:_read_lists", lambda: lists(train800val200="images/0.jpg 10\n"),
       "svhn/train800val200.txt has the label 10;", "SVHN has 10 classes, 0 to 9."),
    at("evaluate/suite_sources.py:_read_list#1", lists,
       "svhn/test.txt (No such file or directory).", "VTAB's lists are train800val200.txt and test.txt; copy both."),
    at("evaluate/suite_sources.py:_read_list#2", lambda: lists(test="images/0.jpg 0\nimages/1.jpg\n"),
       "svhn/test.txt, line 2 is 'images/1.jpg';", LINE),
    at("evaluate/suite_sources.py:_read_list#3", lambda: lists(test="\n"), "svhn/test.txt is empty;", "expected lines with a path"),
    at("evaluate/suite_sources.py:_require", lambda: _require({"train": split()}, "val", "photos"),
       "photos has no val split, which this task needs.", "It has train."),
    at("evaluate/suite_sources.py:_check_classes", lambda: open_task(TASKS["dtd"], Path("empty"), {"dtd": "photos"}),
       "photos has 2 classes;", "DTD has 47 classes (its own classes)."),
    at("evaluate/suite_sources.py:_check_classes",
       lambda: open_task(TASKS["dtd"], Path("empty"), {"dtd": "folder:photos?labels=none"}),
       "folder:photos?labels=none has no labels;", "DTD has 47 classes (its own classes)."),
    at("evaluate/suite_sources.py:_first", lambda: _first(split(1), 800, TASKS["svhn"], "training"),
       "SVHN has 1 training image; 800 are needed.", "The copy is incomplete: download it again."),
    at("evaluate/suite_layouts.py:open_layout", lambda: broken("dsprites_location", "dsprites.npz", b"PK\3\4 not an archive"),
       "as it is distributed (BadZipFile:", "Download the dataset again."),
    at("evaluate/suite_layouts.py:open_layout", lambda: broken("clevr_count", "scenes/CLEVR_train_scenes.json", b"{}"),
       "as it is distributed (KeyError: 'scenes').", "Download the dataset again."),
    at("evaluate/suite_layouts.py:open_layout", lambda: broken("kitti_distance", "label_2/000000.txt", b"Car 0.0\n"),
       "as it is distributed (IndexError:", "Download the dataset again."),
    at("evaluate/suite_layouts.py:_kitti_drives#1", lambda: kitti(None),
       "mapping/train_mapping.txt and mapping/train_rand.txt are missing.", "Unpack its object development kit"),
    at("evaluate/suite_layouts.py:_kitti_drives#2", lambda: kitti("one, two"),
       "mapping is not the mapping of KITTI's object development kit (", "Unpack devkit_object.zip again."),
    at("evaluate/suite_layouts.py:_kitti_drives#3", lambda: kitti("0"),
       "mapping does not name the drive of 000000.txt.", "Unpack devkit_object.zip again."),
    at("evaluate/suite_layouts.py:_read_matrix", lambda: _read_matrix(Path("notes.txt")),
       "notes.txt is not a smallNORB matrix.", "Unpack the downloaded .gz files first."),
    at("evaluate/suite_layouts.py:_json", lambda: _json(Path("notes.txt")),
       "Cannot read the annotations notes.txt (", "Download the dataset again."),
)  # fmt: skip
