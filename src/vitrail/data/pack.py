"""Packing a source: decoded and resized once, so that training reads pixels instead of decoding files.

Work goes on in `DST.partial`, stretch by stretch. After each stretch its end and checksum are written to a journal; an
interrupted run takes up after the last stretch that is still whole. At the end everything is read back and compared,
and only then does the folder get its name.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
from PIL import Image

from vitrail.data.decode import ImageHeader, decode, image_header
from vitrail.data.preprocess import Preprocess
from vitrail.data.sources.packed import FORMAT, VERSION, damages, read_about
from vitrail.data.types import Array, BadImage, Names, Payload, Source, Split
from vitrail.errors import VitrailError
from vitrail.files import atomic_file, write_text

Store = Literal["arrays", "encoded"]
Fit = Literal["crop", "stretch"]
Progress = Callable[[int], None]
STRETCH = 1024
"""Images between two entries of the journal: what an interruption can cost."""


@dataclass(frozen=True, kw_only=True)
class Packing:
    """How a source is packed."""

    store: Store
    size: tuple[int, int] | None
    """(height, width) of every image. Encoded files without a size are kept byte for byte."""
    fit: Fit = "crop"
    """`crop` keeps the proportions and cuts the middle out, `stretch` keeps everything and bends it."""
    channels: int = 3
    bits: int = 8
    quality: int = 95
    """Of JPEGs, where encoded files are resized."""
    exact: bool = False
    """The size was found and not asked for: an image that differs is refused rather than resized unasked."""

    def image(self, payload: Payload, name: str) -> bytes:
        """One image as the bytes to be stored."""
        if self.store == "encoded":
            return _encoded(payload, self, name)
        assert self.size is not None
        if self.exact:
            header = image_header(payload, name=name)
            if (header.height, header.width) != self.size:
                raise VitrailError(
                    f"{name} is {header.height}×{header.width} where the others are {self.size[0]}×{self.size[1]}. "
                    "Say with --size to which size all shall be brought, or keep them as they are with --store encoded."
                )
        whole = self.fit == "crop"
        shaped = Preprocess(
            size=self.size,
            resize="short-side" if whole else "square",
            resize_to=min(self.size) if whole else None,
            interpolation="bicubic",
            mean=(0.5,) * self.channels,
            std=(0.5,) * self.channels,
            channels=self.channels,
            bits=self.bits,
        )
        return shaped.pixels(payload, name=name).tobytes()


def plan(
    source: Source,
    *,
    size: int | tuple[int, int] | None = None,
    fit: Fit = "crop",
    store: Store | None = None,
    channels: int | None = None,
    bits: int = 8,
    quality: int = 95,
) -> Packing:
    """Fill in what was left open: without a size, images of one size become arrays and others stay as they are."""
    box = (size, size) if isinstance(size, int) else size
    headers = _some_headers(source)
    sizes = {(header.height, header.width) for header in headers}
    exact = box is None and store != "encoded" and len(sizes) == 1
    if exact:
        (box,) = sizes
    if store == "arrays" and box is None:
        raise VitrailError(f"The images of {source.reference} differ in size. Pass --size, or --store encoded.")
    if channels is None:
        channels = max(header.channels for header in headers)
    store = store or ("arrays" if box is not None else "encoded")
    return Packing(store=store, size=box, fit=fit, channels=channels, bits=bits, quality=quality, exact=exact)


def pack(
    source: Source,
    destination: Path,
    packing: Packing,
    *,
    bad_images: Literal["error", "skip"] = "error",
    workers: int = 2,
    progress: Progress = lambda count: None,
) -> dict[str, Any]:
    """Write `source` as a packed set and return its description; `progress` is told of every finished stretch."""
    plan_ = _plan_of(source, packing)
    if destination.exists():
        return _already_there(destination, plan_, progress)
    partial = destination.with_name(f"{destination.name}.partial")
    _take_up(partial, plan_)
    parts = {}
    with ThreadPoolExecutor(workers) as pool:
        for split in source.splits.values():
            parts[split.name] = _pack_split(split, partial, packing, bad_images, pool, progress)
    left_out = [entry for part in parts.values() for entry in part.pop("left_out")]
    left_out += [[fault.name, fault.fault] for fault in source.left_out]
    about = {"format": FORMAT, "version": VERSION, **plan_, "splits": parts, "left_out": left_out}
    for fault in damages(partial, about):
        raise VitrailError(f"{fault} The disk did not give back what was written; delete {partial} and try another disk.")
    write_text(partial / "packed.json", json.dumps(about, indent=1))
    for leftover in ("plan.json", *(f"{name}.journal" for name in parts)):
        (partial / leftover).unlink(missing_ok=True)
    partial.rename(destination)
    return about


def _plan_of(source: Source, packing: Packing) -> dict[str, Any]:
    """What must be the same for an interrupted run to be taken up: settings, classes, and which images there are."""
    content = hashlib.sha256()
    for split in source.splits.values():
        content.update(split.name.encode() + np.ascontiguousarray(split.targets).tobytes())
        content.update("\n".join(split.image_name(k) for k in range(len(split))).encode("utf-8", "surrogateescape"))
    settings = json.loads(json.dumps(asdict(packing)))  # tuples as the lists they will be read back as
    return {
        "made_from": source.reference,
        "task": source.task,
        "classes": list(source.classes),
        "packing": settings,
        "content": content.hexdigest(),
    }


def _already_there(destination: Path, plan_: dict[str, Any], progress: Progress) -> dict[str, Any]:
    about = read_about(destination)
    if {key: about[key] for key in plan_} != plan_:
        raise VitrailError(f"{destination} is already there and was packed otherwise. Delete it, or choose another name.")
    for fault in damages(destination, about):
        raise VitrailError(f"{fault} Delete {destination} and pack again.")
    for part in about["splits"].values():
        progress(part["count"])
    return about


def _take_up(partial: Path, plan_: dict[str, Any]) -> None:
    file = partial / "plan.json"
    if file.exists() and json.loads(file.read_text(encoding="utf-8")) != plan_:
        raise VitrailError(f"{partial} was begun with other images or other options. Use those again to finish it, or delete it.")
    write_text(file, json.dumps(plan_))


def _pack_split(
    split: Split,
    partial: Path,
    packing: Packing,
    bad_images: Literal["error", "skip"],
    pool: ThreadPoolExecutor,
    progress: Progress,
) -> dict[str, Any]:
    images, journal = partial / f"{split.name}.images.bin", partial / f"{split.name}.journal"
    images.touch()
    entries = _whole_entries(images, journal)
    with images.open("r+b") as data, journal.open("w", encoding="utf-8") as log:
        for entry in entries:
            log.write(json.dumps(entry) + "\n")
            progress(min(STRETCH, len(split) - entry["first"]))
        data.truncate(entries[-1]["end"] if entries else 0)
        data.seek(0, os.SEEK_END)
        for first in range(len(entries) * STRETCH, len(split), STRETCH):
            entry = _pack_stretch(split, first, packing, bad_images, pool, data)
            data.flush()
            os.fsync(data.fileno())  # the journal must never be ahead of the data
            log.write(json.dumps(entry) + "\n")
            log.flush()
            entries.append(entry)
            progress(min(STRETCH, len(split) - first))
    return _finish(split, partial, packing, entries)


def _whole_entries(images: Path, journal: Path) -> list[dict[str, Any]]:
    """Entries of an earlier run's journal, as far as the data still agree with their checksums."""
    entries: list[dict[str, Any]] = []
    if not journal.exists():
        return entries
    with images.open("rb") as data:
        for line in journal.read_text(encoding="utf-8").splitlines():
            try:
                entry = json.loads(line)
            except json.JSONDecodeError:
                break  # the line being written when the run ended
            if hashlib.sha256(data.read(entry["end"] - data.tell())).hexdigest() != entry["sha256"]:
                break
            entries.append(entry)
    return entries


