from __future__ import annotations

import base64
import json
import pickle
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.data.image_files import encoded, folder_of, picture
from vitrail.data import open_source
from vitrail.data import pack as pack_module
from vitrail.data.decode import decode, image_header
from vitrail.data.pack import PackSettings, choose_settings, pack
from vitrail.data.sources.packed_files import read_description
from vitrail.data.types import BadImage, Source
from vitrail.errors import VitrailError


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Source:
    monkeypatch.setattr(pack_module, "CHUNK", 4)
    return open_source(str(folder_of(tmp_path / "photos", {"train/a": 7, "train/b": 6, "val/b": 3})))


def packed(source: Source, folder: Path, **options: Any) -> Source:
    pack(source, folder, choose_settings(source, **options))
    return open_source(f"packed:{folder}?verify=1")


def test_images_of_one_size_are_stored_exactly(photos: Source, tmp_path: Path) -> None:
    again = packed(photos, tmp_path / "p")
    assert again.classes == photos.classes
    for name, split in photos.splits.items():
        other = again.splits[name]
        assert other.arrays is not None
        assert np.array_equal(other.targets, split.targets)
        for k in range(len(split)):
            assert other.image_name(k) == split.image_name(k)
            assert np.array_equal(other.payload(k), decode(split.payload(k), channels=3))
            assert np.array_equal(other.arrays[k], other.payload(k))
    assert sorted(file.name for file in (tmp_path / "p").iterdir()) == [
        "packed.json",
        "train.images.bin",
        "train.index.npz",
        "val.images.bin",
        "val.index.npz",
    ]
    assert open_source(str(tmp_path / "p")).kind == "packed"
    assert not (tmp_path / "p.partial").exists()


def test_a_packed_split_is_small_when_pickled_and_a_contiguous_subset_is_a_view(photos: Source, tmp_path: Path) -> None:
    split = packed(photos, tmp_path / "p").splits["train"]
    assert split.arrays is not None
    content = pickle.dumps(split)
    assert len(content) < 4000 < split.arrays.nbytes
    assert np.array_equal(pickle.loads(content).payload(5), split.payload(5))
    part = split.subset(range(2, 6)).arrays
    assert part is not None
    assert np.shares_memory(part, split.arrays)
    assert split.subset([1, 0]).arrays is None
    assert np.array_equal(split.subset([1, 0]).payload(0), split.payload(1))


def test_resizing_equals_pillow(photos: Source, tmp_path: Path) -> None:
    split = photos.splits["train"]
    cut = packed(photos, tmp_path / "cut", size=20).splits["train"].payload(3)
    bent = packed(photos, tmp_path / "bent", size=(20, 30), fit="stretch").splits["train"].payload(3)
    image = Image.fromarray(decode(split.payload(3), channels=3))
    assert np.array_equal(bent, np.asarray(image.resize((30, 20), Image.Resampling.BICUBIC)))
    assert np.array_equal(cut, np.asarray(image.resize((24, 20), Image.Resampling.BICUBIC))[:, 2:22])


def test_grey_and_16_bit_images(tmp_path: Path) -> None:
    deep = np.linspace(0, 65535, 64).astype(np.uint16).reshape(8, 8)
    for name in ("train/a/0.png", "train/b/0.png"):
        (tmp_path / "set" / name).parent.mkdir(parents=True)
        (tmp_path / "set" / name).write_bytes(encoded(Image.fromarray(deep)))
    source = open_source(str(tmp_path / "set"))
    eight = packed(source, tmp_path / "8").splits["train"].payload(0)
    sixteen = packed(source, tmp_path / "16", bits=16).splits["train"].payload(0)
    assert np.array_equal(np.asarray(eight)[:, :, 0], deep >> 8)
    assert np.array_equal(np.asarray(sixteen)[:, :, 0], deep)


