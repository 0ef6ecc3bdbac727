"""`Recipe`: everything that decides a run, as one frozen value.

A recipe is written down whole in the run folder, compared field by field when a run is resumed, and every field can be
changed from the command line.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from vitrail.data.augment.spec import Augment
from vitrail.data.settings import BadImages, check_rule
from vitrail.errors import VitrailError, did_you_mean
from vitrail.models.settings import LORA_MATRICES, LoraMatrix
from vitrail.train.lengths import Length, describe_length, parsed_length
from vitrail.train.patterns import check_patterns
from vitrail.train.plain import flatten, from_plain, to_plain

Size = int | tuple[int, int]
Decay = Literal["scaled-by-lr", "independent-of-lr", "coupled"]


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """The model, and changes to it. None: as in the variant or the checkpoint."""

    name: str = "ViT-B/16"
    """The paper's name: ViT-B/16, R50+ViT-B/16, BiT-R50x1. With `start`, the checkpoint decides."""
    start: str | None = None
    """The checkpoint to start from: a run, a folder, an .npz, ViT-B/16, hf:owner/name. None: random initialisation."""
    image_size: Size | None = None
    """Side in pixels, or height and width as 384x512. None: the checkpoint's own, or 224."""
    channels: int | None = None
    """Input channels: 1 for grey, 3 for colour."""
    patch: int | None = None
    """Side of a patch in pixels."""
    width: int | None = None
    """Width of the tokens."""
    depth: int | None = None
    """Number of encoder blocks."""
    heads: int | None = None
    """Attention heads per block."""
    mlp: int | None = None
    """Hidden width of the MLP."""
    layers: tuple[int, ...] | None = None
    """Blocks per stage of the ResNet of a hybrid or BiT: 3 4 6 3 is the R50. Fewer stages suit smaller images."""
    pooling: Literal["class", "mean", "map"] | None = None
    """What the head reads: the class token, the mean over patches, or attention pooling (map)."""
    position: Literal["learned", "learned-2d", "relative", "sincos2d", "none"] | None = None
    """Kind of position embedding (App. D.4); the paper uses learned."""
    pre_logits: int | None = None
    """Width of the tanh layer before the head; 0 removes a checkpoint's, as the paper does for fine-tuning."""
    init: Literal["paper", "small"] | None = None
    """Initial values. paper: Xavier, which needs a long warm-up. small: truncated normal of std .02 (timm, DeiT), better for short
    runs. None: paper."""
    head_bias: float | None = None
    """Initial bias of the head: −10 or −6.9 for sigmoid losses over many classes."""
    gelu: Literal["tanh", "erf"] | None = None
    """Form of GELU: tanh as in JAX and the paper's code, erf (exact) as in timm and DeiT."""
    registers: int | None = None
    """Number of register tokens, which are learned and not read."""
    distill_token: bool | None = None
    """Add the distillation token of DeiT, with a head of its own."""
    layer_scale: float | None = None
    """Initial value of a learned factor on each residual branch (LayerScale)."""
    qk_norm: bool | None = None
    """A layer norm on each head's queries and keys, which keeps attention scores small (ViT-22B)."""
    dropout: float | None = None
    """Probability of dropout after the embedding and in the MLPs."""
    attention_dropout: float | None = None
    """Probability of dropout of attention weights."""
    stochastic_depth: float | None = None
    """Probability to skip the last block; it rises linearly with depth."""
    recompute: int = 0
    """Number of blocks whose activations are recomputed in the backward pass to save memory; −1: all."""
    recompute_keep: Literal["nothing", "matmuls"] = "nothing"
    """What such blocks keep: nothing, or matmul outputs, so that only norms, attention and GELU are recomputed."""
    freeze: bool = False
    """Train the head only. `optim.freeze` adds parts to that, or excepts some."""
    lora: int = 0
    """Rank of LoRA: the checkpoint is frozen, and thin matrices next to its linear layers are trained, with the head. They are
    merged in the saved model. 0: off."""
    lora_alpha: float | None = None
    """The adapters are scaled by this over the rank. None: equal to the rank."""
    lora_on: tuple[LoraMatrix, ...] = LORA_MATRICES
    """Which matrices of each block get an adapter."""

    def changes(self) -> dict[str, Any]:
        """Return the fields of the model's config that are set here."""
        other = ("name", "start", "image_size", "recompute", "recompute_keep", "freeze", "lora", "lora_alpha", "lora_on")
        values = {one.name: getattr(self, one.name) for one in dataclasses.fields(self) if one.name not in other}
        return {name: value for name, value in values.items() if value is not None}

    def config_changes(self) -> dict[str, Any]:
        """Return `changes` as the model's config has them, where None means that there is no tanh layer."""
        return {name: value or None if name == "pre_logits" else value for name, value in self.changes().items()}


