"""The display of a training run: a live display on a terminal, plain lines elsewhere."""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from vitrail.commands.terminal import Console
from vitrail.errors import counted
from vitrail.train.callbacks import Callback, Record, RunInfo
from vitrail.train.config import Recipe
from vitrail.train.parameter_groups import Group as ParameterGroup
from vitrail.train.plain import differences
from vitrail.train.record_text import remaining, shown, validation_text
from vitrail.train.result import Result
from vitrail.train.run import RunFolder

_PAUSE = 2.0  # seconds between plain lines


def display_for(console: Console, *, plain: bool) -> PlainLines | LiveDisplay:
    return LiveDisplay(console) if console.is_terminal and not plain else PlainLines(console)


class PlainLines(Callback):
    """A line every few seconds, for logs and pipes."""

    def __init__(self, console: Console) -> None:
        self.console, self._last = console, 0.0

    def note(self, text: str) -> None:
        self.console.print(Text(text, style="yellow" if text.startswith("warning") else ""), soft_wrap=True)

    def started(self, info: RunInfo) -> None:
        self.info = info
        self.note(f"run: {info.out}, {info.steps} steps, {info.steps_per_epoch} per epoch")

    def trained(self, record: Record) -> None:
        now = time.monotonic()
        if now - self._last >= _PAUSE or record["step"] == self.info.steps:
            self._last = now
            parts = [f"step {record['step']}/{self.info.steps}", *(f"{name} {value}" for name, value in shown(record).items())]
            self.note("  ".join([*parts, f"ETA {remaining(record, self.info)}"]))

    def validated(self, record: Record) -> None:
        self.note(f"step {record['step']}/{self.info.steps}  validation: {validation_text(record)}")


class LiveDisplay(Callback):
    """A progress bar, the latest metrics, and the validations so far."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(bar_width=40), MofNCompleteColumn(), TextColumn("{task.fields[left]}")
        )
        self._metrics: dict[str, str] = {}
        self._validated: list[Record] = []
        self._live: Live | None = None

    def note(self, text: str) -> None:
        self.console.print(Text(text, style="yellow" if text.startswith("warning") else "dim"), soft_wrap=True)

    def started(self, info: RunInfo) -> None:
        self.info = info
        self._task = self._bar.add_task(info.name, total=info.steps, completed=info.first, left="")
        self._live = Live(self._shown(), console=self.console, refresh_per_second=4, transient=True)
        self._live.start()

    def trained(self, record: Record) -> None:
        self._metrics = shown(record)
        self._bar.update(self._task, completed=record["step"], left=f"ETA {remaining(record, self.info)}")
        self._refresh()

    def validated(self, record: Record) -> None:
        self._validated.append(record)
        self._refresh()

    def closed(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _refresh(self) -> None:
        if self._live is not None:
            self._live.update(self._shown())

    def _shown(self) -> RenderableType:
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        for name, value in self._metrics.items():
            table.add_row(Text(name, style="dim"), value)
        rows = [Text(f"epoch {one['epoch']:.4g}  {validation_text(one)}", style="green") for one in self._validated[-4:]]
        return Group(self._bar, table, *rows)


def deviations(recipe: Recipe, changed: Recipe, console: Console) -> None:
    """Print where a run differs from its recipe, and that the expected metric then may not hold."""
    changes = differences(recipe, changed)
    if not changes:
        return
    console.print(f"Differs from the recipe {recipe.name}", style="italic", soft_wrap=True, highlight=False)
    table = Table(box=box.SIMPLE_HEAD)
    for heading in ("setting", "recipe", "this run"):
        table.add_column(heading)
    for key, (old, new) in sorted(changes.items()):
        table.add_row(key, _plain(old), _plain(new))
    console.print(table)
    if recipe.expected:
        lengths = [(name, *changes[name]) for name in ("steps", "epochs") if name in changes and all(changes[name])]
        shorter = next((f", with {new:g} of {old:g} {name}" for name, old, new in lengths if new < old), "")
        console.print(f"The recipe's expected result does not apply to this run{shorter}: {recipe.expected}", soft_wrap=True)


def group_table(groups: Sequence[ParameterGroup], recipe: Recipe, console: Console) -> None:
    """Print the parameter groups with their learning rates and weight decays."""
    table = Table(title=f"Parameter groups (weight decay {recipe.optim.decay})", box=box.SIMPLE_HEAD, title_justify="left")
    for heading in ("learning rate", "weight decay", "tensors", "parameters", "first"):
        table.add_column(heading, justify="left" if heading == "first" else "right", overflow="fold")
    for group in groups:
        rate = "frozen" if group.frozen else f"{recipe.optim.lr * group.scale:.3g}"
        decay = f"{group.weight_decay:g}" if group.decays else "–"
        table.add_row(rate, decay, str(len(group.names)), f"{group.values:,}", group.names[0])
    console.print(table)


def name_patterns(names: Sequence[str]) -> list[str]:
    """Return parameter names; those that differ only in numbers as one pattern, `blocks.*.norm1.weight`."""
    stems: dict[str, list[str]] = {}
    for name in names:
        stems.setdefault(re.sub(r"\.\d+(?=\.)", ".*", name), []).append(name)
    return [stem if len(members) > 1 else members[0] for stem, members in stems.items()]


def print_result(result: Result, console: Console, page: Path | None = None) -> None:
    """Print how the run ended, where its `page` is, and what to do next."""
    if result.ended_by is not None:
        return
    state = "was finished already" if result.before else f"finished in {timedelta(seconds=round(result.seconds))} of training"
    early = ", stopped early" if result.stopped_early else ""
    summary = f" {state}: {counted(result.steps, 'step')}{early}"
    console.print(Text.assemble("\n", (str(result.out), "bold"), summary), highlight=False, soft_wrap=True)
    if result.metrics:
        metrics, images = validation_text(result.metrics), result.metrics.get("images")
        on = f" on {images:.0f} images" if images is not None else ""  # absent after a bit of the file changed
        console.print(Text.assemble((metrics, "bold green"), on), highlight=False, soft_wrap=True)
    if result.model is not None:
        console.print(f"{result.out / 'model'}: {result.model.describe()}", highlight=False, soft_wrap=True)
    console.print(f"curves: {result.out / 'figures' / 'curves.png'}", highlight=False, soft_wrap=True)
    if page is not None:
        console.print(f"report: {page}", highlight=False, soft_wrap=True)
    saved = RunFolder(result.out).saved_recipe()
    run, source = shlex.quote(str(result.out)), shlex.quote(saved.data.source) if saved is not None else "SOURCE"
    if result.headline == "relative_loss":  # trained without labels: it cannot classify yet
        commands = {
            f"vitrail inspect {run} --what reconstruction --out FOLDER": "see what it predicts for hidden patches",
            f"vitrail finetune --from {run} --data FOLDER": "fine-tune it on classes",
            f"vitrail fewshot {run} --data FOLDER --feature mean": "few-shot accuracy of its features",
        }
    else:
        commands = {
            f"vitrail info {run}": "describe the checkpoint",
            f"vitrail eval {run} --data {source}": "evaluate it; --out DIR writes a report",
            f"vitrail predict {run} IMAGE": "use it on an image",
            f"vitrail finetune --from {run} --data FOLDER": "fine-tune it on other images",
        }
    width = max(map(len, commands))
    console.print("\nNext:")
    for command, purpose in commands.items():
        console.print(f"  {command:<{width}}  {purpose}", highlight=False, soft_wrap=True)


def _plain(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.12g}"
    if isinstance(value, (list, tuple)):
        return " ".join(map(_plain, value)) or "–"
    return "–" if value is None else str(value)
