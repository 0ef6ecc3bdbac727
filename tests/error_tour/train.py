"""Errors of training runs: data and model, devices, run folders, checkpoints, steps that fail."""

from __future__ import annotations

import dataclasses
import errno
import signal
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from tests.error_tour.case import Case, at
from tests.error_tour.files import scratch
from tests.error_tour.models import new_vit
from tests.train.small import MODEL, small
from vitrail.data import open_source
from vitrail.data.augment.spec import Augment
from vitrail.models import create_model
from vitrail.tasks import Classify, Regress
from vitrail.train.best_checkpoint import Selection, check_metric
from vitrail.train.callbacks import Callback, TensorBoard, WeightsAndBiases
from vitrail.train.captured_step import CapturedStep
from vitrail.train.config import ModelSpec, OptimSpec, Recipe, ScheduleSpec, TaskSpec
from vitrail.train.fp8 import use_fp8
from vitrail.train.loop import Loop, total_steps, train
from vitrail.train.parallel import World, choose_device, mesh_of
from vitrail.train.parameter_groups import freeze, matching, parameter_groups
from vitrail.train.prepare import Prepared, check_no_empty_class, make_distillation, prepare
from vitrail.train.pretext import load_parts, save_parts
from vitrail.train.recovery import _any_failed, halve_micro_batch
from vitrail.train.result import Result
from vitrail.train.run import RunFolder
from vitrail.train.snapshots import Snapshots
from vitrail.train.step import Step
from vitrail.train.sweep import best_rate
from vitrail.train.upgrade import upgrade

CPU = torch.device("cpu")
FROM = ModelSpec(start="model", lora=4)
RESNET = ModelSpec(name="BiT-R26x1", image_size=32, channels=1, layers=(1,))


def masked(**changes: Any) -> Recipe:
    return small(task=TaskSpec(kind="masked-patch"), augment=Augment(flip=0.0), **changes)


def run_folder(**files: str) -> RunFolder:
    """Return a folder with these files: `config` is config.json."""
    folder = scratch()
    for name, text in files.items():
        (folder / f"{name}.json").write_text(text)
    return RunFolder(folder)


# Data and model


def empty_class() -> object:
    folder = scratch()
    for split in ("train", "val"):
        for name in ("cat", "dog"):
            (folder / split / name).mkdir(parents=True)
            if (split, name) != ("train", "dog"):
                (folder / split / name / "0.jpg").write_bytes(Path("cat.jpg").read_bytes())
    return check_no_empty_class(open_source(f"folder:{folder}"), "train")


def distill_numbers() -> object:
    recipe = small(task=TaskSpec(distill="hard", teacher="model"))
    return make_distillation(recipe, Regress(np.array([[1.0], [2.0]]), ("age",)), *(None,) * 2, (), [])  # type: ignore[arg-type]


@cache
def masked_run() -> Prepared:
    return prepare(masked())


def parts(name: str = "", content: str | dict[str, Tensor] | None = None) -> object:
    """Load the parts of a masked run, of which one file has this content; None: the file is missing."""
    run, prepared = scratch(), masked_run()
    save_parts(run, prepared.wrapper, prepared.task, write=True)  # type: ignore[arg-type]
    file = run / "reconstruction" / name
    if isinstance(content, dict):
        save_file(content, file)
    elif content is not None:
        file.write_text(content)
    else:
        file.unlink()
    return load_parts(run, prepared.model, prepared.preprocess)


def frozen_rate() -> object:
    model, spec = new_vit(), OptimSpec(freeze=("blocks",), lr_scale=("blocks.0=2",))
    freeze(model, spec)
    return parameter_groups(model, spec)


# Devices


class OtherRank(World):
    """Two ranks, of which the other one has the opposite answer."""

    def gather(self, value: Any) -> list[Any]:
        return [value, not value]


