"""Recipes are what the papers say, and every one can be built."""

from __future__ import annotations

import importlib
import json

import pytest

from vitrail.errors import VitrailError
from vitrail.models import create_model, parameters
from vitrail.recipes import RECIPES, recipe_named, summary
from vitrail.recipes.any_folder import any_folder
from vitrail.train.config import ModelSpec, Recipe, ScheduleSpec
from vitrail.train.optimizers import convert_decay
from vitrail.train.plain import differences, flatten
from vitrail.train.plan import config_of
from vitrail.train.schedules import in_steps


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_is_complete(name: str) -> None:
    recipe = recipe_named(name)
    assert recipe.name == name
    assert Recipe.from_dict(json.loads(json.dumps(recipe.to_dict()))) == recipe
    assert summary(name)
    assert (recipe.epochs is None) != (recipe.steps is None)
    if recipe.model.start is None:
        config = config_of(recipe.model, outputs=1000)
        assert parameters(config) == sum(one.numel() for one in _built(recipe.model).parameters())


def _built(spec: ModelSpec):
    config = config_of(spec, outputs=1000)
    return importlib.import_module("vitrail.models").build_model(config, device="meta")


def test_each_file_gives_its_command() -> None:
    for function in RECIPES.values():
        module = importlib.import_module(getattr(function, "func", function).__module__)
        assert "    vitrail " in module.__doc__ or "-m vitrail train" in module.__doc__
        command = next(line for line in module.__doc__.splitlines() if "vitrail train" in line or "vitrail finetune" in line)
        named = [word for word in command.split() if word in RECIPES]
        assert named or command.split()[-1] == "train", f"{module.__name__} names no recipe in {command!r}"


def test_table_3() -> None:
    rows = {
        "vit-b16-jft": (7, 8e-4, 0.1, 0.0, "linear"),
        "vit-l16-jft": (14, 4e-4, 0.1, 0.0, "linear"),
        "vit-h14-jft": (14, 3e-4, 0.1, 0.0, "linear"),
        "r50-vit-l32-jft": (7, 2e-4, 0.1, 0.0, "linear"),
        "vit-b16-imagenet21k": (90, 1e-3, 0.03, 0.1, "linear"),
        "vit-l32-imagenet": (300, 3e-3, 0.3, 0.1, "cosine"),
    }
    for name, (epochs, lr, decay, dropout, kind) in rows.items():
        recipe = recipe_named(name)
        assert (recipe.epochs, recipe.optim.lr, recipe.optim.weight_decay) == (epochs, lr, decay), name
        assert (recipe.model.dropout, recipe.schedule.kind) == (dropout, kind), name
        assert (recipe.batch, recipe.schedule.warmup, recipe.optim.decay) == (4096, 10_000, "scaled-by-lr"), name
        assert (recipe.optim.name, recipe.optim.beta1, recipe.optim.beta2) == ("adam", 0.9, 0.999), name
    assert recipe_named("vit-b16-imagenet21k").model.head_bias == -10 and recipe_named("vit-b16-imagenet21k").task.loss == "sigmoid"
    assert recipe_named("vit-b16-imagenet21k").schedule.end == 1e-5
    assert recipe_named("vit-l16-imagenet").optim.clip == 1.0 and recipe_named("vit-l16-imagenet").task.loss == "softmax"
    assert recipe_named("bit-r152x2-jft").optim.lr == 6e-4


def test_table_4() -> None:
    steps = {"imagenet": 20_000, "cifar10": 10_000, "cifar100": 10_000, "pets": 500, "flowers": 500, "vtab": 2_500}
    for name, count in steps.items():
        recipe = recipe_named(f"finetune-{name}")
        assert (recipe.steps, recipe.batch, recipe.optim.name, recipe.optim.momentum) == (count, 512, "sgd", 0.9)
        assert (recipe.optim.weight_decay, recipe.optim.clip, recipe.model.image_size, recipe.model.pre_logits) == (0, 1.0, 384, 0)
    assert recipe_named("finetune-imagenet").lr_grid == (0.003, 0.01, 0.03, 0.06)
    large, huge = recipe_named("finetune-imagenet-l16"), recipe_named("finetune-imagenet-h14")
    assert (large.model.image_size, huge.model.image_size) == (512, 518)
    assert large.ema == huge.ema == 0.9999


def test_big_vision_s_decay_is_the_papers_in_other_words() -> None:
    recipe = recipe_named("vit-s16-imagenet")
    assert convert_decay(recipe.optim.weight_decay, recipe.optim.lr, "independent-of-lr", "scaled-by-lr") == pytest.approx(0.1)
    assert (recipe.epochs, recipe.batch, recipe.model.pre_logits, recipe.augment.mixup) == (90, 1024, 384, 0.2)
    bit = recipe_named("bit-r50x1-imagenet-sgd")
    assert (bit.optim.lr, bit.optim.weight_decay) == (pytest.approx(1.6), pytest.approx(1.6e-3))


def test_augreg_levels() -> None:
    found = {name: recipe_named(f"augreg-{name}-imagenet").augment for name in ("vit-ti16", "vit-b16")}
    assert (found["vit-ti16"].randaugment_magnitude, found["vit-ti16"].mixup) == (0, 0)
    assert (found["vit-b16"].randaugment_magnitude, found["vit-b16"].mixup) == (15, 0.5)
    assert recipe_named("augreg-vit-ti16-imagenet21k").augment.randaugment == "none"
    heads = {name: recipe_named(f"augreg-vit-s16-{name}").model for name in ("imagenet", "imagenet21k")}
    assert {name: (one.pre_logits, one.head_bias) for name, one in heads.items()} == {
        "imagenet": (384, -6.9),
        "imagenet21k": (None, -10.0),
    }


