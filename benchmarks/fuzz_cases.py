"""One good file of every format that Vitrail reads, and how to read it, for `fuzz.py`."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file

from vitrail.checkpoints import Bundle, load, write
from vitrail.checkpoints.report import Report
from vitrail.commands.terminal import Console
from vitrail.commands.training_display import print_result
from vitrail.data import open_source
from vitrail.data.decode import decode
from vitrail.data.pack import choose_settings, pack
from vitrail.data.preprocess import preset
from vitrail.data.sources.arrays import ArraySplit
from vitrail.data.sources.files import FileSplit
from vitrail.evaluate.context import EvalContext
from vitrail.evaluate.embeddings import Embeddings, load_embeddings, open_embeddings
from vitrail.evaluate.real_labels import read_real
from vitrail.evaluate.shards import embed_shards
from vitrail.files import sha256
from vitrail.models import BiTConfig, ResNetConfig, ViTConfig, build_model
from vitrail.train.curves import draw_curves
from vitrail.train.parallel import World
from vitrail.train.run import RunFolder
from vitrail.train.shard_metadata import FILE
from vitrail.train.snapshots import Snapshots, checksum

TINY = ViTConfig(name="tiny", width=4, depth=1, heads=2, mlp=4, patch=(2, 2), image_size=(4, 4), outputs=2)
TINY_BIT = BiTConfig(name="tiny", resnet=ResNetConfig(layers=(1,)), outputs=2, image_size=(8, 8))
CHECKPOINTS = (
    *(("google", ".npz"), ("big-vision", ".npz"), ("timm", ".safetensors"), ("timm", ".pth"), ("timm", ""), ("hf", "")),
    *(("torchvision", ".pth"), ("torchvision", ".safetensors"), ("vitrail", ""), ("bit", ".npz")),
)
TRAINING_FILES = ("Lightning.ckpt", "DINO.pth", "MAE.pth", "big_transfer.pth")
BIG_TRANSFER = (
    *((r"^stem\.conv", "root.conv"), (r"downsample\.conv\.", "downsample."), (r"\.norm(\d)", r".gn\1")),
    *((r"^stages\.0\.blocks\.0\.", "body.block1.unit01."), (r"^norm\.", "head.gn."), (r"^head\.fc\.", "head.conv.")),
)
HUGGING_FACE: dict[str, tuple[str, str, dict[str, Any]]] = {
    "DeiT": ("DeiTForImageClassificationWithTeacher", "DeiTConfig", {"intermediate_size": 8, "num_labels": 2}),
    "DINOv2": ("Dinov2WithRegistersModel", "Dinov2WithRegistersConfig", {}),
    "SigLIP": ("SiglipVisionModel", "SiglipVisionConfig", {"intermediate_size": 8}),
}
IMAGES = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "NPY")


@dataclass(frozen=True)
class Case:
    """A good file or folder, the files in it that are mutated, and the function that reads it."""

    name: str
    target: Path
    files: tuple[Path, ...]
    read: Callable[[], object]


def make_cases(root: Path, only: str | None = None) -> list[Case]:
    """Write one good file of every format below `root`, or that of the case `only`."""
    makers: dict[str, Callable[[], Case]] = {}
    for kind, suffix in CHECKPOINTS:
        makers[f"checkpoint {kind}{suffix}"] = partial(_checkpoint, root, kind, suffix)
    for name in TRAINING_FILES:
        makers[f"checkpoint {name}"] = partial(_training_file, root, name)
    for name in HUGGING_FACE:
        makers[f"checkpoint hf {name}"] = partial(_hugging_face, root, name)
    for kind in IMAGES:
        makers[f"image {kind}"] = partial(_image, root, kind)
    makers |= {f"packed {store}": partial(_packed, root, store) for store in ("arrays", "encoded")}
    makers |= {f"embeddings{suffix}": partial(_embeddings, root, suffix) for suffix in (".npz", ".parquet")}
    makers |= {f"shards {kind}": partial(_shards, root, kind) for kind in ("safetensors", "parquet")}
    makers |= {f"real labels {kind}": partial(_real_labels, root, kind) for kind in ("list", "object")}
    others = {"csv": _table, "tar": _tar, "tar index": _tar_index, "run config": _run, "run metrics": _metrics, "run end": _end}
    makers |= {name: partial(make, root) for name, make in others.items()}
    makers |= {"run checkpoint": partial(_snapshot, root), "run shard metadata": partial(_shard_metadata, root)}
    return [replace(make(), name=name) for name, make in makers.items() if only in (None, name)]


def _checkpoint(root: Path, name: str, suffix: str) -> Case:
    config: Any = TINY_BIT if name == "bit" else TINY
    model = build_model(config, seed=0).eval()
    bundle = Bundle(model, preset("timm", size=config.image_size), ("a", "b"), "classify", Report("here", "vitrail"))
    target = root / f"{name}{suffix.replace('.', '-')}" / f"good{suffix}"
    target.parent.mkdir()
    write(bundle, target, name)
    files = tuple(sorted(target.iterdir())) if target.is_dir() else (target,)
    fields = {"heads": 2} if name in ("timm", "torchvision") and suffix else {}
    return Case("", target, files, lambda: load(target, **fields))


def _timm_state(config: Any, root: Path) -> dict[str, torch.Tensor]:
    """Return the weights of a tiny model under timm's names."""
    with tempfile.TemporaryDirectory(dir=root) as folder:
        file = Path(folder) / "a.safetensors"
        preprocess = preset("timm", size=config.image_size)
        write(Bundle(build_model(config, seed=0).eval(), preprocess, None, "classify", Report("here", "vitrail")), file, "timm")
        return {name: tensor.clone() for name, tensor in load_file(file).items()}


