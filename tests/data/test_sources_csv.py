from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.data.image_files import folder_of
from vitrail.data import open_source
from vitrail.data.types import Source
from vitrail.errors import VitrailError
from vitrail.regular_files import MAX_BYTES, read_bytes


def table(tmp_path: Path, text: str | bytes, images: int = 6) -> Path:
    folder_of(tmp_path, {"a": images})
    (tmp_path / "a/x, y.png").write_bytes((tmp_path / "a/0.png").read_bytes())
    file = tmp_path / "labels.csv"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return file


def opened(tmp_path: Path, text: str | bytes, options: str = "", **arguments: object) -> Source:
    return open_source(f"csv:{table(tmp_path, text)}{options}", **arguments)  # type: ignore[arg-type]


def labels(source: Source, split: str) -> dict[str, str]:
    part = source.splits[split]
    return {part.image_name(k): part.classes[part.targets[k]] for k in range(len(part))}


def test_path_label_split(tmp_path: Path) -> None:
    source = opened(tmp_path, "path,label,split\na/0.png,10,train\na/1.png,2,train\na/2.png,2,valid\na/3.png,10,TEST\n")
    assert source.classes == ("2", "10")
    assert list(source.splits) == ["train", "val", "test"]
    assert labels(source, "train") == {"a/0.png": "10", "a/1.png": "2"}
    assert labels(source, "test") == {"a/3.png": "10"}


def test_a_table_and_its_images_in_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder_of(tmp_path, {".": 2})
    (tmp_path / "labels.csv").write_text("path,label\n0.png,cat\n1.png,dog\n")
    monkeypatch.chdir(tmp_path)
    assert open_source("csv:labels.csv?val=0").classes == ("cat", "dog")


@pytest.mark.parametrize(
    "text",
    [
        b"\xef\xbb\xbfpath,label\na/0.png,cat\na/1.png,dog\n",  # a byte order mark, as spreadsheets write it
        b"path,label\r\na/0.png,cat\r\na/1.png,dog\r\n",
        b"path;label\na/0.png;cat\na/1.png;dog\n",
        b"path\tlabel\na/0.png\tcat\na/1.png\tdog\n",
        b"a/0.png,cat\na/1.png,dog\n",  # no header
        b"Label,Filename,comment\ncat,a/0.png,x\ndog,a/1.png,y\n",
        b"path,label\n\na/0.png , cat\n,\na/1.png,dog\n\n",
        b"path,label\na\\0.png,cat\na\\1.png,dog\n",  # written on Windows
        b"path,label\n./a/0.png,cat\na/../a/1.png,dog\n",
    ],
)
def test_common_variants_of_tables(tmp_path: Path, text: bytes) -> None:
    source = opened(tmp_path, text, "?val=0")
    assert sorted(labels(source, "train").values()) == ["cat", "dog"]
    assert source.splits["train"].payload(0) == (tmp_path / "a/0.png").read_bytes()


def test_commas_in_quotes(tmp_path: Path) -> None:
    source = opened(tmp_path, 'path,label\n"a/x, y.png","cat, tabby"\na/1.png,dog\n', "?val=0")
    assert labels(source, "train") == {"a/x, y.png": "cat, tabby", "a/1.png": "dog"}


def test_without_a_split_column_a_tenth_is_held_out_and_nothing_is_written(tmp_path: Path) -> None:
    rows = "".join(f"a/{k}.png,{'cat' if k % 2 else 'dog'}\n" for k in range(20))
    folder_of(tmp_path, {"a": 20})
    source = opened(tmp_path, "path,label\n" + rows)
    assert {name: len(split) for name, split in source.splits.items()} == {"train": 18, "val": 2}
    assert not list(tmp_path.glob("*split*"))
    assert labels(opened(tmp_path, "path,label\n" + rows), "val") == labels(source, "val")


def test_several_labels(tmp_path: Path) -> None:
    text = "path,labels,split\na/0.png,cat|dog,train\na/1.png,,train\na/2.png,fox,train\na/3.png,dog | cat,val\n"
    source = opened(tmp_path, text)
    assert (source.task, source.classes) == ("multilabel", ("cat", "dog", "fox"))
    assert source.splits["train"].targets.tolist() == [[1, 1, 0], [0, 0, 0], [0, 0, 1]]
    assert source.splits["val"].targets.tolist() == [[1, 1, 0]]


