from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import vitrail.data.data_wait as data_wait
from tests.data.memory_splits import MemorySplit, StoredSplit, photos, picture, stored
from vitrail.data.augment import Augment
from vitrail.data.batch import Batch, HostBatch
from vitrail.data.device_prefetch import DevicePrefetch
from vitrail.data.loader import EvalLoader, TrainLoader, _endless_slices
from vitrail.data.preprocess import preset
from vitrail.data.types import BadImage, Split
from vitrail.errors import VitrailError

PREPROCESS = preset("imagenet", size=24)
RICH = Augment(randaugment="big-vision", mixup=0.4, cutmix=1.0, mix="per-sample", erase=0.5, smoothing=0.1)


def train(split: Split, augment: Augment = RICH, **options: object) -> TrainLoader:
    settings = {"preprocess": PREPROCESS, "augment": augment, "batch": 10, "seed": 5, "workers": 0, **options}
    return TrainLoader(split, **settings)  # type: ignore[arg-type]


def take(loader: TrainLoader, count: int) -> list[Batch]:
    return list(itertools.islice(loader, count))


def same(left: list[Batch], right: list[Batch]) -> bool:
    return len(left) == len(right) and all(
        torch.equal(a.images, b.images)
        and torch.equal(a.targets, b.targets)
        and torch.equal(a.indices, b.indices)
        and (a.epoch, a.step, a.micro_step) == (b.epoch, b.step, b.micro_step)
        for a, b in zip(left, right, strict=True)
    )


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The images are too small for several threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def many_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_wait, "max_workers", lambda ranks=1: 8)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.usefixtures("many_cpus")
@pytest.mark.parametrize("kind", ["photos", "stored"])
def test_batches_are_the_same_for_any_number_of_workers(kind: str) -> None:
    split = photos(47) if kind == "photos" else stored(47)
    alone = take(train(split), 9)  # four steps per epoch: into the third
    assert [(batch.epoch, batch.step) for batch in alone[3:6]] == [(0, 3), (1, 0), (1, 1)]
    for workers in (1, 4):
        assert same(take(train(split, workers=workers), 9), alone)


@pytest.mark.slow
@pytest.mark.usefixtures("many_cpus")
def test_workers_may_be_spawned() -> None:
    split = photos(20)
    assert same(take(train(split, workers=1, start_method="spawn"), 3), take(train(split), 3))


@pytest.mark.parametrize(
    "augment",
    [
        RICH,
        Augment(mixup=0.2),
        Augment(device="gpu", randaugment="torchvision", cutmix=1),
        Augment(device="gpu", randaugment="timm", randaugment_deviation=0.5, cutmix=1),
        Augment(three_augment=True, hue=0.1, contrast=0.4, cutmix=1),
    ],
)
@pytest.mark.parametrize("micro_batch", [None, 3])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_batches_are_the_same_for_any_number_of_ranks(ranks: int, micro_batch: int | None, augment: Augment) -> None:
    """The parts of a step, over ranks and micro-batches, put together are the batch one rank alone would have had."""
    split = stored(47)
    whole = take(train(split, augment), 6)
    loaders = [iter(train(split, augment, rank=rank, ranks=ranks, micro_batch=micro_batch)) for rank in range(ranks)]
    for expected in whole:
        parts = []
        for loader in loaders:
            while True:
                parts.append(next(loader))
                if parts[-1].completes_step:
                    break
        assert all((part.epoch, part.step) == (expected.epoch, expected.step) for part in parts)
        assert all(part.total == 10 for part in parts)
        assert torch.cat([part.indices for part in parts]).tolist() == expected.indices.tolist()
        # Batched sums may differ in their last bit with the batch size; a wrong partner or parameter would differ much more.
        torch.testing.assert_close(torch.cat([part.images for part in parts]), expected.images, atol=0.03, rtol=0)
        torch.testing.assert_close(torch.cat([part.targets for part in parts]), expected.targets)


def test_photos_are_the_same_for_any_number_of_ranks() -> None:
    split = photos(30)
    whole = take(train(split), 4)
    for ranks in (2, 3):
        per_rank = [take(train(split, rank=rank, ranks=ranks), 4) for rank in range(ranks)]
        for step, expected in enumerate(whole):
            assert torch.equal(torch.cat([batches[step].images for batches in per_rank]), expected.images)
            assert torch.equal(torch.cat([batches[step].targets for batches in per_rank]), expected.targets)