def test_images_of_many_sizes_stay_encoded_byte_for_byte(tmp_path: Path) -> None:
    root = folder_of(tmp_path / "set", {"train/a": 2, "train/b": 2})
    (root / "train/a/wide.jpg").write_bytes(encoded(picture(1, 60, 200), "JPEG"))
    source = open_source(str(root))
    split = packed(source, tmp_path / "p").splits["train"]
    assert split.arrays is None
    assert [split.payload(k) for k in range(5)] == [source.splits["train"].payload(k) for k in range(5)]
    with pytest.raises(VitrailError, match=r"differ in size\. Pass --image-size"):
        choose_settings(source, store="arrays")
    small = packed(source, tmp_path / "q", store="encoded", size=30).splits["train"]
    headers = {small.image_name(k): image_header(small.payload(k)) for k in range(5)}
    assert (headers["train/a/wide.jpg"].format, headers["train/a/wide.jpg"].height, headers["train/a/wide.jpg"].width) == (
        "JPEG",
        30,
        100,
    )
    assert headers["train/a/0.png"].format == "PNG"
    assert min(headers["train/a/0.png"].height, headers["train/a/0.png"].width) == 30


def test_an_image_of_another_size_is_refused(tmp_path: Path) -> None:
    source = open_source(str(folder_of(tmp_path / "set", {"train/a": 90, "train/b": 90})))
    (tmp_path / "set/train/a/17.png").write_bytes(encoded(picture(1, 41, 48)))
    chosen = choose_settings(source)
    assert chosen.exact
    with pytest.raises(VitrailError, match=r"train/a/17.png is 41×48, but the others are 40×48.*--image-size"):
        pack(source, tmp_path / "p", chosen)


class Interruption(Exception):
    pass


