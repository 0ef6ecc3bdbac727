"""Callbacks of a run: the metrics file, TensorBoard, Weights & Biases, a display."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitrail.errors import VitrailError
from vitrail.train.run import RunFolder

Record = dict[str, Any]


@dataclass(frozen=True)
class RunInfo:
    """What is known before the first step."""

    name: str
    out: Path
    steps: int
    steps_per_epoch: int
    first: int
    """The first step to take; above 0 when a run is resumed."""
    headline: str
    config: dict[str, Any]


class Callback:
    """Gets the events of a run; override the methods you need."""

    def note(self, text: str) -> None:
        """Show a message."""

    def started(self, info: RunInfo) -> None: ...

    def trained(self, record: Record) -> None:
        """Called with the averages over the steps since the last record."""

    def validated(self, record: Record) -> None: ...

    def closed(self) -> None:
        """Called when the run has ended, successfully or not."""


class MetricsFile(Callback):
    """metrics.jsonl"""

    def __init__(self, run: RunFolder) -> None:
        self.run = run

    def trained(self, record: Record) -> None:
        self.run.add(record)

    def validated(self, record: Record) -> None:
        self.run.add(record)


class TensorBoard(Callback):
    """Scalars for `tensorboard --logdir`, an extra. When a run is resumed, what came after the checkpoint is hidden."""

    def __init__(self) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise VitrailError(
                "TensorBoard logs need tensorboard: install the extra with pip install 'vitrail[tensorboard]'."
            ) from error
        self._make_writer = SummaryWriter

    def started(self, info: RunInfo) -> None:
        self._writer = self._make_writer(str(info.out / "tensorboard"), purge_step=info.first or None)

    def trained(self, record: Record) -> None:
        for name, value in scalars(record).items():
            self._writer.add_scalar(f"{record['kind']}/{name}", value, record["step"])

    validated = trained

    def closed(self) -> None:
        if hasattr(self, "_writer"):
            self._writer.close()


class WeightsAndBiases(Callback):
    """The same for wandb, an extra."""

    def __init__(self, project: str) -> None:
        try:
            import wandb
        except ImportError as error:
            raise VitrailError(
                "Logging to Weights & Biases needs wandb: install the extra with pip install 'vitrail[wandb]'."
            ) from error
        self._wandb, self._project = wandb, project

    def started(self, info: RunInfo) -> None:
        # The name of the folder is the run's identity, so a resumed run is resumed there too.
        self._wandb.init(project=self._project, id=info.out.resolve().name, resume="allow", config=info.config)

    def trained(self, record: Record) -> None:
        named = {f"{record['kind']}/{name}": value for name, value in scalars(record).items()}
        self._wandb.log(named, step=record["step"])

    validated = trained

    def closed(self) -> None:
        if self._wandb.run is not None:
            self._wandb.finish()


def scalars(record: Record) -> dict[str, float]:
    """Return the numbers of a record, those of its speed included."""
    flat = {**record, **record.get("speed", {})}
    numbers = {name: value for name, value in flat.items() if isinstance(value, int | float) and not isinstance(value, bool)}
    return {name: value for name, value in numbers.items() if name != "step"}
