"""From a recipe to what a run needs: data, preprocessing, task and model, with notes on what was chosen."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from vitrail.data import Preprocess, Source, Split, open_source, preset
from vitrail.data.imagenet import same_classes
from vitrail.data.sampler import class_weights
from vitrail.data.split import divide
from vitrail.errors import VitrailError, counted
from vitrail.models import Model, ViT, ViTConfig, create_model, initialise
from vitrail.models.lora import add_lora
from vitrail.models.masked import Pretraining
from vitrail.tasks import Classify, Distill, MultiLabel, Regress, Task
from vitrail.train.config import CHANGEABLE, SELF_SUPERVISED, Recipe
from vitrail.train.pretext import make_pretext
from vitrail.train.sharded_init import Initialise
from vitrail.train.speed import training_flops

if TYPE_CHECKING:
    from vitrail.checkpoints import Bundle


@dataclass
class Prepared:
    """Everything a run needs, before it is moved to devices."""

    model: Model
    task: Task
    preprocess: Preprocess
    train: Split
    validation: Split | None
    classes: tuple[str, ...]
    source: str
    notes: list[str] = field(default_factory=list)
    wrapper: Pretraining | None = None
    """The module around the model in self-supervised training."""
    initialise: Initialise | None = None
    """For a model on the meta device: draws the initial values of everything that is trained."""
    opened: Source | None = None
    """The data source, if it was opened from the recipe."""
    trained_on: list[dict[str, Any]] = field(default_factory=list)
    """Records of the images that this model and the one it started from were trained on; see `data.trained_on`."""

    @property
    def trained(self) -> Model | Pretraining:
        """The module that is trained."""
        return self.model if self.wrapper is None else self.wrapper

    @property
    def flops(self) -> int:
        """FLOPs of training on one image."""
        return training_flops(self.model.config) if self.wrapper is None else 3 * self.wrapper.flops()


def prepare(
    recipe: Recipe, *, on_meta: bool = False, check_images: Callable[[Source, Sequence[Split]], None] | None = None
) -> Prepared:
    """Open the data and build the model; what was decided on the way is in `notes`.

    With `on_meta` a fresh model is built on the meta device, to be filled by `sharded_init`; one from a checkpoint is not.
    `check_images` is called with the source and the splits to train and validate on, before the model is built.
    """
    on_meta = on_meta and recipe.model.start is None
    notes: list[str] = []
    source = opened_source(recipe)
    notes.append(f"data: {source.describe()}")
    check_no_empty_class(source, recipe.data.train)
    train, validation = chosen_splits(recipe, source)
    notes += _part_notes(recipe, source, train, validation) + _validation_notes(recipe, validation)
    if check_images is not None:
        check_images(source, [split for split in (train, validation) if split is not None])
    if recipe.task.kind in SELF_SUPERVISED:
        model, preprocess = make_model(recipe, 0, (), notes, on_meta=on_meta)
        wrapper, pretext = make_pretext(recipe, model, preprocess, train, notes)
        notes += warnings_for(recipe, model, len(train))
        draw = (lambda twin: _draw_pretraining(twin, recipe.seed)) if on_meta else None
        return Prepared(model, pretext, preprocess, train, validation, (), source.describe(), notes, wrapper, draw, source)
    task = make_task(recipe, train)
    if train.task == "classify" and len(train.classes) == 1:
        notes.append(
            f"warning: there is only one class, {train.classes[0]!r}, so every prediction is right and nothing is learned."
        )
    model, preprocess = make_model(recipe, task.outputs, train.classes, notes, on_meta=on_meta)
    if recipe.task.distill != "none":
        task = make_distillation(recipe, task, model, preprocess, train.classes, notes)
    notes += warnings_for(recipe, model, len(train))
    draw = (lambda twin: initialise(twin, recipe.seed)) if on_meta else None
    return Prepared(model, task, preprocess, train, validation, train.classes, source.describe(), notes, None, draw, source)


def opened_source(recipe: Recipe) -> Source:
    spec = recipe.data
    if not spec.source:
        raise VitrailError(f"The recipe {recipe.name} has no images: add --data, such as --data folder:DIR.")
    skip = spec.ignore_unknown_classes
    return open_source(spec.source, rule=spec.split_rule, bad_images=spec.bad_images, ignore_unknown=skip)


def check_no_empty_class(source: Source, split: str) -> None:
    """Refuse class folders without training images: a mistake of copying, or a class that could never be predicted.

    Other sources may list classes that they do not use, which a user cannot remove; there it is only a warning.
    """
    train = source.split(split)
    if source.kind != "folder" or train.task != "classify":
        return
    empty = [train.classes[k] for k in np.flatnonzero(np.bincount(train.targets, minlength=len(train.classes)) == 0)]
    if empty:
        more = f" and {counted(len(empty) - 1, 'more class', 'more classes')}" if len(empty) > 1 else ""
        raise VitrailError(
            f"The class {empty[0]!r}{more} of {source.reference} has no training images. Add images to its folder, or remove it"
            f"{' from all splits' if len(source.splits) > 1 else ''}; `vitrail data check` lists all such classes."
        )


def _draw_pretraining(wrapper: Pretraining, seed: int) -> None:
    initialise(wrapper.encoder, seed)
    wrapper.reset(torch.Generator().manual_seed(seed))


def chosen_splits(recipe: Recipe, source: Source) -> tuple[Split, Split | None]:
    """Return the split to train on and the one to validate on."""
    spec = recipe.data
    train, held_out = divide(source, spec.train, holdout=spec.holdout, holdout_rule=spec.holdout_rule, fraction=spec.fraction)
    if held_out is not None:
        return train, held_out
    if spec.validate != "auto":
        return train, source.split(spec.validate)
    return train, next((source.splits[name] for name in ("val", "test") if name in source.splits), None)


def make_task(recipe: Recipe, split: Split) -> Task:
    spec = recipe.task
    if split.task == "unlabelled":
        raise VitrailError(
            f"{recipe.data.source} has no labels. Put the images of each class in a folder, "
            "or train without labels: --task.kind masked-patch."
        )
    if spec.kind not in ("auto", split.task):
        hint = " For a binary loss per class, use --task.loss sigmoid." if split.task == "classify" else ""
        raise VitrailError(
            f"task.kind is {spec.kind}, but {recipe.data.source} has {split.task} targets. Leave out --task.kind.{hint}"
        )
    if split.task == "regress":
        return Regress(split.targets, split.classes)
    if split.task == "multilabel":
        return MultiLabel(len(split.classes))
    weights = class_weights(split, spec.class_weights, sampling=recipe.data.sampling)
    return Classify(len(split.classes), loss=spec.loss, weights=weights)


def make_model(
    recipe: Recipe, outputs: int, classes: tuple[str, ...], notes: list[str], *, on_meta: bool = False
) -> tuple[Model, Preprocess]:
    spec = recipe.model
    if spec.start is None:
        model = create_model(
            spec.name,
            outputs=outputs,
            image_size=224 if spec.image_size is None else spec.image_size,
            device="meta" if on_meta else None,
            seed=recipe.seed,
            **spec.config_changes(),
        )
        size, channels = model.config.image_size, model.config.channels
        named = "google-vit" if recipe.data.preprocess == "auto" else recipe.data.preprocess
        preprocess = preset(named, size=size, channels=channels)
    else:
        model, preprocess = _continued(recipe, outputs, classes, notes)
    if spec.lora:
        _add_lora(model, recipe, notes)
    if spec.recompute:
        covered = model.checkpoint_activations(None if spec.recompute < 0 else spec.recompute, spec.recompute_keep)
        notes.append(f"activations recomputed in {counted(covered, 'block')}, keeping {spec.recompute_keep}")
    return model, dataclasses.replace(preprocess, exif=recipe.data.exif)


def _continued(recipe: Recipe, outputs: int, classes: tuple[str, ...], notes: list[str]) -> tuple[Model, Preprocess]:
    """Return a checkpoint made ready for these targets: a new zero-initialised head unless its classes are the same (§3.2)."""
    from vitrail.checkpoints import load

    spec = recipe.model
    assert spec.start is not None
    changes = spec.changes()
    fixed = sorted(set(changes) - {*CHANGEABLE, "channels", "pre_logits"})
    if fixed:
        raise VitrailError(f"model.{fixed[0]} cannot be changed in a trained checkpoint; leave it out, or train from scratch.")
    fields = {name: value for name, value in changes.items() if name in CHANGEABLE}
    channels = changes.get("channels")
    given = None if recipe.data.preprocess == "auto" else recipe.data.preprocess
    stem: Literal["sum"] | None = "sum" if channels else None
    bundle = load(spec.start, image_size=spec.image_size, channels=channels, stem=stem, preprocess=given, **fields)
    notes.append(f"start: {spec.start}, {bundle.model.config.name}")
    model = bundle.model
    if bundle.task_info.get("parts"):
        notes.append(f"dropped: {bundle.task_info['parts']}, which only {bundle.task_info['kind']} pre-training needs")
    if not outputs:
        notes.append(f"head: left out (the checkpoint had {model.config.outputs or 'none'}), there are no classes here")
        model.replace_head(0)
    elif same_classes(bundle.classes, classes) and model.config.outputs == outputs:
        notes.append(f"head: kept, the checkpoint has the same {counted(outputs, 'class', 'classes')}")
    else:
        without = ""
        if changes.get("pre_logits") == 0 and isinstance(model, ViT) and model.pre_logits is not None:
            model.pre_logits, model.config = None, model.config.replace(pre_logits=None)
            without = "; the tanh layer before it is left out"
        had = f"the checkpoint had {model.config.outputs or 'none'}"
        notes.append(f"head: new, zero-initialised, {counted(outputs, 'output')} ({had}){without}")
        model.replace_head(outputs)
    notes += [note for note in bundle.report.notes if note.startswith(("image size", "input channels"))]
    notes += [f"assumed about {spec.start}: {text}" for text in bundle.report.assumptions]
    if recipe.data.preprocess != "auto":
        return model, preset(recipe.data.preprocess, size=model.config.image_size, channels=model.config.channels)
    return model, bundle.stored_preprocess("--data.preprocess")


def _add_lora(model: Model, recipe: Recipe, notes: list[str]) -> None:
    spec = recipe.model
    if spec.start is None:
        raise VitrailError(
            "LoRA adapts a trained model, and this one starts from random values: add --from, or leave out --model.lora."
        )
    if spec.freeze:
        raise VitrailError("--model.freeze trains the head only, and --model.lora the adapters too; choose one of them.")
    if recipe.task.kind in SELF_SUPERVISED:
        raise VitrailError(f"LoRA is for fine-tuning with labels, not for {recipe.task.kind}; leave out --model.lora.")
    added = add_lora(model, spec.lora, alpha=spec.lora_alpha, matrices=spec.lora_on, seed=recipe.seed)  # type: ignore[arg-type]
    notes.append(f"LoRA: rank {spec.lora} on {', '.join(spec.lora_on)}, {added:,} values; merged in the saved model")


def _teacher_classes(bundle: Bundle, classes: tuple[str, ...]) -> tuple[str, ...]:
    """Return the teacher's class names as the dataset spells them; none if they were only assumed, and are others."""
    if same_classes(bundle.classes, classes):
        return classes
    return () if bundle.classes_assumed else tuple(bundle.classes or ())


