"""Whole benchmarks on tiny models: everything but the times is checked."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.models.other_libraries import TIMM, load, randomise, renamed
from vitrail.bench import BenchPlan, Row, benchmark, peak, run, timer, workload
from vitrail.bench.baselines import PACKAGE, build, comparable
from vitrail.bench.entry import Entry
from vitrail.bench.plan import BASELINES
from vitrail.bench.results import read_csv
from vitrail.bench.timer import Timer
from vitrail.bench.workload import Case, Inputs, build_workload, many_compilations
from vitrail.cli import main
from vitrail.errors import VitrailError
from vitrail.models import build_model, model_config, parameters

ROOT = Path(__file__).parent.parent.parent
CPU = torch.device("cpu")
CONFIG = model_config("Ti/16", image_size=32, depth=2)
TINY: dict[str, Any] = {"model": ("Ti/16",), "image_size": 32, "batch": 2, "steps": 1, "rounds": 2, "device": "cpu"}


@pytest.fixture(autouse=True)
def short_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    """Benchmark models with 2 layers, and take little time for the matmul peak and for warm-up: no test looks at times."""
    monkeypatch.setattr(benchmark, "model_config", partial(model_config, depth=CONFIG.depth))
    monkeypatch.setitem(peak._SQUARE, "cpu", 256)
    monkeypatch.setattr(peak, "_SECONDS", 0.01)
    monkeypatch.setattr(timer, "_MAX_WARMUP", timer._MIN_WARMUP)


def tiny(**changes: Any) -> BenchPlan:
    return BenchPlan(**{**TINY, **changes})


def case(library: str = "vitrail", mode: str = "default", **changes: Any) -> Case:
    return dataclasses.replace(Case(CONFIG, "train", "throughput", library, mode, 2, "fp32", CPU), **changes)


def named(rows: list[Row]) -> list[str]:
    return [f"{row.library} {row.mode} {row.status}" for row in rows]


@pytest.mark.parametrize("library", BASELINES)
def test_other_libraries_have_our_parameter_count_and_output_shape(library: str) -> None:
    theirs = build(library, CONFIG)
    assert sum(one.numel() for one in theirs.parameters()) == parameters(CONFIG)
    assert theirs(torch.randn(3, 3, 32, 32)).shape == (3, 1000)


def test_ours_is_measured_with_the_erf_gelu() -> None:
    """All libraries compute the same function: with timm's weights ours gives timm's logits."""
    (config,) = benchmark.Benchmark(tiny(), lambda message: None, "x").configs
    theirs = randomise(build("timm", config))
    ours = load(build_model(config), renamed(theirs.state_dict(), TIMM))
    images = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(ours(images), theirs(images), atol=2e-5, rtol=0)


@pytest.mark.parametrize("name", ["B/16", "L/32", "H/14", "So400m/14"])
def test_timm_has_our_parameter_count_for_larger_models(name: str) -> None:
    config = model_config(name)
    with torch.device("meta"):
        theirs = build("timm", config)
    assert sum(one.numel() for one in theirs.parameters()) == parameters(config)


def test_only_plain_vits_are_comparable() -> None:
    assert comparable(CONFIG) and not comparable(model_config("BiT-R50x1"))
    assert not comparable(model_config("R50+ViT-B/16")) and not comparable(model_config("B/16", pooling="mean"))
    with pytest.raises(VitrailError, match="no equivalent"):
        build("timm", model_config("BiT-R50x1"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("library", "mode"), [("vitrail", "default"), ("vitrail", "plain"), *((name, "eager") for name in BASELINES)]
)
def test_every_library_reduces_the_loss(library: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workload, "OPTIM", dataclasses.replace(workload.OPTIM, lr=1e-3))
    built = build_workload(case(library, mode, clip=1.0), Inputs(CONFIG, 2, CPU))
    losses = [float(built.step()) for _ in range(8)]
    assert losses[0] > 5 and losses[-1] < losses[0] / 2


def test_the_loop_mode_reports_non_finite_steps() -> None:
    inputs = Inputs(CONFIG, 2, CPU)
    built = build_workload(case(mode="loop"), inputs)
    assert built.is_finite(built.step())
    inputs.images.fill_(float("nan"))
    assert not built.is_finite(built.step())


@pytest.mark.parametrize(("mode", "keep"), [("loop-recompute", "nothing"), ("loop-recompute-matmuls", "matmuls")])
def test_recompute_modes(mode: str, keep: str, monkeypatch: pytest.MonkeyPatch) -> None:
    models: list[Any] = []
    real = workload.build_model
    monkeypatch.setattr(workload, "build_model", lambda *given, **named: models.append(real(*given, **named)) or models[-1])  # type: ignore[func-returns-value]
    built = build_workload(case(mode=mode), Inputs(CONFIG, 2, CPU))
    assert built.is_finite(built.step())
    assert (models[0].recompute.blocks, models[0].recompute.keep) == (CONFIG.depth, keep)


@pytest.mark.slow
def test_fp8_on_a_cpu_gives_a_failed_row_with_the_reason() -> None:
    rows = run(tiny(against=(), mode=("loop", "loop-fp8")), log=lambda message: None, command="x")
    assert named(rows) == ["vitrail loop done", "vitrail loop-fp8 failed"] and "needs a GPU" in rows[1].note


@pytest.mark.parametrize("mode", ["default-bf16", "default"])
def test_bf16_weights_and_autocast_compute_in_bf16(mode: str) -> None:
    """The logits are float32, with the rounding errors of bf16."""
    inputs = Inputs(CONFIG, 2, CPU)
    logits = build_workload(case(mode=mode, task="infer", precision="bf16"), inputs).step()
    exact = build_workload(case(mode="default", task="infer"), inputs).step()
    assert logits.dtype == torch.float32 and not logits.requires_grad and logits.std() > 0
    assert 1e-4 < float((logits - exact).abs().max()) < 0.05


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["fast", "fast-fp32", "fast-int8"])
def test_the_precision_of_an_inference_copy_is_noted(mode: str) -> None:
    inputs = Inputs(CONFIG, 2, CPU)
    exact, fast = (build_workload(case(mode=one, task="infer"), inputs) for one in ("default", mode))
    logits = fast.step()
    assert logits.shape == (2, 1000) and fast.is_finite(logits)
    assert fast.note().startswith("computes in ") and exact.note() == ""
    if mode == "fast-fp32":
        torch.testing.assert_close(logits, exact.step(), atol=1e-4, rtol=0)


@pytest.mark.slow
def test_all_libraries_run_in_alternating_rounds_and_write_complete_rows(tmp_path: Path) -> None:
    messages: list[str] = []
    rows = run(
        tiny(against=BASELINES, task=("train", "infer"), out=tmp_path, mode=("default", "loop", "eager")),
        log=messages.append,
        command="x",
    )
    assert named(rows[:5]) == ["vitrail default done", "vitrail loop done", *(f"{name} eager done" for name in BASELINES)]
    assert [row.task for row in rows] == ["train"] * 5 + ["infer"] * 4
    # Patches, 2 blocks of 5 tokens (4 dense layers of width², 2 of width·mlp, and attention), head; a multiply-add is two.
    whole = 2 * 4 * 768 * 192 + 2 * (2 * 5 * (4 * 192 * 192 + 2 * 192 * 768) + 2 * 2 * 5 * 5 * 192) + 2 * 192 * 1000
    # In the last block ours computes only one of five tokens after the keys and values.
    skipped = 4 * 2 * (2 * 192 * 192 + 2 * 192 * 768) + 2 * 2 * 4 * 5 * 192
    for row in rows:
        forward = whole - skipped if row.library == "vitrail" else whole
        assert row.images_per_s is not None and row.tflops is not None and row.peak_tflops
        assert row.tflops * 1e12 == pytest.approx(row.images_per_s * forward * (3 if row.task == "train" else 1), rel=1e-4)
        assert row.peak_fraction == pytest.approx(row.tflops / row.peak_tflops, rel=1e-3)
        assert row.min_images_per_s is not None and row.max_images_per_s is not None
        assert row.min_images_per_s <= row.images_per_s <= row.max_images_per_s
        assert row.finite and row.rounds == 2 and row.note == "" and row.parameters == parameters(CONFIG)
        assert row.interleaved_with == (4 if row.task == "train" else 3) and row.peak_memory_gib is None
        assert row.hardware and row.torch and row.timm and row.transformers and row.torchvision and row.date and row.command == "x"
    assert named(read_csv(tmp_path / "bench.csv")) == named(rows)
    assert (tmp_path / "bench.png").stat().st_size > 10_000
    assert any("matmul peak" in message for message in messages)


@pytest.mark.slow
def test_latency(tmp_path: Path) -> None:
    (row,) = run(tiny(latency=True, against=(), mode=("default",), steps=5, out=tmp_path))
    assert (row.batch, row.task, row.metric) == (1, "infer", "latency")
    assert row.p50_ms is not None and row.p95_ms is not None and row.p50_ms <= row.p95_ms
    assert row.images_per_s == pytest.approx(1000 / row.p50_ms)


@pytest.mark.slow
def test_finished_rows_are_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = tiny(against=("timm",), out=tmp_path)
    first = run(plan)
    built: list[Case] = []
    monkeypatch.setattr(benchmark, "Entry", lambda case, *rest: built.append(case) or Entry(case, *rest))
    messages: list[str] = []
    assert named(run(plan, log=messages.append)) == named(first) and not built
    assert any("--overwrite" in message for message in messages)
    run(dataclasses.replace(plan, mode=("default", "plain", "eager")))
    assert [one.mode for one in built] == ["plain"]
    run(dataclasses.replace(plan, batch=3, mode=("default",)))
    assert len(built) == 2 and len(read_csv(tmp_path / "bench.csv")) == 4
    run(dataclasses.replace(plan, overwrite=True))
    assert len(built) == 4 and len(read_csv(tmp_path / "bench.csv")) == 2


@pytest.mark.slow
def test_an_interrupted_run_keeps_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stopped(Entry):
        def run_round(self) -> None:
            if len(self.rounds) == 2:
                raise KeyboardInterrupt
            super().run_round()

    plan = tiny(against=("timm",), rounds=4, out=tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(benchmark, "Entry", Stopped)
        with pytest.raises(KeyboardInterrupt):
            run(plan)
    kept = read_csv(tmp_path / "bench.csv")
    assert named(kept) == ["vitrail default partial", "timm eager partial"] and [row.rounds for row in kept] == [2, 2]
    assert named(run(plan)) == ["vitrail default done", "timm eager done"]


def test_nothing_starts_after_the_time_limit(tmp_path: Path) -> None:
    messages: list[str] = []
    rows = run(tiny(seconds=1e-9, out=tmp_path), log=messages.append)
    assert rows == [] and any("Time limit reached before ViT-Ti/16 train, vitrail default" in message for message in messages)


def test_a_file_as_out_is_rejected_and_not_changed(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(VitrailError, match=r"notes is a file; --out must be a folder"):
        run(tiny(out=tmp_path / "notes"))
    assert (tmp_path / "notes").read_text() == "mine"


def test_the_command_lists_only_files_it_has_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "--model", "Ti/16", "--device", "cpu", "--seconds", "1e-9", "--out", str(tmp_path / "new")])
    shown = capsys.readouterr().out
    assert "Nothing was measured." in shown and "bench.csv" not in shown and not (tmp_path / "new").exists()


@pytest.mark.slow
def test_entries_that_do_not_fit_together_are_measured_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    alive: weakref.WeakSet[Entry] = weakref.WeakSet()

    class LimitedMemory(Entry):
        """Memory for two entries, and never for hf."""

        def __init__(self, case: Case, *rest: Any) -> None:
            if len(alive) == 2 or case.library == "hf":
                raise torch.OutOfMemoryError("CUDA out of memory.")
            super().__init__(case, *rest)
            alive.add(self)

    monkeypatch.setattr(benchmark, "Entry", LimitedMemory)
    messages: list[str] = []
    rows = run(tiny(against=BASELINES, mode=("default", "plain", "eager")), log=messages.append)
    assert named(rows) == [
        "vitrail default done", "vitrail plain done", "timm eager done", "torchvision eager done", "hf eager out of memory"
    ]  # fmt: skip
    assert [row.interleaved_with for row in rows[:4]] == [1, 1, 1, 1]
    assert any("does not fit in memory next to the other 2" in message for message in messages)


@pytest.mark.slow
def test_an_entry_is_added_only_if_every_entry_can_still_reach_its_peak_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    class Measured(Entry):
        def __init__(self, case: Case, *rest: Any) -> None:
            super().__init__(case, *rest)
            self.resident_bytes, self.peak_bytes = 10, 70

    monkeypatch.setattr(benchmark, "Entry", Measured)
    for available, expected in ((79, [0, 0, 0]), (80, [1, 1, 0]), (90, [2, 2, 2])):  # 70 at the peak, and 10 for each other entry
        monkeypatch.setattr(benchmark, "available_memory", lambda device, available=available: available)
        rows = run(tiny(against=("timm",), mode=("default", "plain", "eager")))
        assert [row.interleaved_with for row in rows] == expected
        assert all(row.status == "done" for row in rows)


@pytest.mark.slow
def test_an_entry_that_fails_in_its_second_round_does_not_affect_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    class FailsLater(Entry):
        def run_round(self) -> None:
            if self.case.library == "timm" and self.rounds:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            super().run_round()

    monkeypatch.setattr(benchmark, "Entry", FailsLater)
    assert named(run(tiny(rounds=3))) == ["vitrail default done", "timm eager out of memory"]


@pytest.mark.slow
def test_an_entry_that_fails_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(case: Case, inputs: Inputs) -> Any:
        if case.library == "timm":
            raise RuntimeError("the compiler failed\nwith details")
        return build_workload(case, inputs)

    monkeypatch.setattr("vitrail.bench.entry.build_workload", broken)
    rows = run(tiny(against=("timm", "hf")))
    assert named(rows) == ["vitrail default done", "timm eager failed", "hf eager done"]
    assert rows[1].note == "RuntimeError: the compiler failed"


@pytest.mark.slow
def test_non_finite_outputs_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def with_nan(case: Case, inputs: Inputs) -> Any:
        built = build_workload(case, inputs)
        return dataclasses.replace(built, step=lambda: built.step() * float("nan"))

    monkeypatch.setattr("vitrail.bench.entry.build_workload", with_nan)
    (row,) = run(tiny(against=()))
    assert row.finite is False and row.score is None


@pytest.mark.slow
def test_a_different_number_of_parameters_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    def larger(library: str, config: Any) -> nn.Module:
        model = build(library, config)
        model.extra = nn.Linear(3, 3, bias=False)
        return model

    monkeypatch.setattr("vitrail.bench.baselines.build", larger)
    rows = run(tiny())
    assert rows[0].note == "" and rows[1].note == f"{parameters(CONFIG) + 9:,} parameters, ours has {parameters(CONFIG):,}"


@pytest.mark.slow
@pytest.mark.parametrize("library", BASELINES)
def test_a_library_that_is_not_installed_is_skipped(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, PACKAGE[library], None)
    messages: list[str] = []
    assert named(run(tiny(against=(library,)), log=messages.append)) == ["vitrail default done"]
    assert any(f"pip install {PACKAGE[library]}" in message for message in messages)


@pytest.mark.slow
def test_the_largest_batch_with_simulated_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fits(case: Case, timer: Timer) -> None:
        if case.batch > 300:
            raise torch.OutOfMemoryError("CUDA out of memory.") if case.library == "vitrail" else ValueError("too many")

    monkeypatch.setattr(benchmark, "check_fits", fits)
    one = benchmark.Benchmark(tiny(out=tmp_path), lambda _: None, "")
    for library in ("vitrail", "timm"):
        one._search(case(library, metric="largest-batch", batch=0))
    ours, theirs = one.results.rows
    assert ours.largest_batch is not None and 292 <= ours.largest_batch <= 300 and ours.status == "done" and ours.note == ""
    assert theirs.largest_batch == ours.largest_batch and theirs.note.endswith("ValueError: too many")
    with pytest.raises(VitrailError, match="needs a GPU"):
        run(tiny(largest_batch=True))


class Small(nn.Module):
    """A user-defined module: torch 2.11 does not compile plain torch modules."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).relu()  # type: ignore[no-any-return]


