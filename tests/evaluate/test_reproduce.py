"""`reproduce` on made-up images in the layouts of ImageNet and its test sets, against logits computed one image at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail
from vitrail.checkpoints import Bundle
from vitrail.cli import main
from vitrail.data import imagenet
from vitrail.data.preprocess import preset
from vitrail.errors import VitrailError
from vitrail.evaluate.imagenet_sets import ALEXNET_ERROR, SETS, ImageNetSet, open_set
from vitrail.evaluate.reproduction import ReproducedMetric, Reproduction, reproduce
from vitrail.models import ViTConfig, build_model

IDS = imagenet.wordnet_ids("1k")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small classifier of ImageNet's classes whose outputs differ much between images."""
    config = ViTConfig(name="small", width=32, depth=1, heads=4, mlp=64, patch=(8, 8), image_size=(16, 16), outputs=1000)
    model = build_model(config, seed=0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel())) * 0.5)
    folder = tmp_path_factory.mktemp("weights") / "small"
    vitrail.save(folder, model, preprocess=preset("timm", size=(16, 16)), classes=imagenet.labels("1k"))
    return folder


@pytest.fixture(scope="module")
def bundle(checkpoint: Path) -> Bundle:
    return vitrail.load(checkpoint)


def picture(number: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(number).integers(0, 256, (20, 24, 3), dtype=np.uint8))


def logits(bundle: Bundle, number: int) -> torch.Tensor:
    assert bundle.preprocess is not None
    with torch.no_grad():
        return bundle.model(bundle.preprocess(picture(number))[None])[0]


def best(bundle: Bundle, number: int, among: Iterable[int] = range(1000)) -> int:
    outputs, allowed = logits(bundle, number), list(among)
    return allowed[int(outputs[allowed].argmax())]


def place(root: Path, number: int, folder: str, name: str = "ILSVRC2012_val_{:08d}.png") -> None:
    (root / folder).mkdir(parents=True, exist_ok=True)
    picture(number).save(root / folder / name.format(number + 1))


def run(bundle: Bundle, reference: str = "small", **options: object) -> Reproduction:
    return reproduce(reference, load_bundle=lambda: bundle, **options)  # type: ignore[arg-type]


def metric(found: Reproduction, benchmark: str, name: str = "top-1") -> ReproducedMetric:
    return next(one for one in found.metrics if (one.benchmark, one.metric) == (benchmark, name))


def second(bundle: Bundle, number: int) -> int:
    return int(logits(bundle, number).argsort(descending=True)[1])


def test_imagenet_with_class_folders_below_val(bundle: Bundle, tmp_path: Path) -> None:
    for k in range(9):  # three right, three in the top 5 only, three wrong
        output = (best, second, lambda b, n: int(logits(b, n).argmin()))[k % 3](bundle, k)
        place(tmp_path / "val", k, IDS[output])
    place(tmp_path / "train", 20, IDS[0])  # not looked at
    found = run(bundle, "ViT-B/16", folders={"imagenet": tmp_path})
    top1, top5 = metric(found, "ImageNet"), metric(found, "ImageNet", "top-5")
    assert top1.value == pytest.approx(100 / 3) and top5.value == pytest.approx(200 / 3) and top1.images == 9
    # Wilson's interval of 3 of 9, by hand.
    assert (top1.low, top1.high) == (pytest.approx(12.06, abs=0.01), pytest.approx(64.58, abs=0.01))
    assert top1.published == 84.532 and top1.difference == pytest.approx(100 / 3 - 84.532)
    assert top1.verdict == "outside" and top5.published == 97.292
    assert any("9 of 50,000 images" in note for note in found.notes)
    same = run(bundle, "ViT-B/16", folders={"imagenet": tmp_path / "val"})
    assert [one.value for one in same.metrics] == [one.value for one in found.metrics]
    assert metric(run(bundle, "ViT-B/16", folders={"imagenet": tmp_path}, compare=False), "ImageNet").published is None


def test_the_verdict_is_within_where_the_interval_has_the_published_value(bundle: Bundle, tmp_path: Path) -> None:
    for k in range(6):
        place(tmp_path, k, IDS[best(bundle, k)])
    one = metric(run(bundle, "ViT-B/16", folders={"imagenet": tmp_path}), "ImageNet")
    assert one.value == 100 and one.low is not None and one.low < 84.532 and one.verdict == "within"