@dataclass(frozen=True, kw_only=True)
class DataSpec:
    """The images, and how they are read."""

    source: str = "digits"
    """digits, folder:DIR, csv:FILE, packed:DIR, torchvision:CIFAR10, hf:NAME, wds:PATTERN, or a path."""
    train: str = "train"
    """The split to train on."""
    validate: str = "auto"
    """The split to validate on: `auto` takes val, else test."""
    split_rule: str = "names"
    """How validation images are chosen if the source has none. `names`: by a hash of their names, which no seed changes; runs of
    older versions have `seed-N`."""
    holdout: float = 0.0
    """Fraction of the training split to hold out for validation, instead of using the split `validate`; 0: none."""
    holdout_rule: str = "names"
    """How the held-out images are chosen, the same fraction of every class. `names`: as in `split_rule`; `seed-N`: drawn with the
    seed N, as in runs of older versions."""
    fraction: float = 1.0
    """Train on this fraction of the training split, the same part of every class. Smaller fractions are subsets of larger ones and
    do not depend on the seed."""
    preprocess: str = "auto"
    """A preset (google-vit, big-vision, timm, imagenet, deit, cifar). `auto`: the checkpoint's own, else google-vit."""
    exif: bool = True
    """Apply the EXIF orientation of photos, whatever the preset does; the trained model's preprocessing records it. Most libraries
    ignore it; switch it off to train exactly as they do."""
    sampling: Literal["shuffle", "balanced", "in-order"] = "shuffle"
    """Order of training images; `balanced` draws every class equally often."""
    workers: int | None = None
    """Processes that read images. None: chosen from the number of CPU cores."""
    bad_images: BadImages = "error"
    """What to do with an image that cannot be read: stop with an error, or skip it."""
    ignore_unknown_classes: bool = False
    """Skip images of other splits whose class is not in the training split, instead of an error."""


@dataclass(frozen=True, kw_only=True)
class TaskSpec:
    """The training task and its loss."""

    kind: Literal["auto", "classify", "multilabel", "regress", "masked-patch", "masked-autoencoder"] = "auto"
    """`auto` follows the data. The masked kinds need no labels: masked patch prediction is the paper's, masked autoencoding
    is not."""
    loss: Literal["softmax", "sigmoid"] = "softmax"
    """For one label per image. The paper's ImageNet-21k and JFT models were trained with sigmoid."""
    class_weights: str | None = None
    """`auto`: inversely proportional to the number of images per class; or a JSON file of weights by class name."""
    distill: Literal["none", "hard", "soft"] = "none"
    """Distillation: from the teacher's predicted class (hard) or its probabilities (soft)."""
    teacher: str | None = None
    """The checkpoint to distill from."""
    distill_weight: float = 0.5
    """Weight of the distillation loss; the loss on the labels has 1 minus this weight."""
    temperature: float = 3.0
    """Softmax temperature of soft distillation."""
    mask_rate: float | None = None
    """Fraction of the patches that are masked. None: 0.5 for masked-patch, 0.75 for masked-autoencoder."""
    patch_target: Literal["mean-colour", "downsized", "pixels"] | None = None
    """For masked-patch: the patch's mean colour in 512 classes (None), a 4×4 version of it, or all its pixels."""
    decoder_width: int | None = None
    """For masked-autoencoder. None: 512."""
    decoder_depth: int | None = None
    """For masked-autoencoder, in blocks. None: 4; the MAE paper uses 8."""


