"""Signals, killed workers and killed ranks: the run saves, or says in a sentence what ended it."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train.small import Recorder, small
from tests.train.test_loop import BadOnce
from vitrail import cli
from vitrail.commands.output import TolerantOutput
from vitrail.data.worker_signals import STOP_SIGNALS, blocked, caught_signals, raise_worker_error
from vitrail.errors import StoppedBySignal, VitrailError
from vitrail.train import loop
from vitrail.train.loop import train
from vitrail.train.parallel import World
from vitrail.train.prepare import prepare
from vitrail.train.result import Result
from vitrail.train.snapshots import Snapshots, damage
from vitrail.train.stopping import Stop


@pytest.fixture(autouse=True)
def not_ignored() -> Iterator[None]:
    """A background job of a shell, or one under nohup, ignores some signals, and a run then does, too."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    for number, handler in before.items():
        if handler is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class Signaller(Recorder):
    """Signals data workers, and this process too if asked to, after the first record."""

    def __init__(self, number: int, *, here: bool) -> None:
        super().__init__()
        self.number, self.here, self.workers = number, here, list[Any]()

    def trained(self, record: dict[str, Any]) -> None:
        super().trained(record)
        if self.workers:
            return
        self.workers = multiprocessing.active_children()
        assert self.workers
        targets = [str(one.pid) for one in self.workers] + ([str(os.getpid())] if self.here else [])
        subprocess.run(["kill", f"-{self.number}", *targets], check=True)  # not from here: that is how torch ends its workers
        time.sleep(0.2)


def workers_run(**changes: Any) -> Any:
    return small(data__workers=1, log_every=1, steps=40, **changes)


@pytest.mark.skipif(not hasattr(signal, "sigwaitinfo"), reason="needs Linux")
def test_a_signal_to_the_whole_process_group_saves(tmp_path: Path) -> None:
    """As `timeout`, Slurm and systemd send it. Torch's workers ended by it, and the run with a traceback."""
    signaller = Signaller(signal.SIGTERM, here=True)
    result = train(workers_run(checkpoint_every=100), tmp_path / "run", callbacks=[signaller])
    assert result.ended_by == signal.SIGTERM and 0 < result.steps < 40
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == [f"step-{result.steps:08d}"]
    assert damage(tmp_path / "run" / "checkpoints" / f"step-{result.steps:08d}") == ""
    assert "saved; run the same command again to resume" in signaller.notes[-1]
    for one in signaller.workers:  # they end with the run, and by its own signal
        one.join(10)
        assert one.exitcode == 0


def test_a_killed_worker_is_a_sentence(tmp_path: Path) -> None:
    # Torch is told of the signal, or finds the process gone.
    with pytest.raises(VitrailError, match=r"reads images ended unexpectedly \(process \d+\)(: Killed)?\. .*use fewer workers"):
        train(workers_run(), tmp_path / "run", callbacks=[Signaller(signal.SIGKILL, here=False)])


def test_too_little_shared_memory_is_named() -> None:
    error = RuntimeError("DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that dataloader's workers are…")
    with pytest.raises(VitrailError, match=r"ended unexpectedly \(process 7\): Bus error\. .*--shm-size"):
        raise_worker_error(error)
    gone = RuntimeError("DataLoader worker (pid(s) 24419, 24420) exited unexpectedly")
    with pytest.raises(VitrailError, match=r"ended unexpectedly \(process 24419, 24420\)\. Most often"):
        raise_worker_error(gone)
    raise_worker_error(RuntimeError("something else"))


def test_workers_block_signals_only_where_their_parent_can_still_end_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """macOS has no `sigwaitinfo`: nothing would end a worker that hangs."""
    monkeypatch.delattr(signal, "sigwaitinfo", raising=False)
    with blocked([signal.SIGTERM]):
        assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


@pytest.fixture
def uncaught() -> Iterator[list[int]]:
    """The signals that a run did not catch, which would have ended this process."""
    numbers: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: numbers.append(number))
    yield numbers
    signal.signal(signal.SIGTERM, before)


def test_a_signal_while_the_last_checkpoint_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uncaught: list[int]
) -> None:
    real = Snapshots._write

    def slow(self: Snapshots, step: int, *rest: Any) -> None:
        if step == 6:
            time.sleep(0.5)  # the run waits for it
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.5)
        real(self, step, *rest)

    monkeypatch.setattr(Snapshots, "_write", slow)
    recorder = Recorder()
    result = train(small(), tmp_path / "run", callbacks=[recorder])
    assert not uncaught and result.ended_by == signal.SIGTERM and result.steps == 6
    assert damage(tmp_path / "run" / "checkpoints" / "step-00000006") == ""
    assert not (tmp_path / "run" / "model").exists()
    assert "before model/ was written; run the same command again to write it" in recorder.notes[-1]
    monkeypatch.undo()
    assert train(small(), tmp_path / "run").ended_by is None
    assert (tmp_path / "run" / "model").exists()


