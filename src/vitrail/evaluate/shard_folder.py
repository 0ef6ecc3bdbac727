"""A folder of shards: what is in it, what is still missing, and whether it belongs to this job.

    settings.json           what decides the content, written before the first shard
    shard-00000.safetensors the rows of the first `shard_size` images (or .parquet, .csv)
    shard-00000.json        their count, checksum and bad images; written after the shard, so that its presence says: finished
    manifest.json           the settings and all shards; written last

Every file is written to a temporary name and renamed. So a process that is killed leaves finished shards, and temporary files that
the next one deletes; and two processes that compute the same shard write the same bytes. There are no locks that could outlive
their owner.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitrail.errors import VitrailError, counted, reason_of
from vitrail.files import atomic_file, sha256, write_text
from vitrail.regular_files import read_json_object
from vitrail.text import to_bytes, to_json

FORMAT = 1
SETTINGS, MANIFEST = "settings.json", "manifest.json"
_INFORMATION = ("checkpoint", "versions")
"""Settings that are stored and not compared: the same weights may be loaded from elsewhere."""
_TEMPORARY = re.compile(r"\.(shard-\d+|settings|manifest)\.\w+\.[0-9a-f]{8}\.\w+")


@dataclass(frozen=True)
class BadRow:
    """An image of a shard that could not be read."""

    index: int
    name: str
    reason: str


@dataclass(frozen=True)
class Record:
    """What `shard-….json` says of a finished shard."""

    shard: int
    file: str
    first: int
    images: int
    bytes: int
    sha256: str
    bad: tuple[BadRow, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "bad": [vars(one) for one in self.bad]}

    def entry(self) -> dict[str, Any]:
        """Return the line of the manifest, which has the number of bad images only."""
        return {**vars(self), "bad": len(self.bad)}


@dataclass(frozen=True, kw_only=True)
class ShardFolder:
    """The shards of one job. Boundaries depend on the number of images and `shard_size` only."""

    folder: Path
    images: int
    shard_size: int
    suffix: str
    settings: dict[str, Any]

    def __len__(self) -> int:
        return -(-self.images // self.shard_size)

    def rows(self, shard: int) -> range:
        """Return the positions of the images of a shard."""
        return range(shard * self.shard_size, min((shard + 1) * self.shard_size, self.images))

    def file(self, shard: int, suffix: str | None = None) -> Path:
        return self.folder / f"shard-{shard:05d}{self.suffix if suffix is None else suffix}"

    def open(self) -> None:
        """Make the folder, or check that it belongs to a job with these settings; then delete temporary files of killed processes.

        Those of a job that still runs are deleted, too: it stops, and this one computes its shards.
        """
        if self.folder.exists() and not self.folder.is_dir():
            raise VitrailError(f"{self.folder} is a file; --out needs a folder for shards. Choose another name.")
        if not self.folder.exists() or all(_TEMPORARY.fullmatch(file.name) for file in self.folder.iterdir()):
            text = to_json({"format": FORMAT, **self.settings}, indent=2) + "\n"
            # Another job may start at the same moment: the first settings stay, and it may delete our temporary file.
            with suppress(FileNotFoundError), atomic_file(self.folder / SETTINGS, first=True) as temporary:
                temporary.write_bytes(to_bytes(text))
        self.check(read_settings(self.folder))
        for file in self.folder.glob(".*"):
            if _TEMPORARY.fullmatch(file.name):
                file.unlink(missing_ok=True)

    def check(self, stored: dict[str, Any]) -> None:
        """Refuse settings that would give other bytes than those of the shards that are there."""
        other = self.differences(stored)
        if other:
            differ, listing = counted(len(other), "setting differs", "settings differ"), "".join(f"\n  {one}" for one in other[:8])
            raise VitrailError(
                f"{self.folder} holds shards of another job; {differ}:{listing}\n"
                "Use the same settings and images to resume it, or another folder."
            )

    def differences(self, stored: dict[str, Any]) -> list[str]:
        """Return the settings that differ, as text."""
        ours, theirs = (_flat(one) for one in (self.settings, stored))
        keys = [key for key in sorted(ours.keys() | theirs.keys()) if ours.get(key) != theirs.get(key)]
        return [f"{key}: {theirs.get(key)} there, {ours.get(key)} now" for key in keys]

    def record(self, shard: int) -> Record | None:
        """Return the record of a finished shard; None if there is none that can be read."""
        try:
            content = read_json_object(self.file(shard, ".json"))
            bad = tuple(BadRow(**one) for one in content.pop("bad"))
            record = Record(**content, bad=bad)
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return None
        rows = self.rows(shard)
        return record if (record.shard, record.first, record.images) == (shard, rows.start, len(rows)) else None

    def _is_intact(self, record: Record) -> bool:
        """Whether the file of a finished shard has the recorded bytes."""
        file = self.file(record.shard)
        try:
            return file.stat().st_size == record.bytes and sha256(file) == record.sha256
        except OSError:
            return False

    def unfinished(self, shards: Iterable[int]) -> list[int]:
        """Return the shards that are not finished, or no longer what was written: the records of these are deleted."""
        missing = []
        for shard in shards:
            record = self.record(shard)
            if record is None:
                missing.append(shard)
            elif not self._is_intact(record):
                self.file(shard, ".json").unlink(missing_ok=True)
                missing.append(shard)
        return missing

    def write_record(self, shard: int, bad: Iterable[BadRow]) -> None:
        file, rows = self.file(shard), self.rows(shard)
        record = Record(shard, file.name, rows.start, len(rows), file.stat().st_size, sha256(file), tuple(bad))
        write_text(self.file(shard, ".json"), to_json(record.to_dict(), indent=2) + "\n")

    def write_manifest(self) -> dict[str, Any]:
        """Write the manifest of a finished job from its records, and return it."""
        entries = []
        for shard in range(len(self)):
            record = self.record(shard)
            if record is None:
                raise VitrailError(f"{self.file(shard, '.json')} is missing or corrupted. Run the same command again.")
            entries.append(record.entry())
        bad = sum(entry["bad"] for entry in entries)
        settings = read_settings(self.folder)
        manifest = {**settings, "images": self.images, "bad_images": bad, "shards": entries}
        write_text(self.folder / MANIFEST, to_json(manifest, indent=1) + "\n")
        return manifest

    def delete_manifest(self) -> None:
        """Delete the manifest of a job that turned out not to be finished, because a shard is corrupted or missing."""
        (self.folder / MANIFEST).unlink(missing_ok=True)


def read_settings(folder: Path) -> dict[str, Any]:
    try:
        stored = read_json_object(folder / SETTINGS)
    except FileNotFoundError:
        raise VitrailError(
            f"{folder} is not empty and has no {SETTINGS}, so it is not a folder of shards. Choose a new folder for --out."
        ) from None
    except (OSError, ValueError) as error:
        raise VitrailError(f"{folder / SETTINGS} cannot be read ({error}). Choose a new folder for --out.") from error
    if stored.get("format") != FORMAT:
        raise VitrailError(
            f"{folder} has shards of format {stored.get('format')!r}; this version of Vitrail needs {FORMAT}. "
            "Choose a new folder for --out."
        )
    return stored


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of a finished job."""
    try:
        manifest = read_json_object(folder / MANIFEST)
        if manifest["format"] != FORMAT:
            raise ValueError(f"its format is {manifest['format']!r}, not {FORMAT}")
        if not isinstance(manifest["shards"], list):
            raise ValueError("its shards are not a list")
        return manifest
    except FileNotFoundError:
        unfinished = (folder / SETTINGS).is_file()
        why = "its job is not finished: run the same command again" if unfinished else "it was not written by `vitrail embed`"
        raise VitrailError(f"{folder} has no {MANIFEST}; {why}.") from None
    except (OSError, ValueError, KeyError) as error:
        raise VitrailError(
            f"{folder / MANIFEST} cannot be read ({reason_of(error)}). "
            "Run the same command again; it is written anew, without computing."
        ) from error


def hash_names(names: Iterable[str]) -> str:
    """Return the SHA-256 of a sequence of names."""
    digest = hashlib.sha256()
    for name in names:
        digest.update(to_bytes(name) + b"\0")
    return digest.hexdigest()


def _flat(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return settings with one level, `a.b`, without what is not compared, and as JSON has them: lists for tuples."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.") if prefix or key not in _INFORMATION else {}
        elif prefix or (key not in _INFORMATION and key != "format"):
            flat[f"{prefix}{key}"] = list(value) if isinstance(value, tuple) else value
    return flat
