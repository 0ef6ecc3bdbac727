"""Describe what to benchmark: models, tasks, libraries, and the modes each runs in."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from vitrail.errors import VitrailError, did_you_mean

Task = Literal["train", "infer"]
Metric = Literal["throughput", "latency", "largest-batch"]
Baseline = Literal["timm", "torchvision", "hf"]

OURS = "vitrail"
BASELINES: tuple[Baseline, ...] = ("timm", "torchvision", "hf")

# default: the model as users get it. plain: without our fused kernels. compiled: torch.compile. graphs: compiled, with CUDA
# graphs. loop: the whole step of `vitrail train`, captured as a CUDA graph, with its check for non-finite gradients.
# loop-fp8: the same with fp8 matmuls. loop-recompute…: the same with activation checkpointing. …-bf16: bf16 weights instead of
# autocast. fast: the copy that `vitrail.models.inference.for_inference` returns.
_BASELINE_TRAIN = ("eager", "compiled", "graphs")
_BASELINE_INFER = (*_BASELINE_TRAIN, *(f"{mode}-bf16" for mode in _BASELINE_TRAIN))
_OUR_COMMON = ("default", "plain", "compiled", "graphs")
_OUR_TRAIN = (*_OUR_COMMON, "loop", "loop-fp8", "loop-recompute", "loop-recompute-matmuls")
_OUR_INFER = (*_OUR_COMMON, *(f"{mode}-bf16" for mode in _OUR_COMMON), "fast", "fast-fp32", "fast-bf16", "fast-int8")

# Default modes by (GPU, task, metric): (ours, a baseline's). They are few, because each compilation takes about a minute.
_DEFAULT_MODES: dict[tuple[bool, Task, Metric], tuple[tuple[str, ...], tuple[str, ...]]] = {
    (True, "train", "throughput"): (("default", "loop", "compiled"), ("eager", "compiled")),
    (True, "infer", "throughput"): (("default", "default-bf16", "fast"), ("compiled", "compiled-bf16")),
    (True, "infer", "latency"): (("default", "default-bf16", "fast", "graphs-bf16"), ("eager", "graphs", "graphs-bf16")),
    (True, "train", "largest-batch"): (("default",), ("eager",)),
    (True, "infer", "largest-batch"): (("default",), ("eager",)),
    (False, "train", "throughput"): (("default",), ("eager",)),
    (False, "infer", "throughput"): (("default", "fast-fp32", "fast"), ("eager",)),
    (False, "infer", "latency"): (("default", "fast-fp32", "fast"), ("eager",)),
}


@dataclass(frozen=True, kw_only=True)
class BenchPlan:
    """What to measure, and for how long."""

    model: tuple[str, ...] = ("B/16",)
    """The paper's names: B/16, L/16, Ti/16."""
    task: tuple[Task, ...] = ()
    """train: forward, backward and optimizer step; infer: forward only; or both. Default: train, with --latency infer."""
    against: tuple[Baseline, ...] = ("timm",)
    """The libraries to compare with. Those that are not installed are skipped."""
    mode: tuple[str, ...] = ()
    """The modes to run, such as `default compiled`, or `timm:compiled` for one library. Default: a few per library."""
    batch: int | None = None
    """Images per step. Default: 256 on a GPU, 8 on a CPU."""
    image_size: int = 224
    """Height and width of the images in pixels."""
    device: str = "auto"
    """auto, cpu, cuda or mps."""
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """auto: bf16 on a GPU that supports it, else fp32."""
    latency: bool = False
    """Measure latency at batch 1 instead of throughput: the median and the 95th percentile."""
    largest_batch: bool = False
    """Find the largest batch that fits in GPU memory instead of throughput (the paper's Fig. 12)."""
    clip: float | None = None
    """Clip gradients to this norm, for every library. Default: no clipping."""
    rounds: int = 10
    """Rounds of steps; the libraries run in alternating rounds, and the median round is reported."""
    steps: int | None = None
    """Steps per round. Default: about half a second of steps."""
    seconds: float | None = None
    """Stop after about this many seconds and keep what was measured."""
    out: Path | None = None
    """Folder for bench.csv and bench.png. Rows already finished there are not measured again."""
    overwrite: bool = False
    """Measure everything again and replace the results in --out."""

    def __post_init__(self) -> None:
        for name in ("batch", "image_size", "rounds", "steps"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise VitrailError(f"--{name.replace('_', '-')} is {value}; it must be at least 1.")
        if self.clip is not None and self.clip <= 0:
            raise VitrailError(f"--clip is {self.clip:g}; it must be above 0. Leave it out for no clipping.")
        if not self.model:
            raise VitrailError("No model given. --model takes one or more names, such as B/16 L/16.")
        for library in self.against:
            if library not in BASELINES:
                raise VitrailError(f"--against takes {', '.join(BASELINES)}, not {library!r}.{did_you_mean(library, BASELINES)}")
        if self.latency and "train" in self.task:
            raise VitrailError("--latency measures inference: use --task infer, not train.")
        self._check_modes()

    def _check_modes(self) -> None:
        for word in self.mode:
            library, mode = _split(word)
            if library not in (None, OURS, *BASELINES):
                raise VitrailError(f"--mode {word}: unknown library {library!r}. Use one of {', '.join((OURS, *BASELINES))}.")
            if library in BASELINES and library not in self.against:
                raise VitrailError(f"--mode {word}: {library} is not in --against. Add it there.")
            libraries = (library,) if library else (OURS, *self.against)
            known = tuple(dict.fromkeys(mode for name in libraries for task in self.tasks for mode in _known_modes(name, task)))
            if mode not in known:
                tasks = " and ".join(self.tasks)
                raise VitrailError(
                    f"--mode {word}: there is no mode {mode!r} for {tasks}.{did_you_mean(mode, known)} "
                    f"Use one of {', '.join(known)}."
                )

    @property
    def tasks(self) -> tuple[Task, ...]:
        return self.task or (("infer",) if self.latency else ("train",))

    @property
    def metrics(self) -> tuple[Metric, ...]:
        options: tuple[tuple[bool, Metric], ...] = ((self.latency, "latency"), (self.largest_batch, "largest-batch"))
        return tuple(metric for chosen, metric in options if chosen) or ("throughput",)

    def modes_of(self, library: str, task: Task, metric: Metric, *, gpu: bool) -> tuple[str, ...]:
        """Return the modes of one library to measure, in order."""
        if not self.mode:
            return _DEFAULT_MODES[gpu, task, metric][library != OURS]
        known = _known_modes(library, task)
        chosen = (mode for name, mode in map(_split, self.mode) if name in (None, library))
        return tuple(dict.fromkeys(mode for mode in chosen if mode in known))


def _known_modes(library: str, task: Task) -> tuple[str, ...]:
    if library == OURS:
        return _OUR_TRAIN if task == "train" else _OUR_INFER
    return _BASELINE_TRAIN if task == "train" else _BASELINE_INFER


def _split(word: str) -> tuple[str | None, str]:
    library, colon, mode = word.rpartition(":")
    return (library, mode) if colon else (None, mode)