def test_a_signal_while_the_model_is_written_lets_the_run_finish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uncaught: list[int]
) -> None:
    real = loop.write_models

    def signalled(*arguments: Any) -> Any:
        signal.raise_signal(signal.SIGTERM)
        return real(*arguments)

    monkeypatch.setattr(loop, "write_models", signalled)
    result = train(small(), tmp_path / "run")
    assert not uncaught and result.ended_by is None
    assert train(small(), tmp_path / "run").before


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_every_signal_that_asks_to_end_is_caught(number: int) -> None:
    stop = Stop()
    before = signal.getsignal(number)
    with stop.handling_signals():
        assert number in caught_signals()
        signal.raise_signal(number)
        signal.raise_signal(number)  # `timeout` and torchrun send it twice
        assert stop.signal == number
    assert signal.getsignal(number) == before


def test_a_second_signal_ends_at_once() -> None:
    """In a child, which a signal ends."""
    for first, second in ((signal.SIGTERM, signal.SIGTERM), (signal.SIGINT, signal.SIGHUP)):
        child = os.fork()
        if child == 0:
            stop = Stop()
            with stop.handling_signals():
                signal.raise_signal(first)
                stop._since -= 2
                signal.raise_signal(second)
                os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -second
    stop = Stop()
    with pytest.raises(KeyboardInterrupt), stop.handling_signals():
        signal.raise_signal(signal.SIGINT)
        stop._since -= 2
        signal.raise_signal(signal.SIGINT)


def test_ignored_signals_stay_ignored() -> None:
    """SIGHUP under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Stop().handling_signals() as stop:
            signal.raise_signal(signal.SIGHUP)
        assert not stop.requested and signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [None, *STOP_SIGNALS])
@pytest.mark.parametrize("rank", ["0", "1"])
def test_the_exit_status_is_that_of_a_signal(
    number: int | None, rank: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr("vitrail.train.sweep.train", lambda *_, **__: Result(tmp_path, 3, "accuracy", {}, ended_by=number))
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", "digits", "--json", "--out", str(tmp_path)])
    assert ended.value.code == (0 if number is None else 128 + number)


@pytest.mark.parametrize("policy", ["stop", "rollback"])
def test_steps_after_a_bad_gradient_are_not_saved_as_taken(policy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU gradients are checked only now and then; until then weights stay as they are, and a signal may come."""
    monkeypatch.setattr(loop.Loop, "_checks_nonfinite", lambda self: False)
    monkeypatch.setattr(loop.Loop, "_must_stop", lambda self, stop, **_: self.done == 5)
    recipe = small(steps=8, checkpoint_every=2, log_every=8, on_nonfinite=policy)
    prepared = prepare(recipe)
    BadOnce(prepared, 4)
    if policy == "stop":
        with pytest.raises(VitrailError, match="not finite in step 4"):
            train(recipe, tmp_path / "run", prepared=prepared)
    else:
        assert train(recipe, tmp_path / "run", prepared=prepared).steps == 4
    assert max(int(path.name[5:]) for path in (tmp_path / "run" / "checkpoints").iterdir()) == 4


def test_a_sweep_ends_with_the_status_of_its_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_: object, **__: object) -> Result:
        return Result(tmp_path, 3, "accuracy", {}, ended_by=signal.SIGTERM)

    monkeypatch.setattr("vitrail.train.sweep.train", stopped)
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", "digits", "--sweep", "--lr-grid", "0.1", "--out", str(tmp_path)])
    assert ended.value.code == 128 + signal.SIGTERM


def test_a_stopped_command_can_be_sent_between_processes() -> None:
    import pickle

    error = pickle.loads(pickle.dumps(StoppedBySignal("Stopped.", 15)))
    assert (str(error), error.number) == ("Stopped.", 15)


def test_output_that_nobody_reads_does_not_end_a_run(capfd: pytest.CaptureFixture[str]) -> None:
    """`tee` gets the signals of the process group, too, and ends before the run has saved."""
    ours, theirs = os.pipe()
    os.close(ours)
    with os.fdopen(theirs, "w") as stream:
        output = TolerantOutput(stream)
        for _ in range(3):
            output.write("text\n")
            output.flush()
    assert capfd.readouterr().err.count("the output is lost (Broken pipe); the run continues") == 1


def test_errors_of_other_ranks_are_a_sentence() -> None:
    gloo = RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:7")
    world = World(torch.device("cpu"), rank=1, ranks=2)
    with pytest.raises(VitrailError, match=r"Rank 1 of 2 cannot reach another rank.*it was killed"):
        world.raise_rank_error(gloo)
    world.raise_rank_error(RuntimeError("shapes do not match"))
    World(torch.device("cpu")).raise_rank_error(gloo)


DYING = """
import os, signal, sys
from tests.train.small import Recorder, small
from vitrail.errors import VitrailError
from vitrail.train.loop import Loop, train
real = Loop._next_step
def step(self):
    if self.done == 3 and self.world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    real(self)
Loop._next_step = step
try:
    train(small(steps=30, device="cpu"), sys.argv[1])
except VitrailError as error:
    sys.exit(str(error))
"""


@pytest.mark.slow
def test_a_killed_rank_is_a_sentence_for_the_others(tmp_path: Path) -> None:
    from tests.train.processes import ROOT, free_port

    common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    common |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", DYING, str(tmp_path / "run")],
            cwd=ROOT,
            env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        errors = [process.communicate(timeout=300)[1] for process in ranks]
        assert [process.returncode for process in ranks] == [1, -signal.SIGKILL]
        assert "Rank 0 of 2 cannot reach another rank" in errors[0] and not re.search("Traceback", errors[0])
    finally:
        for process in ranks:
            process.kill()
