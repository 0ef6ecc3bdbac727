"""All formats of other libraries, in the order in which a file is matched with them."""

from __future__ import annotations

from vitrail.checkpoints.archive import Archive
from vitrail.checkpoints.big_vision import BIG_VISION
from vitrail.checkpoints.bit import BIT
from vitrail.checkpoints.format import Format
from vitrail.checkpoints.google import GOOGLE
from vitrail.checkpoints.huggingface import HUGGING_FACE
from vitrail.checkpoints.timm import TIMM
from vitrail.checkpoints.torchvision import TORCHVISION
from vitrail.errors import VitrailError, counted

FORMATS: dict[str, Format] = {f.name: f for f in (GOOGLE, BIT, BIG_VISION, TIMM, HUGGING_FACE, TORCHVISION)}


def detect_format(archive: Archive) -> Format:
    """Return the format whose tensor names the file has."""
    names = archive.tensors.keys()
    for fmt in FORMATS.values():
        if fmt.matches(names):
            return fmt
    if "patches.weight" in names or "root.weight" in names:
        raise VitrailError(
            f"{archive.path} contains Vitrail weights without their config.json. Load the folder they were saved in."
        )
    if "img/embedding/kernel" in names:
        raise VitrailError(f"{archive.path} contains several models. Load the image tower with {archive.path}:img.")
    shown = ", ".join(sorted(names)[:6]) + (" …" if len(names) > 6 else "")
    titles = ", ".join(fmt.title for fmt in FORMATS.values())
    raise VitrailError(
        f"{archive.path} contains {counted(len(names), 'tensor')} ({shown}), whose names match no supported format: "
        f"{titles}. If it is one of these, its names may have an extra prefix."
    )