@pytest.mark.slow
@pytest.mark.usefixtures("many_cpus")
@pytest.mark.parametrize("done", [1, 3, 4, 6])
def test_a_resumed_run_sees_the_remaining_batches(done: int) -> None:
    split = photos(47)
    expected = take(train(split), 10)
    first = train(split, workers=2)  # its workers have prefetched when the state is saved
    batches = iter(first)
    for _ in range(done):
        next(batches)
    state = first.state_dict()
    resumed = train(split, workers=1)
    resumed.load_state_dict(state)
    assert same(take(resumed, 10 - done), expected[done:])
    # Another number of ranks resumes from the same position.
    halves = [train(split, rank=rank, ranks=2) for rank in range(2)]
    for half in halves:
        half.load_state_dict(state)
    parts = [take(half, 1)[0] for half in halves]
    assert torch.equal(torch.cat([part.images for part in parts]), expected[done].images)


def test_the_state_counts_complete_steps() -> None:
    loader = train(stored(30), micro_batch=4)
    batches = iter(loader)
    first = next(batches)
    assert (first.micro_step, first.micro_steps, first.completes_step) == (0, 3, False)
    assert loader.state_dict()["step"] == 0
    next(batches), next(batches)
    assert loader.state_dict()["step"] == 1


def test_micro_batches_may_be_halved_in_the_middle_of_a_step() -> None:
    loader, whole = train(stored(30), micro_batch=5), take(train(stored(30)), 2)
    batches = iter(loader)
    next(batches), next(batches), next(batches)  # one step, and a half of the second
    loader.micro_batch = 3
    parts = [next(batches) for _ in range(4)]
    assert [(part.step, part.micro_step, part.micro_steps) for part in parts] == [(1, k, 4) for k in range(4)]
    torch.testing.assert_close(torch.cat([part.images for part in parts]), whole[1].images, atol=0.03, rtol=0)


def test_a_running_loader_can_load_a_state() -> None:
    loader = train(stored(30))
    start = loader.state_dict()
    before = take(loader, 4)
    loader.load_state_dict(start)
    assert same(take(loader, 4), before)


def test_state_of_another_run_is_refused() -> None:
    state = train(stored(30)).state_dict()
    for change in ({"batch": 5}, {"seed": 6}, {"sampling": "balanced"}):
        with pytest.raises(VitrailError, match=next(iter(change))):
            train(stored(30), **change).load_state_dict(state)
    with pytest.raises(VitrailError, match="images"):
        train(stored(31)).load_state_dict(state)


@pytest.mark.parametrize("variant", ["batch", "per-sample"])
def test_mixing_ends_after_its_fraction_of_the_run(variant: str) -> None:
    """Before the end, batches are as if they were mixed all along; after it, as if never, but targets keep their form."""
    split = stored(47)
    alphas = {"mixup": 0.8, "cutmix": 1.0, "mix": variant}
    always, never, until = (
        train(split, Augment(smoothing=0.1, **changes))  # type: ignore[arg-type]
        for changes in (alphas, {}, {**alphas, "mix_until": 0.6})
    )
    until.set_total_steps(10)  # four steps per epoch: the sixth is in the second epoch
    expected = [*take(always, 6), *take(never, 10)[6:]]
    assert same(take(until, 10), expected)
    resumed = [train(split, until.transforms.augment, rank=rank, ranks=2) for rank in range(2)]
    for loader in resumed:
        loader.set_total_steps(10)
        loader.load_state_dict({**until.state_dict(), "epoch": 1, "step": 1})
    for wanted in expected[5:]:
        parts = [take(loader, 1)[0] for loader in resumed]
        torch.testing.assert_close(torch.cat([part.images for part in parts]), wanted.images)
        torch.testing.assert_close(torch.cat([part.targets for part in parts]), wanted.targets)


def test_the_end_of_mixing_needs_the_length_of_the_run() -> None:
    with pytest.raises(VitrailError, match=r"mix_until.*length of the run"):
        take(train(stored(20), Augment(mixup=0.2, mix_until=0.9)), 1)
    take(train(stored(20), Augment(mix_until=0.9)), 1)  # nothing is mixed