def _pack_stretch(
    split: Split,
    first: int,
    packing: Packing,
    bad_images: Literal["error", "skip"],
    pool: ThreadPoolExecutor,
    data: BinaryIO,
) -> dict[str, Any]:
    def one(index: int) -> bytes | BadImage:
        try:
            return packing.image(split.payload(index), split.image_name(index))
        except BadImage as fault:
            if bad_images == "error":
                raise
            return fault

    digest, lengths, kept, left_out = hashlib.sha256(), [], [], []
    span = range(first, min(first + STRETCH, len(split)))
    for index, stored in zip(span, pool.map(one, span), strict=True):
        if isinstance(stored, BadImage):
            left_out.append([split.image_name(index), stored.fault])
            continue
        digest.update(stored)
        data.write(stored)
        lengths.append(len(stored))
        kept.append(index)
    return {
        "first": first,
        "end": data.tell(),
        "sha256": digest.hexdigest(),
        "kept": kept,
        "lengths": lengths if packing.store == "encoded" else [],
        "left_out": left_out,
    }


def _finish(split: Split, partial: Path, packing: Packing, entries: list[dict[str, Any]]) -> dict[str, Any]:
    kept = np.array([index for entry in entries for index in entry["kept"]], np.int64)
    block, ends = Names(split.image_name(int(k)) for k in kept).to_arrays()
    content: dict[str, Any] = {"targets": split.targets[kept], "name_block": block, "name_ends": ends}
    if packing.store == "encoded":
        content["ends"] = np.cumsum([n for entry in entries for n in entry["lengths"]], dtype=np.int64)
    index = io.BytesIO()
    np.savez(index, **content)
    file = partial / f"{split.name}.index.npz"
    with atomic_file(file) as temporary:
        temporary.write_bytes(index.getvalue())
    shape = [*packing.size, packing.channels] if packing.store == "arrays" and packing.size else None
    return {
        "count": len(kept),
        "shape": shape,
        "dtype": "uint16" if packing.bits == 16 and shape else "uint8",
        "images": f"{split.name}.images.bin",
        "bytes": entries[-1]["end"] if entries else 0,
        "stretches": [[entry["end"], entry["sha256"]] for entry in entries],
        "index": file.name,
        "index_bytes": file.stat().st_size,
        "index_sha256": hashlib.sha256(index.getvalue()).hexdigest(),
        "left_out": [bad for entry in entries for bad in entry["left_out"]],
    }


