"""Errors of images: decoding, preprocessing, augmentation, sampling and loading."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from tests.data.memory_splits import MemorySplit, stored
from tests.error_tour.case import Case, at
from vitrail.data.augment.mix import check_targets
from vitrail.data.augment.spec import Augment, augment_level
from vitrail.data.augment_sheet import augment_sheet
from vitrail.data.classes import align
from vitrail.data.decode import decode, open_image, unwrap_npy
from vitrail.data.device_transforms import DeviceTransforms
from vitrail.data.find_bad import image_error
from vitrail.data.loader import EvalLoader, TrainLoader
from vitrail.data.preprocess import Preprocess, preset
from vitrail.data.sampler import EpochOrder, batch_slices, class_weights
from vitrail.data.settings import check_rule
from vitrail.data.split import hold_out, write_table
from vitrail.data.trained_on import TrainedOn
from vitrail.data.types import Split
from vitrail.data.worker_signals import raise_worker_error

_AUGMENT, _PREPROCESS = "data/augment/spec.py:Augment.__post_init__", "data/preprocess.py:Preprocess.__post_init__"
_ORDER = "data/sampler.py:EpochOrder.__init__"


def _split(**fields: Any) -> MemorySplit:
    """Return three images of the classes `class 0` to `class 2`; they cannot be read."""
    return MemorySplit([b""] * 3, **fields)


def _wrong_label() -> MemorySplit:
    return _split(targets=np.array([0, 5, 1]))


def _regress() -> MemorySplit:
    return _split(classes=1, task="regress", targets=np.ones((3, 1), np.float32))


def _augment(**fields: Any) -> Augment:
    return Augment(**fields)


def _preprocess(**fields: Any) -> Preprocess:
    return Preprocess(**fields)


def _loader(split: Split | None = None, **options: Any) -> TrainLoader:
    fixed: dict[str, Any] = {"preprocess": Preprocess(size=(8, 8)), "workers": 0, "sampling": "in-order"}
    return TrainLoader(split or stored(4, 8), **{"augment": Augment(), "batch": 2, **fixed, **options})


def _order(**options: Any) -> EpochOrder:
    return EpochOrder(stored(4, 8), **{"batch": 2, **options})


def _resume_with(**changes: int) -> None:
    loader = _loader()
    loader.load_state_dict({**loader.state_dict(), **changes})


def _throw(error: BaseException | None) -> None:
    if error is not None:
        raise error


def _huge_png() -> bytes:
    """Return the beginning of a PNG of 20,000 × 10,000 pixels."""
    header = b"IHDR" + struct.pack(">IIBBBBB", 20_000, 10_000, 1, 0, 0, 0, 0)
    crc = struct.pack(">I", zlib.crc32(header))
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + header + crc + struct.pack(">I", 4) + b"IDAT" + bytes(8)


def _older_file(text: str) -> None:
    """Hold out images by a file of an older version."""
    file = Path("older.csv")
    file.write_text(text)
    hold_out(_split(), 0.5, rule="seed-0", older_file=file)


# fmt: off
CASES: tuple[Case, ...] = (
    # Augmentation.
    at(
        f"{_AUGMENT}#1", lambda: _augment(crop_area=(0.5, 1.2)),
        "Augment.crop_area is (0.5, 1.2);", "it must be (smallest, largest) above 0 and at most 1.",
    ),
    at(
        f"{_AUGMENT}#2", lambda: _augment(crop="center"),
        "Augment.crop is 'center';", "it must be one of inception, inception-tensorflow, same-aspect, none.",
    ),
    at(f"{_AUGMENT}#3", lambda: _augment(flip=1.5), "Augment.flip is 1.5;", "it must be between 0 and 1."),
    at(f"{_AUGMENT}#4", lambda: _augment(mixup=float("inf")), "Augment.mixup is inf;", "it must be a finite number, 0 or more."),
    at(f"{_AUGMENT}#5", lambda: _augment(hue=0.6), "Augment.hue is 0.6;", "it must be at most 0.5, half of the colour circle."),
    at(
        f"{_AUGMENT}#6", lambda: _augment(trivialaugment=True, three_augment=True),
        "three_augment, trivialaugment are on together.", "Choose one of them.",
    ),
    at(f"{_AUGMENT}#7", lambda: _augment(repeats=0), "Augment.repeats is 0;", "it must be at least 1."),
    at(
        f"{_AUGMENT}#8", lambda: _augment(interpolation="bicubic", antialias=False),
        "antialias is off;", "bicubic crops always have it. Use interpolation='bilinear', or antialias=True.",
    ),
    at(
        f"{_AUGMENT}#9", lambda: _augment(randaugment="torchvision", randaugment_magnitude=31),
        "not 31.", "torchvision's RandAugment has integer magnitudes from 0 to 30", "The big-vision variant has any magnitude.",
    ),
    at(
        f"{_AUGMENT}#10", lambda: _augment(randaugment="timm", randaugment_magnitude=11),
        "not 11.", "timm's RandAugment has magnitudes from 0 to 10",
    ),
    at(
        f"{_AUGMENT}#11", lambda: _augment(randaugment_deviation=0.5),
        "Augment.randaugment_deviation is 0.5,", "only timm's RandAugment has it. Set randaugment to 'timm'.",
    ),
    at(
        "data/augment/spec.py:Augment.from_dict", lambda: Augment.from_dict({"mixupp": 0.2}),
        "Unknown augmentation key 'mixupp'.", "Did you mean mixup?",
    ),
    at(
        "data/augment/spec.py:augment_level", lambda: augment_level("average"),
        "There is no augmentation level 'average'.", "There are none, light1, light2, medium1, medium2, strong1, strong2.",
    ),
    at(
        "data/augment/mix.py:check_targets#1", lambda: check_targets(Augment(smoothing=0.1), "regress", 1),
        "this dataset has the task 'regress'.", "Label smoothing needs one class per image", "Set smoothing to 0.",
    ),
    at(
        "data/augment/mix.py:check_targets#2", lambda: check_targets(Augment(), "classify", 0),
        "The training split has no classes.", "Check the data with `vitrail data check`.",
    ),
    at(
        "data/augment_sheet.py:augment_sheet#1",
        lambda: augment_sheet(_split(), Preprocess(), Augment(), Path("sheet.png"), rows=0),
        "not 0 and 8.", "A sheet needs at least one row and one column",
    ),
    at(
        "data/augment_sheet.py:augment_sheet#2",
        lambda: augment_sheet(MemorySplit([b"text"]), Preprocess(), Augment(), Path("sheet.png"), bad_images="skip"),
        "None of the images drawn for the sheet (1) can be read.", "Run `vitrail data check` to list all bad images.",
    ),
    at(
        "data/device_transforms.py:DeviceTransforms.__init__",
        lambda: DeviceTransforms(Preprocess(bits=16), Augment(brightness=0.2), task="classify", classes=2),
        "this preprocessing has 16 bits.", "colour jitter need 8-bit images", "Switch them off, or set bits to 8.",
    ),
    # Classes and labels.
    at(
        "data/classes.py:align", lambda: align({"train": _split()}, ("crane", "crane", "crane")),
        "The class 'crane' is listed 3 times.", "Class names must be unique: rename or remove one.",
    ),
    at(
        "data/classes.py:_remap#1", lambda: align({"train": _regress()}, ("weight",)),
        "train has the numeric targets class 0, but the model has weight.", "They must be the same, in the same order.",
    ),
    at(
        "data/classes.py:_remap#2", lambda: align({"train": _split()}, ("class 0",)),
        "train has class 'class 1', which the model does not have (class 0). 1 more class is unknown.",
        "Remove them, or pass --ignore-unknown-classes to skip their images.",
    ),
    at(
        "data/classes.py:check_range", lambda: _loader(_wrong_label()),
        "picture-1.jpg has label 5, but there are 3 classes (0 to 2). 1 label is outside.", "Correct the labels of the dataset.",
    ),
    # Decoding.
    at(
        "data/decode.py:decode", lambda: decode(Path("truncated.jpg").read_bytes(), channels=3, name="truncated.jpg"),
        "truncated.jpg: truncated: the file ends before the image is complete.", "Replace or remove it.",
    ),
    at(
        "data/decode.py:open_image", lambda: open_image(_huge_png(), name="huge.png"),
        "huge.png: more than 178,956,970 pixels:", "a decompression bomb, or an image to resize first.", "Replace or remove it.",
    ),
    at(
        "data/decode.py:_open#1", lambda: open_image(b"", name="zero.jpg"),
        "zero.jpg: an empty file (0 bytes).", "Replace or remove it.",
    ),
    at(
        "data/decode.py:_open#2", lambda: open_image(b"version https://git-lfs.github.com/spec/v1\n", name="cat.jpg"),
        "cat.jpg: a Git LFS pointer, not the image;", "run `git lfs pull` to download it.",
    ),
    at(
        "data/decode.py:_open#3", lambda: open_image(_huge_png(), name="huge.png"),
        "huge.png: 10000×20000 pixels,", "more than the limit of 178,956,970: a decompression bomb, or an image to resize first.",
        patch=lambda monkeypatch: monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None),
    ),
    at(
        "data/decode.py:_pillow_pixels#1",
        lambda: decode(Image.fromarray(np.full((2, 2), 70_000, np.int32)), channels=1, name="deep.tif"),
        "deep.tif: pixel values from 70000 to 70000,", "which do not fit in 16 bits. Replace or remove it.",
    ),
    at(
        "data/decode.py:_pillow_pixels#2",
        lambda: decode(Image.fromarray(np.ones((2, 2), np.float32)), channels=1, name="float.tif"),
        "float.tif: floating-point pixels, whose range is unknown;", "save it with 8 or 16 bits.",
    ),
    at(
        "data/decode.py:_pillow_pixels#3", lambda: decode(Image.new("RGB", (2, 2)), channels=13, name="cat.jpg"),
        "cat.jpg: its mode is RGB,", "but 13 channels are expected; use .npy files for more than 4.",
    ),
    at(
        "data/decode.py:unwrap_npy", lambda: unwrap_npy(b"\x93NUMPY\x01\x00v\x00{'descr'", name="cut.npy"),
        "cut.npy: not a readable .npy image (its header cannot be read:", "Replace or remove it.",
    ),
    at(
        "data/decode.py:_as_image_array", lambda: decode(np.zeros(3, np.uint8), channels=3, name="flat.npy"),
        "flat.npy: an array (3,) of uint8,", "but uint8 or uint16 [height, width, channels] is expected.",
    ),
    at(
        "data/decode.py:_with_channels", lambda: decode(np.zeros((2, 2, 13), np.uint8), channels=3, name="bands.npy"),
        "bands.npy: 13 channels,", "but the model expects 3.",
    ),
    at(
        "data/find_bad.py:image_error", lambda: _throw(image_error(_split(), 0)),
        "picture-0.jpg: an empty file (0 bytes).", "Replace or remove it.",
    ),
    at(
        "data/types.py:BadImage.skippable", lambda: next(_loader(_split()).epoch()),
        "picture-0.jpg: an empty file (0 bytes).", "Replace or remove it, or pass --bad-images skip.",
    ),
    at(
        "data/train_reader.py:TrainReader._substitute", lambda: next(_loader(_split(), bad_images="skip").epoch()),
        "The 16 images tried instead of picture-0.jpg are bad too.", "Run `vitrail data check` to list all bad images.",
    ),
    # Preprocessing.
    at(
        f"{_PREPROCESS}#1", lambda: _preprocess(resize="sqare"),
        "Preprocess.resize is 'sqare';", "it must be one of square, short-side, none, keep-aspect.",
    ),
    at(
        f"{_PREPROCESS}#2", lambda: _preprocess(size=(0, 4)),
        "Preprocess.size is (0, 4);", "it must be (height, width), both at least 1.",
    ),
    at(
        f"{_PREPROCESS}#3", lambda: _preprocess(resize="none", resize_to=256),
        "resize is 'none' and resize_to is 256.", "Leave it out, or use resize='short-side'.",
    ),
    at(
        f"{_PREPROCESS}#4", lambda: _preprocess(resize="short-side", resize_to=100),
        "resize_to=100 is smaller than the 224×224 crop.", "Use 224 or more.",
    ),
    at(
        f"{_PREPROCESS}#5", lambda: _preprocess(resize="short-side", resize_to=256, pad=True),
        "pad has no effect with resize='short-side' and resize_to.", "Use resize='square' without resize_to, or 'none'.",
    ),
    at(
        f"{_PREPROCESS}#6", lambda: _preprocess(mean=(0.5,)),
        "Preprocess.mean has 1 value for 3 channels.", "Give one value per channel.",
    ),
    at(
        f"{_PREPROCESS}#7", lambda: _preprocess(std=(0.5, 0, 0.5)),
        "Preprocess.std is (0.5, 0.0, 0.5);", "every value must be above 0.",
    ),
    at(
        "data/preprocess.py:_numbers_of", lambda: _preprocess(size=224),
        "Preprocess.size is 224;", "it must be (height, width).",
    ),
    at(
        "data/preprocess.py:Preprocess._check_keep_aspect#1", lambda: _preprocess(max_size=512),
        "resize is 'square', max_size is 512 and multiple is None.", "max_size and multiple go with resize='keep-aspect'",
    ),
    at(
        "data/preprocess.py:Preprocess._check_keep_aspect#2",
        lambda: _preprocess(resize="keep-aspect", resize_to=224, max_size=448, multiple=(16,)),
        "multiple is (16,) and resize_to is 224;", "expected (height, width) and a length, all at least 1.",
    ),
    at(
        "data/preprocess.py:Preprocess._check_keep_aspect#3", lambda: preset("timm").keep_aspect((16, 16), 8),
        "The longest side is limited to 8 pixels, but the model's patches have 16:", "allow 16 or more.",
    ),
    at(
        "data/preprocess.py:Preprocess.pixels#1",
        lambda: preset("imagenet").pixels(np.zeros((1, 2_000_000, 3), np.uint8), name="line.png"),
        "line.png: 1×2000000 pixels: resizing to 256×512000000 would exceed the limit of 178,956,970 pixels;",
        "crop or resize it first.",
    ),
    at(
        "data/preprocess.py:Preprocess.pixels#2",
        lambda: _preprocess(size=(8, 8), resize="none").pixels(np.zeros((6, 20, 3), np.uint8), name="small.png"),
        "small.png is 6×20,", "the model expects 8×8 and resize is 'none'.",
        "Resize the image, or use a preprocessing with pad=True or another resize.",
    ),
    at(
        "data/preprocess.py:Preprocess.normalise", lambda: Preprocess().normalise(torch.zeros(4, 8, 8, 3)),
        "Images (4, 8, 8, 3) have 8 channels,", "this preprocessing has 3. The expected order is [..., channels, height, width].",
    ),
    at(
        "data/preprocess.py:Preprocess.from_dict", lambda: Preprocess.from_dict({"colours": 3}),
        "Unknown preprocessing key 'colours'.", "The keys are antialias, bits, channels, exif,",
    ),
    at(
        "data/preprocess.py:preset", lambda: preset("imagnet"), "There is no preprocessing 'imagnet'.", "Did you mean imagenet?",
        "There are google-vit, big-vision, timm, imagenet, deit, cifar.",
    ),
    at(
        "data/preprocess.py:read_file", lambda: Preprocess()("nowhere.jpg"),
        "Cannot read the image nowhere.jpg: No such file or directory.", "Check the path and its permissions.",
    ),
    # Sampling and loading.
    at(
        f"{_ORDER}#1", lambda: _order(sampling="balancd"),
        "There is no sampler 'balancd'.", "Did you mean balanced?", "There are shuffle, balanced, in-order.",
    ),
    at(f"{_ORDER}#2", lambda: _order(batch=0), "The batch size is 0;", "it must be at least 1."),
    at(
        f"{_ORDER}#3", lambda: _order(batch=8),
        "0 optimiser steps per epoch: 4 images < batch 8.",
        "Use a smaller batch, more images, or keep the last, smaller batch (keep_last).",
    ),
    at(
        "data/sampler.py:batch_slices", lambda: next(batch_slices(_order(), epoch=0, step=0, ranks=3)),
        "A batch of 2 images cannot be divided among 3 ranks.", "Use a larger batch.",
    ),
    at(
        "data/sampler.py:class_weights", lambda: class_weights(_split(), {"lynx": 8.5}),
        "There is a weight for the class 'lynx', which train does not have (class 0, class 1, class 2).", "Correct or remove it.",
    ),
    at(
        "data/sampler.py:_weights_file", lambda: class_weights(_split(), "nowhere.json"),
        "Cannot read class weights from nowhere.json (No such file or directory).",
        "Pass `auto`, or a JSON file such as {\"cat\": 1.0, \"lynx\": 8.5}.",
    ),
    at(
        "data/sampler.py:_class_targets", lambda: class_weights(_regress(), "auto"),
        "this dataset has the task 'regress'.", "Balancing needs one class per image",
        "Use the shuffle sampler, without class weights.",
    ),
    at(
        "data/loader.py:_Loader.__init__", lambda: _loader(rank=2, ranks=2),
        "There is no rank 2 of 2 ranks:", "they are numbered from 0 to 1.",
    ),
    at(
        "data/loader.py:TrainLoader.load_state_dict", lambda: _resume_with(batch=4),
        "The saved state of the data loader has batch 4, but this run has 2: the remaining batches would differ.",
        "Resume with the same value, or start a new run.",
    ),
    at(
        "data/loader.py:TrainLoader._start", lambda: next(_loader(augment=Augment(mixup=0.2, mix_until=0.5)).epoch()),
        "mix_until is 0.5, a fraction of the run, but the loader does not know the length of the run.",
        "Call set_total_steps first.",
    ),
    at(
        "data/loader.py:EvalLoader.__init__", lambda: EvalLoader(_split(), preprocess=Preprocess(), batch=0),
        "The batch size is 0;", "it must be at least 1.",
    ),
    at(
        "data/loader.py:_skip_bad", lambda: _loader(bad_images="ignore"),
        "bad_images is 'ignore';", "it must be 'error' or 'skip'.",
    ),
    at(
        "data/worker_signals.py:raise_worker_error",
        lambda: raise_worker_error(RuntimeError("DataLoader worker (pid 4711) is killed by signal: Killed. ")),
        "A process that reads images ended unexpectedly (process 4711): Killed.",
        "Most often the memory was too small: use fewer workers.",
    ),
    # Which images are used.
    at(
        "data/settings.py:check_rule", lambda: check_rule("seed-x"),
        "data.split_rule is 'seed-x';", "it can be names, or seed-N for a run of an older version with seed N.",
    ),
    at(
        "data/split.py:write_table", lambda: write_table([_split()], Path("out.csv")),
        "The images of train are not files, so a table cannot list them.", "Use `vitrail data pack`.",
    ),
    at(
        "data/split.py:_read_older_file#1", lambda: _older_file("name,part\na.jpg,val\n"),
        "older.csv cannot be read as a table of path and split (it has no column 'path').",
        "An older version divided the images by this file. Restore it, or delete it.",
    ),
    at(
        "data/split.py:_read_older_file#2", lambda: _older_file("path,split\ngone.jpg,val\n"),
        "older.csv lists 1 image that cannot be found, for example gone.jpg.", "Restore the missing images, or delete this file.",
    ),
    at(
        "data/trained_on.py:TrainedOn.from_dict", lambda: TrainedOn.from_dict({"source": 3}),
        "The record of what this checkpoint was trained on is corrupted.", "Download or copy the checkpoint again.",
    ),
)
# fmt: on