def test_epochs_end_and_start_at_the_right_batch() -> None:
    loader = train(stored(25), Augment(), keep_last=True)
    first, second = list(loader.epoch()), list(loader.epoch())
    assert [len(batch) for batch in first] == [10, 10, 5]
    assert {batch.epoch for batch in first} == {0} and {batch.epoch for batch in second} == {1}
    for epoch in (first, second):
        assert sorted(torch.cat([batch.indices for batch in epoch]).tolist()) == list(range(25))


@pytest.mark.parametrize("augment", [Augment(mixup=0.3), Augment(cutmix=1.0, mix="per-sample")])
def test_odd_last_batches_mix(augment: Augment) -> None:
    for images in (21, 13):
        loader = train(stored(images), augment, keep_last=True)
        batches = list(loader.epoch())
        assert sum(map(len, batches)) == images
        for batch in batches:
            torch.testing.assert_close(batch.targets.sum(1), torch.ones(len(batch)))


def test_cpu_and_gpu_augmentation_give_the_same_images() -> None:
    """CPU and GPU use the same parameters, so images differ only by the rounding of the resize, by one level."""
    split = stored(40, side=48)
    plain = {"crop_area": (0.2, 1.0)}
    for randaugment in ("none", "torchvision"):
        here, there = (
            take(train(split, Augment(randaugment=randaugment, device=device, **plain)), 4)  # type: ignore[arg-type]
            for device in ("cpu", "gpu")
        )
        for left, right in zip(here, there, strict=True):
            assert torch.equal(left.targets, right.targets)
            level = 1 / (255 * min(PREPROCESS.std))
            difference = (left.images - right.images).abs()
            if randaugment == "none":
                assert difference.max() < 1.01 * level
            else:  # Equalize and Solarize may amplify one level, on few pixels
                assert (difference > 2.01 * level).float().mean() < 0.05
            assert difference.mean() < level / 4 if randaugment == "none" else difference.mean() < 3 * level


def test_images_are_normalised_and_of_the_right_size() -> None:
    batch = take(train(photos(12), Augment(flip=0)), 1)[0]
    assert batch.images.shape == (10, 3, 24, 24) and batch.images.dtype == torch.float32
    assert batch.targets.dtype == torch.int64
    split = photos(12)
    assert batch.names(split) == [f"picture-{i}.jpg" for i in batch.indices]
    assert (split.targets[batch.indices.numpy()] == batch.targets.numpy()).all()


def test_without_a_crop_training_sees_what_evaluation_sees() -> None:
    split = photos(12)
    seen = {
        int(i): image
        for b in train(split, Augment(crop="none", flip=0), batch=4).epoch()
        for i, image in zip(b.indices, b.images, strict=True)
    }
    for batch in EvalLoader(split, preprocess=PREPROCESS, batch=5, workers=0):
        for index, image in zip(batch.indices, batch.images, strict=True):
            torch.testing.assert_close(seen[int(index)], image, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("channels", "bits"), [(1, 8), (4, 8), (3, 16), (1, 16)])
def test_other_channels_and_depths(channels: int, bits: int) -> None:
    dtype = np.uint8 if bits == 8 else np.uint16
    images = [picture(i, 50, 60, channels).astype(dtype) * (1 if bits == 8 else 257) for i in range(12)]
    preprocess = preset("imagenet", size=24, channels=channels, bits=bits)
    for interpolation in ("bilinear", "bicubic"):
        loader = train(MemorySplit(images), Augment(mixup=0.2, interpolation=interpolation), preprocess=preprocess)  # type: ignore[arg-type]
        batch = take(loader, 1)[0]
        assert batch.images.shape == (10, channels, 24, 24)
        mean, std = (torch.tensor(values)[:, None, None] for values in (preprocess.mean, preprocess.std))
        shown = batch.images * std + mean
        assert shown.min() >= -1e-4 and shown.max() <= 1 + 1e-4
        assert batch.images.std() > 0.3
    if bits == 16:
        with pytest.raises(VitrailError, match="8-bit"):
            train(MemorySplit(images), RICH, preprocess=preprocess)


