"""Every foreign format, in the order in which a file is compared with them."""

from __future__ import annotations

from vitrail.checkpoints.archive import Archive
from vitrail.checkpoints.big_vision import BIG_VISION
from vitrail.checkpoints.bit import BIT
from vitrail.checkpoints.format import Format
from vitrail.checkpoints.google import GOOGLE
from vitrail.checkpoints.huggingface import HUGGING_FACE
from vitrail.checkpoints.timm import TIMM
from vitrail.checkpoints.torchvision import TORCHVISION
from vitrail.errors import VitrailError

FORMATS: dict[str, Format] = {f.name: f for f in (GOOGLE, BIT, BIG_VISION, TIMM, HUGGING_FACE, TORCHVISION)}


def recognise(archive: Archive) -> Format:
    """The format whose names the file carries."""
    names = archive.entries.keys()
    for known in FORMATS.values():
        if known.recognise(names):
            return known
    if "patches.weight" in names or "root.weight" in names:
        raise VitrailError(
            f"{archive.path} holds Vitrail's own weights without their config.json. Load the folder they were saved in."
        )
    if "img/embedding/kernel" in names:
        raise VitrailError(f"{archive.path} holds several models: name the image tower with {archive.path}:img.")
    shown = ", ".join(sorted(names)[:6])
    titles = ", ".join(known.title for known in FORMATS.values())
    raise VitrailError(
        f"{archive.path} holds {len(names)} tensors ({shown} …), whose names fit no format known here: {titles}. "
        f"If it is one of these, a prefix may have been added to its names."
    )