@pytest.mark.parametrize(
    ("labels", "warning"),
    [
        ("a;b b c;a b;c", "'a;b' is one class here; several labels of an image are written 'a|b'"),
        ("a,b b c,a b,c", "'a,b' is one class here; several labels of an image are written 'a|b'"),
        ("1,5 2,25 3,0 2,5", "labels such as '1,5' are classes here; write numbers with a decimal point"),
        ("tench,fish dog,hound cat dog", ""),  # synonyms, as ImageNet has them
        ("1 2 3 4", ""),
    ],
)
def test_labels_that_look_like_lists_or_numbers_are_mentioned(
    labels: str, warning: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder_of(tmp_path, {".": 4})
    rows = "".join(f'{k}.png,"{label}"\n' for k, label in enumerate(labels.split()))
    (tmp_path / "t.csv").write_text(f"path,label\n{rows}")
    assert open_source(f"csv:{tmp_path}/t.csv?val=0").splits["train"].task == "classify"
    assert warning in caplog.text if warning else not caplog.records


def test_numbers(tmp_path: Path) -> None:
    source = opened(tmp_path, "path,label\na/0.png,1.5\na/1.png,-2\na/2.png,1e3\n", "?val=0")
    assert (source.task, source.classes) == ("regress", ("label",))
    assert source.splits["train"].targets.tolist() == [[1.5], [-2], [1000]]
    whole = opened(tmp_path, "path,label\na/0.png,1\na/1.png,2\n", "?val=0")
    assert whole.task == "classify"
    assert opened(tmp_path, "path,label\na/0.png,1\na/1.png,2\n", "?val=0&task=regress").task == "regress"


def test_several_numbers(tmp_path: Path) -> None:
    source = opened(tmp_path, "path,x,y\na/0.png,1,2\na/1.png,3,4\n", "?val=0&targets=y,x")
    assert source.classes == ("y", "x")
    assert source.splits["train"].targets.tolist() == [[2, 1], [4, 3]]


def test_no_labels(tmp_path: Path) -> None:
    source = opened(tmp_path, "path\na/0.png\na/1.png\n", "?val=0&task=unlabelled")
    assert source.splits["train"].targets.shape == (2, 0)


def test_only_the_training_split_defines_classes(tmp_path: Path) -> None:
    text = "path,label,split\na/0.png,a,train\na/1.png,b,train\na/2.png,z,val\n"
    with pytest.raises(VitrailError, match=r"val has class 'z', which the training split does not have \(a, b\)"):
        opened(tmp_path, text)
    assert len(opened(tmp_path, text, ignore_unknown=True).splits["val"]) == 0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"", r"is empty\. The first line should be"),
        (b"path,label\n", "has a header but no rows"),
        (b"path,label\na/0.png,cat\na/1.png,dog,x\n", "line 3: 3 cells, but the first line has 2.*Quote"),
        (b"path,label\na/0.png,\n", "line 2: the label is empty"),
        (b"path,label\n,cat\n", "line 2: the path is empty"),
        (b"path,label,split\na/0.png,cat,train\na/1.png,cat,holdout\n", "line 3: the split is 'holdout'"),
        (b"path,label\na/0.png,cat\na/1.png,dog\na/0.png,dog\n", "lines 2 and 4 both list a/0.png"),
        (b"one,two\nx,y\n", "has no column with image paths"),
        (b"path,colour\na/0.png,red\n", "has no column 'label'"),
        (b"path,label\na/0.png,caf\xe9\n", "line 2 is not UTF-8"),
        (b"path,label\na/0.png,c\0t\n", "zero bytes"),
    ],
)
def test_each_mistake_is_named_with_its_line(tmp_path: Path, text: bytes, words: str) -> None:
    with pytest.raises(VitrailError, match=words):
        opened(tmp_path, text)


def test_invalid_numbers_are_named_with_their_line(tmp_path: Path) -> None:
    for cell in ("tall", "nan", "inf", ""):
        with pytest.raises(VitrailError, match=rf"line 3: '{cell}' is not a finite number"):
            opened(tmp_path, f"path,label\na/0.png,1.5\na/1.png,{cell}\n", "?task=regress")
    with pytest.raises(VitrailError, match="has no column 'z'"):
        opened(tmp_path, "path,x\na/0.png,1\n", "?targets=z")
    with pytest.raises(VitrailError, match="task=classes"):
        opened(tmp_path, "path,label\na/0.png,1\n", "?task=classes")


def test_missing_files_are_listed_or_skipped(tmp_path: Path) -> None:
    text = "path,label\na/0.png,cat\na/1.png,dog\n" + "".join(f"gone/{k}.png,cat\n" for k in range(7))
    with pytest.raises(
        VitrailError, match=r"(?s)lists 9 images, of which 7 cannot be found:\n  line 4: gone/0.png.*and 2 more.*root=DIR"
    ):
        opened(tmp_path, text)
    source = opened(tmp_path, text, "?val=0", bad_images="skip")
    assert len(source.splits["train"]) == 2
    assert [bad.name for bad in source.skipped] == [f"gone/{k}.png" for k in range(7)]
    assert "7 images skipped" in source.describe()
    with pytest.raises(VitrailError, match="none of its images can be found"):
        opened(tmp_path, "path,label\ngone.png,cat\n", bad_images="skip")


def test_paths_may_have_another_root(tmp_path: Path) -> None:
    folder_of(tmp_path / "images", {"b": 2})
    text = f"path,label\nb/0.png,x\n{tmp_path}/images/b/1.png,y\n"
    source = opened(tmp_path, text, f"?root={tmp_path}/images&val=0")
    assert [len(source.splits["train"].payload(k)) > 0 for k in range(2)] == [True, True]
    assert np.array_equal(source.splits["train"].targets, [0, 1])


def test_a_table_may_be_larger_than_an_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = []

    def read(path: Path, limit: int = MAX_BYTES) -> bytes:
        limits.append(limit)
        return read_bytes(path, limit)

    monkeypatch.setattr("vitrail.data.sources.csv.read_bytes", read)
    folder_of(tmp_path, {"x": 2})
    (tmp_path / "t.csv").write_text("path,label\nx/0.png,a\nx/1.png,b\n")
    open_source(f"csv:{tmp_path}/t.csv?val=0")
    assert limits == [16 * MAX_BYTES]
