"""The measurement itself, on models small enough for a moment: everything but the time is checked."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.models.peers import TIMM, load, randomise, renamed
from vitrail.bench import BenchPlan, Row, ceiling, run, running, subjects
from vitrail.bench.clock import Clock
from vitrail.bench.peers import PACKAGE, build, comparable
from vitrail.bench.plan import PEERS
from vitrail.bench.rows import read_csv
from vitrail.bench.seat import Seat
from vitrail.bench.subjects import Case, Inputs, many_compilations, prepare
from vitrail.cli import main
from vitrail.errors import VitrailError
from vitrail.models import build_model, model_config, parameters

ROOT = Path(__file__).parent.parent.parent
CPU = torch.device("cpu")
CONFIG = model_config("Ti/16", image_size=32)
TINY: dict[str, Any] = {"model": ("Ti/16",), "image_size": 32, "batch": 2, "steps": 1, "rounds": 2, "device": "cpu"}


@pytest.fixture(autouse=True)
def small_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ceiling is measured in earnest, only not with products that take a second each."""
    monkeypatch.setitem(ceiling._CUBE, "cpu", 256)


def tiny(**changes: Any) -> BenchPlan:
    return BenchPlan(**{**TINY, **changes})


def case(who: str = "vitrail", mode: str = "default", **changes: Any) -> Case:
    return dataclasses.replace(Case(CONFIG, "train", "throughput", who, mode, 2, "fp32", CPU), **changes)


def named(rows: list[Row]) -> list[str]:
    return [f"{row.who} {row.mode} {row.status}" for row in rows]


@pytest.mark.parametrize("peer", PEERS)
def test_peers_have_our_size_and_answer_in_our_shape(peer: str) -> None:
    theirs = build(peer, CONFIG)
    assert sum(one.numel() for one in theirs.parameters()) == parameters(CONFIG)
    assert theirs(torch.randn(3, 3, 32, 32)).shape == (3, 1000)


def test_ours_is_measured_with_the_peers_gelu() -> None:
    """The same function is compared: with timm's weights ours gives timm's logits."""
    (config,) = running.Bench(tiny(), lambda words: None, "x").configs
    theirs = randomise(build("timm", config))
    ours = load(build_model(config), renamed(theirs.state_dict(), TIMM))
    images = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(ours(images), theirs(images), atol=2e-5, rtol=0)


@pytest.mark.parametrize("name", ["B/16", "L/32", "H/14", "So400m/14"])
def test_timm_has_our_size_for_larger_models_too(name: str) -> None:
    config = model_config(name)
    with torch.device("meta"):
        theirs = build("timm", config)
    assert sum(one.numel() for one in theirs.parameters()) == parameters(config)


def test_other_kinds_of_model_are_not_held_against_a_plain_one() -> None:
    assert comparable(CONFIG) and not comparable(model_config("BiT-R50x1"))
    assert not comparable(model_config("R50+ViT-B/16")) and not comparable(model_config("B/16", pooling="mean"))
    with pytest.raises(VitrailError, match="no equal"):
        build("timm", model_config("BiT-R50x1"))


@pytest.mark.parametrize(("who", "mode"), [("vitrail", "default"), ("vitrail", "plain"), *((peer, "eager") for peer in PEERS)])
def test_every_subject_really_learns(who: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subjects, "OPTIM", dataclasses.replace(subjects.OPTIM, lr=1e-3))
    subject = prepare(case(who, mode, clip=1.0), Inputs(CONFIG, 2, CPU))
    losses = [float(subject.step()) for _ in range(8)]
    assert losses[0] > 5 and losses[-1] < losses[0] / 2


def test_the_loop_mode_counts_a_step_that_was_not_finite() -> None:
    inputs = Inputs(CONFIG, 2, CPU)
    subject = prepare(case(mode="loop"), inputs)
    assert subject.finite(subject.step())
    inputs.images.fill_(float("nan"))
    assert not subject.finite(subject.step())