def _encoded(payload: Payload, packing: Packing, name: str) -> bytes:
    header = image_header(payload, name=name)
    if packing.size is None or min(header.height, header.width) <= min(packing.size):
        if isinstance(payload, bytes):
            decode(payload, channels=packing.channels, bits=packing.bits, name=name)  # a bad file is found now, not later
            return payload
        return _lossless(payload)
    small = min(packing.size) / min(header.height, header.width)
    size = (round(header.height * small), round(header.width * small))
    pixels = replace(packing, store="arrays", size=size, fit="stretch", exact=False).image(payload, name)
    dtype = np.uint16 if packing.bits == 16 else np.uint8
    image = np.frombuffer(pixels, dtype).reshape(*size, packing.channels)
    if header.format != "JPEG" or packing.channels == 4 or packing.bits == 16:
        return _lossless(image)
    file = io.BytesIO()
    Image.fromarray(image[:, :, 0] if packing.channels == 1 else image).save(file, "JPEG", quality=packing.quality)
    return file.getvalue()


def _lossless(image: Array) -> bytes:
    file = io.BytesIO()
    if image.dtype == np.uint8 and image.shape[2] in (1, 3, 4):
        Image.fromarray(image[:, :, 0] if image.shape[2] == 1 else image).save(file, "PNG")
    else:
        np.save(file, image, allow_pickle=False)
    return file.getvalue()


def _some_headers(source: Source) -> list[ImageHeader]:
    """Of images spread over the whole source: enough to see what kind of set it is, without reading all of it."""
    headers = []
    for split in source.splits.values():
        for index in range(0, len(split), max(1, len(split) // 64)):
            try:
                headers.append(image_header(split.payload(index), name=split.image_name(index)))
            except BadImage:
                continue
    if not headers:
        raise VitrailError(f"No image of {source.reference} could be read. `vitrail data check` lists what is wrong.")
    return headers
