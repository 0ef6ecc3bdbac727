"""Pack a source: decode and resize once, so that training reads pixels instead of decoding files.

Images are written to `DST.partial` in chunks. After each chunk, its end and checksum are added to a journal; an interrupted
run resumes after the last valid chunk. At the end all checksums are verified, and only then is the folder renamed to `DST`.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from PIL import Image

from vitrail.data.decode import ImageHeader, decode, image_header
from vitrail.data.preprocess import Preprocess
from vitrail.data.settings import BadImages, Fit, Store
from vitrail.data.sources.packed_files import FORMAT, VERSION, checksum_errors, digest_of_next, read_description
from vitrail.data.types import Array, BadImage, PackedStrings, Payload, Source, Split
from vitrail.errors import VitrailError
from vitrail.files import atomic_file, disk_errors, disk_reason, fsync, take_lock, write_text
from vitrail.regular_files import parse_json, read_bytes, read_json_object
from vitrail.text import to_bytes

Progress = Callable[[int], None]
CHUNK = 1024
"""Images per journal entry: the most that an interruption can lose."""


@dataclass(frozen=True, kw_only=True)
class PackSettings:
    """How a source is packed."""

    store: Store
    size: tuple[int, int] | None
    """(height, width) of every image. Without a size, encoded files are copied byte for byte."""
    fit: Fit = "crop"
    """`crop` keeps the aspect ratio and crops the centre; `stretch` keeps the whole image and changes its aspect ratio."""
    channels: int = 3
    bits: int = 8
    quality: int = 95
    """JPEG quality, if encoded files are resized."""
    exact: bool = False
    """The size was inferred from the images, so an image of another size is an error and not resized."""

    def image(self, payload: Payload, name: str) -> bytes:
        """Return the bytes to store for an image."""
        if self.store == "encoded":
            return _encode(payload, self, name)
        assert self.size is not None
        if self.exact:
            header = image_header(payload, name=name)
            if (header.height, header.width) != self.size:
                raise VitrailError(
                    f"{name} is {header.height}×{header.width}, but the others are {self.size[0]}×{self.size[1]}. "
                    "Pass --image-size to resize all images, or --store encoded to store them as they are."
                )
        crop = self.fit == "crop"
        preprocess = Preprocess(
            size=self.size,
            resize="short-side" if crop else "square",
            resize_to=min(self.size) if crop else None,
            interpolation="bicubic",
            mean=(0.5,) * self.channels,
            std=(0.5,) * self.channels,
            channels=self.channels,
            bits=self.bits,
        )
        return preprocess.pixels(payload, name=name).tobytes()


def choose_settings(
    source: Source,
    *,
    size: int | tuple[int, int] | None = None,
    fit: Fit = "crop",
    store: Store | None = None,
    channels: int | None = None,
    bits: int = 8,
    quality: int = 95,
) -> PackSettings:
    """Choose the settings not given. Default: arrays if a size is given or all images have the same size, else encoded files."""
    target_size = (size, size) if isinstance(size, int) else size
    headers = _sample_headers(source)
    sizes = {(header.height, header.width) for header in headers}
    exact = target_size is None and store != "encoded" and len(sizes) == 1
    if exact:
        (target_size,) = sizes
    if store == "arrays" and target_size is None:
        raise VitrailError(f"The images of {source.reference} differ in size. Pass --image-size, or --store encoded.")
    if channels is None:
        channels = max(header.channels for header in headers)
    store = store or ("arrays" if target_size is not None else "encoded")
    return PackSettings(store=store, size=target_size, fit=fit, channels=channels, bits=bits, quality=quality, exact=exact)


def pack(
    source: Source,
    destination: Path,
    settings: PackSettings,
    *,
    bad_images: BadImages = "error",
    workers: int = 2,
    progress: Progress = lambda count: None,
) -> dict[str, Any]:
    """Write `source` as a packed dataset and return its description. `progress` is called with the images of each chunk."""
    resume_key = _resume_key(source, settings)
    if _in_use(destination):
        return _verify_existing(destination, resume_key, progress)
    partial = destination.with_name(f"{destination.name}.partial")
    with disk_errors(partial), locked(destination):
        if _in_use(destination):  # another process has finished it meanwhile
            return _verify_existing(destination, resume_key, progress)
        return _pack(source, partial, destination, settings, resume_key, bad_images, workers, progress)


@contextmanager
def locked(destination: Path) -> Iterator[None]:
    """Let only one process pack into a folder. The system unlocks it when that process ends."""
    file = destination.with_name(f".{destination.name}.lock")  # not in the folder, which is renamed
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        lock = take_lock(file)
    except OSError as error:
        if disk_reason(error):
            raise
        raise VitrailError(f"Cannot write into {file.parent}: {error.strerror}. Choose another folder.") from error
    if lock is None:
        raise VitrailError(f"Another process is packing into {destination}. Wait for it, or choose another name.")
    with lock:
        try:
            yield
        finally:
            with suppress(OSError):  # Windows deletes no open file
                file.unlink(missing_ok=True)


def _pack(
    source: Source,
    partial: Path,
    destination: Path,
    settings: PackSettings,
    resume_key: dict[str, Any],
    bad_images: BadImages,
    workers: int,
    progress: Progress,
) -> dict[str, Any]:
    partial.mkdir(exist_ok=True)
    _check_partial(partial, resume_key)
    parts = {}
    with ThreadPoolExecutor(workers) as pool:
        for split in source.splits.values():
            parts[split.name] = _pack_split(split, partial, settings, bad_images, pool, progress)
    skipped = [entry for part in parts.values() for entry in part.pop("skipped")]
    skipped += [[bad.name, bad.reason] for bad in source.skipped]
    description = {"format": FORMAT, **resume_key, "splits": parts, "skipped": skipped}
    for error in checksum_errors(partial, description):
        raise VitrailError(f"{error} The disk did not return what was written. Delete {partial} and use another disk.")
    write_text(partial / "packed.json", json.dumps(description, indent=1))
    for leftover in (".lock", "plan.json", *(f"{name}.journal" for name in parts)):  # an older version kept its lock there
        (partial / leftover).unlink(missing_ok=True)
    if destination.exists():
        destination.rmdir()  # an empty folder
    partial.rename(destination)
    fsync(destination.parent)
    return description


def _resume_key(source: Source, settings: PackSettings) -> dict[str, Any]:
    """Return what must be the same to resume an interrupted run: version, settings, classes, names and targets."""
    content = hashlib.sha256()
    for split in source.splits.values():
        content.update(to_bytes(split.name) + np.ascontiguousarray(split.targets).tobytes())
        content.update(to_bytes("\n".join(split.image_name(k) for k in range(len(split)))))
    return {
        "version": VERSION,
        "made_from": source.reference,
        "task": source.task,
        "classes": list(source.classes),
        "packing": json.loads(json.dumps(asdict(settings))),  # tuples become lists, as when read back
        "content": content.hexdigest(),
    }


def _in_use(destination: Path) -> bool:
    """Tell whether something is there; an empty folder counts as nothing."""
    return destination.exists() and not (destination.is_dir() and not any(destination.iterdir()))


def _verify_existing(destination: Path, resume_key: dict[str, Any], progress: Progress) -> dict[str, Any]:
    description = read_description(destination)
    if {key: description.get(key) for key in resume_key} != resume_key:
        raise VitrailError(f"{destination} already exists, with other images or options. Delete it, or choose another name.")
    for error in checksum_errors(destination, description):
        raise VitrailError(f"{error} Delete {destination} and pack again.")
    for part in description["splits"].values():
        progress(part["count"])
    return description


def _check_partial(partial: Path, resume_key: dict[str, Any]) -> None:
    file = partial / "plan.json"
    try:
        started = read_json_object(file) if file.exists() else resume_key
    except (OSError, ValueError):
        started = None
    if started != resume_key and not any(journal.stat().st_size for journal in partial.glob("*.journal")):
        for left in (*partial.glob("*.journal"), *partial.glob("*.images.bin")):  # it failed before its first chunk was complete
            left.unlink()
    elif started != resume_key:
        raise VitrailError(
            f"{partial} was started with other images, options or another version. Use the same ones to resume, or delete it."
        )
    write_text(file, json.dumps(resume_key))


def _pack_split(
    split: Split,
    partial: Path,
    settings: PackSettings,
    bad_images: BadImages,
    pool: ThreadPoolExecutor,
    progress: Progress,
) -> dict[str, Any]:
    images, journal = partial / f"{split.name}.images.bin", partial / f"{split.name}.journal"
    images.touch()
    entries = _valid_entries(split, images, journal, settings)
    with images.open("r+b") as data, journal.open("w", encoding="utf-8") as log:
        for entry in entries:
            log.write(json.dumps(entry) + "\n")
            progress(min(CHUNK, len(split) - entry["first"]))
        data.truncate(entries[-1]["end"] if entries else 0)
        data.seek(0, os.SEEK_END)
        for first in range(len(entries) * CHUNK, len(split), CHUNK):
            entry = _pack_chunk(split, first, settings, bad_images, pool, data)
            data.flush()
            os.fsync(data.fileno())  # the journal must never be ahead of the data
            log.write(json.dumps(entry) + "\n")
            log.flush()
            entries.append(entry)
            progress(min(CHUNK, len(split) - first))
    return _finish(split, partial, settings, entries)


def _valid_entries(split: Split, images: Path, journal: Path, settings: PackSettings) -> list[dict[str, Any]]:
    """Return the journal entries of an interrupted run, up to the first that is corrupted or whose checksum is wrong."""
    entries: list[dict[str, Any]] = []
    if not journal.exists():
        return entries
    with images.open("rb") as data:
        for line in read_bytes(journal, 1 << 34).splitlines():
            try:
                entry, start = parse_json(line), data.tell()
                valid = _describes_chunk(entry, _chunk(split, len(entries) * CHUNK), start, settings)
                if not valid or digest_of_next(data, entry["end"] - start) != entry["sha256"]:
                    break
            except (ValueError, TypeError, KeyError, AttributeError):
                break  # the run ended while writing this line
            entries.append(entry)
    return entries


def _describes_chunk(entry: dict[str, Any], span: range, start: int, settings: PackSettings) -> bool:
    """Tell whether an entry accounts for every image of its chunk and every byte from `start` on: the checksum is of bytes only."""
    indices, lengths, skipped = entry["indices"], entry["lengths"], entry["skipped"]
    packed = set(indices)
    if entry["first"] != span.start or indices != [index for index in span if index in packed]:
        return False
    if len(indices) + len(skipped) != len(span) or not all(isinstance(name + reason, str) for name, reason in skipped):
        return False
    if settings.store == "arrays":
        assert settings.size is not None
        lengths = [settings.size[0] * settings.size[1] * settings.channels * settings.bits // 8] * len(indices)
    sound = len(lengths) == len(indices) and all(isinstance(one, int) and one >= 0 for one in lengths)
    return sound and entry["end"] - start == sum(lengths)


def _chunk(split: Split, first: int) -> range:
    return range(first, min(first + CHUNK, len(split)))


def _pack_chunk(
    split: Split,
    first: int,
    settings: PackSettings,
    bad_images: BadImages,
    pool: ThreadPoolExecutor,
    data: BinaryIO,
) -> dict[str, Any]:
    def convert(index: int) -> bytes | BadImage:
        try:
            return settings.image(split.payload(index), split.image_name(index))
        except BadImage as error:
            if bad_images == "error":
                raise error.skippable() from None
            return error

    digest, lengths, indices, skipped = hashlib.sha256(), [], [], []
    span = _chunk(split, first)
    for index, stored in zip(span, pool.map(convert, span), strict=True):
        if isinstance(stored, BadImage):
            skipped.append([split.image_name(index), stored.reason])
            continue
        digest.update(stored)
        data.write(stored)
        lengths.append(len(stored))
        indices.append(index)
    return {
        "first": first,
        "end": data.tell(),
        "sha256": digest.hexdigest(),
        "indices": indices,
        "lengths": lengths if settings.store == "encoded" else [],
        "skipped": skipped,
    }


def _finish(split: Split, partial: Path, settings: PackSettings, entries: list[dict[str, Any]]) -> dict[str, Any]:
    indices = np.array([index for entry in entries for index in entry["indices"]], np.int64)
    block, ends = PackedStrings(split.image_name(int(k)) for k in indices).to_arrays()
    content: dict[str, Any] = {"targets": split.targets[indices], "name_block": block, "name_ends": ends}
    if settings.store == "encoded":
        content["ends"] = np.cumsum([n for entry in entries for n in entry["lengths"]], dtype=np.int64)
    index = io.BytesIO()
    np.savez(index, **content)
    file = partial / f"{split.name}.index.npz"
    with atomic_file(file) as temporary:
        temporary.write_bytes(index.getvalue())
    shape = [*settings.size, settings.channels] if settings.store == "arrays" and settings.size else None
    return {
        "count": len(indices),
        "shape": shape,
        "dtype": "uint16" if settings.bits == 16 and shape else "uint8",
        "images": f"{split.name}.images.bin",
        "bytes": entries[-1]["end"] if entries else 0,
        "chunks": [[entry["end"], entry["sha256"]] for entry in entries],
        "index": file.name,
        "index_bytes": file.stat().st_size,
        "index_sha256": hashlib.sha256(index.getvalue()).hexdigest(),
        "skipped": [bad for entry in entries for bad in entry["skipped"]],
    }


def _encode(payload: Payload, settings: PackSettings, name: str) -> bytes:
    header = image_header(payload, name=name)
    if settings.size is None or min(header.height, header.width) <= min(settings.size):
        if isinstance(payload, bytes):
            decode(payload, channels=settings.channels, bits=settings.bits, name=name)  # find a bad file now
            return payload
        return encode_lossless(payload)
    scale = min(settings.size) / min(header.height, header.width)
    size = (round(header.height * scale), round(header.width * scale))
    pixels = replace(settings, store="arrays", size=size, fit="stretch", exact=False).image(payload, name)
    dtype = np.uint16 if settings.bits == 16 else np.uint8
    image = np.frombuffer(pixels, dtype).reshape(*size, settings.channels)
    if header.format != "JPEG" or settings.channels == 4 or settings.bits == 16:
        return encode_lossless(image)
    file = io.BytesIO()
    Image.fromarray(image[:, :, 0] if settings.channels == 1 else image).save(file, "JPEG", quality=settings.quality)
    return file.getvalue()


def encode_lossless(image: Array) -> bytes:
    """Return a file of an image [height, width, channels]: a PNG, or NumPy's format for pixels that Pillow's PNG cannot hold."""
    file = io.BytesIO()
    if image.dtype == np.uint8 and image.shape[2] in (1, 3, 4):
        Image.fromarray(image[:, :, 0] if image.shape[2] == 1 else image).save(file, "PNG")
    else:
        np.save(file, image, allow_pickle=False)
    return file.getvalue()


def _sample_headers(source: Source) -> list[ImageHeader]:
    """Read the headers of images spread over the source: enough to choose settings without reading everything."""
    headers = []
    for split in source.splits.values():
        for index in range(0, len(split), max(1, len(split) // 64)):
            try:
                headers.append(image_header(split.payload(index), name=split.image_name(index)))
            except BadImage:
                continue
    if not headers:
        raise VitrailError(f"No image of {source.reference} can be read. Run `vitrail data check` to list the problems.")
    return headers
