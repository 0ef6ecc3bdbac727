"""Small checkpoints with one mistake each, for the rows of `checkpoints_*.py`. All are written to the folder `weights`."""

from __future__ import annotations

import io
import json
import shutil
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import vitrail
from tests.checkpoints.hub_server import HubServer, hub_server
from tests.checkpoints.small_models import KINDS, bundle_of
from tests.error_tour.files import scratch
from vitrail.checkpoints import FORMATS, Bundle, Report, download
from vitrail.checkpoints.huggingface import config_json
from vitrail.checkpoints.mapping import rows_of, write_state
from vitrail.checkpoints.timm_config import timm_config
from vitrail.data.preprocess import preset
from vitrail.models import ModelConfig, ViTConfig

TINY = ViTConfig(name="tiny", width=4, depth=1, heads=2, mlp=4, patch=(2, 2), image_size=(4, 4), outputs=2)
ALL = {**KINDS, "tiny": TINY}


def bundle(kind: str = "tiny") -> Bundle:
    """Return a model with random weights; its report calls its source `here`."""
    return bundle_of(ALL[kind])


@cache
def tensors(fmt: str, kind: str = "tiny") -> dict[str, Tensor]:
    """Return the tensors of a model under the names of a format."""
    made, described = bundle(kind), FORMATS[fmt]
    rows = rows_of(described.rows(made.model.config), made.model)
    return write_state(made.model.state_dict(), rows, Report("", fmt))


def arrays(fmt: str = "google", kind: str = "tiny") -> dict[str, np.ndarray[Any, Any]]:
    return {name: tensor.numpy() for name, tensor in tensors(fmt, kind).items()}


def place(name: str) -> Path:
    """Return the path of a new file or folder in `weights`."""
    path = Path("weights", name)
    path.parent.mkdir(exist_ok=True)
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    return path


def raw(content: bytes, name: str) -> str:
    place(name).write_bytes(content)
    return f"weights/{name}"


def npz(values: Mapping[str, Any], *, compressed: bool = False) -> str:
    (np.savez_compressed if compressed else np.savez)(place("x.npz"), **values)
    return "weights/x.npz"


def zipped(*members: tuple[str, bytes]) -> str:
    """Write a zip file with these members, of which two may have the same name."""
    with warnings.catch_warnings(), zipfile.ZipFile(place("x.npz"), "w") as archive:
        warnings.simplefilter("ignore")
        for name, content in members:
            archive.writestr(name, content)
    return "weights/x.npz"


def npy(shape: tuple[int, ...], content: bytes = b"") -> bytes:
    """Return an array whose header claims a shape."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": shape})
    return header.getvalue() + content


def safe(values: Mapping[str, Tensor]) -> str:
    save_file({name: tensor.clone() for name, tensor in values.items()}, place("x.safetensors"))
    return "weights/x.safetensors"


def pth(content: object) -> str:
    torch.save(content, place("x.pth"))
    return "weights/x.pth"


def hf(values: Mapping[str, Tensor] | None = None, **config: Any) -> str:
    """Write a folder of transformers; `config` are values of its config.json."""
    return _folder("hf", values or tensors("hf"), {**config_json(TINY, None, "float32"), **config})


def timm(values: Mapping[str, Tensor] | None = None, model: ModelConfig = TINY, **config: Any) -> str:
    """Write a folder of timm; `config` are values of its config.json, and of `model_args` in it."""
    written = timm_config(model, {}, None)
    arguments = written["model_args"] | config.pop("model_args", {})
    return _folder("timm", values or tensors("timm"), {**written, **config, "model_args": arguments})


def _folder(name: str, values: Mapping[str, Tensor], config: dict[str, Any]) -> str:
    folder = place(name)
    folder.mkdir()
    save_file({key: tensor.clone() for key, tensor in values.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return f"weights/{name}"


def own(**changes: Any) -> str:
    """Save a checkpoint of Vitrail, then change its config.json: `weights__sha256={}` is an entry of `weights`."""
    made = bundle()
    folder = place("own")
    vitrail.save(folder, made.model, classes=["a", "b"], preprocess=preset("imagenet", size=4))
    values = json.loads((folder / "config.json").read_text())
    for path, value in changes.items():
        *parents, last = path.split("__")
        part = values
        for parent in parents:
            part = part[parent]
        part[last] = value
    (folder / "config.json").write_text(json.dumps(values))
    return "weights/own"


@contextmanager
def environment(**variables: str) -> Iterator[None]:
    """Set the environment of huggingface_hub, with empty caches and no token."""
    from huggingface_hub import constants

    home = scratch()
    unset = ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_TOKEN", "HF_ENDPOINT")
    local = {"HF_HOME": str(home), "VITRAIL_CACHE": str(home), "NO_PROXY": "127.0.0.1,localhost", "no_proxy": "127.0.0.1,localhost"}
    with pytest.MonkeyPatch.context() as patch:
        for name in unset:
            patch.delenv(name, raising=False)
        for name, value in {**local, **variables}.items():
            patch.setenv(name, value)
        patch.setattr(download, "PAUSE", 0.0)
        patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        patch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
        yield


@contextmanager
def server(**repositories: Path) -> Iterator[HubServer]:
    """Run a Hub on this machine with these repositories of `ada`, for whom the token `hf_ada` may write."""
    with hub_server() as running, environment(HF_ENDPOINT=running.address):
        running.repositories = {f"ada/{name}": folder for name, folder in repositories.items()}
        running.root = scratch()
        running.tokens = {"hf_ada": ("ada",)}
        yield running


def repository(**files: str) -> Path:
    """Return a folder with these files; `README_md` stands for README.md."""
    folder = scratch()
    for name, text in files.items():
        (folder / name.replace("_md", ".md").replace("_json", ".json")).write_text(text)
    return folder
