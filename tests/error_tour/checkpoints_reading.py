"""Errors of loading and saving checkpoints: weight files, Vitrail's own folders, and what is asked of them."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import torch

import vitrail
from tests.error_tour.case import at
from tests.error_tour.checkpoint_files import arrays, bundle, npy, npz, own, place, pth, raw, safe, tensors, zipped
from vitrail.checkpoints import archive, native
from vitrail.checkpoints.archive import open_archive
from vitrail.checkpoints.formats import detect_format
from vitrail.checkpoints.loading import load
from vitrail.data.preprocess import preset

ONE = torch.ones(1)
DOWNLOAD = "The file is corrupted: download or copy it again."
SKIP = "Load it with verify='none' to skip this check."


def wrong_checksum() -> None:
    path = Path(npz({"a": np.ones(2000, np.float32)}))
    content = bytearray(path.read_bytes())
    content[6000] ^= 1
    path.write_bytes(content)
    open_archive(path).tensors["a"].read()


def shortened_while_open() -> None:
    path = Path(npz({"a": np.ones(2000, np.float32)}))
    tensor = open_archive(path).tensors["a"]
    path.write_bytes(path.read_bytes()[:300])
    tensor.read()


def saved_with(value: float, **options: object) -> None:
    """Save a model with this value in its last norm."""
    made = bundle()
    torch.nn.init.constant_(made.model.norm.weight, value)
    vitrail.save(place("new"), made.model, **options)  # type: ignore[arg-type]


def bad_index() -> None:
    folder = Path(own())
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../secret.safetensors"}}')
    load(folder)


def golden(**changes: object) -> object:
    return load(own(**{f"golden__{path}": value for path, value in changes.items()}))


def unfinished_run() -> None:
    (place("run") / "checkpoints").mkdir(parents=True)
    load("weights/run")


# fmt: off
CASES = (
    at("checkpoints/adapt.py:change_channels#2", lambda: load("model", channels=1, stem="mean"),
       "stem is 'mean';", "it must be one of sum, repeat, random."),
    at("checkpoints/archive.py:wrap_errors#1", lambda: open_archive("none.npz"),
       "There is no file none.npz.", "Check the path."),
    at("checkpoints/archive.py:wrap_errors#2", lambda: open_archive("photos"),
       "Cannot read photos: a folder, not a regular file.", "Check the path and its permissions."),
    at("checkpoints/archive.py:_open_npz#1", lambda: open_archive(npz({"a": np.zeros(250_000, np.float32)}, compressed=True)),
       "bytes and claims to unpack to 1,000,128.",
       "It is rejected: weights do not compress so far.", "Get them from another source.",
       patch=lambda patch: patch.setattr(archive, "_BOMB_SIZE", 1000)),
    at("checkpoints/archive.py:_open_npz#2", lambda: open_archive(zipped(("a.npy", npy((0,))), ("a.npy", npy((0,))))),
       "weights/x.npz contains 'a' twice, so it is rejected.", "Download or copy it again."),
    at("checkpoints/archive.py:_open_npz#3", lambda: open_archive(zipped(("a.npy", npy((100,), bytes(64))))),
       "weights/x.npz: 'a' should be an array (100,) of float32, but 192 bytes are stored for it.",
       "The file is corrupted or incomplete: download or copy it again."),
    at("checkpoints/archive.py:_array_header#1", lambda: open_archive(npz({"a": np.array([{}], object)})),
       "weights/x.npz needs unsafe unpickling ('a' contains Python objects), which can run any code, so it is rejected.",
       "Open it in a sandbox and save only its arrays with numpy.savez."),
    at("checkpoints/archive.py:_array_header#2", lambda: open_archive(zipped(("a.npy", npy((-1,))))),
       "weights/x.npz: 'a' has the invalid shape (-1,).", DOWNLOAD),
    at("checkpoints/archive.py:_fill", wrong_checksum, "weights/x.npz: 'a.npy' has a wrong checksum.", DOWNLOAD),
    at("checkpoints/archive.py:_read_all", shortened_while_open, "weights/x.npz is truncated:", "download or copy it again."),
    at("checkpoints/archive.py:_state_dict#1", lambda: open_archive(pth([1, 2])),
       "weights/x.pth contains a value of type list, not a state dict.", "Save model.state_dict()."),
    at("checkpoints/archive.py:_state_dict#2", lambda: load(pth({"model": {"a": ONE}}) + ":ema"),
       "weights/x.pth has no part 'ema';", "its parts with tensors: model."),
    at("checkpoints/archive.py:_state_dict#3", lambda: load(pth({"student": {"a": ONE}, "ema": {"a": ONE}})),
       "weights/x.pth has several parts: student, ema.", "Choose one, such as weights/x.pth:student."),
    at("checkpoints/archive.py:_state_dict#4", lambda: load(pth({"epoch": 3})),
       "weights/x.pth contains no tensors.", "Save model.state_dict()."),
    at("checkpoints/bundle.py:Bundle.stored_preprocess#1",
       lambda: dataclasses.replace(bundle(), preprocess=None).stored_preprocess(),
       "No preprocessing is stored in here.", "Choose one: --preprocess google-vit", "in Python load(…, preprocess='google-vit')."),
    at("checkpoints/bundle.py:Bundle.stored_preprocess#2",
       lambda: dataclasses.replace(bundle(), preprocess=preset("imagenet", size=8)).stored_preprocess(),
       "The preprocessing stored in here makes images of 8×8 pixels with 3 channels,",
       "but the model takes 4×4 pixels with 3 channels.", "Correct `preprocess` in its config.json, or replace it: --preprocess"),
    at("checkpoints/formats.py:detect_format#1", lambda: load(safe({"patches.weight": ONE})),
       "weights/x.safetensors contains Vitrail weights without their config.json.", "Load the folder they were saved in."),
    at("checkpoints/formats.py:detect_format#2", lambda: detect_format(open_archive(npz({"img/embedding/kernel": np.ones(1)}))),
       "weights/x.npz contains several models.", "Load the image tower with weights/x.npz:img."),
    at("checkpoints/golden.py:record", lambda: saved_with(3e38),
       "The outputs of the model are not finite (NaN or infinite), though its weights are: the training diverged.",
       "Nothing was saved. Start again with a lower learning rate, or from an earlier checkpoint."),
    at("checkpoints/golden.py:check", lambda: load(own(golden={})),
       "weights/own: config.json has no golden output to check the model with.",
       "The folder is corrupted: download or copy it again.", SKIP),
    at("checkpoints/golden.py:_compare#1", lambda: golden(quick__logits=["x", "y"]),
       "weights/own: the golden logits in config.json do not fit this model.",
       "The folder is corrupted: download or copy it again.", SKIP),
    at("checkpoints/golden.py:_compare#2", lambda: golden(quick__pre_logits=[100.0] * 4),
       "weights/own does not compute the same outputs as when it was saved: its pre_logits differ by 1e+02,",
       "The weights or the model in config.json were changed, or this machine computes wrong results.", SKIP),
    at("checkpoints/loading.py:load", lambda: load("model", verify="all"),
       "verify is 'all';", "it must be 'none', 'quick' or 'full'."),
    at("checkpoints/loading.py:locate#1", lambda: load("/dev/null"),
       "/dev/null is a character device, not a checkpoint.", "Give a folder or a regular file."),
    at("checkpoints/loading.py:_folder#1", unfinished_run,
       "weights/run is a run that has no model/ yet.", "Finish it first: run its training command again to resume."),
    at("checkpoints/loading.py:_folder#2", lambda: load("photos"),
       "photos is a folder without a checkpoint's config.json (it contains train, val).",
       "For a single weight file, give the file itself."),
    at("checkpoints/loading.py:_checked", lambda: load("model", preprocess=preset("imagenet", size=64)),
       "The preprocessing makes images of 64×64 pixels with 3 channels,", "but the model takes 32×32 pixels with 3 channels.",
       "Pass one that fits, or the name of a preset, such as 'imagenet'."),
    at("checkpoints/mapping.py:empty_model_for", lambda: load("model", depth=100_000),
       "model/model.safetensors has 32 tensors, but the config means 100,000 blocks.",
       "One of them belongs to another model, or is corrupted."),
    at("checkpoints/mapping.py:rename", lambda: load(safe({"cls_token": ONE, "module.cls_token": ONE})),
       "weights/x.safetensors contains 'cls_token' under two names,", "so it is unclear which one to use. Save only one of them."),
    at("checkpoints/mapping.py:read_state",
       lambda: load(safe({name.replace(".proj.b", ".projection.b"): one for name, one in tensors("timm").items()}), heads=2),
       "weights/x.safetensors does not match the model.",
       "Unexpected in the file (2): blocks.0.attn.projection.bias, patch_embed.projection.bias.",
       "Missing from the file (2): patch_embed.proj.bias, blocks.0.attn.proj.bias.",
       "For patch_embed.proj.bias: Did you mean patch_embed.projection.bias?",
       "To leave tensors out, use drop=['pattern*'] (--drop on the command line)."),
    at("checkpoints/mapping.py:_check#1", lambda: load(npz({**arrays(), "cls": np.ones((1, 1, 4), np.int8)})),
       "weights/x.npz: 'cls' is not a floating-point tensor.", "The file is corrupted or quantised: give float weights."),
    at("checkpoints/mapping.py:_check#2", lambda: load(npz({**arrays(), "head/bias": np.ones(3)})),
       "weights/x.npz: 'head/bias' is 3, but the other tensors need 2.",
       "The tensors belong to different models, or the file is corrupted."),
    at("checkpoints/mapping.py:_read", lambda: load(npz({**arrays(), "head/bias": np.full(2, math.nan, np.float32)})),
       "weights/x.npz: head/bias contains values that are not finite (NaN or infinite).",
       "The training diverged, or the file is corrupted."),
    at("checkpoints/native.py:weight_files#1", bad_index,
       "weights/own/model.safetensors.index.json does not list safetensors files of this folder.", "Download or copy it again."),
    at("checkpoints/native.py:weight_files#2", lambda: native.weight_files(Path("config-only")),
       "config-only has a config.json but no weights:", "copy model.safetensors or pytorch_model.bin there."),
    at("checkpoints/native.py:merge", lambda: native.merge([open_archive(safe({"a": ONE}))] * 2, Path("weights")),
       "weights/x.safetensors contains 'a', and so does another file of weights.", "Copy the folder again."),
    at("checkpoints/native.py:read_json", lambda: native.read_json(Path(raw(b"[1]", "config.json"))),
       "weights/config.json is not a JSON object (it contains a list, but a JSON object was expected).",
       "It is corrupted: download or copy it again."),
    at("checkpoints/native.py:check_replaceable#1", lambda: vitrail.save("notes.txt", bundle().model),
       "notes.txt is a file, but a checkpoint is a folder.", "Choose another name."),
    at("checkpoints/native.py:check_replaceable#2", lambda: vitrail.save("photos", bundle().model),
       "photos exists and contains other files than a checkpoint (train, val).", "It is not changed: choose another folder."),
    at("checkpoints/native.py:_unwrapped_state#1", lambda: vitrail.save("new", torch.nn.Linear(2, 2)),
       "Cannot save a model of type Linear:", "only Vitrail's models, wrapped or not, have a config.",
       "Save the state dict of others with torch.save."),
    at("checkpoints/native.py:_unwrapped_state#1", lambda: vitrail.save(bundle().model, "new"),  # as torch.save is called
       "Cannot save a model of type str:", "The folder comes first: vitrail.save(folder, model)."),
    at("checkpoints/native.py:_unwrapped_state#2", lambda: saved_with(math.nan),
       "norm.weight contains values that are not finite (NaN or infinite): the training diverged.", "Nothing was saved."),
    at("checkpoints/native.py:_rounded#1", lambda: saved_with(1.0, store_dtype=torch.int8),
       "Weights cannot be stored as torch.int8.", "Use one of float16, bfloat16, float32, float64."),
    at("checkpoints/native.py:_rounded#2", lambda: saved_with(1e6, store_dtype=torch.float16),
       "norm.weight has values that are too large for float16.", "Store the weights as bfloat16."),
    at("checkpoints/native.py:_in_load_dtype", lambda: load(own(weights__load_dtype="int8")),
       "weights/own/config.json: load_dtype is 'int8';", "it must be one of float16, bfloat16, float32, float64. Copy it again."),
    at("checkpoints/native.py:check_task#1", lambda: load(own(task="dream")),
       "The task is 'dream';", "it must be one of classify, multilabel, regress, unlabelled."),
    at("checkpoints/native.py:_check_version#2", lambda: load(own(version=99)),
       "weights/own has format version 99, but this Vitrail reads versions up to 1.", "Update Vitrail to load it."),
    at("checkpoints/native.py:_field", lambda: load(own(model=None)),
       "weights/own/config.json: 'model' is missing or has a wrong type.", "The file is corrupted: copy it again."),
    at("checkpoints/native.py:_check_sha256", lambda: load(own(weights__sha256={}), verify="full"),
       "weights/own/model.safetensors has SHA-256", "but config.json says nothing.", "Download or copy it again."),
    at("checkpoints/native.py:_json", lambda: saved_with(1.0, provenance={"model": object()}),
       "Object of type object is not JSON serializable", "provenance and class names must be plain JSON values"),
    at("checkpoints/prefixes.py:take_part", lambda: load(safe({"model.a": ONE, "ema.a": ONE}) + ":net"),
       "weights/x.safetensors has no part 'net', and no names that start so;", "it has ema, model."),
    at("checkpoints/prefixes.py:find_model",
       lambda: load(safe({f"{who}.{name}": one for who in ("student", "teacher") for name, one in tensors("timm").items()})),
       "weights/x.safetensors contains several models: student, teacher.",
       "Choose one, such as weights/x.safetensors:student."),
)
# fmt: on