def make_distillation(
    recipe: Recipe, labels: Task, model: Model, preprocess: Preprocess, classes: tuple[str, ...], notes: list[str]
) -> Task:
    from vitrail.checkpoints import load

    spec = recipe.task
    if not isinstance(labels, Classify):
        raise VitrailError(
            f"Distillation needs one label per image, but {recipe.data.source} has {labels.kind} targets. "
            "Leave out --task.distill and --task.teacher."
        )
    assert spec.teacher is not None
    bundle = load(spec.teacher)
    notes += [f"assumed about {spec.teacher}: {text}" for text in bundle.report.assumptions]
    teacher_preprocess = bundle.stored_preprocess(f"vitrail convert {spec.teacher} FOLDER --preprocess")
    two_heads = isinstance(model.config, ViTConfig) and model.config.distill_token
    token = "the distillation token" if two_heads else "the only head"
    notes.append(f"teacher: {bundle.model.config.name} with its own preprocessing, {spec.distill} distillation into {token}")
    assert spec.distill != "none"
    return Distill(
        labels,
        bundle.model,
        classes=classes,
        teacher_classes=_teacher_classes(bundle, classes),
        preprocess=preprocess,
        teacher_preprocess=teacher_preprocess,
        mode=spec.distill,
        weight=spec.distill_weight,
        temperature=spec.temperature,
        two_heads=two_heads,
    )


