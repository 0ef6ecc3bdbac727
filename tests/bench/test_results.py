"""Rows, the results file, ratios, tables and plots; and the search for the largest batch."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from vitrail.bench import ratios
from vitrail.bench.largest_batch import is_out_of_memory, largest_batch
from vitrail.bench.plot import plot
from vitrail.bench.results import ResultsFile, Row, read_csv
from vitrail.commands.bench_table import show, summary
from vitrail.errors import VitrailError


def row(library: str, mode: str, **fields: Any) -> Row:
    values: dict[str, Any] = {
        "model": "ViT-B/16", "task": "train", "metric": "throughput", "batch": 256, "image_size": "224x224", "precision": "bf16",
        "status": "done", "images_per_s": 3460.2, "min_images_per_s": 3401.0, "max_images_per_s": 3502.0, "tflops": 365.1,
        "peak_tflops": 745.2, "peak_fraction": 0.49, "peak_memory_gib": 31.4, "first_step_s": 55.2, "finite": True, "rounds": 10,
        "steps": 7, "interleaved_with": 3, "parameters": 86_567_656, "hardware": "NVIDIA H200", "torch": "2.11.0",
    }  # fmt: skip
    return Row(library=library, mode=mode, **{**values, **fields})


def test_a_table_with_a_changed_cell_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "bench.csv"
    ResultsFile(file).put(row("timm", "eager"))
    file.write_text(file.read_text().replace("3460.2", "fast"))
    with pytest.raises(VitrailError, match="does not have the columns or the values of a benchmark"):
        read_csv(file)


def test_our_best_mode_is_compared_with_the_fastest_mode_of_the_fastest_library() -> None:
    rows = [
        row("vitrail", "default", images_per_s=4325.25, peak_memory_gib=26.0),
        row("vitrail", "compiled", images_per_s=4000.0),
        row("vitrail", "loop-fp8", images_per_s=5000.0),  # not comparable: fp8
        row("timm", "eager", images_per_s=2500.0),
        row("timm", "compiled", images_per_s=3460.2, peak_memory_gib=32.5),
        row("hf", "eager", images_per_s=2000.0),
        row("vitrail", "default", task="infer", images_per_s=1.0),  # no other library to compare with
    ]
    (found,) = ratios(rows)
    assert (found.ours.mode, found.baseline.library, found.baseline.mode) == ("default", "timm", "compiled")
    assert found.speed == pytest.approx(1.25) and found.memory == pytest.approx(0.8)
    assert summary(found) == "vitrail default vs. timm compiled: 1.25× the images/s, 0.80× the memory"


def test_non_finite_and_failed_rows_do_not_count() -> None:
    bad = row("vitrail", "compiled", images_per_s=9000.0, finite=False)
    failed = row("timm", "compiled", images_per_s=None, status="failed")
    (found,) = ratios([bad, row("vitrail", "default"), failed, row("timm", "eager", images_per_s=1730.1)])
    assert found.ours.mode == "default" and found.speed == pytest.approx(2.0)
    assert ratios([bad, row("timm", "eager")]) == []


def test_latency_and_largest_batch_ratios() -> None:
    quick = {"task": "infer", "metric": "latency", "batch": 1}
    ours = row("vitrail", "fast", p50_ms=0.8, p95_ms=0.9, images_per_s=1250.0, **quick)
    (found,) = ratios([ours, row("timm", "graphs", p50_ms=1.0, p95_ms=1.1, images_per_s=1000.0, **quick)])
    assert found.latency == pytest.approx(0.8) and "0.80× the latency" in summary(found)
    large = {"metric": "largest-batch", "images_per_s": None, "batch": 0}
    (found,) = ratios([row("vitrail", "default", largest_batch=900, **large), row("timm", "eager", largest_batch=600, **large)])
    assert found.speed == 1.5 and "1.50× the batch" in summary(found)


def test_rows_round_trip_through_the_file(tmp_path: Path) -> None:
    rows = [
        row("vitrail", "default", note="a, b", command="vitrail bench --model 'B/16'"),
        row("timm", "eager", status="failed", images_per_s=None, finite=None, clip=1.0),
    ]
    file = ResultsFile(tmp_path / "new" / "bench.csv")
    for one in rows:
        file.put(one)
    assert read_csv(tmp_path / "new" / "bench.csv") == rows
    again = ResultsFile(tmp_path / "new" / "bench.csv")
    assert again.rows == rows and again.finished(rows[0]) == rows[0]
    assert again.finished(rows[1]) is None and again.finished(row("vitrail", "default", hardware="another")) is None
    again.put(dataclasses.replace(rows[1], status="done"))
    assert [one.status for one in read_csv(tmp_path / "new" / "bench.csv")] == ["done", "done"]
    assert ResultsFile(tmp_path / "new" / "bench.csv", overwrite=True).rows == []


def test_files_without_the_power_columns_are_read(tmp_path: Path) -> None:
    file = tmp_path / "bench.csv"
    ResultsFile(file).put(row("vitrail", "default"))
    lines = [line.split(",") for line in file.read_text().splitlines()]
    kept = [index for index, name in enumerate(lines[0]) if name not in ("clock_mhz", "watts")]
    file.write_text("".join(",".join(line[index] for index in kept) + "\n" for line in lines))
    assert read_csv(file) == [row("vitrail", "default")]


def test_the_committed_results_are_readable() -> None:
    files = sorted((Path(__file__).parents[2] / "benchmarks" / "results").glob("bench-*.csv"))
    assert files and all(read_csv(file) for file in files)


def test_a_csv_with_other_columns_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "bench.csv").write_text("name,value\na,1\n")
    with pytest.raises(VitrailError, match="--overwrite"):
        ResultsFile(tmp_path / "bench.csv")


def test_the_table_fits_in_a_hundred_columns_and_lists_problems() -> None:
    rows = [
        row(
            "vitrail",
            "default",
            images_per_s=14_325.0,
            min_images_per_s=14_001.0,
            max_images_per_s=14_402.0,
            clock_mhz=1455.0,
            watts=698.2,
        ),
        row("torchvision", "compiled-bf16", images_per_s=11_000.0, min_images_per_s=10_001.0, max_images_per_s=12_402.0),
        row("hf", "graphs", status="out of memory", images_per_s=None, min_images_per_s=None, rounds=0),
        row("timm", "eager", finite=False, interleaved_with=0, note="1 parameters, ours has 2"),
    ]
    page = io.StringIO()
    show(rows, Console(file=page, width=100))
    text = page.getvalue()
    lines = text.splitlines()
    assert max(len(line.rstrip()) for line in lines if "│" not in line) <= 100
    assert "…" not in text and "14,325" in text and "compiled-bf16" in text
    assert "out of memory" in next(line for line in lines if line.lstrip().startswith("hf"))
    assert "GPU clock and power: vitrail default 1,455 MHz, 698 W\n" in text
    for message in ("1.30× the images/s", "not finite", "ran alone", "ours has 2", "745 TFLOP/s"):
        assert message in text


def test_the_plot_is_a_png_unless_there_is_nothing_to_plot(tmp_path: Path) -> None:
    rows = [row("vitrail", "default"), row("timm", "compiled"), row("hf", "eager", status="failed", images_per_s=None)]
    plot(rows, tmp_path / "bench.png")
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")
    plot(rows[2:], tmp_path / "empty.png")
    assert not (tmp_path / "empty.png").exists()


@given(limit=st.integers(0, 70_000), first=st.integers(1, 512))
def test_the_largest_batch_is_found_below_a_given_limit(limit: int, first: int) -> None:
    tried: list[int] = []

    def fits(batch: int) -> bool:
        tried.append(batch)
        return batch <= limit

    found = largest_batch(fits, first=first)
    assert found <= min(limit, 32_768)
    assert found == 0 or found in tried
    assert min(limit, 32_768) - found < max(1, found // 32) + 1
    assert len(tried) == len(set(tried)) <= 32


def test_out_of_memory_errors_are_recognised_in_every_wording() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"))
    assert is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"))
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
