"""Errors of data sources: folders, tables, tars, torchvision and the Hub."""

from __future__ import annotations

import io
import os
import tarfile
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest

from tests.error_tour.case import Case, at
from vitrail.data import embedded, open_source
from vitrail.data.sources.chain import MissingImages
from vitrail.data.sources.files import FileSplit
from vitrail.data.sources.hub import HubSplit
from vitrail.data.sources.labels import infer_task
from vitrail.data.sources.layout import images_under, subfolders
from vitrail.data.sources.read_ahead import with_retries
from vitrail.data.sources.reference import Request
from vitrail.data.sources.tars import TarSplit, _file_system, _state
from vitrail.data.types import BadImage, Source

_CAT = "photos/train/cat/0.jpg"
_URL = "https://example.org/train.tar"


def _table(text: str | bytes, tail: str = "", **options: Any) -> Source:
    """Open a table with this content."""
    Path("t.csv").write_bytes(text if isinstance(text, bytes) else text.encode())
    return open_source(f"csv:t.csv{tail}", **options)


def _option(option: str, value: str) -> Request:
    return Request(f"folder:photos?{option}={value}", "folder", "photos", {option: value})


def _folders(*names: str) -> None:
    for name in names:
        Path(name).mkdir(parents=True, exist_ok=True)


def _two_names() -> Source:
    _folders("two-names/val", "two-names/valid")
    return open_source("two-names")


def _skipped(name: str) -> NoReturn:
    """Raise why a file of a folder was skipped."""
    _folders("special")
    if name.endswith("heic"):
        Path("special", name).touch()
    else:
        os.mkfifo(f"special/{name}")
    special: list[BadImage] = []
    list(images_under(Path("special"), special=special))
    raise next(one for one in special if one.name.endswith(name))


def _tar(name: str, tail: str = "", **members: bytes) -> Source:
    """Open a tar of the sample 1, with members by extension."""
    with tarfile.open(name, "w") as archive:
        for extension, content in members.items():
            about = tarfile.TarInfo(f"1.{extension}")
            about.size = len(content)
            archive.addfile(about, io.BytesIO(content))
    return open_source(f"wds:{name}?index=tar-index{tail}")


def _text_tar() -> Source:
    Path("text.tar").write_text("hello " * 400)
    return open_source("wds:text.tar?index=tar-index")


def _image_of_tar(tar: str, size: int) -> object:
    span = np.array([[0, 0, size]])
    return TarSplit("train", "unlabelled", [tar], ["1.jpg"], span, np.empty((1, 0), np.float32), ()).payload(0)


def _named_classes(names: str) -> Source:
    Path("names.txt").write_text(names)
    return _tar("five.tar", "&classes=names.txt", jpg=b"", cls=b"5")


def _absent(*_: object) -> NoReturn:
    raise FileNotFoundError("no such file")


def _image_of_hub(value: object) -> object:
    return HubSplit("train", [{"image": value}], "image", "unlabelled", np.empty((1, 0), np.float32), ()).payload(0)


@cache
def _saved(*columns: str, splits: tuple[str, ...] = ()) -> str:
    """Save a dataset of the Hub's library, and return its reference."""
    import datasets

    folder, rows = "hub-" + "-".join((*columns, *splits)), datasets.Dataset.from_dict({name: ["a", "b"] for name in columns})
    (datasets.DatasetDict(dict.fromkeys(splits, rows)) if splits else rows).save_to_disk(folder)
    return f"hf:{folder}"


def _incomplete_hub() -> Source:
    _folders("hub-incomplete")
    Path("hub-incomplete/state.json").write_text("{}")
    return open_source("hf:hub-incomplete")


def _svhn_is_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    import torchvision.datasets

    monkeypatch.setattr(torchvision.datasets.SVHN, "_check_integrity", lambda self: True)


