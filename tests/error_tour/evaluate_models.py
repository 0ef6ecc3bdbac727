"""Errors of evaluating a model: settings, metrics, features, few-shot, probes and predictions."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import vitrail
from tests.error_tour.case import at
from tests.error_tour.files import scratch
from vitrail.data.preprocess import preset
from vitrail.data.sources.arrays import ArraySplit
from vitrail.data.sources.files import FileSplit
from vitrail.data.types import Source
from vitrail.evaluate import fewshot as fewshot_module
from vitrail.evaluate.context import EvalContext
from vitrail.evaluate.embeddings import embed
from vitrail.evaluate.evaluator import EvalResult, _distinct, check_fits, evaluate, open_data
from vitrail.evaluate.fewshot import FewShotEvaluator, few_shot
from vitrail.evaluate.predictor import find_images, predict
from vitrail.evaluate.probes import choose, probe_splits
from vitrail.evaluate.report import check_output_folder
from vitrail.evaluate.ridge import fit_ridge
from vitrail.evaluate.settings import FeatureSpec, FewShotSpec, ProbeSpec
from vitrail.evaluate.support_set import draw_support_sets
from vitrail.models import Model
from vitrail.train.parallel import World

ROWS, LABELS = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 0, 1, 1])
PREPROCESS = preset("imagenet", size=32)


@cache
def bundle() -> vitrail.Bundle:
    return vitrail.load("model")


@cache
def nan_bundle() -> vitrail.Bundle:
    loaded = vitrail.load("model")
    torch.nn.init.constant_(loaded.model.norm.bias, float("nan"))
    return loaded


def split(images: int = 2, task: Any = "classify", classes: tuple[str, ...] = ("cat", "dog"), targets: Any = None) -> ArraySplit:
    """Black images, named 000000 and so on."""
    labels = np.arange(images) % len(classes) if targets is None else np.array(targets)
    return ArraySplit("val", task, np.zeros((images, 32, 32, 3), np.uint8), labels, classes)


def bad_split() -> FileSplit:
    return FileSplit("val", "classify", Path(), ["text.jpg"], np.zeros(1, np.int64), ("cat", "dog"))


def result() -> EvalResult:
    common: dict[str, Any] = {"metrics": {}, "intervals": {}, "images": 2, "total": 2, "bad": [], "preprocess": PREPROCESS}
    return EvalResult(task="multilabel", classes=("cat", "dog"), **common)


def without_weights(name: str, **changes: Any) -> Model:
    return vitrail.create_model(name, device="meta", **changes)


def empty_val(patch: pytest.MonkeyPatch) -> None:
    source = Source(reference="photos", kind="folder", splits={"train": split(), "val": split(0)})
    patch.setattr(fewshot_module, "open_for", lambda *_, **__: source)


def probe(using: vitrail.Bundle, feature: Any) -> object:
    return probe_splits(using, split(), split(), ProbeSpec(), FeatureSpec(feature=feature), EvalContext())


def tested_on_a_dropped_class() -> object:
    classes = ("cat", "dog", "fox")
    train, test = split(5, classes=classes, targets=[0, 0, 1, 1, 2]), split(2, classes=classes, targets=[2, 2])
    protocol = FewShotSpec(shots=(2,), seeds=1, small_classes="drop")
    return FewShotEvaluator(train, test, PREPROCESS, protocol=protocol).run(bundle().model, EvalContext())


def binary_list() -> str:
    file = scratch() / "list.txt"
    file.write_bytes(b"cat.jpg\0")
    return str(file)


def notes() -> str:
    file = scratch() / "notes.txt"
    file.write_text("buy milk\n", encoding="utf-8")
    return str(file)


NOT_FINITE = ("Check the weights (`vitrail info`).", "use bf16 or fp32")
AFTER = "use class, mean or patches."

CASES = (
    # what the user chooses
    at("evaluate/settings.py:check_choice", lambda: FeatureSpec(feature="map"),  # type: ignore[arg-type]
       "feature is 'map';", "it can be pre_logits, pooled, class, mean, patches."),
    at("evaluate/settings.py:check_choice", lambda: ProbeSpec(method="svm"),  # type: ignore[arg-type]
       "method is 'svm';", "it can be logistic, knn."),
    at("evaluate/settings.py:check_choice", lambda: FewShotSpec(small_classes="dropp"),  # type: ignore[arg-type]
       "small_classes is 'dropp';", "it can be error, drop. Did you mean drop?"),
    at("evaluate/settings.py:check_choice", lambda: open_data(bundle(), "photos", match="names"),  # type: ignore[arg-type]
       "match is 'names';", "it can be name, order. Did you mean name?"),
    at("evaluate/settings.py:check_choice", lambda: EvalContext(precision="fp8"),  # type: ignore[arg-type]
       "precision is 'fp8';", "it can be auto, fp32, bf16, fp16, int8."),
    at("evaluate/settings.py:check_choice", lambda: EvalContext(bad_images="ignore"),  # type: ignore[arg-type]
       "bad_images is 'ignore';", "it can be error, skip."),
    at("evaluate/settings.py:FeatureSpec.__post_init__#1", lambda: FeatureSpec(layer=3),
       "pre_logits exists only for the last layer;", f"for layer 3 {AFTER}"),
    at("evaluate/settings.py:FeatureSpec.__post_init__#2", lambda: FeatureSpec(feature="pooled", norm=False),
       "pooled comes after the final norm;", f"without the norm {AFTER}"),
    at("evaluate/settings.py:FeatureSpec.check#1", lambda: FeatureSpec(feature="patches").check(bundle().model, any_size=True),
       "Images of any size have grids of any size, which do not fit into one array.", "Use the feature mean or class."),
    at("evaluate/settings.py:FeatureSpec.check#2", lambda: FeatureSpec(feature="class").check(without_weights("BiT-R50x1")),
       "BiT-R50x1 is a ResNet without a class token;", "use mean or pooled."),
    at("evaluate/settings.py:FeatureSpec.check#3", lambda: FeatureSpec(feature="mean", layer=0).check(without_weights("BiT-R50x1")),
       "The final norm of BiT-R50x1 applies to its last stage only;", "pass --no-norm with --layer."),
    at("evaluate/settings.py:FeatureSpec.check#4",
       lambda: FeatureSpec(feature="class").check(without_weights("ViT-Ti/16", pooling="mean")),
       "ViT-Ti/16 has no class token;", "use mean or pooled."),
    at("evaluate/settings.py:FewShotSpec.__post_init__", lambda: FewShotSpec(seeds=0), "seeds is 0;", "use 1 or more."),
    at("evaluate/settings.py:ProbeSpec.__post_init__#1", lambda: ProbeSpec(l2=(1.0, 0.0)),
       "l2 is [1.0, 0.0];", "a logistic probe needs one or more values above 0."),
    at("evaluate/settings.py:ProbeSpec.__post_init__#1", lambda: ProbeSpec(method="knn", neighbours=()),
       "neighbours is [];", "a knn probe needs one or more values above 0."),
    at("evaluate/settings.py:ProbeSpec.__post_init__#2", lambda: ProbeSpec(holdout=1.5),
       "holdout is 1.5;", "to choose among 7 values it must be a fraction between 0 and 1."),
    at("evaluate/context.py:EvalContext.__post_init__#1", lambda: EvalContext(batch=0),
       "The batch size is 0;", "it must be at least 1."),
    at("evaluate/context.py:EvalContext.__post_init__#2", lambda: EvalContext(workers=-1),
       "The number of workers is -1;", "it must be at least 0."),
    at("evaluate/context.py:EvalContext.prepare",
       lambda: EvalContext(world=World(torch.device("cuda")), precision="int8").prepare(bundle().model),
       "int8 needs a CPU;", "on cuda use fp32, bf16 or fp16."),
    at("evaluate/context.py:EvalContext.__post_init__#3", lambda: bundle().predict("cat.jpg", max_size=64),
       "max_size is 64: it limits the long side of images that keep their aspect ratio.", "Add any_size."),
    # evaluate
    at("evaluate/context.py:check_finite", lambda: evaluate(nan_bundle(), split()),
       "The model's output for 000000 contains NaN or infinity.", *NOT_FINITE),
    at("evaluate/context.py:check_features", lambda: embed(nan_bundle(), split()),
       "The model's output for 000000 contains NaN or infinity.", *NOT_FINITE),
    at("evaluate/evaluator.py:EvalResult.confusion", lambda: result().confusion,
       "this is a multi-label classifier.", "A confusion matrix needs one class per image;", "Use to_pandas('classes')."),
    at("evaluate/evaluator.py:EvalResult.to_pandas#1", lambda: result().to_pandas("images"),
       "this is a multi-label classifier.", "A table of images needs one class per image;", "Use to_pandas('classes')."),
    at("evaluate/evaluator.py:EvalResult.to_pandas#2", lambda: result().to_pandas("rows"),  # type: ignore[arg-type]
       "There is no table 'rows';", "use 'metrics', 'classes' or 'images'."),
    at("evaluate/evaluator.py:check_fits#1", lambda: evaluate(bundle(), split(0)),
       "The split 'val' has no images to evaluate.", "Choose another one."),
    at("evaluate/evaluator.py:check_fits#2", lambda: evaluate(bundle(), "folder:photos?labels=none", split="val"),
       "The split 'val' has no labels to compare with.", "`vitrail predict` needs no labels."),
    at("evaluate/evaluator.py:check_fits#3", lambda: evaluate(bundle(), split(task="regress")),
       "model is a classifier, but this dataset has regression targets.", "Evaluate it on a dataset for the same task."),
    at("evaluate/evaluator.py:check_fits#4", lambda: check_fits(bundle(), split(classes=("cat",))),
       "model has 2 outputs, the dataset has 1 class.", "The numbers must be equal;", "`vitrail probe` work with any classes."),
    at("evaluate/evaluator.py:_not_empty", lambda: evaluate(bundle(), bad_split(), context=EvalContext(bad_images="skip")),
       "No image of 'val' could be read. The first: text.jpg: a text file, not an image", "Repair or replace the images."),
    at("evaluate/evaluator.py:_distinct", lambda: _distinct(np.array([3, 3])),
       "Images evaluated twice: 1.", "This is a bug in Vitrail; please report it."),
    at("evaluate/report.py:check_output_folder#1", lambda: check_output_folder(Path("notes.txt"), overwrite=True),
       "notes.txt is a file,", "but a report is a folder.", "Choose another name for --out."),
    at("evaluate/report.py:check_output_folder#2", lambda: check_output_folder(Path("photos"), overwrite=True),
       "photos already contains other files (train, val).", "Choose another name."),
    # features, few-shot, probes
    at("evaluate/features.py:extract_features#1", lambda: embed(bundle(), split(0)),
       "The split 'val' has no images.", "Choose another one."),
    at("evaluate/features.py:extract_features#2", lambda: embed(bundle(), ["text.jpg", "zero.jpg"]),
       "could be read. The first: text.jpg: a text file, not an image", "Repair or replace the images."),
    at("evaluate/fewshot.py:open_train_and_test#1", lambda: few_shot(bundle(), "folder:photos-bad?val=0"),
       "folder:photos-bad?val=0 has only the split train;", "a test split is needed too.", "make one with `vitrail data split`."),
    at("evaluate/fewshot.py:open_train_and_test#2", lambda: few_shot(bundle(), "photos", split="train"),
       "Both splits are 'train';", "test on images that were not used for training.", "Change --split or --train-split."),
    at("evaluate/fewshot.py:open_train_and_test#3", lambda: few_shot(bundle(), "folder:photos?labels=none"),
       "folder:photos?labels=none has no labels;", "few-shot and probes need one class per image."),
    at("evaluate/fewshot.py:open_train_and_test#4", lambda: few_shot(bundle(), "photos"),
       "The split 'val' of photos has no images.", "Choose another one.", patch=empty_val),
    at("evaluate/fewshot.py:FewShotEvaluator.__init__",
       lambda: FewShotEvaluator(split(), split(), PREPROCESS, features=FeatureSpec(feature="patches")),
       "Few-shot needs one vector per image;", "use mean instead of patches."),
    at("evaluate/fewshot.py:FewShotEvaluator._trial", tested_on_a_dropped_class,
       "None of the 2 test images belongs to one of the 2 classes of the support set.", "Test on images of the same classes."),
    at("evaluate/support_set.py:draw_support_sets#1",
       lambda: draw_support_sets(LABELS.numpy(), ("cat", "dog"), shots=(0,), seeds=(0,)),
       "shots is [0];", "each must be a number of images per class, 1 or more."),
    at("evaluate/support_set.py:draw_support_sets#2",
       lambda: draw_support_sets(LABELS[:3].numpy(), ("cat", "dog"), shots=(2,), seeds=(0,), small_classes="drop"),
       "Classes with at least 2 images: 1 of 2.", "A classifier needs at least 2.", "Use fewer shots."),
    at("evaluate/probes.py:probe_splits", lambda: probe(bundle(), "patches"),
       "A probe needs one vector per image;", "use mean instead of patches."),
    at("evaluate/probes.py:choose", lambda: choose(ROWS[:1], LABELS[:1], 2, ProbeSpec(), np.empty(0, np.int64)),
       "1 training image: too few to hold some out.", "Pass a single value of l2 or neighbours."),
    at("evaluate/probes.py:_finite", lambda: probe(nan_bundle(), "pre_logits"),
       "The features of 2 of 2 images contain NaN or infinity (the first is image 0).", "use bf16 or fp32."),
    at("evaluate/ridge.py:RidgeClassifier.scores", lambda: fit_ridge(ROWS, LABELS, 2).scores(ROWS[:, :2]),
       "The test features have 2 channels, the support features 3.", "Compute both with the same model, layer and pooling."),
    at("evaluate/ridge.py:fit_ridge", lambda: fit_ridge(ROWS, LABELS, 2, l2=0),
       "l2 is 0;", "it must be above 0 (the paper's code uses 1024)."),
    at("evaluate/ridge.py:_features#1", lambda: fit_ridge(ROWS[0], LABELS, 2),
       "The support features have the shape [3];", "expected [images, features]."),
    at("evaluate/ridge.py:_features#2", lambda: fit_ridge(ROWS[:0], LABELS[:0], 2),
       "The support set is empty;", "a few-shot classifier needs at least one image."),
    at("evaluate/ridge.py:_features#3", lambda: fit_ridge(ROWS.log(), LABELS, 2),
       "NaN or infinity in 4 of 4 rows of the support features (the first is row 0).", "use bfloat16 or float32."),
    at("evaluate/ridge.py:_labels#1", lambda: fit_ridge(ROWS, LABELS.float(), 2),
       "The labels are torch.float32 of shape [4];", "expected integers of shape [4]."),
    at("evaluate/ridge.py:_labels#2", lambda: fit_ridge(ROWS, LABELS + 1, 2),
       "Label 2 in row 2 is out of range;", "the classes are 0 to 1."),
    # predict
    at("evaluate/predictor.py:check_scores", lambda: next(predict(nan_bundle(), ["cat.jpg"])),
       "The model's output for cat.jpg contains NaN or infinity.", *NOT_FINITE),
    at("evaluate/predictor.py:find_images", lambda: find_images([]),
       "No image found.", "Pass image files, folders of images, or .txt files that list images."),
    at("evaluate/predictor.py:_images_at#1", lambda: find_images(["empty"]),
       "There is no image in the folder empty", "or its subfolders."),
    at("evaluate/predictor.py:_images_at#2", lambda: find_images(["cat.jpg", "https://example.com/cat.jpg"]),
       "https://example.com/cat.jpg is a URL, and images are not downloaded.", "Save the image, and give the file."),
    at("evaluate/predictor.py:_images_at#3", lambda: find_images(["cat.jpg", "nowhere.jpg"]),
       "There is no file or folder nowhere.jpg.", "Check the path."),
    at("evaluate/predictor.py:_read_list#1", lambda: find_images(["nowhere.txt"]),
       "Cannot read the list nowhere.txt: No such file or directory.", "Check the path."),
    at("evaluate/predictor.py:_read_list#2", lambda: find_images([binary_list()]),
       "list.txt is not a text file;", "a list of images has one path per line."),
    at("evaluate/predictor.py:_read_list#3", lambda: find_images([notes()]),
       "No line of", "notes.txt is the path of a file; the first is 'buy milk'.", "A .txt file lists images, one path per line."),
)  # fmt: skip
