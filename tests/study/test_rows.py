"""Rows in a file that several processes write to."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest

from vitrail.errors import VitrailError
from vitrail.study.rows import DONE, FAILED, LEFT_OUT, Results, Row, try_lock


def row(key: str, status: str = DONE, point: int = 0, **values: object) -> Row:
    return Row(study="data-size", point=point, series="ViT", label="10 %", seed=0, status=status, key=key, **values)  # type: ignore[arg-type]


def put_many(file: Path, name: str) -> None:
    results = Results(file)
    for number in range(12):
        results.put([row(f"{name}{number}")])


def hold(file: Path, held: object, release: object) -> None:
    with try_lock(file) as got:
        assert got
        held.set()  # type: ignore[attr-defined]
        release.wait(30)  # type: ignore[attr-defined]


def test_a_row_survives_the_file(tmp_path: Path) -> None:
    results = Results(tmp_path / "new" / "data-size.csv")
    assert results.read() == []
    full = row("a", few_shot=0.5, parameters=12, note='with "quotes", commas\nand lines')
    results.put([full, row("b", LEFT_OUT), row("c", FAILED)])
    assert results.read()[0] == full
    assert results.finished() == {"a", "c"}
    results.put([row("b", few_shot=0.25)])
    assert [(one.key, one.few_shot) for one in results.read()] == [("a", 0.5), ("b", 0.25), ("c", None)]
    results.remove(FAILED)
    assert results.finished() == {"a", "b"}


def test_the_file_is_in_the_order_of_the_grid(tmp_path: Path) -> None:
    results = Results(tmp_path / "x.csv")
    results.put([row("second", point=1)])
    results.put([row("first", point=0)])
    assert [one.key for one in results.read()] == ["first", "second"]


def test_processes_do_not_lose_each_others_rows(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=put_many, args=(tmp_path / "x.csv", name)) for name in "abc"]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert {one.key for one in Results(tmp_path / "x.csv").read()} == {f"{name}{k}" for name in "abc" for k in range(12)}


def test_a_lock_is_free_again_when_its_process_was_killed(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    held, release = context.Event(), context.Event()
    process = context.Process(target=hold, args=(tmp_path / "lock", held, release))
    process.start()
    assert held.wait(30)
    with try_lock(tmp_path / "lock") as got:
        assert not got
    process.kill()
    process.join()
    with try_lock(tmp_path / "lock") as got:
        assert got


def test_another_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("a,b\n1,2\n")
    with pytest.raises(VitrailError, match="does not have the columns of a study"):
        Results(tmp_path / "x.csv").read()