# fmt: off
CASES: tuple[Case, ...] = (
    # References and options.
    at(
        "data/embedded/__init__.py:digits", lambda: open_source("digits"),
        "The digits are missing:", "Install it, such as with `uv sync`, or give other images with --data.",
        patch=lambda monkeypatch: monkeypatch.setattr(embedded, "files", lambda package: Path("empty")),
    ),
    at(
        "data/sources/example.py:open_example", lambda: open_source("example:cats"),
        "example:cats: there is no such example.", "Did you mean cat?", "Included are example:cat, example:coffee.",
    ),
    at(
        "data/sources/__init__.py:resolve#1", lambda: open_source("folder:"),
        "The data source 'folder:' has no path or name.", "Write . for the current folder.",
    ),
    at(
        "data/sources/__init__.py:_infer_kind#1", lambda: open_source("notes.txt"),
        "notes.txt is not a table (.csv), a tar (.tar) or a .parquet file.",
        "A data source is one of these, or a folder of images.",
    ),
    at(
        "data/sources/reference.py:Request.fraction", lambda: _option("val", "2").fraction("val", 0.1),
        "val=2 in folder:photos?val=2:", "a fraction from 0 to below 1 is expected.",
    ),
    at(
        "data/sources/reference.py:Request.flag", lambda: _option("verify", "maybe").flag("verify"),
        "verify=maybe in folder:photos?verify=maybe:", "write verify=1, or remove it.",
    ),
    at(
        "data/sources/digits.py:_class_range", lambda: open_source("digits?classes=4"),
        "classes=4 in digits?classes=4:", "a range of digits such as 0-4 is expected.",
    ),
    # Folders and files.
    at(
        "data/sources/folder.py:open_folder#1", lambda: open_source("folder:nowhere"),
        "folder:nowhere: nowhere does not exist;", "a folder of images is expected. Check the path.",
    ),
    at(
        "data/sources/folder.py:open_folder#2", lambda: open_source("folder:photos?labels=some"),
        "labels=some in folder:photos?labels=some:", "write labels=none, or remove it.",
    ),
    at(
        "data/sources/folder.py:_split_folders", _two_names,
        "two-names has both val/ and valid/, which both mean 'val'.", "Rename one of them.",
    ),
    at(
        "data/sources/folder.py:_split_layout", lambda: open_source("folder:photos?val=0.2"),
        "val=0.2 in folder:photos?val=0.2: it already has train, val.", "Remove the option.",
    ),
    at(
        "data/sources/layout.py:images_under#1", lambda: _skipped("pipe.jpg"),
        "special/pipe.jpg: a FIFO, not a regular file.", "Replace or remove it.",
    ),
    at(
        "data/sources/layout.py:images_under#2", lambda: _skipped("photo.heic"),
        "special/photo.heic: HEIC photos are not read;", "convert it to JPEG or PNG.",
    ),
    at(
        "data/sources/layout.py:_entries", lambda: subfolders(Path("nowhere")),
        "Cannot list nowhere: No such file or directory.", "Check the path and its permissions.",
    ),
    at(
        "data/sources/files.py:FileSplit.payload",
        lambda: FileSplit("train", "classify", Path("photos"), ["nowhere.jpg"], np.zeros(1, np.int64), ("cat",)).payload(0),
        "photos/nowhere.jpg: no such file.", "Replace or remove it.",
    ),
    at(
        "data/sources/chain.py:MissingImages.payload",
        lambda: MissingImages([BadImage("gone.jpg", "no such file (line 2 of t.csv)")]).payload(0),
        "gone.jpg: no such file (line 2 of t.csv).", "Replace or remove it.",
    ),
    # Tables.
    at(
        "data/sources/csv.py:open_csv", lambda: _table(f"path,label,split\n{_CAT},cat,train\n", "?val=0.2"),
        "val=0.2 in csv:t.csv?val=0.2: the table already has a split column.", "Remove the option, or the column.",
    ),
    at(
        "data/sources/csv.py:_read#1", lambda: _table(""),
        "t.csv is empty.", "The first line should be path,label or path,label,split.",
    ),
    at(
        "data/sources/csv.py:_read#2", lambda: _table("path,label\n"),
        "t.csv has a header but no rows.", "Add a row with path and label for each image.",
    ),
    at(
        "data/sources/csv.py:_read#4", lambda: _table("path,label\n,cat\n"),
        "t.csv, line 2: the path is empty.", "Add it, or remove the row.",
    ),
    at(
        "data/sources/csv.py:_not_utf8", lambda: _table(f"path,label\n{_CAT},caf".encode() + b"\xe9\n"),
        "t.csv, line 2 is not UTF-8 text.", "Save the table as 'CSV UTF-8'.",
    ),
    at(
        "data/sources/csv.py:_rows#1", lambda: open_source("csv:nowhere.csv"),
        "Cannot read the table nowhere.csv: No such file or directory.", "Check the path.",
    ),
    at(
        "data/sources/csv.py:_rows#2", lambda: _table("path,label\na.jpg,c\0t\n"),
        "t.csv contains zero bytes, so it is not a text file.", "Save it as 'CSV UTF-8'.",
    ),
    at(
        "data/sources/csv.py:_rows#3", lambda: _table("path,label\n\"" + "a.jpg,cat " * 15_000),
        "t.csv, line 2: field larger than field limit (131072).", "Check its quotes.",
    ),
    at(
        "data/sources/csv.py:_columns#1", lambda: _table(f"path,height\n{_CAT},1\n", "?targets=width"),
        "t.csv has no column 'width';", "it has path, height.",
    ),
    at(
        "data/sources/csv.py:_columns#2", lambda: _table("one,two\nx,y\n"),
        "t.csv has no column with image paths; its first line is 'one, two'.",
        "Name the columns path,label or path,label,split.",
    ),
    at(
        "data/sources/csv.py:_columns#3", lambda: _table(f"path,colour\n{_CAT},red\n"),
        "t.csv has no column 'label' (it has path, colour).", "Add one, or use ?task=unlabelled.",
    ),
    at(
        "data/sources/csv.py:_split", lambda: _table(f"path,label,split\n{_CAT},cat,holdout\n"),
        "t.csv, line 2: the split is 'holdout';", "expected train, val or test.",
    ),
    at(
        "data/sources/csv.py:_missing_files#1", lambda: _table(f"path,label\n{_CAT},cat\nnowhere.jpg,dog\n"),
        "t.csv lists 2 images, of which 1 cannot be found: line 3: nowhere.jpg",
        "Paths are relative to .; use csv:t.csv?root=DIR for another folder, or --bad-images skip to skip them.",
    ),
    at(
        "data/sources/csv.py:_missing_files#3", lambda: _table("path,label\nnowhere.jpg,dog\n", bad_images="skip"),
        "t.csv: none of its images can be found.", "Paths are relative to .; use ?root=DIR for another folder.",
    ),
    at(
        "data/sources/csv.py:_refuse_duplicates", lambda: _table(f"path,label\n{_CAT},cat\n{_CAT},dog\n"),
        f"t.csv: lines 2 and 3 both list {_CAT}.", "Use one row per image; write several labels as a|b.",
    ),
    at(
        "data/sources/labels.py:infer_task", lambda: infer_task([["1"]], "classes"),
        "task=classes:", "expected one of classify, multilabel, regress, unlabelled.",
    ),
    at(
        "data/sources/labels.py:parse_targets", lambda: _table(f"path,label\n{_CAT},\n"),
        "t.csv, line 2: the label is empty.", "Add it, or remove the image.",
    ),
    at(
        "data/sources/labels.py:_numeric", lambda: _table(f"path,label\n{_CAT},tall\n", "?task=regress"),
        "t.csv, line 2: 'tall' is not a finite number.", "Correct it, or remove the image.",
    ),
    # Tars.
    at(
        "data/sources/tars.py:TarSplit.payload#1", lambda: _image_of_tar("nowhere.tar", 10),
        "nowhere.tar: 1.jpg: cannot be read (No such file or directory).", "Replace or remove it.",
    ),
    at(
        "data/sources/tars.py:TarSplit.payload#2", lambda: _image_of_tar("notes.txt", 10),
        "notes.txt: 1.jpg: the tar ends before the image is complete.", "Copy the tar again.",
    ),
    at(
        "data/sources/tars.py:open_tars", lambda: open_source("wds:a.tar?train=b.tar"),
        "wds:a.tar?train=b.tar:", "expected one pattern, as in wds:DIR/train-{000..146}.tar,",
        "or one per split, as in wds:?train=PATTERN&val=PATTERN.",
    ),
    at(
        "data/sources/tars.py:_expand", lambda: open_source("wds:train-{0..3}.tar"),
        "wds:train-{0..3}.tar: 4 of 4 tars not found, for example train-0.tar.", "Check the path and the numbers in braces.",
    ),
    at(
        "data/sources/tars.py:_check_count#1", lambda: open_source(f"wds:{'{a}' * 101}.tar"),
        "there are 101 pairs of braces;", "at most 100 are accepted. Use a range, such as {000..146}, or *.",
    ),
    at(
        "data/sources/tars.py:_check_count#2", lambda: open_source("wds:{0..9999999}.tar"),
        "wds:{0..9999999}.tar: the braces stand for more than 1,000,000 names, the most that are accepted.",
        "Check the numbers in braces, or give the tars of one folder as wds:DIR/*.tar.",
    ),
    at(
        "data/sources/tars.py:_braces", lambda: open_source("wds:train-{3..1}.tar"),
        "{3..1} in 'train-{3..1}.tar':", "the second number must be the larger one.",
    ),
    at(
        "data/sources/tars.py:_split#1", lambda: _tar("none.tar", txt=b"no image"),
        "no images in none.tar.",
        "Expected members such as 0001.jpg and 0001.cls; for another extension of images use ?image=EXTENSION.",
    ),
    at(
        "data/sources/tars.py:_split#2", lambda: _tar("labels.tar", "&label=json.size", jpg=b"", cls=b"0"),
        "no image has a label 'json.size'.", "Check ?label=, or remove it.",
    ),
    at(
        "data/sources/tars.py:_with_names#1", lambda: _tar("names.tar", "&classes=nowhere.txt", jpg=b"", cls=b"0"),
        "Cannot read the class names from nowhere.txt: No such file or directory.",
        "Expected one name per line, or a JSON list.",
    ),
    at(
        "data/sources/tars.py:_with_names#2", lambda: _named_classes("cat\ndog\n"),
        "label '5', but names.txt has 2 names, numbered from 0.", "Correct the list of names, or remove ?classes=.",
    ),
    at(
        "data/sources/tars.py:_samples", _text_tar,
        "text.tar cannot be read as a tar:", "It may be truncated: copy it again.",
    ),
    at(
        "data/sources/tars.py:_label", lambda: _tar("json.tar", jpg=b"", json=b"{"),
        "json.tar: 1.json is not JSON:", "Correct it, or choose another label with ?label=EXTENSION.",
    ),
    at(
        "data/sources/tars.py:_file_system#1", lambda: _file_system(_URL),
        f"{_URL} is a URL, and reading it needs the `fsspec` package:", "pip install 'vitrail[web]'.",
        hidden="fsspec",
    ),
    at(
        "data/sources/tars.py:_file_system#2", lambda: _file_system("htp://example.org/train.tar"),
        "htp://example.org/train.tar cannot be reached: Protocol not known: htp.", "Check the URL.",
    ),
    at(
        "data/sources/tars.py:_state", lambda: _state("memory://nowhere.tar"),
        "memory://nowhere.tar cannot be reached: not found.", "Check the URL and the connection.",
    ),
    at(
        "data/sources/read_ahead.py:with_retries", lambda: with_retries(_absent, _URL, 0, 10),
        f"{_URL} cannot be read (FileNotFoundError: no such file).",
        "Check the URL and the connection, and run the same command again.",
    ),
    # torchvision and the Hub.
    at(
        "data/sources/torchvision.py:open_torchvision#2", lambda: open_source("torchvision:MNIST?val=0.2"),
        "val=0.2 in torchvision:MNIST?val=0.2: it already has train, test.", "Remove the option.",
    ),
    at(
        "data/sources/torchvision.py:_dataset#1", lambda: open_source("torchvision:SVHN?root=empty"),
        "SVHN needs the package scipy:", "pip install scipy.", hidden="scipy", patch=_svhn_is_complete,
    ),
    at(
        "data/sources/torchvision.py:_dataset#2", lambda: open_source("torchvision:CIFAR10?root=empty"),
        "CIFAR10 cannot be opened in empty: Dataset not found or corrupted.",
        "corrupted. Download it with torchvision:CIFAR10?download=1, or give its folder with ?root=DIR.",
    ),
    at(
        "data/sources/hub.py:HubSplit.payload#1", lambda: _image_of_hub({"bytes": None, "path": "nowhere.jpg"}),
        "nowhere.jpg: cannot be read (No such file or directory).", "Replace or remove it.",
    ),
    at(
        "data/sources/hub.py:HubSplit.payload#2", lambda: _image_of_hub(None),
        "train 00000000: no image in this row.", "Replace or remove it.",
    ),
    at(
        "data/sources/hub.py:open_hub#1", lambda: open_source("hf:cifar10"),
        "hf:cifar10 needs the `datasets` package:", "pip install 'vitrail[hub]'.", hidden="datasets",
    ),
    at(
        "data/sources/hub.py:open_hub#2", lambda: open_source(_saved("image", "label", splits=("train", "test")) + "?val=0.2"),
        "val=0.2 in hf:hub-image-label-train-test?val=0.2: it already has train, test.", "Remove the option.",
    ),
    at(
        "data/sources/hub.py:_load", _incomplete_hub,
        "hf:hub-incomplete cannot be opened:", "Its files may be incomplete: copy or download them again.",
    ),
    at(
        "data/sources/hub.py:_parquet_files", lambda: open_source("hf:empty"),
        "There is no .parquet file in empty.", "For a folder of images, use folder:empty.",
    ),
    at(
        "data/sources/hub.py:_columns#1", lambda: open_source(_saved("image", "tag") + "?label=colour"),
        "hf:hub-image-tag?label=colour has no column 'colour';", "it has image, tag.",
    ),
    at(
        "data/sources/hub.py:_columns#2", lambda: open_source(_saved("text")),
        "hf:hub-text has no image column; it has text.", "Name it with ?image=COLUMN.",
    ),
    at(
        "data/sources/hub.py:_columns#3", lambda: open_source(_saved("image", "tag")),
        "hf:hub-image-tag has no label column; it has image, tag.",
        "Name it with ?label=COLUMN, or use the images alone with ?task=unlabelled.",
    ),
)
# fmt: on