def _under(prefix: str, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {prefix + name: tensor for name, tensor in state.items()}


def _training_file(root: Path, name: str) -> Case:
    """Make a file as training code leaves it."""
    file = root / name.replace(" ", "-")
    state = _timm_state(TINY_BIT if "big_transfer" in name else TINY, root)
    settings = argparse.Namespace(arch="vit", lr=1e-3, layers=[1, 2])
    options: dict[str, Any] = {"heads": 2}
    if "Lightning" in name:
        content: Any = {"epoch": 3, "state_dict": _under("model.", state), "hyper_parameters": settings, "optimizer_states": []}
    elif "DINO" in name:
        teacher = {**_under("backbone.", state), "head.mlp.0.weight": torch.ones(2, 2)}
        content = {"student": _under("module.backbone.", state), "teacher": teacher, "args": settings, "epoch": 1}
    elif "MAE" in name:
        content = {
            "model": {**state, "decoder_pos_embed": torch.ones(1, 5, 8), "mask_token": torch.ones(1, 1, 8)},
            "args": settings,
        }
    else:
        for pattern, new in BIG_TRANSFER:
            state = {re.sub(pattern, new, key): tensor for key, tensor in state.items()}
        content, options = {"step": 500, "model": _under("module.", state)}, {"image_size": 8}
    torch.save(content, file)
    return Case("", file, (file,), lambda: load(file, **options))


def _hugging_face(root: Path, name: str) -> Case:
    import transformers

    kind, config, more = HUGGING_FACE[name]
    sizes = {"hidden_size": 4, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8, "patch_size": 4}
    target = root / f"hf-{name}"
    torch.manual_seed(0)
    getattr(transformers, kind)(getattr(transformers, config)(**sizes, **more)).save_pretrained(target)
    return Case("", target, tuple(sorted(target.iterdir())), lambda: load(target))


def _picture(seed: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (12, 10, 3), np.uint8))


def _image(root: Path, kind: str) -> Case:
    file = root / f"image.{kind.lower()}"
    if kind == "NPY":
        np.save(file, np.asarray(_picture(0)))
    else:
        _picture(0).save(file, kind)
    return Case("", file, (file,), lambda: decode(file.read_bytes(), channels=3))


