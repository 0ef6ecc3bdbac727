"""The paper's transfer tasks as data: VTAB-1k with its 19, and the five of Table 2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vitrail.errors import VitrailError, nearest

Group = Literal["natural", "specialized", "structured"]
Divide = Literal["own", "train", "test-is-val", "whole", "half-test"]
GROUPS: tuple[Group, ...] = ("natural", "specialized", "structured")


@dataclass(frozen=True, kw_only=True)
class SuiteTask:
    """One task: what it is, where its images may come from, and how they are divided and augmented."""

    name: str
    title: str
    classes: int
    group: Group | None = None
    recipe: str = "finetune-vtab"
    torchvision: str | None = None
    """The set of that library that holds it, ready to be used."""
    layout: Literal["clevr", "kitti", "dsprites", "smallnorb"] | None = None
    """The form in which its makers distribute it, where labels have to be made from annotations."""
    attribute: str = ""
    """Which label is made of them."""
    labels: str = "its own classes"
    divide: Divide = "own"
    """Where training, validation and test images come from. own: the set has all three. train: validation is the end of its
    training split. test-is-val: so, and its validation split is the test. whole: the set is one, divided by `shares`.
    half-test: the first half of its test split is for validation, the second for the test."""
    shares: tuple[int, ...] = ()
    """Per cent of the images for training (and validation; the rest is for the test)."""
    crop: bool = True
    """Whether a random crop leaves the label true."""
    flip: bool = True
    """Whether a left-right flip leaves the label true."""
    obtain: str = ""
    """How to come by it, beyond torchvision."""


def _natural(name: str, title: str, classes: int, **more: object) -> SuiteTask:
    return SuiteTask(name=name, title=title, classes=classes, group="natural", **more)  # type: ignore[arg-type]


def _specialized(name: str, title: str, classes: int, **more: object) -> SuiteTask:
    return SuiteTask(name=name, title=title, classes=classes, group="specialized", **more)  # type: ignore[arg-type]


def _structured(name: str, title: str, classes: int, **more: object) -> SuiteTask:
    return SuiteTask(name=name, title=title, classes=classes, group="structured", crop=False, **more)  # type: ignore[arg-type]


_HF_CIFAR = "hf:uoft-cs/cifar100?label=fine_label"
_CLEVR = {"layout": "clevr", "divide": "test-is-val", "shares": (90,), "obtain": "CLEVR_v1.0 with images/ and scenes/"}
_DSPRITES = {
    "layout": "dsprites",
    "divide": "whole",
    "shares": (80, 10),
    "flip": False,
    "obtain": "dsprites_ndarray_co1sh3sc6or40x32y32_64x64.npz",
}
_NORB = {"layout": "smallnorb", "divide": "half-test", "obtain": "the six .mat files of smallNORB, unpacked"}

VTAB: tuple[SuiteTask, ...] = (
    _natural("caltech101", "Caltech101", 102, divide="train", shares=(90,), obtain="its classes in train/ and test/"),
    _natural(
        "cifar100",
        "CIFAR-100",
        100,
        divide="train",
        shares=(90,),
        torchvision="CIFAR100",
        obtain="hf:uoft-cs/cifar100?label=fine_label",
    ),
    _natural("dtd", "DTD", 47, torchvision="DTD"),
    _natural("flowers102", "Flowers102", 102, torchvision="Flowers102"),
    _natural("pets", "Pets", 37, divide="train", shares=(80,), torchvision="OxfordIIITPet"),
    _natural("sun397", "Sun397", 397, obtain="SUN397 with the lists of its tfds division, or any train/, val/, test/"),
    _natural("svhn", "SVHN", 10, divide="train", shares=(90,), flip=False, torchvision="SVHN"),
    _specialized("patch_camelyon", "Patch Camelyon", 2, obtain="images in train/, val/ and test/, a folder a class"),
    _specialized("eurosat", "EuroSAT", 10, divide="whole", shares=(60, 20), torchvision="EuroSAT"),
    _specialized("resisc45", "Resisc45", 45, divide="whole", shares=(60, 20), obtain="NWPU-RESISC45, a folder a class"),
    _specialized("retinopathy", "Diabetic Retinopathy", 5, obtain="scaled to a radius of 300, in train/, val/ and test/"),
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
        labels="depth of the nearest object, cut at 8, 8.5, 9, 9.5 and 10",
        **_CLEVR,
    ),
    _structured(
        "dmlab",
        "DMLab",
        6,
        labels="distance of a reward, near, far or very far, good or bad",
        obtain="its frames in train/, val/, test/",
    ),
    _structured(
        "kitti_distance",
        "KITTI distance",
        4,
        layout="kitti",
        divide="whole",
        shares=(80, 10),
        attribute="distance",
        labels="distance of the nearest car, van or truck, cut at 8 and 20 metres, or none",
        obtain="training/image_2 and training/label_2",
    ),
    _structured("dsprites_location", "dSprites location", 16, attribute="x", labels="place from left to right", **_DSPRITES),
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
        labels="the camera's angle",
        flip=False,
        **_NORB,
    ),
    _structured(
        "smallnorb_elevation",
        "smallNORB elevation",
        9,
        attribute="elevation",
        labels="the camera's height",
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
        obtain="train/ and val/",
    ),
    SuiteTask(name="cifar10", title="CIFAR-10", classes=10, recipe="finetune-cifar10", torchvision="CIFAR10"),
    SuiteTask(name="cifar100", title="CIFAR-100", classes=100, recipe="finetune-cifar100", torchvision="CIFAR100"),
    SuiteTask(name="pets", title="Pets", classes=37, recipe="finetune-pets", torchvision="OxfordIIITPet"),
    SuiteTask(name="flowers102", title="Flowers102", classes=102, recipe="finetune-flowers", torchvision="Flowers102"),
)

SUITES = {"vtab": VTAB, "transfer": TRANSFER}


def tasks_of(suite: str, names: tuple[str, ...] = ()) -> tuple[SuiteTask, ...]:
    """The tasks of a suite: all, some by name, or those of a group."""
    every = {task.name: task for task in SUITES[suite]}
    if not names:
        return tuple(every.values())
    chosen: dict[str, SuiteTask] = {}
    for name in names:
        found = {task.name: task for task in every.values() if name in (task.name, task.group)}
        if not found:
            raise VitrailError(
                f"There is no task {name!r} in {suite}.{nearest(name, [*every, *GROUPS])} It has {', '.join(every)}."
            )
        chosen |= found
    return tuple(chosen.values())