def interrupted(source: Source, folder: Path, settings: PackSettings, after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    count = 0
    true_image = PackSettings.image

    def image(self: PackSettings, payload: Any, name: str) -> bytes:
        nonlocal count
        count += 1
        if count > after:
            raise Interruption
        return true_image(self, payload, name)

    with monkeypatch.context() as patch, pytest.raises(Interruption):
        patch.setattr(PackSettings, "image", image)
        pack(source, folder, settings, workers=1)


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.parametrize("store", ["arrays", "encoded"])
@pytest.mark.parametrize("after", [0, 3, 6, 11, 14])
def test_an_interrupted_run_resumes_with_the_same_result(
    photos: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: Any, after: int
) -> None:
    settings = choose_settings(photos, store=store)
    pack(photos, tmp_path / "straight", settings)
    interrupted(photos, tmp_path / "broken", settings, after, monkeypatch)
    assert not (tmp_path / "broken").exists()
    with pytest.raises(VitrailError, match="unfinished"):
        open_source(f"packed:{tmp_path}/broken")
    worked: list[str] = []
    true_image = PackSettings.image
    monkeypatch.setattr(PackSettings, "image", lambda self, payload, name: worked.append(name) or true_image(self, payload, name))
    pack(photos, tmp_path / "broken", settings)
    assert len(worked) <= 16 - after // 4 * 4 + 3  # complete chunks were not packed again
    assert contents(tmp_path / "broken") == contents(tmp_path / "straight")


def test_chunks_corrupted_between_two_runs_are_packed_again(
    photos: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = choose_settings(photos)
    pack(photos, tmp_path / "straight", settings)
    interrupted(photos, tmp_path / "broken", settings, 11, monkeypatch)
    data = tmp_path / "broken.partial/train.images.bin"
    content = bytearray(data.read_bytes())
    content[-5] ^= 1
    content += b"half an image"
    data.write_bytes(content)
    journal = tmp_path / "broken.partial/train.journal"
    journal.write_text(journal.read_text() + '{"first": 8, "en')
    pack(photos, tmp_path / "broken", settings)
    assert contents(tmp_path / "broken") == contents(tmp_path / "straight")


@pytest.mark.parametrize(
    ("store", "changed"),
    [
        *(
            ("arrays", {"first": None}),
            ("arrays", {"indices": [4, 6, 5, 7]}),
            ("arrays", {"indices": [4, 5, 6], "skipped": [["a", "b"]]}),
        ),
        *(
            ("encoded", {"skipped": [1]}),
            ("encoded", {"lengths": [1]}),
            ("encoded", {"lengths": ["1"] * 4}),
            ("encoded", {"end": "9"}),
        ),
    ],
)
def test_a_journal_that_does_not_account_for_its_images_is_not_resumed(
    photos: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: str, changed: dict[str, Any]
) -> None:
    """Its checksums are of the images only: a changed position would give an image the label of another."""
    settings = choose_settings(photos, store=store)  # type: ignore[arg-type]
    pack(photos, tmp_path / "straight", settings)
    interrupted(photos, tmp_path / "broken", settings, 11, monkeypatch)
    journal = tmp_path / "broken.partial/train.journal"
    first, second = journal.read_text().splitlines()
    journal.write_text(f"{first}\n{json.dumps({**json.loads(second), **changed})}\n")
    pack(photos, tmp_path / "broken", settings)
    assert contents(tmp_path / "broken") == contents(tmp_path / "straight")


def test_a_partial_dataset_is_not_resumed_with_other_options_or_images(
    photos: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = choose_settings(photos)
    interrupted(photos, tmp_path / "p", settings, 6, monkeypatch)
    with pytest.raises(VitrailError, match=r"p.partial was started with other images, options or another version"):
        pack(photos, tmp_path / "p", replace(settings, channels=1))
    pack(photos, tmp_path / "p", settings)
    before = contents(tmp_path / "p")
    pack(photos, tmp_path / "p", settings)  # finished already
    assert contents(tmp_path / "p") == before
    with pytest.raises(VitrailError, match="already exists, with other images or options"):
        pack(photos, tmp_path / "p", replace(settings, channels=1))


def test_an_empty_folder_is_no_obstacle(photos: Source, tmp_path: Path) -> None:
    (tmp_path / "packed").mkdir()
    pack(photos, tmp_path / "packed", choose_settings(photos))
    assert read_description(tmp_path / "packed")["splits"]
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine.txt").write_text("mine")
    with pytest.raises(VitrailError, match="is not a packed dataset"):
        pack(photos, tmp_path / "other", choose_settings(photos))


def test_what_failed_before_its_first_chunk_does_not_stop_another_try(photos: Source, tmp_path: Path) -> None:
    """As after an image that cannot be read, which was then removed, or a wrong option."""
    settings = choose_settings(photos)
    with pytest.raises(VitrailError, match="the others are 1×1"):
        pack(photos, tmp_path / "p", replace(settings, size=(1, 1)))
    assert (tmp_path / "p.partial").exists()
    pack(photos, tmp_path / "p", settings)
    assert not (tmp_path / "p.partial").exists()


def test_bad_images_stop_packing_or_are_skipped_and_listed(tmp_path: Path, photos: Source) -> None:
    (tmp_path / "photos/train/a/2.png").write_bytes(b"")
    with pytest.raises(BadImage, match=r"train/a/2.png: an empty file"):
        pack(photos, tmp_path / "p", choose_settings(photos))
    description = pack(photos, tmp_path / "q", choose_settings(photos), bad_images="skip")
    assert description["skipped"] == [["train/a/2.png", "an empty file (0 bytes)"]]
    again = open_source(f"packed:{tmp_path}/q?verify=1").splits["train"]
    assert len(again) == 12
    assert [again.image_name(k) for k in range(3)] == ["train/a/0.png", "train/a/1.png", "train/a/3.png"]
    assert np.bincount(again.targets).tolist() == [6, 6]


def test_corruption_is_found_by_checksum(photos: Source, tmp_path: Path) -> None:
    folder = tmp_path / "p"
    packed(photos, folder)
    data = folder / "train.images.bin"
    content = bytearray(data.read_bytes())
    content[40 * 48 * 3 * 5] ^= 255
    data.write_bytes(content)
    assert len(open_source(f"packed:{folder}").splits["train"]) == 13  # checksums are not verified on every open
    with pytest.raises(VitrailError, match=r"train.images.bin is corrupted between bytes 23,040 and 46,080"):
        open_source(f"packed:{folder}?verify=1")
    data.write_bytes(content[:-1])
    with pytest.raises(VitrailError, match=r"has 74,879 bytes, but 74,880 are expected"):
        open_source(f"packed:{folder}")
    data.unlink()
    with pytest.raises(VitrailError, match="is missing"):
        open_source(f"packed:{folder}")


def test_other_versions_and_corrupted_descriptions_are_refused(photos: Source, tmp_path: Path) -> None:
    packed(photos, tmp_path / "p")
    file = tmp_path / "p/packed.json"
    whole = file.read_text()
    corrupted = {
        json.dumps({**json.loads(whole), "version": 99}): "version 99, but this Vitrail reads",
        json.dumps({"format": "vitrail-packed", "version": 2}): "is corrupted",
        json.dumps({"format": "vitrail-packed", "version": 1}): "is corrupted",
        whole[:100]: "is corrupted",
    }
    for text, words in corrupted.items():
        file.write_text(text)
        with pytest.raises(VitrailError, match=words):
            open_source(f"packed:{tmp_path}/p")


# Written by version 1 of the format: the description, and the bytes of train.index.npz (zlib, base85).
VERSION_1 = """{
 "format": "vitrail-packed",
 "version": 1,
 "made_from": "folder:set",
 "task": "classify",
 "classes": ["a", "b"],
 "packing": {
  "store": "arrays", "size": [1, 2], "fit": "crop", "channels": 1, "bits": 8, "quality": 95, "exact": true
 },
 "content": "409b54bdbcaf9d11c1593c8adf2968a375ca4eb2a2c70867dac7d5794b9d02cd",
 "splits": {
  "train": {
   "count": 2,
   "shape": [1, 2, 1],
   "dtype": "uint8",
   "images": "train.images.bin",
   "bytes": 4,
   "stretches": [[4, "f162a9bce275403e431d38cb9a1b790b780f65b895d131dfa5fe138cc76bc665"]],
   "index": "train.index.npz",
   "index_bytes": 828,
   "index_sha256": "c620d4e6fd137d5fa3bd3e6c400fea6c9b0778eae28e6d57f2a58ce68204eb65"
  }
 },
 "left_out": [["train/a/1.png", "an empty file (0 bytes)"]]
}"""
VERSION_1_INDEX = (
    "c-jl_W@gc4fB;2?x~$(P|3d*cg9t-OVo`c(NwHpDK_w%D0K){RLKr>SFVr_6l98c|p;|p9wK%y*-AX~-CeuP)M?pO;zo?`rF)u#9C?ypn"
    "?v|KSoC*{#&PXgs1@bkFbToAoY85B|Tu^5)Fhc176we%qQOksRh7ahOyu{qp_@tct<ZPIKW<k}?!snlwQbXeWV@9cmxPTU9=IJNu8|W3}r9(JL"
    "5Du!(qF56i!hFUH^I2+M%Ak!XUZ^{y;1R{hq|1z&?j}Ip%gulQ4d9qXN`>eeL2*0_8iRZ&8qWer)EGzC3kpS;rMxJ5moqY;hG~E|D;r3P83;E3"
    "=`tn|4**1Bu#W"
)


def test_version_1_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "old"
    folder.mkdir()
    (folder / "packed.json").write_text(VERSION_1)
    (folder / "train.images.bin").write_bytes(b"\n\n\xc8\xc8")
    (folder / "train.index.npz").write_bytes(zlib.decompress(base64.b85decode(VERSION_1_INDEX)))
    source = open_source(f"packed:{folder}?verify=1")
    split = source.splits["train"]
    assert (source.classes, split.targets.tolist()) == (("a", "b"), [0, 1])
    assert [split.image_name(k) for k in range(2)] == ["train/a/0.png", "train/b/0.png"]
    assert [np.asarray(split.payload(k)).ravel().tolist() for k in range(2)] == [[10, 10], [200, 200]]
    description = read_description(folder)
    assert description["version"] == 2
    assert description["skipped"] == [["train/a/1.png", "an empty file (0 bytes)"]]
    (folder / "train.images.bin").write_bytes(b"\n\n\xc8\xc9")
    with pytest.raises(VitrailError, match="is corrupted between bytes 0 and 4"):
        open_source(f"packed:{folder}?verify=1")


def test_arrays_in_memory_can_be_packed(tmp_path: Path) -> None:
    digits = open_source("digits")
    again = packed(digits, tmp_path / "arrays")
    val, other = digits.splits["val"].arrays, again.splits["val"].arrays
    assert val is not None
    assert other is not None
    assert np.array_equal(val, other)
    kept = packed(digits, tmp_path / "files", store="encoded").splits["val"]
    assert np.array_equal(decode(kept.payload(7), channels=1), val[7])
