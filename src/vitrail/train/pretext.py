"""Preparation of self-supervised training: the parts around the model, the task, and a check of its targets."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitrail.data import Preprocess, Split
from vitrail.data.loader import TrainLoader
from vitrail.errors import VitrailError, counted
from vitrail.files import atomic_folder
from vitrail.models import Model, ViT, ViTConfig
from vitrail.models.autoencoder import MaskedAutoencoder
from vitrail.models.masked import MaskedPatches, Pretraining
from vitrail.regular_files import read_json_object, utf8_path
from vitrail.tasks.masked import Masked, compute_baseline
from vitrail.tasks.patch_targets import Colours, PatchTarget, PixelValues
from vitrail.train.config import Recipe, TaskSpec
from vitrail.train.plain import from_plain
from vitrail.train.shards import whole

FOLDER = "reconstruction"
_WEIGHTS, _CONFIG = "parts.safetensors", "config.json"
_SAMPLED_PATCHES = 100_000  # patches, whose entropy is then known to a percent of a bit
_DEFAULTS: dict[str, dict[str, Any]] = {
    "masked-patch": {"mask_rate": 0.5, "patch_target": "mean-colour"},
    "masked-autoencoder": {"mask_rate": 0.75, "decoder_width": 512, "decoder_depth": 4},
}


def make_pretext(
    recipe: Recipe, model: Model, preprocess: Preprocess, train: Split, notes: list[str]
) -> tuple[Pretraining, Masked]:
    """Return the model with its parts, and its task; refused where there is nothing to hide or nothing to learn."""
    spec = with_defaults(recipe.task)
    if not isinstance(model, ViT):
        raise VitrailError(
            f"{model.config.name} is a ResNet: it has no patch embeddings that could be masked. {spec.kind} needs a Vision "
            "Transformer, such as --model.name ViT-B/16."
        )
    wrapper, task = pretext(model, spec, preprocess)
    if not next(model.parameters()).is_meta:
        wrapper.reset(torch.Generator().manual_seed(recipe.seed))
    baseline = compute_baseline(task.target, _sample_images(recipe, train, preprocess, wrapper.patches))
    baseline.check(preprocess.describe())
    task.baseline = baseline
    notes.append(_describe(wrapper, spec))
    notes.append(baseline.describe(task.unit))
    if model.config.resnet is not None:
        notes.append(
            "warning: the ResNet of a hybrid looks beyond the borders of a patch, so hidden patches can partly be seen in their "
            "neighbours; the task is easier than for a plain ViT."
        )
    if model.config.pooling == "class":
        notes.append(
            "the loss is on patches, so the class token's last output learns nothing by itself: for probes and few-shot take "
            "the mean of the patches (--feature mean), or pre-train with --model.pooling mean"
        )
    return wrapper, task


def with_defaults(spec: TaskSpec) -> TaskSpec:
    """Return the settings with defaults for those that are None."""
    missing = {name: value for name, value in _DEFAULTS[spec.kind].items() if getattr(spec, name) is None}
    return dataclasses.replace(spec, **missing)


def pretext(model: ViT, spec: TaskSpec, preprocess: Preprocess) -> tuple[Pretraining, Masked]:
    """Return the parts and the task of a specification with defaults, not yet initialised."""
    config = model.config
    if config.pooling == "map":
        raise VitrailError(
            f"{config.name} pools by attention, and that pooling would stay untrained: {spec.kind} has its loss on the patches. "
            "Use --model.pooling mean or class."
        )
    target = target_of(spec, config, preprocess)
    assert spec.mask_rate is not None
    wrapper: Pretraining
    with torch.device("meta") if next(model.parameters()).is_meta else nullcontext():
        if spec.kind == "masked-patch":
            wrapper = MaskedPatches(model, target.outputs, spec.mask_rate)
        else:
            assert spec.decoder_width is not None and spec.decoder_depth is not None
            wrapper = MaskedAutoencoder(model, target.outputs, spec.mask_rate, width=spec.decoder_width, depth=spec.decoder_depth)
    settings = {name: getattr(spec, name) for name in _DEFAULTS[spec.kind]}
    settings["parts"] = named_parts(wrapper.parts())
    kind: Any = spec.kind
    return wrapper, Masked(kind, target, patches=wrapper.patches, draws=wrapper.draws, settings=settings)


def target_of(spec: TaskSpec, config: ViTConfig, preprocess: Preprocess) -> PatchTarget:
    if spec.kind == "masked-autoencoder":
        return PixelValues(preprocess, config.stride, normalised=True)
    if spec.patch_target == "pixels":
        return PixelValues(preprocess, config.stride)
    return Colours(preprocess, config.stride, cells=4 if spec.patch_target == "downsized" else 1)


def _sample_images(recipe: Recipe, train: Split, preprocess: Preprocess, patches: int) -> Iterator[Tensor]:
    """Yield the first training images, cropped and changed as in training: enough to know their colours."""
    loader = TrainLoader(
        train,
        preprocess=preprocess,
        augment=recipe.augment,
        batch=recipe.batch,
        seed=recipe.seed,
        sampling=recipe.data.sampling,
        micro_batch=64,
        workers=0,
        bad_images=recipe.data.bad_images,
    )
    needed, seen = min(len(train), max(512, min(_SAMPLED_PATCHES // patches, 2048))), 0
    for batch in loader:
        yield batch.images
        seen += len(batch)
        if seen >= needed:
            break
    loader.close()


def _describe(wrapper: Pretraining, spec: TaskSpec) -> str:
    start = f"{spec.kind}: {wrapper.num_masked} of {wrapper.patches} patches masked"
    if isinstance(wrapper, MaskedPatches):
        kept = wrapper.num_masked - wrapper.masked - wrapper.replaced
        return f"{start} ({wrapper.masked} masked, {wrapper.replaced} replaced, {kept} kept), predicting {spec.patch_target}"
    depth = spec.decoder_depth or 0
    return f"{start} from the encoder, decoder of {counted(depth, 'block')} of width {spec.decoder_width} (not in the paper)"


def named_parts(names: Iterable[str]) -> str:
    """Tensors by name; those of a decoder's blocks as one."""
    names = list(names)
    short = [name for name in names if not name.startswith("decoder_blocks.")]
    blocks = len(names) - len(short)
    return ", ".join([*short, *([f"decoder_blocks ({blocks} tensors)"] if blocks else [])])