@pytest.mark.parametrize(("mode", "keeps"), [("loop-recompute", "nothing"), ("loop-recompute-products", "products")])
def test_recomputing_has_modes(mode: str, keeps: str, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[Any] = []
    real = subjects.build_model
    monkeypatch.setattr(subjects, "build_model", lambda *given, **named: built.append(real(*given, **named)) or built[-1])  # type: ignore[func-returns-value]
    subject = prepare(case(mode=mode), Inputs(CONFIG, 2, CPU))
    assert subject.finite(subject.step())
    assert (built[0].recomputing.blocks, built[0].recomputing.keeps) == (12, keeps)


def test_fp8_where_it_cannot_be_is_a_row_that_says_why() -> None:
    rows = run(tiny(against=(), modes=("loop", "loop-fp8")), say=lambda words: None, command="x")
    assert named(rows) == ["vitrail loop done", "vitrail loop-fp8 failed"] and "needs a GPU" in rows[1].note


@pytest.mark.parametrize("mode", ["default-bf16", "default"])
def test_bf16_weights_or_autocast_answer_in_bf16(mode: str) -> None:
    subject = prepare(case(mode=mode, task="infer", precision="bf16"), Inputs(CONFIG, 2, CPU))
    answer = subject.step()
    assert answer.dtype == torch.bfloat16 and not answer.requires_grad and answer.std() > 0


@pytest.mark.parametrize("mode", ["fast", "fast-fp32", "fast-int8"])
def test_what_a_model_for_inference_computes_in_is_said(mode: str) -> None:
    inputs = Inputs(CONFIG, 2, CPU)
    exact, fast = (prepare(case(mode=one, task="infer"), inputs) for one in ("default", mode))
    given = fast.step()
    assert given.shape == (2, 1000) and fast.finite(given)
    assert fast.remark().startswith("computes in ") and exact.remark() == ""
    if mode == "fast-fp32":
        torch.testing.assert_close(given, exact.step(), atol=1e-4, rtol=0)


def test_all_take_turns_and_leave_whole_rows(tmp_path: Path) -> None:
    said: list[str] = []
    rows = run(
        tiny(against=PEERS, mode=("train", "infer"), out=tmp_path, modes=("default", "loop", "eager")), say=said.append, command="x"
    )
    assert named(rows[:5]) == ["vitrail default done", "vitrail loop done", *(f"{peer} eager done" for peer in PEERS)]
    assert [row.task for row in rows] == ["train"] * 5 + ["infer"] * 4
    # Patches, 12 blocks of 5 tokens (4 dense layers of width², 2 of width·mlp, and attention), head; a multiply-add is two.
    whole = 2 * 4 * 768 * 192 + 12 * (2 * 5 * (4 * 192 * 192 + 2 * 192 * 768) + 2 * 2 * 5 * 5 * 192) + 2 * 192 * 1000
    # In the last block ours goes on with one token of five after the keys and values.
    spared = 4 * 2 * (2 * 192 * 192 + 2 * 192 * 768) + 2 * 2 * 4 * 5 * 192
    for row in rows:
        forward = whole - spared if row.who == "vitrail" else whole
        assert row.images_per_s is not None and row.tflops is not None and row.ceiling_tflops
        assert row.tflops * 1e12 == pytest.approx(row.images_per_s * forward * (3 if row.task == "train" else 1), rel=1e-4)
        assert row.ceiling_share == pytest.approx(row.tflops / row.ceiling_tflops, rel=1e-3)
        assert row.slowest is not None and row.fastest is not None and row.slowest <= row.images_per_s <= row.fastest
        assert row.finite and row.rounds == 2 and row.note == "" and row.parameters == parameters(CONFIG)
        assert row.turns_with == (4 if row.task == "train" else 3) and row.peak_gib is None
        assert row.hardware and row.torch and row.timm and row.transformers and row.torchvision and row.date and row.command == "x"
    assert named(read_csv(tmp_path / "bench.csv")) == named(rows)
    assert (tmp_path / "bench.png").stat().st_size > 10_000
    assert any("matrix product" in words for words in said)


def test_one_image_at_a_time(tmp_path: Path) -> None:
    (row,) = run(tiny(latency=True, against=(), modes=("default",), steps=5, out=tmp_path))
    assert (row.batch, row.task, row.measure) == (1, "infer", "latency")
    assert row.p50_ms is not None and row.p95_ms is not None and row.p50_ms <= row.p95_ms
    assert row.images_per_s == pytest.approx(1000 / row.p50_ms)


def test_finished_rows_are_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = tiny(against=("timm",), out=tmp_path)
    first = run(plan)
    built: list[Case] = []
    monkeypatch.setattr(running, "Seat", lambda case, *rest: built.append(case) or Seat(case, *rest))
    said: list[str] = []
    assert named(run(plan, say=said.append)) == named(first) and not built
    assert any("--fresh" in words for words in said)
    run(dataclasses.replace(plan, modes=("default", "plain", "eager")))
    assert [one.mode for one in built] == ["plain"]
    run(dataclasses.replace(plan, batch=3, modes=("default",)))
    assert len(built) == 2 and len(read_csv(tmp_path / "bench.csv")) == 4
    run(dataclasses.replace(plan, fresh=True))
    assert len(built) == 4 and len(read_csv(tmp_path / "bench.csv")) == 2


def test_a_run_that_is_stopped_keeps_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stopped(Seat):
        def take_turn(self) -> None:
            if len(self.turns) == 2:
                raise KeyboardInterrupt
            super().take_turn()

    plan = tiny(against=("timm",), rounds=4, out=tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(running, "Seat", Stopped)
        with pytest.raises(KeyboardInterrupt):
            run(plan)
    kept = read_csv(tmp_path / "bench.csv")
    assert named(kept) == ["vitrail default partial", "timm eager partial"] and [row.rounds for row in kept] == [2, 2]
    assert named(run(plan)) == ["vitrail default done", "timm eager done"]


def test_when_the_time_is_up_nothing_new_begins(tmp_path: Path) -> None:
    said: list[str] = []
    rows = run(tiny(seconds=1e-9, out=tmp_path), say=said.append)
    assert rows == [] and any("time is up before ViT-Ti/16 train, vitrail default" in words for words in said)


def test_a_file_is_no_folder_for_results_and_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(VitrailError, match=r"notes is a file; --out is a folder"):
        run(tiny(out=tmp_path / "notes"))
    assert (tmp_path / "notes").read_text() == "mine"


def test_the_command_does_not_name_files_that_it_has_not_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "--model", "Ti/16", "--device", "cpu", "--seconds", "1e-9", "--out", str(tmp_path / "new")])
    shown = capsys.readouterr().out
    assert "Nothing was measured." in shown and "bench.csv" not in shown and not (tmp_path / "new").exists()