@dataclass(frozen=True, kw_only=True)
class OptimSpec:
    """The optimiser."""

    name: Literal["sgd", "adam", "adamw"] = "adamw"
    """The optimiser."""
    lr: float = 1e-3
    """Peak learning rate; it is not rescaled with the batch size."""
    weight_decay: float = 0.0
    """Weight decay, by the convention of `decay`."""
    decay: Decay = "scaled-by-lr"
    """Convention of `weight_decay`, where s is the schedule from 0 to 1 and lr the peak learning rate.
    scaled-by-lr: p −= s·lr·wd·p (the paper, torch's AdamW). independent-of-lr: p −= s·wd·p (big_vision's configurations).
    coupled: wd·p is added to the gradient (torch's SGD and Adam)."""
    decay_on: Literal["kernels", "all"] = "kernels"
    """`kernels`: not on biases, norms, tokens and position tables."""
    beta1: float = 0.9
    """Adam: decay of the mean of gradients."""
    beta2: float = 0.999
    """Adam: decay of the mean of squared gradients."""
    eps: float = 1e-8
    """Adam: added to the root of the mean of squared gradients."""
    momentum: float = 0.9
    """SGD: momentum."""
    nesterov: bool = False
    """SGD: Nesterov momentum."""
    clip: float | None = 1.0
    """Clip gradients to this global norm. None: no clipping."""
    layer_decay: float = 1.0
    """Learning rate of a block divided by that of the next block; 1: the same for all."""
    freeze: tuple[str, ...] = ()
    """Parameters to freeze: names, globs such as 'blocks.[0-5]', or regular expressions after re:. '!PATTERN' excepts some
    again; the last match decides."""
    lr_scale: tuple[str, ...] = ()
    """PATTERN=FACTOR, such as 'head=10': learning rates relative to `lr`, times layer_decay's. The last match decides."""
    weight_decay_for: tuple[str, ...] = ()
    """PATTERN=VALUE, such as 'positions=0.01': weight decays other than `weight_decay`. The last match decides."""