def test_sigmoids_over_many_classes_begin_with_rare_ones() -> None:
    """With a bias of 0 the loss of 21,843 classes begins at 15,000; the authors' code has −10 for ResNets, too."""
    assert recipe_named("bit-r50x1-imagenet21k-sgd").model.head_bias == recipe_named("bit-r50x1-jft").model.head_bias == -10
    assert recipe_named("bit-r50x1-imagenet-sgd").model.head_bias is None
    model = create_model("BiT-R26x1", layers=(1,), outputs=7, image_size=32, head_bias=-10.0)
    assert model.head.bias.tolist() == [-10.0] * 7 and not model.head.weight.any()


def test_deit_is_that_of_its_code() -> None:
    """The defaults of DeiT's main.py, and its command for DeiT-small: 4 GPUs with batches of 256."""
    recipe = recipe_named("deit-s16-imagenet")
    augment, optim, schedule = recipe.augment, recipe.optim, recipe.schedule
    assert (recipe.epochs, recipe.batch, recipe.ema, recipe.task.distill) == (300, 1024, 0.99996, "none")
    assert (optim.name, optim.lr, optim.weight_decay, optim.clip) == ("adamw", 5e-4 * 1024 / 512, 0.05, None)
    assert (optim.beta1, optim.beta2, optim.eps, optim.decay_on) == (0.9, 0.999, 1e-8, "kernels")
    assert (schedule.kind, schedule.warmup, schedule.end) == ("cosine", "5ep", 1e-5)
    assert (augment.randaugment, augment.randaugment_magnitude, augment.randaugment_count) == ("timm", 9, 2)
    assert (augment.randaugment_deviation, augment.randaugment_increasing, augment.operation_probability) == (0.5, True, 0.5)
    assert (augment.mix, augment.mixup, augment.cutmix, augment.mix_probability) == ("batch", 0.8, 1.0, 1.0)
    assert (augment.cutmix_probability, augment.mix_until, augment.smoothing, augment.repeats) == (0.5, 1.0, 0.1, 3)
    assert (augment.erase, augment.erase_fill, augment.jitters, augment.interpolation) == (0.25, "noise", False, "bicubic")
    assert (augment.erase_area, augment.erase_aspect) == ((0.02, 1 / 3), (0.3, 10 / 3))
    assert (augment.crop_area, augment.crop_aspect, augment.flip) == ((0.08, 1.0), (3 / 4, 4 / 3), 0.5)
    config = config_of(recipe.model, outputs=1000)
    assert (config.stochastic_depth, config.dropout, config.gelu, config.pooling) == (0.1, 0.0, "erf", "class")
    assert parameters(config) == 22_050_664
    distilled = recipe_named("deit-s16-imagenet-distilled")
    assert (distilled.task.distill, distilled.task.distill_weight) == ("hard", 0.5)
    assert distilled.replace(name="", model=recipe.model, task=recipe.task, compile=False, expected="") == recipe.replace(
        name="", expected=""
    )


@pytest.mark.parametrize(("images", "steps"), [(90, 100), (1_000, 250), (5_000, 500), (50_000, 10_000), (1_300_000, 20_000)])
def test_length_follows_the_number_of_images(images: int, steps: int) -> None:
    recipe = any_folder("REF", "FOLDER", images=images)
    assert recipe.steps == steps
    assert recipe.batch <= images
    assert in_steps(recipe.schedule, steps, 1).warmup == min(500, steps // 10)


@pytest.mark.parametrize("steps", [2, 6, 20])
def test_a_shorter_run_has_a_shorter_warmup(steps: int) -> None:
    """A user who asks for a few steps must not be asked for a warm-up, too."""
    for images in (54, 5_000, 50_000, 1_300_000):
        assert in_steps(any_folder("REF", "FOLDER", images=images).schedule, steps, 1).warmup <= max(1, steps // 10)


def test_every_number_of_a_recipe_must_be_finite() -> None:
    values = Recipe().to_dict()
    changed = 0
    for part in (values, *(one for one in values.values() if isinstance(one, dict))):
        for name, value in list(part.items()):
            if isinstance(value, float):
                for bad in (float("nan"), float("inf")):
                    part[name] = bad
                    with pytest.raises(VitrailError, match=name):
                        Recipe.from_dict(values)
                    changed += 1
                part[name] = value
    assert changed > 40
    with pytest.raises(VitrailError, match="lr_grid is nan"):
        Recipe(lr_grid=(0.1, float("nan")))
    with pytest.raises(VitrailError, match=r"schedule\.warmup is '9+'"):
        ScheduleSpec(warmup="9" * 400)


def test_names_differences_and_unknown_keys() -> None:
    with pytest.raises(VitrailError, match="Did you mean digits"):
        recipe_named("digit")
    one = recipe_named("digits")
    assert differences(one, one.replace(batch=8)) == {"batch": (64, 8)}
    assert flatten(one)["optim.lr"] == one.optim.lr
    with pytest.raises(VitrailError, match=r"There is no setting optim\.lrr\. Did you mean lr"):
        Recipe.from_dict({"optim": {"lrr": 1}})
    assert create_model("ViT-Ti/4", image_size=8, device="meta") is not None