# --- evaluation -------------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(length=st.integers(0, 40), batch=st.integers(1, 17), ranks=st.integers(1, 5))
def test_every_image_is_evaluated_once(length: int, batch: int, ranks: int) -> None:
    split = StoredSplit(np.zeros((length, 24, 24, 3), dtype=np.uint8))
    loaders = [EvalLoader(split, preprocess=PREPROCESS, batch=batch, rank=rank, ranks=ranks, workers=0) for rank in range(ranks)]
    seen = [int(index) for loader in loaders for part in loader for index in part.indices]
    assert sorted(seen) == list(range(length))
    assert [loader.images for loader in loaders] == [sum(map(len, loader)) for loader in loaders]
    assert all(len(loader) == len(list(loader)) for loader in loaders)


@pytest.mark.usefixtures("many_cpus")
def test_accuracy_of_a_fixed_model_does_not_depend_on_ranks_or_batches() -> None:
    split = photos(41)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 24 * 24, 3))

    def accuracy(ranks: int, batch: int, workers: int = 0) -> tuple[int, int]:
        right = count = 0
        for rank in range(ranks):
            loader = EvalLoader(split, preprocess=PREPROCESS, batch=batch, rank=rank, ranks=ranks, workers=workers)
            for part in loader:
                right += int((model(part.images).argmax(1) == part.targets).sum())
                count += len(part)
        return right, count

    expected = accuracy(1, 41)
    assert expected[1] == 41 and 0 < expected[0] < 41
    for ranks, batch in itertools.product((1, 2, 3), (1, 7, 16, 64)):
        assert accuracy(ranks, batch) == expected
    assert accuracy(2, 7, workers=2) == expected


def test_evaluation_is_exactly_the_preprocessing() -> None:
    split = photos(9)
    for name in ("google-vit", "big-vision", "timm"):
        preprocess = preset(name, size=24)
        for batch in EvalLoader(split, preprocess=preprocess, batch=4, workers=0):
            for index, image in zip(batch.indices, batch.images, strict=True):
                assert torch.equal(image, preprocess(split.payload(int(index))))


# --- bad input --------------------------------------------------------------------------------------------------------


def with_bad_images(count: int, bad: dict[int, bytes]) -> MemorySplit:
    split = photos(count)
    for index, payload in bad.items():
        split.payloads[index] = payload
    return split