def _part_notes(recipe: Recipe, source: Source, train: Split, validation: Split | None) -> list[str]:
    """Say what is trained on if that is a part of the split, whose size the source's description has."""
    spec = recipe.data
    if spec.fraction == 1 and not spec.holdout:
        return []
    held_out = f", {len(validation):,} held out for validation" if spec.holdout and validation is not None else ""
    return [f"training on {len(train):,} of the {len(source.split(spec.train)):,} images of {spec.train}{held_out}"]


def _validation_notes(recipe: Recipe, validation: Split | None) -> list[str]:
    """Say that the test split is validated on because there is no val, and warn if the best checkpoint is chosen on it."""
    if recipe.data.validate != "auto" or validation is None or validation.name != "test":
        return []
    if recipe.keep_best is None and not recipe.patience:
        return ["validation: the split test, since there is no val"]
    return [
        "warning: there is no val, so the checkpoint is chosen on the split test, and its accuracy there is optimistic. "
        "Hold out a part of the training split instead: --data.holdout 0.1."
    ]


def warnings_for(recipe: Recipe, model: Model, images: int) -> list[str]:
    """Return warnings about settings that usually go wrong."""
    warnings = []
    optim, config = recipe.optim, model.config
    if optim.name != "sgd" and optim.lr >= 1e-2:
        warnings.append(
            f"warning: learning rate {optim.lr:g} with {optim.name}: from 1e-2 on Vision Transformers diverge or predict one "
            "class. Use 1e-3 or less, or sgd, for which such rates are usual."
        )
    if isinstance(config, ViTConfig) and config.width // config.heads < 32:
        warnings.append(
            f"warning: heads of {config.width // config.heads} channels ({config.width} / {config.heads}) are small; "
            "below 32 attention learns poorly. Use fewer heads or a larger width."
        )
    learns_labels = recipe.task.kind not in SELF_SUPERVISED
    embedded = recipe.data.source.partition("?")[0] == "digits"  # made for trying out, and easy enough
    if learns_labels and recipe.model.start is None and isinstance(config, ViTConfig) and images < 100_000 and not embedded:
        warnings.append(
            f"warning: {images:,} training images are few for a Vision Transformer from scratch (the paper's Fig. 3 and 4); "
            "`vitrail finetune` starts from a trained one."
        )
    return warnings
