"""Results of a study: one row per model and seed, in a CSV file that several processes may write to."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from vitrail.errors import VitrailError
from vitrail.files import read_csv, take_lock, write_csv

DONE, FAILED, LEFT_OUT = "done", "failed", "left out"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One point of a study with one seed. A value that was not measured is None, and empty in the file."""

    study: str
    point: int
    """Its number in the study's grid."""
    series: str
    label: str
    seed: int
    status: str
    """done; failed (the note gives the reason); left out (the budget was too short for it)."""
    x: float | None = None
    few_shot: float | None = None
    """Accuracy of a linear classifier on frozen features, mean over the draws of `shots` images per class of the target."""
    finetuned: float | None = None
    """Accuracy on the target after fine-tuning."""
    pretrained: float | None = None
    """Validation accuracy on the pre-training set; None without labels."""
    relative_loss: float | None = None
    """Of self-supervised pre-training: loss relative to the best constant prediction."""
    shots: int | None = None
    test_images: int | None = None
    model: str = ""
    parameters: int | None = None
    image_size: int | None = None
    forward_flops: float | None = None
    """Of one image, at the pre-training resolution."""
    pretrain_flops: float | None = None
    """Of the whole pre-training, forward and backward, without tokens of the last block that nothing reads."""
    finetune_flops: float | None = None
    pretrain_images: int | None = None
    """Images in the pre-training set."""
    fraction: float | None = None
    pretrain_steps: int | None = None
    pretrain_epochs: float | None = None
    finetune_steps: int | None = None
    finetune_epochs: float | None = None
    finetune_size: int | None = None
    """Image size of fine-tuning; `target_pixels` is that of the target's own images."""
    target_pixels: int | None = None
    pretrain_seconds: float | None = None
    """Of training steps alone; `seconds` is everything, with evaluation and files."""
    finetune_seconds: float | None = None
    seconds: float | None = None
    neighbour_similarity: float | None = None
    """Mean cosine similarity of the position embeddings of adjacent patches, and of all pairs of patches."""
    mean_similarity: float | None = None
    line_similarity: float | None = None
    """The same for patches in one row or column that are not adjacent, and for the others that are as far apart."""
    off_line_similarity: float | None = None
    first_layer_distance: float | None = None
    """Mean attention distance of the first and the last layer, and the farthest and nearest head of the first, all divided by
    that of uniform attention."""
    last_layer_distance: float | None = None
    first_layer_farthest: float | None = None
    first_layer_nearest: float | None = None
    data: str = ""
    target: str = ""
    note: str = ""
    hardware: str = ""
    processes: int | None = None
    """Processes that trained side by side on this machine."""
    ranks: int | None = None
    precision: str = ""
    vitrail: str = ""
    torch: str = ""
    date: str = ""
    command: str = ""
    pretrain_recipe: str = ""
    """All settings as JSON."""
    finetune_recipe: str = ""
    key: str = ""
    """Identifies the settings: a row with the same key is never run again."""


class Results:
    """The rows of one study. Every change reads the file again under a lock, so that no process loses another's rows."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def read(self) -> list[Row]:
        return read_rows(self.file) if self.file.exists() else []

    def finished(self) -> set[str]:
        """Return the keys of rows that need not be run."""
        return {row.key for row in self.read() if row.status != LEFT_OUT}

    def put(self, rows: Iterable[Row]) -> None:
        """Add rows; each replaces the one with the same key."""
        with lock(self.file.with_name(f".{self.file.name}.lock")):
            kept = {row.key: row for row in self.read()}
            kept |= {row.key: row for row in rows}
            write_csv(self.file, Row, sorted(kept.values(), key=lambda row: (row.point, row.seed)))

    def remove(self, status: str) -> None:
        with lock(self.file.with_name(f".{self.file.name}.lock")):
            rows = self.read()
            if any(row.status == status for row in rows):
                write_csv(self.file, Row, [row for row in rows if row.status != status])


def read_rows(file: Path) -> list[Row]:
    try:
        rows = read_csv(file, Row)
    except (ValueError, KeyError) as error:
        found = "a row with too many cells" if isinstance(error, KeyError) else f"the cell {str(error).rpartition(': ')[2]}"
        raise VitrailError(f"{file} has {found}, which no study writes. Correct it, or move the file away.") from error
    if rows is None:
        raise VitrailError(f"{file} does not have the columns of a study. Choose another --out, or move the file away.")
    return rows


@contextmanager
def lock(file: Path) -> Iterator[None]:
    """Hold a lock file, waiting for it."""
    while True:
        with try_lock(file) as held:
            if held:
                yield
                return
        time.sleep(0.05)


@contextmanager
def try_lock(file: Path) -> Iterator[bool]:
    """Hold a lock file if no other process does, and tell whether it is held. The system frees the lock of a process that ends."""
    file.parent.mkdir(parents=True, exist_ok=True)
    lock = take_lock(file)
    if lock is None:
        yield False
        return
    with lock:
        yield True
