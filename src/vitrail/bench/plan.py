"""What is to be measured: models, tasks, peers and the modes in which each runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from vitrail.errors import VitrailError, nearest

Task = Literal["train", "infer"]
Measure = Literal["throughput", "latency", "largest-batch"]
Peer = Literal["timm", "torchvision", "hf"]

OURS = "vitrail"
PEERS: tuple[Peer, ...] = ("timm", "torchvision", "hf")

# default: as the product runs it. plain: without our fused kernels. compiled: torch.compile. graphs: compiled, replayed as CUDA
# graphs. loop: the whole step of `vitrail train`, recorded, and with its guard against non-finite gradients; loop-fp8: the same
# with eight-bit products; loop-recompute…: with activations computed again in the backward pass. …-bf16: the weights themselves
# are bf16, instead of being cast by autocast. fast: as `vitrail.models.inference.for_inference` makes it.
_PEER_TRAINS = ("eager", "compiled", "graphs")
_PEER_INFERS = (*_PEER_TRAINS, *(f"{mode}-bf16" for mode in _PEER_TRAINS))
_OUR_PLAIN = ("default", "plain", "compiled", "graphs")
_OUR_TRAINS = (*_OUR_PLAIN, "loop", "loop-fp8", "loop-recompute", "loop-recompute-products")
_OUR_INFERS = (*_OUR_PLAIN, *(f"{mode}-bf16" for mode in _OUR_PLAIN), "fast", "fast-fp32", "fast-bf16", "fast-int8")

# The modes that matter, when none are asked for: (ours, a peer's). Every compilation of a model costs about a minute.
_USUAL: dict[tuple[bool, Task, Measure], tuple[tuple[str, ...], tuple[str, ...]]] = {
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
    """What to measure, and how long."""

    model: tuple[str, ...] = ("B/16",)
    """The paper's names: B/16, L/16, Ti/16."""
    mode: tuple[Task, ...] = ()
    """train: forward, backward and optimiser; infer: forward alone. Both may be named. Neither: train, infer with --latency."""
    against: tuple[Peer, ...] = ("timm",)
    """The libraries to compare with, as far as they are installed."""
    modes: tuple[str, ...] = ()
    """The modes to run, such as default compiled, or for one library alone timm:compiled. None named: those that matter."""
    batch: int | None = None
    """Images a step. None: 256 on a GPU, 8 on a processor."""
    image_size: int = 224
    """Side of the images in pixels."""
    device: str = "auto"
    """Where to compute: auto, cpu, cuda or mps."""
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """auto: bf16 on a GPU that has it, else fp32."""
    latency: bool = False
    """Measure one image at a time instead: the median and the 95th percentile of the time until its answer is there."""
    largest_batch: bool = False
    """Search for the largest batch that fits in the GPU's memory instead (the paper's Fig. 12)."""
    clip: float | None = None
    """Clip gradients to this norm in the training step of every library; None: none does."""
    rounds: int = 10
    """Rounds of steps, in which the libraries take turns; the median of them counts."""
    steps: int | None = None
    """Steps a round. None: as many as take about half a second."""
    seconds: float | None = None
    """Begin nothing new after this many seconds, and end rounds early; what was measured stays."""
    out: Path | None = None
    """A folder for bench.csv and bench.png. Rows that are finished there are not measured again."""
    fresh: bool = False
    """Measure everything again, whatever the folder holds."""

    def __post_init__(self) -> None:
        for name in ("batch", "image_size", "rounds", "steps"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise VitrailError(f"--{name.replace('_', '-')} is {value}; it is a whole number from 1 on.")
        if self.clip is not None and self.clip <= 0:
            raise VitrailError(f"--clip is {self.clip:g}; it is a norm above 0. Leave it out for no clipping.")
        if not self.model:
            raise VitrailError("No model is named: --model takes one or more, such as B/16 L/16.")
        for peer in self.against:
            if peer not in PEERS:
                raise VitrailError(f"--against takes {', '.join(PEERS)}, not {peer!r}.{nearest(peer, PEERS)}")
        if self.latency and "train" in self.mode:
            raise VitrailError("--latency is the time until one image has its answer: it goes with --mode infer, not train.")
        self._check_modes()

    def _check_modes(self) -> None:
        for word in self.modes:
            who, mode = _split(word)
            if who not in (None, OURS, *PEERS):
                raise VitrailError(f"--modes {word}: before the colon stands {', '.join((OURS, *PEERS))}, not {who!r}.")
            if who in PEERS and who not in self.against:
                raise VitrailError(f"--modes {word} names {who}, which is not compared with: add it to --against.")
            owners = (who,) if who else (OURS, *self.against)
            known = tuple(dict.fromkeys(mode for owner in owners for task in self.tasks for mode in _modes_known(owner, task)))
            if mode not in known:
                tasks = " and ".join(self.tasks)
                raise VitrailError(
                    f"--modes {word}: to {tasks} there is no mode {mode!r}.{nearest(mode, known)} Known are {', '.join(known)}."
                )

    @property
    def tasks(self) -> tuple[Task, ...]:
        return self.mode or (("infer",) if self.latency else ("train",))

    @property
    def measures(self) -> tuple[Measure, ...]:
        asked: tuple[tuple[bool, Measure], ...] = ((self.latency, "latency"), (self.largest_batch, "largest-batch"))
        return tuple(measure for wanted, measure in asked if wanted) or ("throughput",)

    def modes_of(self, who: str, task: Task, measure: Measure, *, gpu: bool) -> tuple[str, ...]:
        """The modes of one library that are to be measured, in order."""
        if not self.modes:
            return _USUAL[gpu, task, measure][who != OURS]
        known = _modes_known(who, task)
        asked = (mode for owner, mode in map(_split, self.modes) if owner in (None, who))
        return tuple(dict.fromkeys(mode for mode in asked if mode in known))


def _modes_known(who: str, task: Task) -> tuple[str, ...]:
    if who == OURS:
        return _OUR_TRAINS if task == "train" else _OUR_INFERS
    return _PEER_TRAINS if task == "train" else _PEER_INFERS


def _split(word: str) -> tuple[str | None, str]:
    who, colon, mode = word.rpartition(":")
    return (who, mode) if colon else (None, mode)
