"""Errors of a recipe's settings, before anything is opened."""

from __future__ import annotations

from typing import Any

from tests.error_tour.case import Case, at
from tests.train.small import small
from vitrail.data.augment.spec import Augment
from vitrail.train.config import DataSpec, ModelSpec, OptimSpec, Recipe, ScheduleSpec, TaskSpec
from vitrail.train.plan import make_plan

MASKED = TaskSpec(kind="masked-patch")


def optim(**settings: Any) -> Recipe:
    return Recipe(epochs=1, optim=OptimSpec(**settings))


CASES: tuple[Case, ...] = (
    at("train/config.py:check#1", lambda: optim(lr=float("nan")), "optim.lr is nan;", "it must be a finite number."),
    at("train/config.py:check#2", lambda: Recipe(epochs=1, steps=5), "Both epochs=1 and steps=5 are given;", "Leave one out."),
    at("train/config.py:check#3", lambda: Recipe(batch=0), "batch is 0;", "it must be at least 1."),
    at("train/config.py:check#4", lambda: Recipe(micro_batch=0), "micro_batch is 0;", "at least 1, or auto for what fits."),
    at("train/config.py:check#6", lambda: Recipe(ema=1.0), "ema is 1.0;",
       "it is a decay from 0 (off) up to, but not including, 1, such as 0.9999."),
    at("train/config.py:check#7", lambda: Recipe(epochs=5, schedule=ScheduleSpec(warmup="10ep")),
       "schedule.warmup is 10ep, but the run has only 5 epochs.", "Train longer, or use a shorter warm-up."),
    at("train/config.py:check#8", lambda: Recipe(data=DataSpec(holdout=1.0)), "data.holdout is 1.0;",
       "it is a fraction of the training split, from 0 to below 1."),
    at("train/config.py:check#9", lambda: Recipe(data=DataSpec(fraction=0.0)), "data.fraction is 0.0;",
       "it is a part of the training split, above 0 and at most 1."),
    at("train/config.py:check#10", lambda: Recipe(sweep_holdout=0.0), "sweep_holdout is 0.0;",
       "it is a part of the training split, above 0 and below 1."),
    at("train/config.py:_check_choices", lambda: optim(name="adma"), "optim.name is 'adma';", "it can be sgd, adam, adamw.",
       "Did you mean adam"),
    at("train/config.py:_check_selection#1", lambda: Recipe(min_improvement=0.1), "min_improvement is 0.1,",
       "it is for early stopping, which is off: add --patience, the number of validations to wait."),
    at("train/config.py:_check_selection#2", lambda: Recipe(final_model="best"),
       "final_model is best, but no checkpoint is kept as the best:", "add --keep-best METRIC, such as accuracy."),
    at("train/config.py:_check_selection#3", lambda: Recipe(keep_best="loss", eval_every=0.0), "eval_every is 0:",
       "keep_best and patience compare validations", "Set --eval-every to 1."),
    at("train/config.py:_check_optimiser#2", lambda: optim(decay="coupled"), "optim.decay is coupled,", "use optim.name=adam."),
    at("train/config.py:_check_optimiser#3", lambda: optim(clip=0.0), "optim.clip is 0;",
       "it is a norm above 0, or None for no clipping."),
    at("train/config.py:_check_optimiser#4", lambda: optim(layer_decay=1.5), "optim.layer_decay is 1.5;",
       "it is above 0 and at most 1, such as 0.75."),
    at("train/config.py:_check_optimiser#5", lambda: optim(beta1=1.5), "optim.beta1 is 1.5;",
       "it is from 0 to below 1, such as 0.9."),
    at("train/config.py:_check_optimiser#6", lambda: optim(name="sgd", nesterov=True, momentum=0.0),
       "optim.nesterov needs momentum, but optim.momentum is 0.", "Leave one of them out."),
    at("train/config.py:_check_distillation#1", lambda: Recipe(task=TaskSpec(distill="hard")),
       "task.distill is hard and task.teacher is None;", "distillation needs both", "Add the other, or leave both out."),
    at("train/config.py:_check_distillation#2", lambda: Recipe(task=TaskSpec(distill_weight=2.0)), "task.distill_weight is 2;",
       "it must be between 0 and 1."),
    at("train/config.py:_check_distillation#3", lambda: Recipe(task=TaskSpec(temperature=0.0)), "task.temperature is 0;",
       "it must be above 0."),
    at("train/config.py:_check_masked#1", lambda: Recipe(task=TaskSpec(mask_rate=0.5)), "not with auto.",
       "task.mask_rate goes with --task.kind masked-patch or masked-autoencoder", "Leave it out."),
    at("train/config.py:_check_masked#2", lambda: Recipe(task=MASKED, augment=Augment(mixup=0.2)),
       "so augment.mixup cannot be used with it.", "Switch off with --augment.mixup 0."),
    at("train/config.py:_check_masked#3", lambda: Recipe(task=MASKED, model=ModelSpec(freeze=True)),
       "so model.freeze cannot be used with it.", "masked-patch trains the whole model without labels", "Leave that out."),
    at("train/lengths.py:parsed_length#1", lambda: ScheduleSpec(warmup="150%"), "schedule.warmup is 150%;",
       "a part of the run is less than 100%.", "a number of steps such as 500, of epochs such as 10ep"),
    at("train/lengths.py:parsed_length#2", lambda: ScheduleSpec(warmup="soon"), "schedule.warmup is 'soon';",
       "it must be a number of steps such as 500, of epochs such as 10ep, or a part of the run such as 5%."),
    at("train/patterns.py:compile_pattern", lambda: optim(freeze=("re:(",)), "'re:(' is not a valid regular expression:",
       "missing ), unterminated subpattern"),
    at("train/patterns.py:split_rule", lambda: optim(lr_scale=("head",)), "optim.lr_scale has 'head';",
       "it must be PATTERN=NUMBER, such as 'head=10'."),
    at("train/patterns.py:check_patterns#1", lambda: optim(lr_scale=("head=0",)), "optim.lr_scale has 'head=0';",
       "the factor must be above 0.", "To freeze parameters, use optim.freeze."),
    at("train/patterns.py:check_patterns#2", lambda: optim(weight_decay_for=("head=-1",)), "optim.weight_decay_for has 'head=-1';",
       "weight decay must be 0 or more."),
    at("train/plain.py:from_plain", lambda: Recipe.from_dict({"optim": {"lrr": 1}}), "There is no setting optim.lrr.",
       "Did you mean lr?"),
    at("train/plan.py:make_plan#1", lambda: make_plan(small(), gpus=0, memory=80), "--gpus is 0;", "plans are made for 1 to 4096."),
    at("train/plan.py:make_plan#2", lambda: make_plan(small(), gpus=64, memory=80), "A batch of 32 cannot be split over 64 GPUs;",
       "each needs at least one image.", "Use fewer --gpus or a larger --batch."),
    at("train/plan.py:make_plan#3",
       lambda: make_plan(Recipe(task=MASKED, model=ModelSpec(name="BiT-R50x1")), gpus=1, memory=80),
       "BiT-R50x1 is a ResNet without patches;", "masked-patch needs a Vision Transformer, such as --model.name ViT-B/16."),
)  # fmt: skip
