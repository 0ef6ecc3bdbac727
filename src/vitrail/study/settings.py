"""What the user chooses when running a study."""

from __future__ import annotations

import dataclasses
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from vitrail.errors import VitrailError

LadderName = Literal["tiny", "small", "paper"]
DATA, TARGET = "digits?classes=0-4", "digits?classes=5-9"

# Settings that change how a study is run, not what its rows are.
_FREE = ("seeds", "out", "jobs", "device", "workers", "keep_models", "retry_failed")


@dataclass(frozen=True, kw_only=True)
class StudySettings:
    """Data, size and length of a study."""

    data: str = DATA
    """Images to pre-train on: any data source, such as packed:DIR. Default: the digits 0 to 4."""
    target: str | None = None
    """Images to transfer to: any source with classes. Default: the digits 5 to 9; with --data, the same source."""
    budget: float | None = None
    """Minutes for the whole study. The speed is measured first, which counts as at most a quarter of them. Then runs become
    shorter, and if that is not enough, points are left out, which is shown. None: the full study."""
    seeds: int = 1
    """Number of seeds. With 2 or more, figures and tables have error bars. A later run with more seeds adds rows."""
    image_size: int | None = None
    """Side in pixels. None: that of the images, up to 128; larger images are resized to 224, tiny ones to 16."""
    channels: int | None = None
    """Input channels. None: as in the images."""
    ladder: LadderName | None = None
    """Sizes of the models: tiny (up to 16 pixels, a CPU), small (up to 128 pixels, one GPU), paper (the paper's). None: by image
    size."""
    epochs: float | None = None
    """Length of pre-training in passes over the whole pre-training set, before the budget shortens it. None: 60 for tiny, 40 for
    small, 90 for paper."""
    finetune_epochs: float | None = None
    """Length of fine-tuning. None: 20 for tiny, 10 for small, 8 for paper."""
    shots: int = 5
    """Images per class for few-shot accuracy."""
    out: Path = Path("runs/study")
    """Folder for the CSV files, figures, tables and the report of all studies. Run the same command again to resume."""
    jobs: int | None = None
    """Rows to train at the same time, each in a process of its own. Small models leave most of a GPU idle. None: on a CPU with tiny
    models one per core, otherwise 1."""
    device: str = "auto"
    """auto, cpu, cuda or mps."""
    workers: int | None = None
    """Processes that read images, per row. None: the CPU cores divided among the rows; 0 for tiny models."""
    keep_models: bool = False
    """Keep the trained models, in OUT/NAME/runs. Otherwise they are deleted when their rows are finished."""
    retry_failed: bool = False
    """Run failed rows again."""

    def __post_init__(self) -> None:
        if self.target is None:
            object.__setattr__(self, "target", TARGET if self.data == DATA else self.data)
        for name, least in (("seeds", 1), ("shots", 1), ("jobs", 1), ("image_size", 1), ("channels", 1), ("workers", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise VitrailError(f"--{name.replace('_', '-')} is {value}; it must be at least {least}.")
        for name in ("budget", "epochs", "finetune_epochs"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise VitrailError(f"--{name.replace('_', '-')} is {value:g}; it must be more than 0.")

    def identity(self) -> dict[str, Any]:
        """Return the settings that decide the rows, as JSON has them."""
        return {name: value for name, value in dataclasses.asdict(self).items() if name not in _FREE}

    def command(self, study: str) -> str:
        """Return the command line that runs the study with these settings; paths are shortened to their last part."""
        words = ["vitrail", "study", study]
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            default = StudySettings(data=self.data).target if field.name == "target" else field.default
            if value != default and field.name not in ("out", "device", "workers", "retry_failed", "keep_models"):
                text = (
                    public_name(str(value))
                    if field.name in ("data", "target")
                    else f"{value:g}"
                    if isinstance(value, float)
                    else str(value)
                )
                words += [f"--{field.name.replace('_', '-')}", text]
        return shlex.join(words)


def public_name(source: str) -> str:
    """Return a source without the folders of this machine: packed:/data/tiny is packed:tiny."""
    kind, colon, rest = source.partition(":")
    path, mark, options = (rest if colon else kind).partition("?")
    return f"{kind}{colon}" * bool(colon) + Path(path).name + mark + options
