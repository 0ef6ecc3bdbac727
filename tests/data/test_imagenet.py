"""Class names of ImageNet, checked against timm's own lists, and class folders named by WordNet IDs."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from timm.data import ImageNetInfo

from vitrail.data import imagenet
from vitrail.data.classes import align
from vitrail.data.sources import open_source
from vitrail.data.types import Split
from vitrail.errors import VitrailError


def timm_list(name: str) -> list[str]:
    return (files("timm.data") / "_info" / name).read_text(encoding="utf-8").splitlines()


def test_1k_is_sorted_by_wordnet_id_and_agrees_with_timm() -> None:
    ids = imagenet.wordnet_ids("1k")
    assert len(ids) == 1000 and list(ids) == sorted(ids) == timm_list("imagenet_synsets.txt")
    info = ImageNetInfo("imagenet-1k")
    for k in (0, 1, 6, 281, 517, 849, 999):
        assert info.index_to_label_name(k) == ids[k]
        assert info.index_to_description(k).split(", ")[0] in imagenet.classes("1k")[k].words
    # Indices that everybody who worked with ImageNet knows.
    known = {
        0: "tench",
        1: "goldfish",
        207: "golden retriever",
        281: "tabby",
        282: "tiger cat",
        817: "sports car",
        999: "toilet tissue",
    }
    assert {k: imagenet.labels("1k")[k] for k in known} == known


def test_21k_is_in_googles_order() -> None:
    ids = imagenet.wordnet_ids("21k")
    assert len(ids) == 21843 and list(ids) == timm_list("imagenet21k_goog_synsets.txt")
    assert imagenet.classes("21k")[0].words == "organism, being"
    words = dict(line.split("\t") for line in timm_list("imagenet_synset_to_lemma.txt"))
    differing = [one.wordnet_id for one in imagenet.classes("21k") if one.words != words[one.wordnet_id]]
    assert set(differing) <= {"n02012849", "n03126707"}  # the two cranes


@pytest.mark.parametrize("which", ["1k", "21k"])
def test_labels_are_unique_and_readable(which: imagenet.ClassSet) -> None:
    labels = imagenet.labels(which)
    assert len(set(labels)) == len(labels) and all(label.strip() == label != "" for label in labels)


def test_classes_with_the_same_word_stay_apart() -> None:
    labels = imagenet.labels("1k")
    assert (labels[134], labels[517]) == ("crane (bird)", "crane (machine)")
    assert (labels[638], labels[639]) == ("maillot", "maillot, tank suit")


@pytest.mark.parametrize("name", ["a", "r"])
def test_the_200_classes_of_a_and_r_are_timms(name: str) -> None:
    expected = [int(line) for line in timm_list(f"imagenet_{name}_indices.txt")]
    assert sorted(expected) == list(imagenet.subset(name))  # type: ignore[arg-type]
    assert {imagenet.wordnet_ids("1k")[k] for k in imagenet.subset(name)} == set(timm_list(f"imagenet_{name}_synsets.txt"))  # type: ignore[arg-type]


def test_other_libraries_lists_are_recognised() -> None:
    from torchvision.models import ViT_B_16_Weights

    torchvision = tuple(ViT_B_16_Weights.IMAGENET1K_V1.meta["categories"])
    assert imagenet.recognise(torchvision) == imagenet.wordnet_ids("1k")
    assert imagenet.recognise(imagenet.labels("21k")) == imagenet.wordnet_ids("21k")
    assert imagenet.recognise(tuple(reversed(torchvision))) is None  # another order
    assert imagenet.recognise(tuple(f"class{k}" for k in range(1000))) is None
    assert imagenet.recognise(torchvision[:999]) is None
    twice = tuple("crane" if "crane" in name else name for name in torchvision)
    unique = imagenet.unique_names(twice)
    assert len(set(unique)) == 1000 and unique[134] == "crane (bird)" and unique[0] == "tench"
    assert imagenet.unique_names(("a", "a")) == ("a", "a")


def test_lists_in_another_order_are_not_recognised() -> None:
    from torchvision.models import ViT_B_16_Weights

    ours, theirs = imagenet.labels("1k"), tuple(ViT_B_16_Weights.IMAGENET1K_V1.meta["categories"])
    for names in (ours, theirs, imagenet.wordnet_ids("1k")):
        for one, other in ((0, 1), (134, 0), (638, 639)):  # tench and goldfish; a crane; the two maillots
            swapped = list(names)
            swapped[one], swapped[other] = names[other], names[one]
            assert imagenet.recognise(tuple(swapped)) is None, (one, other)
            assert not imagenet.same_classes(tuple(swapped), ours)
    assert imagenet.recognise((ours[1], *ours[1:])) is None  # a class twice
    own = tuple(f"{name}!" if k < 40 else name for k, name in enumerate(ours))
    assert imagenet.recognise(own) is not None and imagenet.same_classes(own, ours)


def test_names_unknown_in_both_lists_must_be_equal() -> None:
    ours = imagenet.labels("1k")
    one, other = ("fish A", "fish B", *ours[2:]), ("fish B", "fish A", *ours[2:])
    assert imagenet.recognise(one) and imagenet.recognise(other) and not imagenet.same_classes(one, other)
    assert imagenet.same_classes(one, list(one)) and imagenet.same_classes(
        one, ("fish A", "fish B", *imagenet.wordnet_ids("1k")[2:])
    )


def folder_of(root: Path, names: list[str]) -> Path:
    for k, name in enumerate(names):
        (root / "val" / name).mkdir(parents=True)
        Image.fromarray(np.full((8, 8, 3), k, np.uint8)).save(root / "val" / name / "x.png")
    return root


def test_folders_named_by_wordnet_ids_map_to_the_right_outputs(tmp_path: Path) -> None:
    root = folder_of(tmp_path, ["n03126707", "n01440764", "n02012849"])  # the machine, the fish, the bird
    split: Split = open_source(f"folder:{root}", classes=imagenet.labels("1k")).split("val")
    found = {Path(split.image_name(k)).parent.name: int(split.targets[k]) for k in range(3)}
    assert found == {"n03126707": 517, "n01440764": 0, "n02012849": 134}
    assert split.classes == imagenet.labels("1k")


def test_other_classes_are_still_refused(tmp_path: Path) -> None:
    root = folder_of(tmp_path, ["n01440764", "n99999999"])
    with pytest.raises(VitrailError, match="'n99999999', which the model does not have"):
        open_source(f"folder:{root}", classes=imagenet.labels("1k"))
    split = open_source(f"folder:{root}").split("val")
    with pytest.raises(VitrailError, match="'n01440764', which the model does not have"):
        align({"val": split}, ("cat", "dog"))
