"""A run that is interrupted, killed, corrupted or moved ends as if nothing had happened."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tests.train.small import Recorder, losses, same, small, train, weights
from vitrail.errors import VitrailError
from vitrail.train.config import DataSpec, ScheduleSpec
from vitrail.train.loop import Loop
from vitrail.train.run import RunFolder
from vitrail.train.snapshots import Snapshots, damage
from vitrail.train.step import Step


class Enough(Exception):
    """Stands in for a crash."""


def interrupted(recipe, out, monkeypatch, at):
    """Let the run die before step `at`."""
    original = Loop._next_step

    def crash(self):
        if self.done == at:
            self.snapshots.finish()
            raise Enough
        original(self)

    with monkeypatch.context() as patch:
        patch.setattr(Loop, "_next_step", crash)
        with pytest.raises(Enough):
            train(recipe, out)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "whole"
    train(small(), out)
    return out


@pytest.mark.slow
@pytest.mark.parametrize("at", [2, 3, 5])
def test_a_resumed_run_is_the_same_bit_for_bit(at, undisturbed, tmp_path, monkeypatch):
    interrupted(small(), tmp_path / "run", monkeypatch, at)
    recorder = Recorder()
    train(small(), tmp_path / "run", callbacks=[recorder])
    assert any(f"resumed at step {at - at % 2}" in note for note in recorder.notes)
    assert same(weights(tmp_path / "run"), weights(undisturbed))
    assert losses(tmp_path / "run") == losses(undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"optim__name": "sgd", "optim__lr": 0.05},
        {"precision": "bf16"},
        {"precision": "fp16"},
        {"data__sampling": "balanced"},
        {"augment__mix_until": 0.5},
    ],
)
def test_a_resumed_run_is_the_same_with_other_settings(changes, tmp_path, monkeypatch):
    recipe = small(**changes)
    train(recipe, tmp_path / "whole")
    interrupted(recipe, tmp_path / "run", monkeypatch, 4)
    train(recipe, tmp_path / "run")
    assert same(weights(tmp_path / "run"), weights(tmp_path / "whole"))


@pytest.mark.slow
def test_two_runs_have_the_same_log(undisturbed, tmp_path):
    train(small(deterministic=True), tmp_path / "one")
    assert losses(tmp_path / "one") == losses(undisturbed)
    train(small(deterministic=True, seed=1), tmp_path / "other")
    assert losses(tmp_path / "other") != losses(undisturbed)


def test_a_corrupted_checkpoint_is_skipped(undisturbed, tmp_path, monkeypatch, caplog):
    interrupted(small(), tmp_path / "run", monkeypatch, 5)
    newest = tmp_path / "run" / "checkpoints" / "step-00000004"
    file = next(newest.glob("*.distcp"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    assert "checksum" in damage(newest)
    recorder = Recorder()
    train(small(), tmp_path / "run", callbacks=[recorder])
    assert "step 4 is corrupted" in caplog.text
    assert any("resumed at step 2" in note for note in recorder.notes)
    assert same(weights(tmp_path / "run"), weights(undisturbed))


def test_a_finished_run_says_so_and_old_checkpoints_are_gone(undisturbed):
    before = (undisturbed / "metrics.jsonl").read_text()
    result = train(small(), undisturbed)
    assert result.before
    assert result.steps == 6
    assert 0 <= result.metrics["accuracy"] <= 1
    assert (undisturbed / "metrics.jsonl").read_text() == before
    assert sorted(path.name for path in (undisturbed / "checkpoints").iterdir()) == ["step-00000004", "step-00000006"]


def test_changed_settings_are_shown_and_refused_unless_allowed(tmp_path, monkeypatch):
    interrupted(small(), tmp_path / "run", monkeypatch, 3)
    with pytest.raises(VitrailError, match=r"optim.lr: 0.002 → 0.001[\s\S]*--allow-change optim.lr"):
        train(small(optim__lr=1e-3), tmp_path / "run")
    with pytest.raises(VitrailError, match=r"not a setting.* Did you mean optim\.lr"):
        train(small(), tmp_path / "run", allow_change=["optim.lrr"])
    train(small(optim__lr=1e-3), tmp_path / "run", allow_change=["optim.lr"])
    assert losses(tmp_path / "run")[-1][0] == 6


@pytest.mark.slow
def test_what_only_changes_speed_may_change(undisturbed, tmp_path, monkeypatch):
    interrupted(small(), tmp_path / "run", monkeypatch, 3)
    recipe = small(log_every=2, keep=5, data=DataSpec(source="digits", workers=1, holdout=0.02))
    train(recipe, tmp_path / "run")
    assert same(weights(tmp_path / "run"), weights(undisturbed))


def test_another_model_does_not_fit_an_old_checkpoint(tmp_path, monkeypatch):
    interrupted(small(), tmp_path / "run", monkeypatch, 3)
    with pytest.raises(VitrailError, match=r"another model or optimiser[\s\S]*\+ model.blocks.2"):
        train(small(model__depth=3), tmp_path / "run", allow_change=["model.depth"])


def test_a_full_disk_keeps_the_checkpoint_before(tmp_path, monkeypatch):
    real = Snapshots._write

    def full(self, step, tensors, state):
        if step == 4:
            raise OSError(28, "No space left on device")
        real(self, step, tensors, state)

    monkeypatch.setattr(Snapshots, "_write", full)
    with pytest.raises(VitrailError, match=r"No space left on device\. The one before it is valid \(step 2\)"):
        train(small(), tmp_path / "run")
    assert damage(tmp_path / "run" / "checkpoints" / "step-00000002") == ""


def test_an_unwritable_folder_is_a_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(VitrailError, match="Choose another folder with --out"):
        train(small(), tmp_path / "file" / "run")


def test_a_folder_belongs_to_one_process(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.hold()
    with pytest.raises(VitrailError, match="Another process is training"):
        train(small(), tmp_path / "run")
    folder.release()


SCRIPT = """
    import sys
    sys.path.insert(0, {here!r})
    from tests.train.small import small, train
    result = train(small(steps=25, checkpoint_every=1, log_every=1), sys.argv[1])
    sys.exit(0 if result.ended_by is None else 10)
