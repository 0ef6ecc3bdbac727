"""Two or three processes compute what one computes, by every engine, and can take over from each other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.train.processes import run_module
from tests.train.ranks import ADAM, CAPTURED, FROZEN, KEPT, NonFinite, distilling, higher_is_better, run_of
from tests.train.small import train, weights
from vitrail.errors import VitrailError
from vitrail.train.parallel import choose_device
from vitrail.train.prepare import prepare
from vitrail.train.run import RunFolder


def close(one: Path, two: Path) -> float:
    """The largest difference between two runs' weights."""
    ours, theirs = weights(one), weights(two)
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - theirs[name]).abs().max()) for name in ours)


@pytest.mark.long
@pytest.mark.slow
def test_every_engine_and_every_change_of_ranks_computes_what_one_process_does(tmp_path: Path) -> None:
    """One test, because starting processes is what takes the time."""
    train(run_of(steps=3), tmp_path / "teacher")
    run_module("tests.train.ranks", tmp_path)
    train(run_of(), tmp_path / "alone")
    for engine in ("ddp", "fsdp", "hybrid"):
        assert close(tmp_path / engine, tmp_path / "alone") < 1e-5, engine
        ours, theirs = (RunFolder(tmp_path / name).records()[-1] for name in (engine, "alone"))
        assert ours["images"] == theirs["images"] and ours["loss"] == pytest.approx(theirs["loss"], abs=1e-5)
    for engine in ("ddp", "fsdp"):
        train(run_of(), tmp_path / f"cut-{engine}-1")
        for ranks in (1, 3):
            gone_on = tmp_path / f"cut-{engine}-{ranks}"
            assert close(gone_on, tmp_path / "alone") < 1e-5, f"{engine}, then {ranks} ranks"
            assert [one["step"] for one in RunFolder(gone_on).records() if one["kind"] == "train"] == [2, 4, 5]
    train(run_of(**ADAM), tmp_path / "alone-adam")
    assert close(tmp_path / "fsdp-adam", tmp_path / "alone-adam") < 1e-5
    train(run_of(**FROZEN), tmp_path / "alone-frozen")
    for engine in ("ddp", "fsdp"):
        assert close(tmp_path / f"{engine}-frozen", tmp_path / "alone-frozen") < 1e-5
    with higher_is_better():
        train(run_of(**KEPT), tmp_path / "alone-kept")
    assert close(tmp_path / "fsdp-kept", tmp_path / "alone-kept") < 1e-5
    train(run_of(**CAPTURED), tmp_path / "alone-captured")
    assert close(tmp_path / "fsdp-captured", tmp_path / "alone-captured") < 1e-5
    ours, theirs = (RunFolder(tmp_path / name).records() for name in ("fsdp-kept", "alone-kept"))
    assert len([one for one in ours if one["kind"] == "val"]) > 1
    for one, two in zip(
        *([one["attention"] for one in records if one["kind"] == "val"] for records in (ours, theirs)), strict=True
    ):
        assert all(one[name] == pytest.approx(two[name], abs=1e-4) for name in ("entropy", "score_std", "uniform_entropy"))
    assert ours[-1]["model"]["checkpoint"] == "best" and ours[-1]["model"]["step"] == theirs[-1]["model"]["step"] < 5
    last = [load_file(tmp_path / name / "model-last" / "model.safetensors") for name in ("fsdp-kept", "alone-kept")]
    assert all(torch.allclose(last[0][name], value, atol=1e-5) for name, value in last[1].items())
    assert RunFolder(tmp_path / "ddp-stopped").records()[-1]["step"] == 2
    recipe = run_of(on_nonfinite="rollback")
    prepared = prepare(recipe)
    NonFinite(prepared, first=12, passes=1, rank=0)  # four micro-batches per step
    train(recipe, tmp_path / "rolled-back-alone", prepared=prepared)
    assert close(tmp_path / "rolled-back-alone", tmp_path / "alone") > 1e-4
    for engine in ("ddp", "fsdp"):
        assert close(tmp_path / f"rolled-back-{engine}", tmp_path / "rolled-back-alone") < 1e-5
    train(distilling(tmp_path), tmp_path / "distilled-alone")
    assert close(tmp_path / "distilled", tmp_path / "distilled-alone") < 1e-5
    assert not torch.equal(*(weights(tmp_path / "distilled")[f"{head}.weight"] for head in ("head", "distill_head")))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("cpuu", "There is no device 'cpuu'. Use auto, cpu, cuda"),
        ("cuda:x", "There is no device 'cuda:x'"),
        ("xpu", "torch finds no such device"),
    ],
)
def test_a_device_that_is_not_there_is_a_sentence(name: str, said: str) -> None:
    with pytest.raises(VitrailError, match=said):
        choose_device(name)


def test_a_gpu_beyond_the_last_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(VitrailError, match="the last GPU here is cuda:1"):
        choose_device("cuda:2")
