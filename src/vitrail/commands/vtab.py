"""`vitrail vtab`: run the paper's transfer tasks whose data is available."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from rich import box
from rich.table import Table

from vitrail.commands.options import Json
from vitrail.commands.output import check_place
from vitrail.commands.terminal import Console, say
from vitrail.errors import VitrailError, counted
from vitrail.evaluate.settings import SuiteSettings
from vitrail.evaluate.suites import SuiteTask, tasks_of
from vitrail.text import to_json

if TYPE_CHECKING:
    from vitrail.evaluate.suite_run import SuiteResult, TaskScore
    from vitrail.evaluate.suite_sources import TaskData


Settings = Annotated[SuiteSettings, tyro.conf.arg(name="")]


def vtab(
    checkpoint: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="CHECKPOINT")] = None,
    /,
    *,
    root: Path = Path("vtab"),
    suite: Literal["vtab", "transfer"] = "vtab",
    tasks: tuple[str, ...] = (),
    source: tuple[str, ...] = (),
    out: Path = Path("runs/vtab"),
    settings: Settings = SuiteSettings(),  # noqa: B008 - it is frozen
    json_: Json = False,
) -> int:
    """Fine-tune a checkpoint on the 19 tasks of VTAB-1k (1,000 training images each) and average by group.

    Tasks without data are skipped, with a message on how to get the data. Each task is searched in ROOT/NAME: as the usual
    distribution of VTAB-1k (train800val200.txt, test.txt), in its original layout (CLEVR, KITTI, dSprites, smallNORB), or in
    any layout that `vitrail train` reads; then among torchvision's files in ROOT. A finished task is not run again. Without a
    checkpoint, the tasks are listed and nothing is run.

    Example: vitrail vtab --root data/vtab

    Example: vitrail vtab B_16.npz --root data/vtab --tasks natural kitti_distance --source resisc45=hf:timm/resisc45

    Example: vitrail vtab B_16.npz --suite transfer --root data --out runs/transfer

    Args:
        checkpoint: What to start from: a run or checkpoint folder, an .npz, .pth or .safetensors file, ViT-B/16 or hf:owner/name.
        root: The folder with one subfolder per task.
        suite: VTAB-1k, or the paper's five: ImageNet, CIFAR-10, CIFAR-100, Pets, Flowers.
        tasks: Only these tasks or groups.
        source: NAME=SOURCE for tasks that are stored elsewhere.
        out: Output folder for the runs and the results.
        settings: Changes to the paper's protocol.
        json_: Print JSON instead of tables.
    """
    from vitrail.checkpoints import load
    from vitrail.commands.training_display import display_for
    from vitrail.evaluate.suite_run import SuiteResult, find_tasks, run_task, write_results

    check_place(out)
    main = os.environ.get("RANK", "0") == "0"
    console = Console(stderr=json_, quiet=not main)
    chosen = tasks_of(suite, tasks)
    available, missing = find_tasks(chosen, root, dict(_pair(one) for one in source))
    if checkpoint is None:
        _list(console, chosen, available, missing, as_json=json_)
        return 0
    if not available:
        raise VitrailError(
            f"None of the tasks ({len(chosen)}) is in {root}. `vitrail vtab --root {root}` says how to get the data."
        )
    assumptions = load(checkpoint, preprocess=settings.preprocess).report.assumptions
    scores = []
    for task in chosen:
        if (data := available.get(task.name)) is not None:
            console.print(f"{task.title}: {data.origin}", highlight=False, soft_wrap=True)
            scores.append(run_task(task, data, checkpoint, out, settings, callbacks=[display_for(console, plain=False)]))
            console.print(f"{task.title}: {_accuracy(scores[-1])}", highlight=False)
    result = SuiteResult(tuple(scores), missing, len(chosen))
    if not main:
        return 0
    about = {"checkpoint": checkpoint, "suite": suite, "assumptions": assumptions}
    write_results(out, result, about)
    if json_:
        say(to_json({**about, **result.to_dict()}, indent=2))
    else:
        _show(console, result, out)
    return 0


def _list(
    console: Console, tasks: tuple[SuiteTask, ...], available: Mapping[str, TaskData], missing: dict[str, str], *, as_json: bool
) -> None:
    if as_json:
        listed = {name: {"origin": data.origin, "official": data.official} for name, data in available.items()}
        say(to_json({"available": listed, "missing": missing}, indent=2))
        return
    console.print(_overview(tasks, {name: data.origin for name, data in available.items()}))
    _show_missing(console, missing)


def _pair(text: str) -> tuple[str, str]:
    name, equals, reference = text.partition("=")
    if not equals or not reference:
        raise VitrailError(f"--source {text} is not NAME=SOURCE, such as resisc45=folder:data/resisc45.")
    return name, reference


def _overview(tasks: tuple[SuiteTask, ...], available: dict[str, str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title=f"tasks with data: {len(available)} of {len(tasks)}", title_justify="left")
    for heading in ("task", "group", "classes", "labels", "crop", "flip", "found"):
        table.add_column(heading, justify="right" if heading == "classes" else "left", no_wrap=heading == "task")
    for task in tasks:
        marks = ("✓" if task.crop else "–", "✓" if task.flip else "–")
        table.add_row(task.name, task.group or "", str(task.classes), task.labels, *marks, available.get(task.name, "–"))
    return table


def _show(console: Console, result: SuiteResult, out: Path) -> None:
    table = Table(box=box.SIMPLE_HEAD)
    for heading in ("task", "group", "accuracy", "95 % interval", "test images", "training images"):
        table.add_column(heading, justify="left" if heading in ("task", "group") else "right")
    for one in result.scores:
        low, high = one.interval
        images = f"{one.train_images:,}{'' if one.official else ' *'}" if one.group else f"{one.train_images:,}"
        table.add_row(one.title, one.group or "", _accuracy(one), f"{low:.2%} – {high:.2%}", f"{one.test_images:,}", images)
    console.print(table)
    for name, (mean, count) in result.means().items():
        console.print(f"{name}: mean accuracy {mean:.2%} over {counted(count, 'task')}", highlight=False)
    if any(one.group and not one.official for one in result.scores):
        console.print("* images drawn by Vitrail; VTAB's official 1,000 images need its file lists", highlight=False)
    if len(result.scores) < result.total:
        absent = counted(result.total - len(result.scores), "task")
        console.print(f"{absent} without data: these means are not those of the whole suite.", highlight=False)
    _show_missing(console, result.missing)
    console.print(f"results: {out / 'scores.csv'}", highlight=False, soft_wrap=True)


def _accuracy(score: TaskScore) -> str:
    return f"{score.accuracy:.2%}" + ("" if score.std is None else f" ± {score.std:.2%}")


def _show_missing(console: Console, missing: dict[str, str]) -> None:
    for sentence in missing.values():
        console.print(sentence, highlight=False, soft_wrap=True)