@dataclass(frozen=True, kw_only=True)
class ScheduleSpec:
    """The learning rate schedule."""

    kind: Literal["constant", "linear", "cosine", "rsqrt"] = "cosine"
    """How the learning rate falls after the warm-up."""
    warmup: Length = 0
    """Length of the linear warm-up from 0: steps (500), epochs (10ep) or a part of the run (5%)."""
    end: float = 0.0
    """Learning rate at the last step, for linear and cosine."""
    timescale: int = 10_000
    """For rsqrt: lr / √(1 + (step − warmup) / timescale)."""
    cooldown: Length = 0
    """Length of the linear decay to 0 at the end, for any kind; written like `warmup`."""

    def __post_init__(self) -> None:
        for name in ("warmup", "cooldown"):
            object.__setattr__(self, name, parsed_length(getattr(self, name), f"schedule.{name}"))


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One experiment."""

    name: str = "custom"
    """Name of the run, and of its folder if --out is not given."""
    model: ModelSpec = field(default_factory=ModelSpec)
    data: DataSpec = field(default_factory=DataSpec)
    augment: Augment = field(default_factory=Augment)
    task: TaskSpec = field(default_factory=TaskSpec)
    optim: OptimSpec = field(default_factory=OptimSpec)
    schedule: ScheduleSpec = field(default_factory=ScheduleSpec)
    epochs: float | None = None
    """Length of the run in epochs; set this or `steps`."""
    steps: int | None = None
    """Length of the run in optimiser steps."""
    batch: int = 256
    """Images per optimiser step, over all devices."""
    micro_batch: int | Literal["auto"] = "auto"
    """Images per forward pass on each device. It changes memory, speed and rounding, not the gradient, except that dropout,
    stochastic depth and masked patches are drawn per micro-batch. `auto` halves it until it fits."""
    precision: Literal["auto", "bf16", "fp8", "fp16", "fp32"] = "auto"
    """`auto`: bf16 on a GPU that has it, and on a CPU that has it for models of 0.5 GFLOPs per image or more; else fp32. Norms,
    softmax and losses are fp32 in all of them. fp8 is bf16 with fp8 matmuls in the blocks, except for weight gradients: faster
    for L and larger on an H100 and later, and less exact."""
    compile: bool = False
    """torch.compile, in place. On a GPU Vitrail's own kernels are faster for plain ViTs; it helps hybrids, BiT, dropout."""
    cuda_graph: bool = True
    """Capture forward and backward as a CUDA graph and replay it, so that small models do not wait for Python: on one GPU; under
    DDP, and under FSDP2 for models whose blocks stay gathered, with one micro-batch per step."""
    ema: float = 0.0
    """Polyak averaging: decay of the running mean of the weights, .9999 in the paper; 0: off."""
    ema_warmup: bool = False
    """Let the decay rise as (1 + t) / (10 + t), so that in short runs the first steps do not dominate the mean."""
    seed: int = 0
    """Seed of initial weights, data order, augmentation and dropout."""
    deterministic: bool = False
    """Use only deterministic operations, else stop with an error. Slower on a GPU."""
    device: str = "auto"
    """auto, cpu, cuda or mps."""
    threads: int | None = None
    """CPU threads for computation. None: torch's default. Tiny models are fastest with 1."""
    parallel: Literal["auto", "ddp", "fsdp", "hybrid"] = "auto"
    """Under torchrun: copies (ddp), shards (fsdp), or shards within a machine and copies across (hybrid)."""
    on_nonfinite: Literal["stop", "skip", "rollback"] = "stop"
    """What to do when a loss or gradient is infinite or not a number."""
    eval_every: float = 1.0
    """Epochs between validations; 0: only at the end."""
    checkpoint_every: int = 0
    """Steps between checkpoints; 0: with every validation."""
    keep: int = 2
    """Number of checkpoints to keep, the newest ones."""
    keep_best: str | None = None
    """Also keep the checkpoint with the best validation metric: accuracy, loss, map, mae and so on; with averaging raw_accuracy
    and so on for the raw weights. None: only the newest ones."""
    final_model: Literal["auto", "best", "last"] = "auto"
    """Which checkpoint `model/` holds in the end; auto: the best if `keep_best` is set, else the last."""
    patience: int = 0
    """Early stopping: stop after so many validations in a row in which the metric of `keep_best` (None: the task's main metric)
    has not improved; 0: never."""
    min_improvement: float = 0.0
    """What counts as an improvement for `patience`: more than this, in the metric's own unit (0.001 is 0.1 % accuracy)."""
    log_every: int = 10
    """Steps between lines in metrics.jsonl."""
    lr_grid: tuple[float, ...] = ()
    """Learning rates that --sweep tries."""
    sweep_holdout: float = 0.1
    """Fraction of the training split that --sweep validates on."""
    expected: str = ""
    """The metric that this recipe should reach, and who reported it."""

    def __post_init__(self) -> None:
        check(self)

    def replace(self, **changes: Any) -> Recipe:
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        return dict(to_plain(self))

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Recipe:
        """Invert `to_dict`; an unknown key is refused."""
        return from_plain(Recipe, values)


SELF_SUPERVISED = ("masked-patch", "masked-autoencoder")
CHANGEABLE = ("init", "dropout", "attention_dropout", "stochastic_depth")
"""Settings of the model that may be changed in a trained checkpoint: its weights do not depend on them."""

# What may differ when a run is resumed: it changes speed, devices or logging, not what is computed.
FREE = (
    "expected", "lr_grid", "sweep_holdout", "micro_batch", "log_every", "keep", "checkpoint_every", "device", "threads",
    "parallel", "on_nonfinite", "data.workers", "model.recompute", "model.recompute_keep",
    "cuda_graph",
)  # fmt: skip