def save_parts(run: Path, wrapper: Pretraining, task: Masked, *, write: bool) -> None:
    """Write what the checkpoint of the model leaves out into the run folder. Every rank takes part, one writes."""
    from safetensors.torch import save_file

    parts = {name: whole(value).detach().cpu().contiguous() for name, value in wrapper.parts().items()}
    if not write:
        return
    with atomic_folder(run / FOLDER) as temporary:
        save_file(parts, temporary / _WEIGHTS, metadata={"format": "pt"})
        (temporary / _CONFIG).write_text(json.dumps(task.describe(), indent=2) + "\n", encoding="utf-8")


def load_parts(run: Path, model: Model, preprocess: Preprocess) -> tuple[Pretraining, Masked]:
    """Return the parts of a finished run, around its model."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    spec = _read(run)
    assert isinstance(model, ViT)
    wrapper, task = pretext(model, spec, preprocess)
    file = run / FOLDER / _WEIGHTS
    try:
        with utf8_path(file) as readable:
            missing, unknown = wrapper.load_state_dict(load_file(readable), strict=False)
    except (OSError, RuntimeError, SafetensorError) as error:  # not there, other shapes, corrupted
        reason = " ".join(str(error).split())[:200]
        raise VitrailError(f"{file} cannot be loaded ({reason}). Copy the run folder again.") from error
    lost = [name for name in missing if not name.startswith("encoder.")]
    if lost or unknown:
        raise VitrailError(f"{file} does not match its config.json: {', '.join([*lost, *unknown][:3])}. Copy the run folder again.")
    return wrapper.to(model.norm.weight.device).eval(), task


def _read(run: Path) -> TaskSpec:
    file = run / FOLDER / _CONFIG
    if not file.is_file():
        raise VitrailError(
            f"{run} holds no {FOLDER} folder. Reconstructions need the folder of a run with --task.kind masked-patch or "
            "masked-autoencoder: a model alone has no prediction head."
        )
    try:
        config = read_json_object(file)
        return from_plain(TaskSpec, {name: config[name] for name in ("kind", *_DEFAULTS[config["kind"]])})
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise VitrailError(f"{file} does not have the settings of masked pre-training. Copy the run folder again.")