def test_subjects_that_do_not_fit_together_are_measured_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    alive: weakref.WeakSet[Seat] = weakref.WeakSet()

    class Room(Seat):
        """A machine with memory for two, and for no distilled giant at all."""

        def __init__(self, case: Case, *rest: Any) -> None:
            if len(alive) == 2 or case.who == "hf":
                raise torch.OutOfMemoryError("CUDA out of memory.")
            super().__init__(case, *rest)
            alive.add(self)

    monkeypatch.setattr(running, "Seat", Room)
    said: list[str] = []
    rows = run(tiny(against=PEERS, modes=("default", "plain", "eager")), say=said.append)
    assert named(rows) == [
        "vitrail default done", "vitrail plain done", "timm eager done", "torchvision eager done", "hf eager out of memory"
    ]  # fmt: skip
    assert [row.turns_with for row in rows[:4]] == [1, 1, 1, 1]
    assert any("does not fit beside the 2 before it" in words for words in said)


def test_a_seat_is_taken_only_if_everyone_can_still_reach_their_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    class Measured(Seat):
        def __init__(self, case: Case, *rest: Any) -> None:
            super().__init__(case, *rest)
            self.resident, self.peak = 10, 70

    monkeypatch.setattr(running, "Seat", Measured)
    for room, company in ((79, [0, 0, 0]), (80, [1, 1, 0]), (90, [2, 2, 2])):  # 70 at the peak, and 10 for each other one
        monkeypatch.setattr(running, "room_on", lambda device, room=room: room)
        rows = run(tiny(against=("timm",), modes=("default", "plain", "eager")))
        assert [row.turns_with for row in rows] == company
        assert all(row.status == "done" for row in rows)


def test_a_subject_that_fails_in_its_second_turn_leaves_the_others_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Brittle(Seat):
        def take_turn(self) -> None:
            if self.case.who == "timm" and self.turns:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            super().take_turn()

    monkeypatch.setattr(running, "Seat", Brittle)
    assert named(run(tiny(rounds=3))) == ["vitrail default done", "timm eager out of memory"]


def test_a_subject_that_fails_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(case: Case, inputs: Inputs) -> Any:
        if case.who == "timm":
            raise RuntimeError("the compiler is not well\nand this is why")
        return prepare(case, inputs)

    monkeypatch.setattr("vitrail.bench.seat.prepare", broken)
    rows = run(tiny(against=("timm", "hf")))
    assert named(rows) == ["vitrail default done", "timm eager failed", "hf eager done"]
    assert rows[1].note == "RuntimeError: the compiler is not well"


