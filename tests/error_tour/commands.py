"""Errors of the commands."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from tests.error_tour.case import Case, at
from tests.error_tour.files import scratch
from vitrail.commands.export import _images
from vitrail.commands.neighbours import neighbours
from vitrail.commands.options import parse_size
from vitrail.commands.recipe_options import read_recipe
from vitrail.commands.train import _few_shot
from vitrail.evaluate.embeddings import Embeddings


def embeddings(count: int) -> Path:
    """Write an embeddings file."""
    file = scratch() / "images.npz"
    Embeddings(np.zeros((count, 4), np.float32), tuple(f"{number}.jpg" for number in range(count))).save(file)
    return file


def few_shot(**prepared: Any) -> None:
    _few_shot((5,))(SimpleNamespace(**prepared), None)  # type: ignore[arg-type]


def newer_run() -> Path:
    folder = scratch()
    (folder / "config.json").write_text('{"format": 99, "recipe": {}}')
    return folder


BUNDLE: Any = None  # not looked at before the error

# fmt: off
CASES: tuple[Case, ...] = (
    at("commands/arguments.py:check_only", "vitrail train --recipes --batch 5",
       "--recipes goes only with --json, not with --batch.", "Leave it out."),
    at("commands/convert.py:_class_names", "vitrail convert model out --classes nowhere.txt",
       "Cannot read class names from nowhere.txt: No such file or directory.", "Give a text file with one name per line."),
    at("commands/data.py:split#1", "vitrail data split photos notes.txt",
       "notes.txt already exists.", "Delete it, or choose another name."),
    at("commands/data.py:split#3", "vitrail data split photos split.csv",
       "photos already has a split 'val'.", "Pass --val 0 to keep it."),
    at("commands/default_model.py:split_checkpoint#1", "vitrail predict nowhere",
       "There is no image, folder or checkpoint 'nowhere'.", "Check the path."),
    at("commands/default_model.py:split_checkpoint#3", "vitrail predict cat.jpg model",
       "model is a checkpoint, but comes after an image (cat.jpg).", "Give the checkpoint first."),
    at("commands/doctor.py:_report", "vitrail doctor --report a.md b.md", "not 2.", "--report takes one file,"),
    at("commands/doctor_report.py:check_report_file#1", "vitrail doctor --report empty",
       "empty is a folder.", "Give --report a file, such as empty/vitrail-report.md."),
    at("commands/doctor_report.py:check_report_file#2", "vitrail doctor --report notes.txt",
       "notes.txt exists and is not a report of `vitrail doctor`.", "Choose another name."),
    at("commands/evaluate.py:evaluate", "vitrail eval model --data photos --image-size 32 --image-sizes 32 64",
       "--image-size and --image-sizes were both given;", "choose one."),
    at("commands/explore.py:explore", "vitrail explore model", "The explorer needs fastapi:",
       "install the extra with pip install 'vitrail[serve]'.", hidden="fastapi"),
    at("commands/explore.py:_read", "vitrail explore photos other", "There are 32 images; the explorer takes up to 24.",
       "Give fewer, and drop others on the page."),
    at("commands/explore.py:_save", "vitrail explore model text.jpg --save page.html",
       "text.jpg: a text file, not an image (it starts with 'this is not an image').", "Replace it, or use other images."),
    at("commands/export.py:_check_drop", "vitrail export model out --max-drop 2",
       "--max-drop is 2.0;", "it must be a fraction from 0 to 1, such as 0.01."),
    at("commands/export.py:_images", "vitrail export model out --images 0", "--images is 0;", "it must be at least 1."),
    at("commands/export.py:_images", lambda: _images(BUNDLE, "photos", "train", 0, measured=False),
       "--calibrate-images is 0;", "it must be at least 1."),
    at("commands/finetune.py:_settings", "vitrail finetune --recipe finetune-cifar100 --config config.json",
       "Both --recipe finetune-cifar100 and --config config.json were given;", "leave one out."),
    at("commands/inspect.py:_load_images", "vitrail inspect model cat.jpg --data photos --out inside",
       "Image files and --data were both given;", "choose one."),
    at("commands/neighbours.py:neighbours#1", lambda: neighbours(embeddings(3), count=0), "--count is 0;", "use 1 or more."),
    at("commands/neighbours.py:neighbours#2", lambda: neighbours(embeddings(1)), "has 1 image;", "neighbours need at least 2."),
    at("commands/options.py:parse_size", lambda: parse_size("big"),
       "--image-size is 'big';", "it takes a number of pixels, or height and width such as 384x512."),
    at("commands/options.py:data_or_own", "vitrail eval model",
       "model is not a run that knows its data:", "add --data, such as --data folder:DIR."),
    # Where results are written
    at("commands/output.py:check_output_file#1", "vitrail predict cat.jpg --csv empty",
       "empty is a folder, but a file is to be written.", "Name a file in it."),
    at("commands/output.py:check_output_file#2", "vitrail predict cat.jpg --csv notes.txt",
       "notes.txt exists already.", "Choose another name, or replace it with --overwrite."),
    at("commands/output.py:check_place#1", "vitrail predict cat.jpg --csv notes.txt/new.csv",
       "notes.txt/new.csv cannot be written:", "notes.txt is not a folder. Choose another name."),
    at("commands/output.py:check_place#2", "vitrail predict cat.jpg --csv new.csv",
       "new.csv cannot be written: there is no permission to write to", "Choose another place.",
       patch=lambda monkeypatch: monkeypatch.setattr(os, "access", lambda *_: False)),
    at("commands/predict.py:predict#1", "vitrail predict cat.jpg --csv new.csv --json",
       "--csv and --json were both given;", "choose one."),
    at("commands/predict.py:predict#2", "vitrail predict model",
       "No image was given, only model, which is read as the checkpoint.",
       "Pass image files, folders of images, or .txt files that list images."),
    at("commands/predict.py:predict#3", "vitrail predict cat.jpg --out shards --csv new.csv",
       "--out and --csv were both given;", "choose one. --out FOLDER --format csv writes shards of CSV files."),
    at("commands/predict.py:predict#4", "vitrail predict cat.jpg --out shards --tta",
       "--tta is not available for shards yet;", "leave out --tta, or write one file with --csv."),
    at("commands/predict.py:predict#5", "vitrail predict cat.jpg --out new.csv",
       "--out is a folder of shards, but 'new.csv' has the suffix of a file.", "For one file use --csv."),
    at("commands/shards.py:check_shard_folder", "vitrail predict cat.jpg --out shards --overwrite",
       "--overwrite is for single files;", "a job that writes shards resumes. To start anew, delete shards."),
    at("commands/shards.py:refuse_shard_options", "vitrail predict cat.jpg --shard-size 5",
       "--shard-size 5 is for shards, but no folder is written.", "Pass --out FOLDER, or leave it out."),
    at("commands/shards.py:refuse_ranks", "vitrail predict cat.jpg --csv ranks.csv",
       "ranks.csv is one file; under torchrun every rank writes its own shards.", "Pass --out with the name of a folder.",
       patch=lambda monkeypatch: monkeypatch.setenv("WORLD_SIZE", "2")),
    # Models, recipes and studies
    at("commands/published.py:show_published", "vitrail models ViT-B/17 --pretrained",
       "There are no published weights of these models.", "`vitrail models --pretrained` lists those there are."),
    at("commands/recipe_options.py:chosen_recipe#1", "vitrail train digits --config config.json",
       "Both the recipe digits and --config config.json were given;", "leave one out."),
    at("commands/recipe_options.py:chosen_recipe#2", "vitrail plan",
       "The recipe is missing:", "name one (`vitrail train --recipes` lists them), or a file with --config."),
    at("commands/recipe_options.py:read_recipe#1", "vitrail train --config nowhere.json",
       "There is no file nowhere.json.", "--config takes the config.json of a run."),
    at("commands/recipe_options.py:read_recipe#2", lambda: read_recipe(newer_run()),
       "config.json: This run has format 99,", "and this version of Vitrail reads formats 1 to 4. Update Vitrail."),
    at("commands/recipe_options.py:read_recipe#3", "vitrail train --config model",
       "model/config.json holds no recipe (it has no 'recipe').",
       "--config takes the config.json of a run, or what --explain --json printed."),
    at("commands/recipe_options.py:extract_flags", "vitrail train --config", "--config needs", "a value after it."),
    at("commands/recipe_options.py:check_used", "vitrail plan digits --seed 1",
       "--seed has no effect on `vitrail plan`.", "Leave it out."),
    at("commands/reproduce.py:reproduce", "vitrail reproduce", "Give one name, not 0,",
       "such as `vitrail reproduce ViT-B/16 --imagenet DIR`; --list shows the names."),
    at("commands/study.py:study", "vitrail study", "Which study?",
       "Name one of data-size,", "`vitrail study --list` explains them."),
    at("commands/study.py:results", "vitrail study results",
       "There are no folders in docs/results/studies.", "Name folders that hold CSV files of studies."),
    at("commands/train.py:_few_shot.make", lambda: few_shot(validation=None, train=None),
       "This dataset has no validation split;", "--few-shot needs one label per image and a validation split. Leave it out."),
    at("commands/vtab.py:_pair", "vitrail vtab --source resisc45",
       "--source resisc45 is not NAME=SOURCE,", "such as resisc45=folder:data/resisc45."),
)
# fmt: on