def gpus(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


def lost_rank() -> None:
    World(CPU, rank=1, ranks=2).raise_rank_error(RuntimeError("gloo/transport/tcp/pair.cc:547] Connection closed by peer"))


def half_precision_shards() -> object:
    runner: Any = SimpleNamespace(world=World(CPU, mode="fsdp"))
    nothing: Any = None
    return Step(runner, nothing, nothing, Recipe(), total=1, precision="fp16", average=None, schedule=ScheduleSpec())


# Steps that fail


def unreadable_validation() -> object:
    folder = scratch()
    for split in ("train", "val"):
        for name in "ab":
            (folder / split / name).mkdir(parents=True)
            for number in range(4):
                content = Path("cat.jpg").read_bytes() if split == "train" else b"not an image"
                (folder / split / name / f"{number}.jpg").write_bytes(content)
    data = {"data__source": f"folder:{folder}", "data__bad_images": "skip", "data__holdout": 0.0}
    return train(small(**data, model__channels=3, batch=4, steps=3), folder / "run", curves=False)


def diverging(**changes: Any) -> object:
    return train(small(optim__lr=1e30, schedule=ScheduleSpec(), checkpoint_every=100, **changes), scratch(), curves=False)


class Poison(Callback):
    """Makes a weight NaN before the next checkpoint."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def trained(self, record: dict[str, Any]) -> None:
        torch.nn.init.constant_(self.model.head.weight, float("nan"))  # type: ignore[union-attr, arg-type]


def nan_weights() -> object:
    prepared = prepare(small(ema=0.0))
    return train(small(ema=0.0), scratch(), prepared=prepared, callbacks=[Poison(prepared.model)], curves=False)


def out_of_memory() -> object:
    recipe = small(micro_batch=16)
    prepared = prepare(recipe)

    def full(module: nn.Module, inputs: Any) -> None:
        raise torch.OutOfMemoryError("pretended")

    prepared.model.register_forward_pre_hook(full)
    return train(recipe, scratch(), prepared=prepared)


def out_of_memory_on_one_rank() -> None:
    prepared = SimpleNamespace(model=new_vit())
    loop: Any = SimpleNamespace(recipe=small(), prepared=prepared, micro_batch=8, world=World(CPU, ranks=2))
    halve_micro_batch(loop, torch.OutOfMemoryError("pretended"))


# Run folders and checkpoints


def held_twice() -> None:
    first = run_folder()
    first.hold()
    try:
        RunFolder(first.path).hold()
    finally:
        first.release()


def other_rate() -> object:
    run = run_folder()
    run.write_config(small(), {})
    return run.check_unchanged(small(optim__lr=1e-3))


def log_is_a_folder() -> object:
    run = run_folder()
    (run.path / "metrics.jsonl").mkdir()
    return run.records()


def changed_state() -> None:
    loop = Loop(small(), run_folder(), World(CPU), prepare(small()), ())
    try:
        loop.return_to({"step": 4})
    finally:
        loop.close()


def weights(value: float, width: int = 3) -> dict[str, Tensor]:
    return {"model.a": torch.full((2, width), value)}


def checkpoint(value: float) -> Snapshots:
    snapshots = Snapshots(scratch() / "checkpoints", World(CPU))
    snapshots.save(2, weights(value), {"skipped_steps": []})
    snapshots.finish()
    return snapshots


def full_disk() -> None:
    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    snapshots = checkpoint(1.0)
    snapshots._write = full  # type: ignore[method-assign]
    snapshots.save(4, weights(1.0), {})
    snapshots.finish()


def truncated_checkpoint() -> object:
    snapshots = checkpoint(1.0)
    folder = snapshots.path(2)
    next(folder.glob("*.distcp")).write_bytes(b"")
    return snapshots._read(folder, weights(0.0))


def stopped_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    result = Result(Path("run"), 3, "accuracy", {}, ended_by=signal.SIGTERM)
    monkeypatch.setattr("vitrail.train.sweep.train", lambda *arguments, **named: result)


CASES: tuple[Case, ...] = (
    at("train/prepare.py:opened_source", lambda: prepare(small(data__source="")), "The recipe small has no images:",
       "add --data, such as --data folder:DIR."),
    at("train/prepare.py:check_no_empty_class", empty_class, "The class 'dog' of folder:", "has no training images.",
       "Add images to its folder, or remove it from all splits;"),
    at("train/prepare.py:make_task#1", lambda: prepare(small(data__source="folder:flat?labels=none", data__holdout=0.0)),
       "folder:flat?labels=none has no labels.", "Put the images of each class in a folder",
       "or train without labels: --task.kind masked-patch."),
    at("train/prepare.py:make_task#2", lambda: prepare(small(task=TaskSpec(kind="multilabel"))),
       "task.kind is multilabel, but digits has classify targets.", "Leave out --task.kind.", "use --task.loss sigmoid."),
    at("train/prepare.py:_continued", lambda: prepare(small(model=ModelSpec(start="model", depth=3))),
       "model.depth cannot be changed in a trained checkpoint;", "leave it out, or train from scratch."),
    at("train/prepare.py:_add_lora#1", lambda: prepare(small(model=dataclasses.replace(MODEL, lora=4))),
       "this one starts from random values:", "add --from, or leave out --model.lora."),
    at("train/prepare.py:_add_lora#2", lambda: prepare(small(model=dataclasses.replace(FROM, freeze=True))),
       "--model.freeze trains the head only, and --model.lora the adapters too;", "choose one of them."),
    at("train/prepare.py:_add_lora#3", lambda: prepare(masked(model=FROM)), "not for masked-patch;",
       "LoRA is for fine-tuning with labels", "leave out --model.lora."),
    at("train/prepare.py:make_distillation", distill_numbers, "but digits has regress targets.",
       "Distillation needs one label per image", "Leave out --task.distill and --task.teacher."),
    at("train/pretext.py:make_pretext", lambda: prepare(masked(model=RESNET)),
       "BiT-R5x1 is a ResNet: it has no patch embeddings that could be masked.",
       "masked-patch needs a Vision Transformer, such as --model.name ViT-B/16."),
    at("train/pretext.py:pretext", lambda: prepare(masked(model=dataclasses.replace(MODEL, pooling="map"))), "pools by attention",
       "Use --model.pooling mean or class."),
    at("train/pretext.py:load_parts#1", lambda: parts("parts.safetensors"), "parts.safetensors cannot be loaded (",
       "Copy the run folder again."),
    at("train/pretext.py:load_parts#1", lambda: parts("parts.safetensors", "text"), "parts.safetensors cannot be loaded (",
       "Copy the run folder again."),
    at("train/pretext.py:load_parts#2", lambda: parts("parts.safetensors", {"extra": torch.zeros(2)}),
       "parts.safetensors does not match its config.json: mask_token", "Copy the run folder again."),
    at("train/pretext.py:_read#1", lambda: parts("config.json"), "holds no reconstruction folder.",
       "Reconstructions need the folder of a run with --task.kind masked-patch or masked-autoencoder"),
    at("train/pretext.py:_read#2", lambda: parts("config.json", '{"kind": "masked-patch", "mask_rate": "x", "patch_target": ""}'),
       "config.json does not have the settings of masked pre-training.", "Copy the run folder again."),
    at("train/parameter_groups.py:freeze", lambda: freeze(new_vit(), OptimSpec(freeze=("*",))),
       "optim.freeze * leaves nothing to train:", "Leave it out, or except some with --optim.freeze '!PATTERN', such as '!head'."),
    at("train/parameter_groups.py:parameter_groups", frozen_rate,
       "optim.lr_scale has 'blocks.0=2', but every parameter that it matches is frozen.", "Leave it out."),
    at("train/parameter_groups.py:matching", lambda: matching("hed", ["head.weight", "head.bias"], "optim.freeze"),
       "optim.freeze has 'hed', which matches none of the 2 parameters.", "Did you mean head?",
       "`vitrail train --explain` lists them."),
    at("train/best_checkpoint.py:Selection.update",
       lambda: Selection(Recipe(keep_best="f1"), Classify(2)).update({"accuracy": 0.5, "loss": 1.0}, 1),
       "keep_best is 'f1', which is not a metric of this run:", "it has accuracy, loss."),
    at("train/best_checkpoint.py:check_metric#1",
       lambda: check_metric(Recipe(patience=1), Classify(2), has_validation=False, has_evaluators=False),
       "keep_best and patience need validation images, and there are none:", "add --data.holdout 0.1."),
    at("train/best_checkpoint.py:check_metric#2",
       lambda: check_metric(Recipe(keep_best="acuracy"), Classify(2), has_validation=True, has_evaluators=False),
       "keep_best is 'acuracy';", "it can be accuracy, balanced_accuracy, loss.", "Did you mean accuracy?"),
    at("train/callbacks.py:TensorBoard.__init__", TensorBoard, "TensorBoard logs need tensorboard:",
       "install the extra with pip install 'vitrail[tensorboard]'.",
       hidden="torch.utils.tensorboard"),
    at("train/callbacks.py:WeightsAndBiases.__init__", lambda: WeightsAndBiases("vit"), "Logging to Weights & Biases needs wandb:",
       "install the extra with pip install 'vitrail[wandb]'.", hidden="wandb"),
    at("train/fp8.py:use_fp8", lambda: use_fp8(create_model("ViT-Ti/16", depth=1, seed=0), Recipe(), World(CPU)),
       "and the device is cpu.", "it needs a GPU with fp8 matmuls (H100 and later)", "Use --precision auto."),
    at("train/parallel.py:_device_named#1", lambda: choose_device("gpu"), "There is no device 'gpu'.",
       "Use auto, cpu, cuda, cuda:1 or mps."),
    at("train/parallel.py:_device_named#2", lambda: choose_device("cuda:1"), "--device cuda:1: torch finds no GPU.",
       "`vitrail doctor` shows more; or use --device cpu.", patch=partial(gpus, 0)),
    at("train/parallel.py:_device_named#3", lambda: choose_device("cuda:2"), "--device cuda:2: the last GPU here is cuda:1.",
       "`vitrail doctor` lists them.", patch=partial(gpus, 2)),
    at("train/parallel.py:_device_named#4", lambda: choose_device("xpu"), "--device xpu: torch finds no such device here.",
       "`vitrail doctor` lists those it finds."),
    at("train/parallel.py:mesh_of", lambda: mesh_of(World(CPU, ranks=3, local_ranks=2, mode="hybrid")),
       "there are 3 ranks, 2 of them on this machine.", "Start as many on each, or use --parallel fsdp."),
    at("train/parallel.py:World.raise_rank_error", lost_rank, "Rank 1 of 2 cannot reach another rank,",
       "Run the same command again to resume from the newest checkpoint."),
    at("train/step.py:Step.__init__", half_precision_shards, "fp16 with loss scaling cannot be combined with sharding;",
       "use --precision bf16."),
    at("train/loop.py:Loop.__init__",
       lambda: Loop(small(), run_folder(), World(CPU, mode="fsdp"), masked_run(), (), [lambda prepared, world: lambda model: {}]),
       "--parallel is fsdp.", "Evaluators need the whole model on each device;", "Use --parallel ddp."),
    at("train/loop.py:total_steps", lambda: total_steps(Recipe(), 10), "The length of the run is missing:",
       "add --epochs or --steps."),
    at("train/validate.py:validate", unreadable_validation, "No image of the split val can be read,",
       "`vitrail data check` says why; hold out training images instead with --data.holdout 0.1."),
    at("train/captured_step.py:CapturedStep.__init__", lambda: CapturedStep(lambda: None, []),
       "There are no parameters to compute gradients for;", "pass model.parameters()."),
    at("train/captured_step.py:_detached", lambda: CapturedStep(lambda: 0.5, new_vit().parameters())(),
       "The step returned a value of type float;", "return tensors, which a replay can write again."),
    at("train/recovery.py:handle_nonfinite#1", diverging, "A loss or gradient was not finite in step 1 (epoch 0):",
       "Try a lower --optim.lr than 1e+30, a longer --schedule.warmup", "--on-nonfinite skip or rollback."),
    at("train/recovery.py:handle_nonfinite#2", lambda: diverging(on_nonfinite="rollback"),
       "There is no valid checkpoint to return to.", "Try a lower --optim.lr than 1e+30", "--on-nonfinite skip.",
       patch=lambda one: one.setattr(Snapshots, "load", lambda *arguments: None)),  # all of them corrupted
    at("train/recovery.py:refuse_to_save", nan_weights, "The weight head.weight is not finite after step 2.",
       "This checkpoint was not saved; there is none before it.", "Try a lower --optim.lr than 0.002"),
    at("train/recovery.py:_any_failed",
       lambda: _any_failed(SimpleNamespace(world=OtherRank(CPU, ranks=2, mode="fsdp"), micro_batch=8), True),  # type: ignore[arg-type]
       "Rank 0 ran out of memory at micro-batch 8, others did not", "Use --micro-batch 4, or end other programs on that GPU."),
    at("train/recovery.py:halve_micro_batch#1", out_of_memory, "Out of memory at micro-batch 16 (ViT-Ti/4, 8×8).",
       "Try --micro-batch 8 or auto; the batch of 32 stays as it is."),
    at("train/recovery.py:halve_micro_batch#2", out_of_memory_on_one_rank, "Out of memory at micro-batch 8",
       "The other ranks cannot follow now; use --micro-batch 4."),
    at("train/run.py:RunFolder.hold#1", lambda: RunFolder("notes.txt/run").hold(),
       "Cannot write into notes.txt/run: Not a directory.", "Choose another folder with --out, or change its permissions."),
    at("train/run.py:RunFolder.hold#2", held_twice, "Another process is training in", "Wait for it, or choose another --out."),
    at("train/run.py:RunFolder._read_config#1", lambda: run_folder(config='{"format": 9}').saved_recipe(),
       "config.json: This run has format 9", "Update Vitrail. For a new run, choose another --out."),
    at("train/run.py:RunFolder._read_config#2", lambda: run_folder(config="{}").saved_recipe(),
       "config.json is not a run's configuration (it has no 'recipe').", "Choose another --out."),
    at("train/run.py:RunFolder.check_unchanged#1", lambda: run_folder().check_unchanged(small(), ["optim.lrr"]),
       "--allow-change names 'optim.lrr', which is not a setting.", "Did you mean optim.lr?"),
    at("train/run.py:RunFolder.check_unchanged#2", other_rate, "holds a run with other settings: optim.lr: 0.002 → 0.001",
       "To resume it, use its settings. For a new run, choose another --out.", "add --allow-change optim.lr."),
    at("train/run.py:RunFolder.records", log_is_a_folder, "metrics.jsonl cannot be read: a folder, not a regular file.",
       "Choose another --out."),
    at("train/upgrade.py:_format", lambda: upgrade({"format": 9}), "This run has format 9,",
       "this version of Vitrail reads formats 1 to 4. Update Vitrail."),
    at("train/loop.py:Loop.return_to", changed_state, "state.json of the checkpoint of step 4 in",
       "has been changed ('skipped_steps').",
       "Delete that checkpoint, and run the same command again to resume from the one before."),
    at("train/snapshots.py:Snapshots.finish", full_disk, "A checkpoint could not be written to", "No space left on device.",
       "The one before it is valid (step 2). Free some space, then run again to resume."),
    at("train/snapshots.py:Snapshots.load", lambda: checkpoint(float("nan")).load(weights(0.0)), "No checkpoint in",
       "can be resumed: the weights of each are not finite or it is corrupted.",
       "Start a new run with another --out and a lower --optim.lr."),
    at("train/snapshots.py:Snapshots._read#1", lambda: checkpoint(1.0).load(weights(0.0, width=4)),
       "belongs to another model or optimiser (− saved, + this run): - model.a [2, 3] + model.a [2, 4]",
       "Use the settings of that run, or another --out."),
    at("train/snapshots.py:Snapshots._read#2", truncated_checkpoint, "step-00000002 cannot be read (EOFError).",
       "Remove it to resume from the one before it."),
    at("train/sweep.py:best_rate#1", lambda: best_rate(small(), scratch(), say=print), "This recipe has no learning rates to try:",
       "add --lr-grid 0.001 0.003 0.01 0.03."),
    at("train/sweep.py:best_rate#2", lambda: best_rate(small(lr_grid=(0.01, 0.03)), scratch(), say=print),
       "The sweep was interrupted at learning rate 0.01;", "run the same command again to resume.", patch=stopped_sweep),
    at("train/sweep.py:best_rate#3", lambda: best_rate(small(lr_grid=(1e30,)), scratch(), say=print),
       "Training diverged with every learning rate of the grid.", "Try lower ones with --lr-grid."),
)  # fmt: skip