_LEAST = {
    "batch": 1, "keep": 1, "log_every": 1, "threads": 1, "eval_every": 0, "checkpoint_every": 0, "patience": 0,
    "min_improvement": 0, "data.workers": 0, "optim.weight_decay": 0, "optim.momentum": 0, "optim.eps": 0, "schedule.timescale": 1,
    "schedule.end": 0,
}  # fmt: skip


def check(recipe: Recipe) -> None:
    """Refuse what cannot work before anything is opened; the sentence says what to do instead."""
    settings = flatten(recipe)
    for name, values in settings.items():
        for value in values if isinstance(values, list) else [values]:
            if isinstance(value, float) and not math.isfinite(value):
                raise VitrailError(f"{name} is {value:g}; it must be a finite number.")
    for path in ("", "model", "data", "task", "optim", "schedule"):
        _check_choices(getattr(recipe, path) if path else recipe, f"{path}." if path else "")
    if recipe.epochs is not None and recipe.steps is not None:
        raise VitrailError(f"Both epochs={recipe.epochs:g} and steps={recipe.steps} are given; one of them decides. Leave one out.")
    for name, least in _LEAST.items():
        if settings[name] is not None and settings[name] < least:
            raise VitrailError(f"{name} is {settings[name]:g}; it must be at least {least}.")
    if recipe.micro_batch != "auto" and int(recipe.micro_batch) < 1:
        raise VitrailError(f"micro_batch is {recipe.micro_batch}; it must be at least 1, or auto for what fits.")
    for name in ("epochs", "steps"):
        if getattr(recipe, name) is not None and getattr(recipe, name) <= 0:
            raise VitrailError(f"{name} is {getattr(recipe, name):g}; there would be nothing to train.")
    if not 0 <= recipe.ema < 1:
        raise VitrailError(f"ema is {recipe.ema}; it is a decay from 0 (off) up to, but not including, 1, such as 0.9999.")
    warmup = recipe.schedule.warmup
    if recipe.epochs is not None and isinstance(warmup, str) and warmup.endswith("ep") and float(warmup[:-2]) >= recipe.epochs:
        length = describe_length(f"{recipe.epochs:g}ep")
        raise VitrailError(f"schedule.warmup is {warmup}, but the run has only {length}. Train longer, or use a shorter warm-up.")
    check_rule(recipe.data.split_rule)
    check_rule(recipe.data.holdout_rule, "data.holdout_rule")
    if not 0 <= recipe.data.holdout < 1:
        raise VitrailError(f"data.holdout is {recipe.data.holdout}; it is a fraction of the training split, from 0 to below 1.")
    if not 0 < recipe.data.fraction <= 1:
        raise VitrailError(f"data.fraction is {recipe.data.fraction}; it is a part of the training split, above 0 and at most 1.")
    if not 0 < recipe.sweep_holdout < 1:
        raise VitrailError(f"sweep_holdout is {recipe.sweep_holdout}; it is a part of the training split, above 0 and below 1.")
    _check_selection(recipe)
    _check_optimiser(recipe.optim)
    _check_distillation(recipe.task)
    _check_masked(recipe)


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)  # resolving the names takes longer than all checks


def _check_choices(part: Any, path: str) -> None:
    kind: Any = type(part)
    for name, hint in _hints(kind).items():
        choices = _literals(hint)
        value = getattr(part, name)
        if choices and isinstance(value, str) and value not in choices:
            allowed = [str(choice) for choice in choices]
            raise VitrailError(f"{path}{name} is {value!r}; it can be {', '.join(allowed)}.{did_you_mean(value, allowed)}")


def _literals(hint: Any) -> tuple[Any, ...]:
    if get_origin(hint) is Literal:
        return get_args(hint)
    if get_origin(hint) in (Union, UnionType):
        inner = get_args(hint)
        return () if str in inner else tuple(choice for one in inner for choice in _literals(one))
    return ()