def test_numbers_that_are_not_finite_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def poisoned(case: Case, inputs: Inputs) -> Any:
        subject = prepare(case, inputs)
        return dataclasses.replace(subject, step=lambda: subject.step() * float("nan"))

    monkeypatch.setattr("vitrail.bench.seat.prepare", poisoned)
    (row,) = run(tiny(against=()))
    assert row.finite is False and row.score is None


def test_a_different_number_of_parameters_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def larger(peer: str, config: Any) -> nn.Module:
        model = build(peer, config)
        model.extra = nn.Linear(3, 3, bias=False)
        return model

    monkeypatch.setattr("vitrail.bench.peers.build", larger)
    rows = run(tiny())
    assert rows[0].note == "" and rows[1].note == "5,680,561 parameters, ours has 5,680,552"


@pytest.mark.parametrize("peer", PEERS)
def test_a_peer_that_is_not_installed_is_left_out(peer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, PACKAGE[peer], None)
    said: list[str] = []
    assert named(run(tiny(against=(peer,)), say=said.append)) == ["vitrail default done"]
    assert any(f"pip install {PACKAGE[peer]}" in words for words in said)


def test_the_largest_batch_by_planted_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fits(case: Case, clock: Clock) -> None:
        if case.batch > 300:
            raise torch.OutOfMemoryError("CUDA out of memory.") if case.who == "vitrail" else ValueError("too many")

    monkeypatch.setattr(running, "fits", fits)
    bench = running.Bench(tiny(out=tmp_path), lambda _: None, "")
    for who in ("vitrail", "timm"):
        bench._search(case(who, measure="largest-batch", batch=0))
    ours, theirs = bench.ledger.rows
    assert ours.largest_batch is not None and 292 <= ours.largest_batch <= 300 and ours.status == "done" and ours.note == ""
    assert theirs.largest_batch == ours.largest_batch and theirs.note.endswith("ValueError: too many")
    with pytest.raises(VitrailError, match="needs a GPU"):
        run(tiny(largest_batch=True))


class Small(nn.Module):
    """A module of our own: torch 2.11 does not compile those of torch alone."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).relu()  # type: ignore[no-any-return]


def test_more_models_are_compiled_than_torch_would_let_us() -> None:
    compiled = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    torch._dynamo.reset()
    with many_compilations():
        for width in range(1, 13):
            model = nn.Linear(width, 3)
            model.compile(backend=backend, dynamic=False)
            model(torch.ones(2, width))
    torch._dynamo.reset()
    assert len(compiled) == 12


@pytest.mark.slow
def test_a_compiled_model_gives_the_answers_of_a_plain_one() -> None:
    shallow = CONFIG.replace(depth=1)
    inputs, modes = Inputs(shallow, 2, CPU), ("plain", "compiled")
    with many_compilations():
        plain, compiled = (prepare(case(mode=mode, task="infer", config=shallow), inputs).step() for mode in modes)
    torch._dynamo.reset()
    torch.testing.assert_close(compiled, plain, atol=1e-4, rtol=1e-4)


def test_the_command_for_people_and_for_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "bench --model Ti/16 --image-size 32 --batch 2 --steps 1 --rounds 2 --device cpu --against timm".split()
    with pytest.raises(SystemExit) as end:
        main([*words, "--out", str(tmp_path)])
    shown = capsys.readouterr().out
    assert not end.value.code and "vitrail default against timm eager" in shown and "bench.csv and bench.png" in shown
    with pytest.raises(SystemExit):
        main([*words, "--out", str(tmp_path), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert [row["who"] for row in found["rows"]] == ["vitrail", "timm"]
    (ratio,) = found["ratios"]
    assert ratio["ratio"] == pytest.approx(found["rows"][0]["images_per_s"] / found["rows"][1]["images_per_s"])


@pytest.mark.slow
def test_the_script_needs_no_tyro_and_knows_every_option(tmp_path: Path) -> None:
    blocked = "import sys, runpy\nfor name in ('tyro', 'simplejpeg', 'hypothesis'):\n    sys.modules[name] = None\n"
    code = blocked + f"sys.argv = sys.argv[1:]\nrunpy.run_path({str(ROOT / 'benchmarks' / 'bench.py')!r}, run_name='__main__')"
    options = (
        "--model Ti/16 --mode infer --against --modes default --image-size 32 --batch 2 --steps 1 --rounds 2 --device cpu".split()
    )
    words = [sys.executable, "-c", code, "bench.py", *options, "--out", str(tmp_path), "--precision", "fp32", "--seconds", "60"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "ViT-Ti/16 infer" in done.stdout and len(read_csv(tmp_path / "bench.csv")) == 1
