"""The 19 tasks of VTAB-1k and the transfer suite, each on a small synthetic dataset in its original layout."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from vitrail.errors import VitrailError
from vitrail.evaluate import suite_layouts, suite_run, suite_sources
from vitrail.evaluate.settings import SuiteSettings
from vitrail.evaluate.suite_layouts import CLEVR_BINS, KITTI_BINS, MissingData, bin_of
from vitrail.evaluate.suite_run import SuiteResult, TaskScore, find_tasks, recipe_for, run_task, write_results
from vitrail.evaluate.suite_sources import TaskData, open_task
from vitrail.evaluate.suites import SUITES, TRANSFER, VTAB, SuiteTask, tasks_of

Array = npt.NDArray[Any]
TASKS = {task.name: task for task in VTAB}


@pytest.fixture(autouse=True)
def small_draws(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """8 + 4 training images instead of 800 + 200, so that the datasets stay small."""
    monkeypatch.setattr(suite_sources, "TRAIN", 8)
    monkeypatch.setattr(suite_sources, "VALIDATION", 4)
    yield


def picture(file: Path, seed: int = 0) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.random.default_rng(seed).integers(0, 255, (20, 24, 3), np.uint8)).save(file)


def class_folders(root: Path, classes: int, counts: dict[str, int]) -> None:
    """`counts` images per class in each split; the empty split name puts the class folders into the root."""
    for split, count in counts.items():
        for number in range(classes):
            for image in range(count):
                picture(root / split / f"class{number:03d}" / f"{image:03d}.png", seed=number)


def three_splits(task: SuiteTask, root: Path) -> None:
    class_folders(root / task.name, task.classes, {"train": -(-10 // task.classes), "val": 2, "test": 2})


def two_splits(task: SuiteTask, root: Path) -> None:
    few = max(1, 60 // task.classes)
    class_folders(root / task.name, task.classes, {"train": few, "test": 2})


def one_folder(task: SuiteTask, root: Path) -> None:
    class_folders(root / task.name, task.classes, {"": 3})


def dtd(task: SuiteTask, root: Path) -> None:
    """The layout of torchvision: images by class, and lists of the first split."""
    for part, numbers in (("train", (0,)), ("val", (1,)), ("test", (2, 3))):
        names = [f"class{k:02d}/class{k:02d}_{n:04d}.jpg" for k in range(task.classes) for n in numbers]
        for name in names:
            picture(root / "dtd" / "dtd" / "images" / name)
        labels = root / "dtd" / "dtd" / "labels"
        labels.mkdir(exist_ok=True, parents=True)
        (labels / f"{part}1.txt").write_text("\n".join(names) + "\n")


def pets(task: SuiteTask, root: Path) -> None:
    base = root / "oxford-iiit-pet"
    for part, numbers in (("trainval", (0, 1)), ("test", (2,))):
        rows = [(f"breed_{k:02d}_{n}", k + 1) for k in range(task.classes) for n in numbers]
        for name, _ in rows:
            picture(base / "images" / f"{name}.jpg")
        (base / "annotations").mkdir(exist_ok=True)
        (base / "annotations" / f"{part}.txt").write_text("".join(f"{name} {label} 1 1\n" for name, label in rows))


def eurosat(task: SuiteTask, root: Path) -> None:
    class_folders(root / "eurosat" / "2750", task.classes, {"": 4})


def clevr(task: SuiteTask, root: Path) -> None:
    base = root / task.name / "CLEVR_v1.0"
    for part, count in (("train", 60), ("val", 9)):
        scenes = []
        for number in range(count):
            name = f"CLEVR_{part}_{number:06d}.png"
            picture(base / "images" / part / name)
            objects = [{"pixel_coords": [1, 2, 7.2 + 0.4 * (number % 8) + k]} for k in range(3 + number % 8)]
            scenes.append({"image_filename": name, "objects": objects})
        (base / "scenes").mkdir(exist_ok=True)
        (base / "scenes" / f"CLEVR_{part}_scenes.json").write_text(json.dumps({"scenes": scenes}))


def kitti(task: SuiteTask, root: Path) -> None:
    base = root / task.name / "training"
    (base / "label_2").mkdir(parents=True)
    for number in range(60):
        picture(base / "image_2" / f"{number:06d}.png")
        kind, depth = ("Car", "Van", "Truck", "Pedestrian")[number % 4], 4.0 + number
        rows = [f"{kind} 0.0 0 0.0 1 2 3 4 1 1 1 0.5 1.5 {depth} 0.1", "DontCare -1 -1 -10 1 2 3 4 -1 -1 -1 -1000 -1000 -1000 -10"]
        (base / "label_2" / f"{number:06d}.txt").write_text("\n".join(rows) + "\n")
    mapping = root / task.name / "devkit_object" / "mapping"
    mapping.mkdir(parents=True)
    order = np.random.default_rng(0).permutation(60)
    lines = [f"2011_09_26 2011_09_26_drive_{k // 3:04d}_sync {k:010d}" for k in range(60)]  # 20 drives of 3 frames
    (mapping / "train_mapping.txt").write_text("\n".join(lines) + "\n")
    (mapping / "train_rand.txt").write_text(",".join(str(k + 1) for k in order))


def dsprites(task: SuiteTask, root: Path) -> None:
    random = np.random.default_rng(0)
    latents = np.stack([random.integers(0, n, 200) for n in (1, 3, 6, 40, 32, 32)], 1)
    latents[:40, 3], latents[:32, 4] = np.arange(40), np.arange(32)
    images = random.integers(0, 2, (200, 64, 64), np.uint8)
    (root / task.name).mkdir()
    metadata = np.array({"title": "dSprites"}, dtype=object)
    np.savez(root / task.name / "dsprites_ndarray_64x64.npz", imgs=images, latents_classes=latents, metadata=metadata)


def smallnorb(task: SuiteTask, root: Path) -> None:
    folder = root / task.name
    folder.mkdir()
    for word, count in (("training", 36), ("testing", 36)):
        info = np.stack([np.arange(count) % 5, np.arange(count) % 9, 2 * (np.arange(count) % 18), np.arange(count) % 6], 1)
        images = np.random.default_rng(1).integers(0, 255, (count, 2, 96, 96), np.uint8)
        images[:, 1] = 0  # the right camera must not be read
        write_matrix(folder / f"smallnorb-5x46789x9x18x6x2x96x96-{word}-dat.mat", images, 0x1E3D4C55)
        write_matrix(folder / f"smallnorb-5x46789x9x18x6x2x96x96-{word}-info.mat", info.astype(np.int32), 0x1E3D4C54)


def write_matrix(file: Path, values: Array, magic: int) -> None:
    sizes = [*values.shape, *[1] * (3 - values.ndim)]
    header = np.array([magic, values.ndim, *sizes], "<i4").tobytes()
    file.write_bytes(header + values.tobytes())


LAYOUTS: dict[str, Callable[[SuiteTask, Path], None]] = {
    "caltech101": two_splits,
    "cifar100": two_splits,
    "dtd": dtd,
    "flowers102": three_splits,
    "pets": pets,
    "sun397": three_splits,
    "svhn": two_splits,
    "patch_camelyon": three_splits,
    "eurosat": eurosat,
    "resisc45": one_folder,
    "retinopathy": three_splits,
    "clevr_count": clevr,
    "clevr_distance": clevr,
    "dmlab": three_splits,
    "kitti_distance": kitti,
    "dsprites_location": dsprites,
    "dsprites_orientation": dsprites,
    "smallnorb_azimuth": smallnorb,
    "smallnorb_elevation": smallnorb,
}


def names_of(data: TaskData) -> tuple[set[str], set[str]]:
    """Names with the split, because datasets of arrays number the images of each split from 0."""
    train = {data.train.image_name(k) for k in range(len(data.train))}
    return train, {f"{data.test.name}/{data.test.image_name(k)}" for k in range(len(data.test))}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_task_opens_in_its_original_layout(name: str, tmp_path: Path) -> None:
    task = TASKS[name]
    with pytest.raises(MissingData, match="was not found: put it in"):
        open_task(task, tmp_path)
    LAYOUTS[name](task, tmp_path)
    data = open_task(task, tmp_path)
    assert len(data.train) == 12 and len(data.test) > 0 and len(data.train.classes) == task.classes and not data.official
    assert data.train.classes == data.test.classes
    train, test = names_of(data)
    assert len(train) == 12 and not train & test
    assert data.train.targets.min() >= 0 and data.test.targets.max() < task.classes
    if task.classes > 2:
        assert len(np.unique(data.train.targets)) > 2  # shuffled: not the first classes only
    assert data.train.payload(0) is not None and data.test.payload(len(data.test) - 1) is not None
    again = open_task(task, tmp_path)
    assert names_of(again)[0] == train


def test_the_task_table_is_that_of_vtab() -> None:
    assert set(LAYOUTS) == set(TASKS) and len(VTAB) == 19
    assert [sum(task.group == group for task in VTAB) for group in ("natural", "specialized", "structured")] == [7, 4, 8]
    assert not any(task.crop for task in VTAB if task.group == "structured")
    assert {task.name for task in VTAB if not task.flip} == {
        "svhn",
        "dsprites_location",
        "dsprites_orientation",
        "smallnorb_azimuth",
    }
    assert [task.title for task in TRANSFER] == ["ImageNet", "CIFAR-10", "CIFAR-100", "Pets", "Flowers102"]


def test_no_drive_of_kitti_is_in_two_splits(tmp_path: Path) -> None:
    task = TASKS["kitti_distance"]
    kitti(task, tmp_path)
    splits = suite_sources.open_layout(task, tmp_path / task.name)
    assert splits is not None
    order = np.random.default_rng(0).permutation(60)
    drives = {
        name: {int(order[int(Path(split.image_name(k)).stem)]) // 3 for k in range(len(split))} for name, split in splits.items()
    }
    assert sorted(len(one) for one in drives.values()) == [2, 2, 16] and len(set.union(*drives.values())) == 20
    every = {split.image_name(k): name for name, split in splits.items() for k in range(len(split))}
    for number in range(30):  # a partial download: the others stay in their splits
        (tmp_path / task.name / "training" / "label_2" / f"{number:06d}.txt").unlink()
    mapping = tmp_path / task.name / "devkit_object" / "mapping"
    drives_of = suite_layouts._kitti_drives(tmp_path / task.name, tmp_path, sorted((tmp_path / task.name).rglob("label_2/*.txt")))
    assert drives_of == [f"2011_09_26 2011_09_26_drive_{order[k] // 3:04d}_sync" for k in range(30, 60)] and len(every) == 60
    (mapping / "train_rand.txt").write_text(",".join("0" for _ in range(60)))
    with pytest.raises(VitrailError, match=r"does not name the drive of 000030\.txt"):
        suite_sources.open_layout(task, tmp_path / task.name)
    shutil.rmtree(tmp_path / task.name / "devkit_object")
    with pytest.raises(MissingData, match="is split by video"):
        open_task(task, tmp_path)


def test_labels_of_the_structured_tasks(tmp_path: Path) -> None:
    """Counts minus 3; distances by the last lower bound, as in VTAB."""
    assert [bin_of(value, CLEVR_BINS) for value in (7.9, 8.1, 8.6, 9.2, 9.9, 10.5)] == [0, 1, 2, 3, 4, 5]
    assert [bin_of(value, KITTI_BINS) for value in (3.0, 8.5, 25.0, 1000.0)] == [0, 1, 2, 3]
    clevr(TASKS["clevr_count"], tmp_path)
    count = open_task(TASKS["clevr_count"], tmp_path)
    assert count.test.targets.tolist() == [n % 8 for n in range(9)] and count.test.classes == tuple("3 4 5 6 7 8 9 10".split())
    clevr(TASKS["clevr_distance"], tmp_path)
    assert open_task(TASKS["clevr_distance"], tmp_path).test.targets.tolist() == [0, 0, 0, 1, 2, 3, 4, 4, 0]  # 7.2, 7.6, 8.0, …
    kitti(TASKS["kitti_distance"], tmp_path)
    test = open_task(TASKS["kitti_distance"], tmp_path).test
    for k in range(len(test)):
        number = int(Path(test.image_name(k)).stem)
        depth = 4.0 + number
        expected = 3 if number % 4 == 3 else 0 if depth <= 8 else 1 if depth <= 20 else 2
        assert test.targets[k] == expected
    dsprites(TASKS["dsprites_orientation"], tmp_path)
    whole = suite_sources.open_layout(TASKS["dsprites_orientation"], tmp_path / "dsprites_orientation")
    assert whole is not None and whole["train"].targets[:40].tolist() == [int(k // 2.5) for k in range(40)]
    dsprites(TASKS["dsprites_location"], tmp_path)
    whole = suite_sources.open_layout(TASKS["dsprites_location"], tmp_path / "dsprites_location")
    assert whole is not None and whole["train"].targets[:32].tolist() == [k // 2 for k in range(32)]
    assert set(np.unique(np.asarray(whole["train"].payload(0)))) == {0, 255}
    smallnorb(TASKS["smallnorb_azimuth"], tmp_path)
    whole = suite_sources.open_layout(TASKS["smallnorb_azimuth"], tmp_path / "smallnorb_azimuth")
    assert whole is not None and whole["train"].targets.tolist() == [k % 18 for k in range(36)]
    assert np.asarray(whole["train"].payload(3)).shape == (96, 96, 1) and np.asarray(whole["train"].payload(3)).any()


def test_the_official_lists_are_used_unchanged(tmp_path: Path) -> None:
    folder = tmp_path / "svhn"
    rows = [f"images/train/{k:03d}.png {k % 10}" for k in range(20)]
    for row in rows:
        picture(folder / row.split()[0])
    (folder / "train800val200.txt").write_text("\n".join(rows[:12]) + "\n")
    (folder / "test.txt").write_text("\n".join(rows[12:]) + "\n")
    data = open_task(TASKS["svhn"], tmp_path)
    assert data.official and data.train.targets.tolist() == [k % 10 for k in range(12)] and len(data.test) == 8
    (folder / "test.txt").write_text("images/train/001.png 10\n")
    with pytest.raises(VitrailError, match="has the label 10; SVHN has 10 classes, 0 to 9"):
        open_task(TASKS["svhn"], tmp_path)
    (folder / "test.txt").write_text("images/train/001.png\n")
    with pytest.raises(VitrailError, match=r"line 1 is .images.train.001\.png.; expected a path and a label"):
        open_task(TASKS["svhn"], tmp_path)


def test_a_source_can_be_given_and_must_match(tmp_path: Path) -> None:
    two_splits(TASKS["svhn"], tmp_path)
    (tmp_path / "svhn").rename(tmp_path / "digits")
    data = open_task(TASKS["svhn"], tmp_path, {"svhn": f"folder:{tmp_path / 'digits'}"})
    assert len(data.train) == 12 and data.origin.startswith("folder:")
    with pytest.raises(VitrailError, match=r"has 10 classes; DTD has 47"):
        open_task(TASKS["dtd"], tmp_path, {"dtd": f"folder:{tmp_path / 'digits'}"})
    with pytest.raises(VitrailError, match="'mnist' is not a task"):
        find_tasks(VTAB, tmp_path, {"mnist": "digits"})
    with pytest.raises(VitrailError, match=r"There is no task 'kitti' in vtab\. Did you mean kitti_distance"):
        tasks_of("vtab", ("kitti",))
    assert [task.name for task in tasks_of("vtab", ("specialized", "svhn"))][-1] == "svhn"
    available, missing = find_tasks(VTAB, tmp_path, {"svhn": f"folder:{tmp_path / 'digits'}"})
    assert (
        list(available) == ["svhn"] and len(missing) == 18 and "download=1" in missing["eurosat"] and "hf:" in missing["cifar100"]
    )


def test_an_incomplete_copy_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite_sources, "TRAIN", 800)
    one_folder(TASKS["resisc45"], tmp_path)
    with pytest.raises(VitrailError, match="has 81 training images; 800 are needed"):
        open_task(TASKS["resisc45"], tmp_path)


def test_recipes_follow_the_rules_of_the_task() -> None:
    plain = recipe_for(TASKS["eurosat"], "b.npz", SuiteSettings(), "folder:x")
    bare = recipe_for(TASKS["dsprites_location"], "b.npz", SuiteSettings(), "folder:x")
    assert (plain.steps, plain.optim.lr, plain.schedule.warmup, plain.batch, plain.optim.name) == (2500, 0.01, 200, 512, "sgd")
    assert plain.augment.crop == "same-aspect" and plain.augment.flip == 0.5 and not plain.data.exif
    assert plain.augment.crop_area[0] == plain.augment.crop_area[1] == pytest.approx((384 / 448) ** 2)
    assert bare.augment.crop == "none" and bare.augment.flip == 0.0
    changed = recipe_for(TASKS["eurosat"], "b.npz", SuiteSettings(steps=7, lr=0.1, image_size=32, batch=4), "folder:x")
    assert (changed.steps, changed.optim.lr, changed.batch, changed.model.image_size) == (7, 0.1, 4, 32)
    for task in SUITES["transfer"]:
        recipe = recipe_for(task, "b.npz", SuiteSettings(), "x")
        assert recipe.optim.name == "sgd" and recipe.augment.crop == "inception-tensorflow"


def test_means_per_group_and_over_all_tasks(tmp_path: Path) -> None:
    def score(name: str, accuracy: float) -> TaskScore:
        task = TASKS[name]
        return TaskScore(name, task.title, task.group, accuracy, (0.0, 1.0), 1000, 10, True, "x")

    result = SuiteResult((score("dtd", 0.5), score("svhn", 0.7), score("dmlab", 0.3)), {"pets": "…"}, 19)
    assert result.means() == {"natural": (pytest.approx(0.6), 2), "structured": (0.3, 1), "all": (pytest.approx(0.5), 3)}
    write_results(tmp_path, result, {"checkpoint": "b"})
    assert len(list(csv.DictReader((tmp_path / "scores.csv").open()))) == 3
    assert json.loads((tmp_path / "results.json").read_text())["complete"] is False


@pytest.mark.slow
def test_a_finished_task_is_not_run_again(checkpoint: Path, tmp_path: Path) -> None:
    eurosat(TASKS["eurosat"], tmp_path)
    data = open_task(TASKS["eurosat"], tmp_path)
    settings = SuiteSettings(steps=3, warmup=1, image_size=32, batch=4, device="cpu", workers=0, seeds=1)
    first = run_task(TASKS["eurosat"], data, str(checkpoint), tmp_path / "runs", settings)
    assert first.test_images == len(data.test) == 8 and 0 <= first.accuracy <= 1 and first.train_images == 12
    written = (tmp_path / "runs" / "eurosat" / "metrics.jsonl").read_text()
    assert run_task(TASKS["eurosat"], data, str(checkpoint), tmp_path / "runs", settings) == first
    assert (tmp_path / "runs" / "eurosat" / "metrics.jsonl").read_text() == written


def test_several_seeds_give_a_mean_and_a_deviation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    eurosat(TASKS["eurosat"], tmp_path)
    data, made = open_task(TASKS["eurosat"], tmp_path), list[tuple[str, int]]()

    def pretend(task: SuiteTask, data: TaskData, checkpoint: str, out: Path, settings: SuiteSettings, callbacks: object) -> int:
        made.append((out.name, settings.seed))
        return 3 + settings.seed  # of 8

    monkeypatch.setattr(suite_run, "_run_once", pretend)
    score = run_task(TASKS["eurosat"], data, "none", tmp_path / "runs", SuiteSettings())
    assert made == [("eurosat", 0), ("eurosat-run2", 1), ("eurosat-run3", 2)]
    assert score.accuracy == pytest.approx(4 / 8) and score.std == pytest.approx(1 / 8) and score.runs == 3
    assert score.interval[0] < score.accuracy < score.interval[1]
    assert run_task(TASKS["eurosat"], data, "none", tmp_path / "runs", SuiteSettings(seeds=1)).std is None
    with pytest.raises(VitrailError, match="seeds is 0"):
        run_task(TASKS["eurosat"], data, "none", tmp_path / "runs", SuiteSettings(seeds=0))
