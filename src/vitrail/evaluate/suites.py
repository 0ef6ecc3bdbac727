"""Tables of the paper's transfer tasks: the 19 of VTAB-1k, and the five of Table 2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vitrail.errors import VitrailError, did_you_mean

Group = Literal["natural", "specialized", "structured"]
SplitRule = Literal["own", "train", "test-is-val", "whole", "half-test"]
GROUPS: tuple[Group, ...] = ("natural", "specialized", "structured")


@dataclass(frozen=True, kw_only=True)
class SuiteTask:
    """One task: its classes, where its images can be found, and how they are split and augmented."""

    name: str
    title: str
    classes: int
    group: Group | None = None
    recipe: str = "finetune-vtab"
    torchvision: str | None = None
    """The torchvision dataset with these images and labels."""
    layout: Literal["clevr", "kitti", "dsprites", "smallnorb"] | None = None
    """The original distribution, if labels must be derived from its annotations."""
    attribute: str = ""
    """Which label is derived from the annotations."""
    labels: str = "its own classes"
    split_rule: SplitRule = "own"
    """How training, validation and test images are chosen. own: the dataset has all three splits. train: validation is the
    end of the training split. test-is-val: the same, and the dataset's validation split is the test split. whole: the dataset
    is one split, divided by `percentages`. half-test: the first half of the test split is used for validation, the second
    half for the test."""
    percentages: tuple[int, ...] = ()
    """Per cent of the images for training (and for validation; the rest is for the test)."""
    crop: bool = True
    """Whether a random crop preserves the label."""
    flip: bool = True
    """Whether a horizontal flip preserves the label."""
    download_hint: str = ""
    """Where to get it, if not from torchvision."""


def _natural(name: str, title: str, classes: int, **more: object) -> SuiteTask:
    return SuiteTask(name=name, title=title, classes=classes, group="natural", **more)  # type: ignore[arg-type]


def _specialized(name: str, title: str, classes: int, **more: object) -> SuiteTask:
    return SuiteTask(name=name, title=title, classes=classes, group="specialized", **more)  # type: ignore[arg-type]


def _structured(name: str, title: str, classes: int, **more: object) -> SuiteTask:
    return SuiteTask(name=name, title=title, classes=classes, group="structured", crop=False, **more)  # type: ignore[arg-type]


_CLEVR = {
    "layout": "clevr",
    "split_rule": "test-is-val",
    "percentages": (90,),
    "download_hint": "CLEVR_v1.0 with images/ and scenes/",
}
_DSPRITES = {
    "layout": "dsprites",
    "split_rule": "whole",
    "percentages": (80, 10),
    "flip": False,
    "download_hint": "dsprites_ndarray_co1sh3sc6or40x32y32_64x64.npz",
}
_NORB = {"layout": "smallnorb", "split_rule": "half-test", "download_hint": "the six .mat files of smallNORB, unpacked"}

VTAB: tuple[SuiteTask, ...] = (
    _natural(
        "caltech101", "Caltech101", 102, split_rule="train", percentages=(90,), download_hint="its classes in train/ and test/"
    ),
    _natural(
        "cifar100",
        "CIFAR-100",
        100,
        split_rule="train",
        percentages=(90,),
        torchvision="CIFAR100",
        download_hint="hf:uoft-cs/cifar100?label=fine_label",
    ),
    _natural("dtd", "DTD", 47, torchvision="DTD"),
    _natural("flowers102", "Flowers102", 102, torchvision="Flowers102"),
    _natural("pets", "Pets", 37, split_rule="train", percentages=(80,), torchvision="OxfordIIITPet"),
    _natural("sun397", "Sun397", 397, download_hint="SUN397 with the split lists of tfds, or any train/, val/, test/"),
    _natural("svhn", "SVHN", 10, split_rule="train", percentages=(90,), flip=False, torchvision="SVHN"),
    _specialized("patch_camelyon", "Patch Camelyon", 2, download_hint="images in train/, val/ and test/, one folder per class"),
    _specialized("eurosat", "EuroSAT", 10, split_rule="whole", percentages=(60, 20), torchvision="EuroSAT"),
    _specialized(
        "resisc45", "Resisc45", 45, split_rule="whole", percentages=(60, 20), download_hint="NWPU-RESISC45, one folder per class"
    ),
    _specialized("retinopathy", "Diabetic Retinopathy", 5, download_hint="scaled to a radius of 300, in train/, val/ and test/"),
    _structured(
        "clevr_count",
        "Clevr count",
        8,
        attribute="count",
        labels="number of objects, 3 to 10",
        **_CLEVR,
    ),
    _structured(
        "clevr_distance",
        "Clevr distance",
        6,
        attribute="distance",
        labels="depth of the nearest object, binned at 8, 8.5, 9, 9.5 and 10",
        **_CLEVR,
    ),
    _structured(
        "dmlab",
        "DMLab",
        6,
        labels="distance to a reward (near, far or very far), positive or negative",
        download_hint="its frames in train/, val/, test/",
    ),
    _structured(
        "kitti_distance",
        "KITTI distance",
        4,
        layout="kitti",
        attribute="distance",
        labels="distance to the nearest car, van or truck, binned at 8 and 20 metres, or none",
        download_hint="training/image_2, training/label_2 and the object devkit's mapping/",
    ),
    _structured(
        "dsprites_location", "dSprites location", 16, attribute="x", labels="x position, 32 values in 16 bins", **_DSPRITES
    ),
    _structured(
        "dsprites_orientation",
        "dSprites orientation",
        16,
        attribute="orientation",
        labels="orientation, 40 values in 16 bins",
        **_DSPRITES,
    ),
    _structured(
        "smallnorb_azimuth",
        "smallNORB azimuth",
        18,
        attribute="azimuth",
        labels="azimuth of the camera, 18 values",
        flip=False,
        **_NORB,
    ),
    _structured(
        "smallnorb_elevation",
        "smallNORB elevation",
        9,
        attribute="elevation",
        labels="elevation of the camera, 9 values",
        **_NORB,
    ),
)

TRANSFER: tuple[SuiteTask, ...] = (
    SuiteTask(
        name="imagenet",
        title="ImageNet",
        classes=1000,
        recipe="finetune-imagenet",
        torchvision="ImageNet",
        download_hint="train/ and val/",
    ),
    SuiteTask(name="cifar10", title="CIFAR-10", classes=10, recipe="finetune-cifar10", torchvision="CIFAR10"),
    SuiteTask(name="cifar100", title="CIFAR-100", classes=100, recipe="finetune-cifar100", torchvision="CIFAR100"),
    SuiteTask(name="pets", title="Pets", classes=37, recipe="finetune-pets", torchvision="OxfordIIITPet"),
    SuiteTask(name="flowers102", title="Flowers102", classes=102, recipe="finetune-flowers", torchvision="Flowers102"),
)

SUITES = {"vtab": VTAB, "transfer": TRANSFER}


def tasks_of(suite: str, names: tuple[str, ...] = ()) -> tuple[SuiteTask, ...]:
    """Return the tasks of a suite: all, or those with these names or group names."""
    tasks = {task.name: task for task in SUITES[suite]}
    if not names:
        return tuple(tasks.values())
    chosen: dict[str, SuiteTask] = {}
    for name in names:
        matches = {task.name: task for task in tasks.values() if name in (task.name, task.group)}
        if not matches:
            raise VitrailError(
                f"There is no task {name!r} in {suite}.{did_you_mean(name, [*tasks, *GROUPS])} The tasks are {', '.join(tasks)}."
            )
        chosen |= matches
    return tuple(chosen.values())