@pytest.mark.slow
def test_more_models_are_compiled_than_torch_allows_by_default() -> None:
    compiled = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    torch._dynamo.reset()
    with many_compilations():
        for width in range(1, 13):
            model = Small(width)
            model.compile(backend=backend, dynamic=False)
            model(torch.ones(2, width))
    torch._dynamo.reset()
    assert len(compiled) == 12


@pytest.mark.slow
def test_a_compiled_model_returns_the_logits_of_a_plain_one() -> None:
    shallow = CONFIG.replace(depth=1)
    inputs, modes = Inputs(shallow, 2, CPU), ("plain", "compiled")
    with many_compilations():
        plain, compiled = (build_workload(case(mode=mode, task="infer", config=shallow), inputs).step() for mode in modes)
    torch._dynamo.reset()
    torch.testing.assert_close(compiled, plain, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_the_command_prints_tables_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = "bench --model Ti/16 --image-size 32 --batch 2 --steps 1 --rounds 2 --device cpu --against timm".split()
    with pytest.raises(SystemExit) as end:
        main([*arguments, "--out", str(tmp_path)])
    shown = capsys.readouterr().out
    assert not end.value.code and "vitrail default vs. timm eager" in shown and "bench.csv and bench.png" in shown
    with pytest.raises(SystemExit):
        main([*arguments, "--out", str(tmp_path), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert [row["library"] for row in found["rows"]] == ["vitrail", "timm"]
    (ratio,) = found["ratios"]
    assert ratio["ratio"] == pytest.approx(found["rows"][0]["images_per_s"] / found["rows"][1]["images_per_s"])


@pytest.mark.slow
def test_the_script_runs_without_tyro_and_takes_every_option(tmp_path: Path) -> None:
    blocked = "import sys, runpy\nfor name in ('tyro', 'simplejpeg', 'hypothesis'):\n    sys.modules[name] = None\n"
    code = blocked + f"sys.argv = sys.argv[1:]\nrunpy.run_path({str(ROOT / 'benchmarks' / 'bench.py')!r}, run_name='__main__')"
    options = (
        "--model Ti/16 --task infer --against --mode default --image-size 32 --batch 2 --steps 1 --rounds 2 --device cpu".split()
    )
    command = [sys.executable, "-c", code, "bench.py", *options, "--out", str(tmp_path), "--precision", "fp32", "--seconds", "60"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "ViT-Ti/16 infer" in done.stdout and len(read_csv(tmp_path / "bench.csv")) == 1