def test_training_images_are_never_evaluated(bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place(tmp_path / "imagenet" / "train", 0, IDS[best(bundle, 0)])
    (tmp_path / "link").symlink_to(tmp_path / "imagenet" / "train")
    for folder in (tmp_path / "imagenet", tmp_path / "imagenet" / "train", tmp_path / "link"):
        with pytest.raises(VitrailError, match="has training images; ImageNet is evaluated on 50,000 others"):
            open_set("imagenet", folder)
    monkeypatch.chdir(tmp_path / "imagenet" / "train")
    with pytest.raises(VitrailError, match="has training images"):
        open_set("imagenet", ".")
    place(tmp_path / "imagenet" / "val", 1, IDS[3])
    assert open_set("imagenet", tmp_path / "imagenet").targets.tolist() == [3]
    place(tmp_path / "training" / "val", 1, IDS[4])  # the name of a folder above does not matter
    assert open_set("imagenet", tmp_path / "training").targets.tolist() == [4]


def test_more_images_than_the_set_has_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for k in range(3):
        place(tmp_path, k, IDS[k])
    monkeypatch.setitem(SETS, "imagenet", ImageNetSet("ImageNet", 2))
    with pytest.raises(VitrailError, match="has 3 images, but ImageNet has 2"):
        open_set("imagenet", tmp_path)


def test_v2_folders_are_the_numbers_of_the_outputs(bundle: Bundle, tmp_path: Path) -> None:
    root = tmp_path / "imagenetv2-matched-frequency-format-val"  # the folder in the folder of its archive
    chosen = {k: best(bundle, k) for k in range(12)}
    for k, output in chosen.items():
        place(root, k, str(output), "{:x}.png")
    assert metric(run(bundle, folders={"v2": tmp_path}), "ImageNet-V2").value == 100
    split = open_set("v2", root)
    assert {int(split.image_name(k).partition("/")[0]) for k in range(12)} == set(split.targets.tolist()) == set(chosen.values())
    in_text_order = sorted(set(map(str, chosen.values())))
    assert in_text_order != sorted(in_text_order, key=int), "this test would not notice a sort by text"


@pytest.mark.parametrize(("key", "title"), [("a", "ImageNet-A"), ("r", "ImageNet-R")])
def test_only_the_200_classes_of_a_and_r_compete(bundle: Bundle, tmp_path: Path, key: str, title: str) -> None:
    allowed = imagenet.subset(key)  # type: ignore[arg-type]
    for k in range(8):
        place(tmp_path, k, IDS[best(bundle, k, allowed)])
    assert any(best(bundle, k) not in allowed for k in range(8)), "all 1,000 outputs would give the same"
    one = metric(run(bundle, folders={key: tmp_path}), title)
    assert (one.value, one.images, one.published) == (100, 8, None)
    outside = next(k for k in range(1000) if k not in allowed)
    place(tmp_path, 9, IDS[outside])
    with pytest.raises(VitrailError, match=rf"has 1 class that {title} does not have \({IDS[outside]}\)"):
        run(bundle, folders={key: tmp_path})


def test_sketch_and_real(bundle: Bundle, tmp_path: Path) -> None:
    for k in range(4):
        place(tmp_path / "sketch", k, IDS[best(bundle, k)] if k else IDS[second(bundle, 0)], "sketch_{}.png")
        place(tmp_path / "val", k, IDS[second(bundle, k)])
    labels: list[list[int]] = [[] for _ in range(50_000)]
    labels[0], labels[1], labels[2] = [best(bundle, 0), 7], [best(bundle, 1)], [second(bundle, 2)]  # the fourth has none
    (tmp_path / "real.json").write_text(json.dumps(labels))
    found = run(bundle, folders={"sketch": tmp_path / "sketch", "imagenet": tmp_path / "val"}, real=tmp_path / "real.json")
    assert metric(found, "ImageNet-Sketch").value == 75 and metric(found, "ImageNet").value == 0
    real = metric(found, "ImageNet ReaL")
    assert real.value == pytest.approx(200 / 3) and real.images == 3 and real.total_images == 46_837


def corrupted(root: Path, bundle: Bundle, groups: Callable[[str], str]) -> dict[str, float]:
    """Write one or two images per corruption and severity; the error differs between corruptions."""
    errors = {}
    for number, name in enumerate(ALEXNET_ERROR):
        wrong = number % 6  # of five severities
        for severity in range(1, 6):
            output = best(bundle, severity) if severity > wrong else second(bundle, severity)
            place(root / groups(name) / name / str(severity), severity, IDS[output])
        errors[name] = wrong / 5
    return errors


@pytest.mark.parametrize("group", ["", "noise"])
def test_c_is_relative_to_alexnet(bundle: Bundle, tmp_path: Path, group: str) -> None:
    errors = corrupted(tmp_path, bundle, lambda name: group)
    place(tmp_path / "extra" / "speckle_noise" / "1", 0, IDS[0])  # one of the four extra corruptions, which do not count
    found = run(bundle, folders={"c": tmp_path})
    for name, error in errors.items():
        assert metric(found, f"ImageNet-C {name}", "error").value == pytest.approx(100 * error)
    assert metric(found, "ImageNet-C", "mean error").value == pytest.approx(100 * np.mean(list(errors.values())))
    expected = 100 * np.mean([errors[name] / ALEXNET_ERROR[name] for name in errors])
    assert metric(found, "ImageNet-C", "mCE").value == pytest.approx(expected)
    assert not any("speckle" in one.benchmark for one in found.metrics)


def test_c_without_all_severities_has_no_mce(bundle: Bundle, tmp_path: Path) -> None:
    place(tmp_path / "fog" / "3", 0, IDS[best(bundle, 0)])
    found = run(bundle, folders={"c": tmp_path})
    assert [one.metric for one in found.metrics] == ["error", "mean error"]
    assert any("no mCE" in note and "gaussian_noise" in note for note in found.notes)


def test_c_without_any_severity_is_an_error(bundle: Bundle, tmp_path: Path) -> None:
    place(tmp_path / "fog" / "strong", 0, IDS[0])
    with pytest.raises(VitrailError, match=r"--c: fog of ImageNet-C has no severity; folders 1 to 5"):
        run(bundle, folders={"c": tmp_path})


def test_what_does_not_fit_is_said_before_anything_is_loaded(tmp_path: Path) -> None:
    def never() -> Bundle:
        raise AssertionError("loaded")

    (tmp_path / "cat").mkdir()
    cases: list[tuple[str, dict[str, Path], str]] = [
        ("ViT-B/16@mae", {"imagenet": tmp_path}, r"ViT-B/16@mae has no head.*Use ViT-B/16@augreg-in21k-ft-in1k,"),
        ("ViT-B/16@augreg-in21k", {"imagenet": tmp_path}, r"has 21,843 outputs"),
        ("ViT-B/16", {}, "No images are given"),
        ("ViT-B/16", {"imagenet": tmp_path / "absent"}, "does not exist"),
        ("ViT-B/16", {"imagenet": tmp_path}, "class folders are WordNet IDs such as n01440764, it has"),
        ("ViT-B/16", {"c": tmp_path}, "has no corruption of ImageNet-C"),
        ("ViT-B/16", {"o": tmp_path}, "There is no set 'o'"),
    ]
    for name, folders, message in cases:
        with pytest.raises(VitrailError, match=message):
            reproduce(name, folders, load_bundle=never)
    place(tmp_path / "numbers", 0, "12")
    with pytest.raises(VitrailError, match="class folders are WordNet IDs"):  # 12 of which order?
        reproduce("ViT-B/16", {"sketch": tmp_path / "numbers"}, load_bundle=never)
    with pytest.raises(VitrailError, match="pass these, too: --imagenet DIR"):
        reproduce("ViT-B/16", {"v2": tmp_path / "numbers"}, real=tmp_path / "real.json", load_bundle=never)


def test_other_classes_are_refused(tmp_path: Path) -> None:
    place(tmp_path / "v2", 0, "12")
    with pytest.raises(VitrailError, match=r"does not have the classes of ImageNet-1k"):
        reproduce("vitrail-ti8-tiny-imagenet", {"v2": tmp_path / "v2"})


def command(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as exit_:
        main([str(word) for word in words])
    out, err = capsys.readouterr()
    return int(exit_.value.code or 0), out, err


def test_the_command_equals_its_python_call(
    checkpoint: Path, bundle: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for k in range(5):
        place(tmp_path / "v2", k, str(best(bundle, k) if k % 2 else second(bundle, k)))
    expected = reproduce(str(checkpoint), {"v2": tmp_path / "v2"})
    words = ("reproduce", checkpoint, "--v2", tmp_path / "v2", "--workers", 0)
    status, out, _ = command(capsys, *words, "--json", "--csv", tmp_path / "x.csv")
    assert status == 0 and json.loads(out) == json.loads(json.dumps(expected.to_dict()))
    rows = (tmp_path / "x.csv").read_text().splitlines()
    assert rows[0].startswith("benchmark,metric,value,low,high,published") and rows[1].startswith("ImageNet-V2,top-1,40,")
    status, out, _ = command(capsys, *words)
    assert status == 0 and "40.00" in out and "5 of 10,000" in out
    status, _, err = command(capsys, "reproduce")
    assert status == 2 and "Give one name" in err


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = command(capsys, "reproduce", "--list")
    assert status == 0 and "augreg-in21k-ft-in1k*" in out and "84.5" in out and "dinov2" not in out
    listed = json.loads(command(capsys, "reproduce", "--list", "--json")[1])
    assert len(listed) > 60 and all(one["top1"] and one["outputs"] == 1000 for one in listed)