"""


def started(out: Path) -> subprocess.Popen:
    script = textwrap.dedent(SCRIPT).format(here=str(Path(__file__).parents[2]))
    return subprocess.Popen([sys.executable, "-c", script, str(out)], env={**os.environ, "OMP_NUM_THREADS": "1"})


@pytest.mark.slow
def test_sigterm_saves_and_the_same_command_resumes(tmp_path):
    process = started(tmp_path / "run")
    until(lambda: (tmp_path / "run" / "checkpoints" / "step-00000003").exists(), process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(120) == 10
    newest = max((tmp_path / "run" / "checkpoints").glob("step-*"))
    step = json.loads((newest / "state.json").read_text())["step"]
    assert damage(newest) == ""
    assert 3 <= step < 25
    train(small(steps=25, checkpoint_every=1, log_every=1), tmp_path / "run")
    train(small(steps=25, checkpoint_every=1, log_every=1), tmp_path / "whole")
    assert same(weights(tmp_path / "run"), weights(tmp_path / "whole"))
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


def until(condition, process):
    while not condition():
        assert process.poll() is None, "the run ended too early"
        time.sleep(0.01)


def spoil(checkpoint: Path) -> None:
    file = next(checkpoint.glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-1])


def test_without_a_valid_checkpoint_the_run_starts_anew_and_keeps_its_log(undisturbed, tmp_path, monkeypatch):
    interrupted(small(), tmp_path / "run", monkeypatch, 5)
    log = (tmp_path / "run" / "metrics.jsonl").read_text()
    for checkpoint in (tmp_path / "run" / "checkpoints").glob("step-*"):
        spoil(checkpoint)
    recorder = Recorder()
    train(small(), tmp_path / "run", callbacks=[recorder])
    assert any("starts anew at step 0; the log so far is kept in metrics-1.jsonl" in note for note in recorder.notes)
    assert (tmp_path / "run" / "metrics-1.jsonl").read_text() == log
    assert same(weights(tmp_path / "run"), weights(undisturbed))
    assert losses(tmp_path / "run") == losses(undisturbed)


def test_a_bad_line_of_the_log_loses_only_itself(tmp_path, caplog):
    run = RunFolder(tmp_path)
    lines = [json.dumps({"kind": "train", "step": step}).encode() for step in range(4)]
    lines[1:3] = [b'{"kind": "tr\xff', b"[1]", b'{"kind": "val"}', lines[2]]
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join([*lines, b'{"kind": "tra']))
    assert [one["step"] for one in run.records()] == [0, 2, 3]
    assert [record.getMessage()[:6] for record in caplog.records] == ["Line 2", "Line 3", "Line 4"]
    run.forget_after(3)
    run.add({"kind": "train", "step": 4})
    caplog.clear()
    assert [one["step"] for one in run.records()] == [0, 2, 3, 4]
    assert not caplog.records


@pytest.mark.parametrize("policy", ["stop", "rollback"])
def test_weights_that_are_not_finite_are_never_saved(policy, tmp_path, monkeypatch):
    """They can become so by a step with a finite gradient: a learning rate that overflows, or faulty memory."""
    real, faults = Step.take, [3]

    def take(self, parts, number):
        real(self, parts, number)
        if number in faults:
            faults.remove(number)
            next(iter(self.runner.model.parameters())).data.view(-1)[0] = float("inf")

    monkeypatch.setattr(Step, "take", take)
    recorder = Recorder()
    if policy == "stop":
        with pytest.raises(VitrailError, match=r"not finite after step 4\. .*not saved; the last good one is that of step 2"):
            train(small(), tmp_path / "run", callbacks=[recorder])
        assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000002"]
    else:
        assert train(small(on_nonfinite="rollback"), tmp_path / "run", callbacks=[recorder]).steps == 6
        assert any("not finite after step 4" in note for note in recorder.notes)
        assert any("Back to step 2" in note for note in recorder.notes)


def test_a_disk_that_fills_while_the_log_is_written_is_a_sentence(tmp_path):
    resource = pytest.importorskip("resource")
    run = RunFolder(tmp_path)
    run.add({"kind": "train", "step": 1})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))
    try:
        with pytest.raises(VitrailError, match=r"Cannot write .*metrics\.jsonl: File too large"):
            run.add({"kind": "train", "step": 2, "text": "x" * 100})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_run_that_ended_before_its_first_checkpoint_says_that_it_starts_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(self: Loop) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Loop, "_next_step", killed)
    for again in (False, True):
        recorder = Recorder()
        with pytest.raises(KeyboardInterrupt):
            train(small(), tmp_path / "run", callbacks=[recorder])
        assert any("ended before its first checkpoint, so it starts anew at step 0" in note for note in recorder.notes) == again


def test_a_warmup_in_steps_is_that_part_of_the_run(tmp_path):
    """Fine-tuning runs of older versions have 12 steps of 127 where new ones have 10 %, 13 steps."""

    def with_warmup(warmup, steps=127):
        return small(steps=steps, epochs=None, schedule=ScheduleSpec(kind="cosine", warmup=warmup))

    run = RunFolder(tmp_path)
    run.write_config(with_warmup(12), {})
    assert run.keep_warmup(with_warmup("10%")) == with_warmup(12)
    for other in (with_warmup("20%"), with_warmup(13), with_warmup("10%", steps=60)):
        assert run.keep_warmup(other) == other
