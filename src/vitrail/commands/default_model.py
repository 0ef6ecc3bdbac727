"""The positional arguments of commands with a default model: an optional checkpoint, then images."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vitrail.checkpoints.pretrained import DEFAULT
from vitrail.errors import VitrailError, counted

if TYPE_CHECKING:
    from vitrail.checkpoints import Bundle


def split_checkpoint(words: Sequence[str]) -> tuple[str | None, tuple[str, ...]]:
    """Return the checkpoint, or None if the words are only images, and the images.

    The first word is an image if it is a folder of images without a checkpoint, or its name is that of an image or a list; anything
    else is a checkpoint, and its own errors apply.
    """
    if not words:
        return None, ()
    first, rest = words[0], tuple(words[1:])
    if not _is_images(first):
        if not rest and not _exists(first):
            raise VitrailError(f"There is no image, folder or checkpoint {first!r}. Check the path.")
        if not rest and Path(first).expanduser().is_dir() and not any(Path(first).expanduser().iterdir()):
            raise VitrailError(f"The folder {first} is empty: there is neither an image nor a checkpoint in it.")
        return first, rest
    misplaced = next((word for word in rest if _is_checkpoint(word)), None)
    if misplaced is not None:
        raise VitrailError(f"{misplaced} is a checkpoint, but comes after an image ({first}). Give the checkpoint first.")
    return None, tuple(words)


def default_note(bundle: Bundle) -> str:
    """Return a line that names the default model, for a command that was called without a checkpoint."""
    size = "×".join(map(str, bundle.model.config.image_size))
    classes = counted(bundle.model.config.outputs, "class", "classes")
    return f"model: {DEFAULT} ({bundle.model.config.name}, {size} pixels, {classes}), because no checkpoint was given"


def _is_images(word: str) -> bool:
    from vitrail.checkpoints.references import is_name
    from vitrail.data.sources.layout import is_image, is_unread_photo
    from vitrail.evaluate.predictor import is_image_url, is_source

    path = Path(word).expanduser()
    if is_image_url(word):
        return True  # reading it raises the error
    if is_name(word):
        return False
    if path.is_dir():
        return not _is_checkpoint(word) and _has_photos(path)
    is_list, name = path.suffix.lower() == ".txt", path.name or "."
    return is_list or is_image(name) or is_unread_photo(name) or (is_source(word) and not word.endswith(".pth.tar"))


def _has_photos(folder: Path) -> bool:
    from vitrail.data.sources.layout import images_under
    from vitrail.data.types import BadImage

    unread: list[BadImage] = []
    return next(images_under(folder, special=unread), None) is not None or bool(unread)


def _is_checkpoint(word: str) -> bool:
    """Whether a word is surely a checkpoint: a reference by name, or a folder with a config.json."""
    from vitrail.checkpoints.references import is_name

    folder = Path(word).expanduser()
    configs = (folder / "config.json", folder / "model" / "config.json")
    return is_name(word) or any(config.is_file() for config in configs)


def _exists(word: str) -> bool:
    """Whether a checkpoint reference points to something; `file.pth:part` selects a part of a file."""
    from vitrail.checkpoints.references import is_name

    return is_name(word) or any(Path(path).expanduser().exists() for path in (word, word.rpartition(":")[0] or word))