def test_a_bad_image_stops_training_with_its_name() -> None:
    split = photos(12)
    whole = split.payloads[4]
    assert isinstance(whole, bytes)
    for payload in (b"", b"just text", b"unreadable", whole[:60], whole[: len(whole) // 2]):
        with pytest.raises(BadImage, match=r"picture-4\.jpg"):
            list(train(with_bad_images(12, {4: payload}), batch=12).epoch())
        with pytest.raises(BadImage, match=r"picture-4\.jpg"):
            list(EvalLoader(with_bad_images(12, {4: payload}), preprocess=PREPROCESS, batch=5, workers=0))


@pytest.mark.usefixtures("many_cpus")
def test_a_bad_image_in_a_worker_raises_the_same_error() -> None:
    split = with_bad_images(12, {4: b"just text"})
    with pytest.raises(BadImage, match=r"^picture-4\.jpg: a text file") as caught:
        list(train(split, batch=6, workers=1).epoch())
    assert caught.value.name == "picture-4.jpg"


@pytest.mark.usefixtures("many_cpus")
@pytest.mark.slow
def test_a_bad_image_can_be_skipped_and_is_listed(tmp_path: Path) -> None:
    whole = photos(12).payloads[4]
    assert isinstance(whole, bytes)
    split = with_bad_images(30, {4: whole[: len(whole) // 2], 7: b"", 11: b"unreadable"})
    results = []
    for workers in (0, 2):
        loader = train(split, bad_images="skip", workers=workers)
        results.append(list(loader.epoch()))
        assert set(loader.bad) == {"picture-4.jpg", "picture-7.jpg", "picture-11.jpg"}
    assert same(*results)
    used = torch.cat([batch.indices for batch in results[0]]).tolist()
    assert len(used) == 30 and not {4, 7, 11} & set(used)
    plain = train(split, Augment(), bad_images="skip")
    for batch in plain.epoch():  # a replacement has its own label
        assert (split.targets[batch.indices.numpy()] == batch.targets.numpy()).all()
    assert plain.save_bad_images(str(tmp_path / "bad.tsv")) == 3
    lines = (tmp_path / "bad.tsv").read_text().splitlines()
    assert lines[1].split("\t")[0] == "picture-4.jpg" and "truncated" in lines[1]

    evaluation = EvalLoader(split, preprocess=PREPROCESS, batch=4, workers=0, bad_images="skip")
    seen = [int(index) for batch in evaluation for index in batch.indices]
    assert seen == [i for i in range(30) if i not in (4, 7, 11)]
    assert set(evaluation.bad) == set(plain.bad)


def test_a_bad_image_of_a_batch_made_ahead_is_not_listed_yet() -> None:
    """A thread prepares batches ahead; those after the last one were never used."""
    loader = train(with_bad_images(30, dict.fromkeys(range(0, 30, 2), b"unreadable")), bad_images="skip", batch=5)
    steps = 0

    def transform(host: HostBatch) -> Batch:
        nonlocal steps
        steps += 1
        return loader.transforms(host)

    slices = _endless_slices(loader.order, 0, loader._slicing)
    loader._batches = DevicePrefetch(loader._host_batches(slices), transform, torch.device("cpu"), loader.data_wait)
    batch = next(loader.epoch())
    deadline = time.monotonic() + 10
    while steps < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    alone = train(loader.split, bad_images="skip", batch=5)
    assert same([batch], take(alone, 1)) and loader.bad and set(loader.bad) == set(alone.bad)
    loader.close()


def test_only_bad_images() -> None:
    split = MemorySplit([b"unreadable"] * 12)
    with pytest.raises(VitrailError, match="data check"):
        list(train(split, bad_images="skip").epoch())


def test_labels_are_checked_before_the_device_sees_them() -> None:
    split = MemorySplit([b""] * 6, targets=np.array([0, 1, 2, 3, 0, 1]))
    with pytest.raises(VitrailError, match=r"picture-3\.jpg has label 3, but there are 3 classes \(0 to 2\)"):
        train(split, batch=2)
    with pytest.raises(VitrailError, match="has label 3"):
        EvalLoader(split, preprocess=PREPROCESS, batch=2)


def test_messages_for_invalid_settings() -> None:
    split = stored(50)
    for options, words in (
        ({"batch": 128}, "0 optimiser steps per epoch: 50 images < batch 128"),
        ({"rank": 2, "ranks": 2}, "no rank 2 of 2"),
        ({"batch": 2, "ranks": 3}, "cannot be divided among 3 ranks"),
        ({"bad_images": "ignore"}, "'error' or 'skip'"),
        ({"batch": 0}, "at least 1"),
    ):
        with pytest.raises(VitrailError, match=words.replace("(", r"\(")):
            train(split, **options)


# --- workers and data wait --------------------------------------------------------------------------------------------


def test_workers_are_limited_by_cpus_and_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_wait, "usable_cpus", lambda: 8)
    assert data_wait.worker_count(None) == (8, "")
    assert data_wait.worker_count(3) == (3, "")
    workers, note = data_wait.worker_count(32, ranks=4)
    assert workers == 2 and "not 32" in note and "4 ranks" in note


def test_data_wait_is_measured_and_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 3.0, 4.0, 7.0])
    monkeypatch.setattr(data_wait.time, "perf_counter", lambda: next(clock, 7.0))
    timer = data_wait.DataWaitTimer()
    for _ in range(2):  # wait 3, compute 1, wait 3
        timer.stop(timer.start())
    assert timer.fraction() == pytest.approx(6 / 7)
    monkeypatch.setattr(data_wait, "max_workers", lambda ranks=1: 8)
    assert "86% of the time" in timer.advice(2) and "--workers 4" in timer.advice(2)
    assert "--workers" not in timer.advice(8)
    assert data_wait.DataWaitTimer().advice(2) == ""


def test_computing_counts_in_short_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Intervals of one batch: a second of waiting, nine of computing."""
    clock = 0.0
    monkeypatch.setattr(data_wait.time, "perf_counter", lambda: clock)
    timer = data_wait.DataWaitTimer()
    for _ in range(3):
        started = timer.start()
        clock += 1
        timer.stop(started)
        clock += 9
        assert timer.fraction() == pytest.approx(0.1) and timer.advice(0) == ""
        timer.reset()
    clock += 100
    timer.reset(idle=True)
    started = timer.start()
    clock += 1
    timer.stop(started)
    assert timer.fraction() == 1