def _photos(folder: Path) -> Path:
    if folder.exists():
        return folder
    for k in range(6):
        (folder / str(k % 2)).mkdir(parents=True, exist_ok=True)
        _picture(k).save(folder / str(k % 2) / f"{k}.png")
    return folder


def _reader(reference: str) -> Callable[[], object]:
    def read() -> list[object]:
        splits = open_source(reference).splits.values()
        return [decode(split.payload(k), channels=3) for split in splits for k in range(min(len(split), 8))]

    return read


def _packed(root: Path, store: str) -> Case:
    source, target = open_source(f"folder:{_photos(root / 'photos')}?val=0"), root / f"packed-{store}"
    pack(source, target, choose_settings(source, store=store), workers=1)  # type: ignore[arg-type]
    return Case("", target, tuple(sorted(target.iterdir())), _reader(f"packed:{target}"))


def _table(root: Path) -> Case:
    _photos(root / "photos")
    table = root / "table" / "table.csv"
    table.parent.mkdir()
    table.write_text("".join(["path,label,split\n", *(f"../photos/{k % 2}/{k}.png,{k % 2},train\n" for k in range(6))]))
    return Case("", table, (table,), _reader(f"csv:{table}"))


def _write_tar(file: Path) -> Path:
    file.parent.mkdir()
    with tarfile.open(file, "w") as archive:
        for k in range(3):
            picture = io.BytesIO()
            _picture(k).save(picture, "PNG")
            for ending, content in (("png", picture.getvalue()), ("json", json.dumps({"label": k % 2}).encode())):
                member = tarfile.TarInfo(f"{k}.{ending}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    return file


def _tar(root: Path) -> Case:
    file = _write_tar(root / "tar" / "train.tar")

    def read() -> object:
        shutil.rmtree(root / "tar-index", ignore_errors=True)  # the cache is keyed by size and time, which mutations share
        return _reader(f"wds:{file}?index={root / 'tar-index'}")()

    return Case("", file, (file,), read)


def _tar_index(root: Path) -> Case:
    """Make the cache of a tar's members. A corrupted one is made anew, so it is written."""
    read = _reader(f"wds:{_write_tar(root / 'indexed' / 'train.tar')}?index={root / 'indexed' / 'tar-index'}")
    read()
    (index,) = (root / "indexed" / "tar-index").glob("*.json")
    return Case("", index, (index,), read)


def _embeddings(root: Path, suffix: str) -> Case:
    file = root / f"embeddings{suffix}"
    Embeddings(np.ones((3, 4), np.float32), ("a", "b", "c"), {"model": "tiny"}).save(file)
    return Case("", file, (file,), lambda: load_embeddings(file).nearest([0], 1))


def _shards(root: Path, kind: Any) -> Case:
    """Make a folder of embeddings in shards, as it is searched."""
    folder, config = root / f"shards-{kind}", TINY
    bundle = Bundle(
        build_model(config, seed=0).eval(), preset("timm", size=config.image_size), None, "classify", Report("here", "")
    )
    images = ArraySplit("train", "unlabelled", np.ones((5, 4, 4, 3), np.uint8), np.empty((5, 0), np.float32), ())
    embed_shards(bundle, images, folder, context=EvalContext(workers=0), format=kind, shard_size=3)
    files = (folder / "manifest.json", *sorted(folder.glob(f"*.{kind}")))
    return Case("", folder, files, lambda: open_embeddings(folder).nearest([0], 1))


def _real_labels(root: Path, kind: str) -> Case:
    file = root / f"real-{kind}.json"
    names = [f"ILSVRC2012_val_{k + 1:08d}.JPEG" for k in range(4)]
    split = FileSplit("val", "classify", root, names, np.zeros(4, np.int64), ("0", "1", "2"))
    labels: list[Any] = [[0], [1, 2], [], [2]]
    file.write_text(json.dumps(labels if kind == "list" else dict(zip(names, labels, strict=True))))
    return Case("", file, (file,), lambda: read_real(file, split, split.classes))


def _run(root: Path) -> Case:
    """Make the files of a run that are read to resume it; its weights are checkpoints of our own format."""
    from vitrail.recipes import recipe_named

    folder = root / "run"
    folder.mkdir()
    run = RunFolder(folder)
    images = [{"source": "digits", "split": "train", "count": 3, "names": "0" * 16}]
    run.write_config(recipe_named("digits"), {"precision": "fp32", "trained_on": images, "steps": 10})

    def read() -> None:
        run.saved_recipe()
        run.saved_precision()
        run.saved_images()
        run.check_unchanged(recipe_named("digits"))

    return Case("", folder, (folder / "config.json",), read)


def _write_records(folder: Path, *more: dict[str, Any]) -> Path:
    folder.mkdir()
    file = folder / "metrics.jsonl"
    train = {"kind": "train", "step": 2, "loss": 1.5, "lr": 1e-3, "speed": {"seconds": 1.0, "images_per_second": 9.0}}
    records = [train, {"kind": "val", "step": 2, "accuracy": 0.5, "loss": 1.25}, {**train, "step": 4, "loss": 1.0}, *more]
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


def _metrics(root: Path) -> Case:
    folder = root / "metrics-run"
    file = _write_records(folder)

    def read() -> None:
        draw_curves(RunFolder(folder), headline="accuracy")
        RunFolder(folder).end()
        RunFolder(folder).seconds()
        shutil.rmtree(RunFolder(folder).figures, ignore_errors=True)

    return Case("", file, (file,), read)


def _end(root: Path) -> Case:
    """Make a finished run, as it is read when the same command is run again."""
    from vitrail.train.result import finished
    from vitrail.train.saved_model import SavedModel

    folder = root / "finished-run"
    model = SavedModel("best", 2, 4, "averaged", "accuracy", 0.5).to_dict()
    end = {"kind": "end", "step": 4, "headline": "accuracy", "seconds": 2.0, "stopped_early": False, "model": model}
    file = _write_records(folder, {**end, "accuracy": 0.5, "loss": 1.25, "images": 8})
    (folder / "model").mkdir()

    def read() -> None:
        run = RunFolder(folder)
        record = run.end()
        if record is not None:
            result = finished(run, record)
            print_result(result, Console(file=io.StringIO()))
            json.dumps(result.summary())

    return Case("", file, (file,), read)


def _tensors() -> dict[str, torch.Tensor]:
    return {"model.a": torch.ones(2, 3), "optim.a.mean": torch.ones(2, 3, dtype=torch.bfloat16), "optim.count": torch.tensor(7)}


def _snapshot(root: Path, name: str = "run checkpoint") -> Case:
    """Make a checkpoint to resume from. A corrupted one is set aside with a warning, so it is moved back here."""
    made = Snapshots(root / name.replace(" ", "-"), World(torch.device("cpu")))
    made.save(2, _tensors(), {"skipped_steps": [], "window": [], "scaler": None, "ranks": 1})
    made.finish()
    step = made.path(2)

    def read() -> None:
        try:
            made.load(_tensors())
        finally:
            if (aside := step.with_name(f"{step.name}.corrupted")).exists():
                aside.replace(step)

    return Case("", step, tuple(sorted(step.iterdir())), read)


def _shard_metadata(root: Path) -> Case:
    """Make a checkpoint whose checksums always agree with its metadata, as an attacker's would."""
    case = _snapshot(root, "run shard metadata")
    metadata, state_file = case.target / FILE, case.target / "state.json"

    def read() -> None:
        with restored(state_file):
            state = json.loads(state_file.read_text())
            state["files"][FILE] = sha256(metadata)
            state_file.write_text(json.dumps({**state, "checksum": checksum(state)}))
            case.read()

    return Case("", case.target, (metadata,), read)


@contextlib.contextmanager
def restored(file: Path) -> Iterator[None]:
    """Restore the content and the time of a file afterwards."""
    good, times = file.read_bytes(), file.stat()
    try:
        yield
    finally:
        file.write_bytes(good)
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