def _check_selection(recipe: Recipe) -> None:
    if recipe.min_improvement and not recipe.patience:
        raise VitrailError(
            f"min_improvement is {recipe.min_improvement:g}, but it is for early stopping, which is off: add --patience, the "
            "number of validations to wait."
        )
    if recipe.final_model == "best" and recipe.keep_best is None:
        raise VitrailError("final_model is best, but no checkpoint is kept as the best: add --keep-best METRIC, such as accuracy.")
    if recipe.eval_every == 0 and (recipe.keep_best is not None or recipe.patience):
        raise VitrailError(
            "keep_best and patience compare validations, but eval_every is 0: there is only one, at the end. Set --eval-every to 1."
        )


def _check_optimiser(optim: OptimSpec) -> None:
    if optim.lr <= 0:
        raise VitrailError(f"optim.lr is {optim.lr:g}; a learning rate is above 0.")
    if optim.name == "adamw" and optim.decay == "coupled":
        raise VitrailError("optim.decay is coupled, but adamw decays weights apart from the gradient: use optim.name=adam.")
    if optim.clip is not None and optim.clip <= 0:
        raise VitrailError(f"optim.clip is {optim.clip:g}; it is a norm above 0, or None for no clipping.")
    if not 0 < optim.layer_decay <= 1:
        raise VitrailError(f"optim.layer_decay is {optim.layer_decay:g}; it is above 0 and at most 1, such as 0.75.")
    for name in ("beta1", "beta2"):
        if not 0 <= getattr(optim, name) < 1:
            raise VitrailError(f"optim.{name} is {getattr(optim, name):g}; it is from 0 to below 1, such as 0.9.")
    if optim.nesterov and not optim.momentum:
        raise VitrailError("optim.nesterov needs momentum, but optim.momentum is 0. Leave one of them out.")
    check_patterns(optim)


def _check_distillation(task: TaskSpec) -> None:
    if (task.distill == "none") != (task.teacher is None):
        raise VitrailError(
            f"task.distill is {task.distill} and task.teacher is {task.teacher}; distillation needs both: a teacher, which is a "
            "checkpoint, and hard or soft. Add the other, or leave both out."
        )
    if not 0 <= task.distill_weight <= 1:
        raise VitrailError(f"task.distill_weight is {task.distill_weight:g}; it must be between 0 and 1.")
    if task.temperature <= 0:
        raise VitrailError(f"task.temperature is {task.temperature:g}; it must be above 0.")


def _check_masked(recipe: Recipe) -> None:
    """Settings of one kind of task given to another would be ignored in silence."""
    task = recipe.task
    kinds_with = {"mask_rate": SELF_SUPERVISED, "patch_target": ("masked-patch",)}
    kinds_with |= dict.fromkeys(("decoder_width", "decoder_depth"), ("masked-autoencoder",))
    for name, kinds in kinds_with.items():
        if getattr(task, name) is not None and task.kind not in kinds:
            raise VitrailError(f"task.{name} goes with --task.kind {' or '.join(kinds)}, not with {task.kind}. Leave it out.")
    if task.kind not in SELF_SUPERVISED:
        return
    labelled = {
        "augment.mixup": recipe.augment.mixup,
        "augment.cutmix": recipe.augment.cutmix,
        "augment.smoothing": recipe.augment.smoothing,
        "augment.erase": recipe.augment.erase,
        "model.head_bias": recipe.model.head_bias,
        "model.pre_logits": recipe.model.pre_logits,
    }
    given = [name for name, value in labelled.items() if value]
    if given:
        off = " ".join(f"--{name.replace('_', '-')} {'None' if name.startswith('model') else '0'}" for name in given)
        raise VitrailError(
            f"{task.kind} predicts the patches of single, whole images and has no labels or head, so {', '.join(given)} cannot be "
            f"used with it. Switch off with {off}."
        )
    supervised = {
        "task.class_weights": task.class_weights,
        "task.distill": task.distill != "none",
        "model.freeze": recipe.model.freeze,
        "optim.layer_decay": recipe.optim.layer_decay != 1,
    }
    given = [name for name, value in supervised.items() if value]
    if given:
        raise VitrailError(
            f"{task.kind} trains the whole model without labels, so {', '.join(given)} cannot be used with it. Leave that out."
        )
