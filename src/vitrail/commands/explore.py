"""`vitrail explore`: a page that shows how a model sees images."""

from __future__ import annotations

import importlib.util
import logging
import os
import threading
import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import quote

import tyro

from vitrail.checkpoints.pretrained import DEFAULT
from vitrail.commands.default_model import split_checkpoint
from vitrail.commands.output import check_output_file
from vitrail.commands.serve import run_and_end
from vitrail.commands.terminal import Console
from vitrail.errors import VitrailError, counted
from vitrail.files import write_text
from vitrail.serve.settings import ServeSettings, token_of_environment
from vitrail.text import printable

if TYPE_CHECKING:
    from vitrail.data.types import Split
    from vitrail.serve.explorations import NamedImage


Words = Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[CHECKPOINT] [IMAGE|DIR|LIST.txt …]")]
_MOST = 24  # images that the page offers


def explore(
    words: Words = (),
    /,
    *,
    compare_with: Annotated[str | None, tyro.conf.arg(name="compare")] = None,
    save: Path | None = None,
    overwrite: bool = False,
    no_browser: bool = False,
    port: int = 0,
    device: str = "auto",
    preprocess: str | None = None,
) -> None:
    """Open a page that shows how a model sees images: attention of any patch, layer by layer and head by head, and more.

    Starts a server that only this machine can reach, opens the page in the browser, and ends with Ctrl-C. The page shows
    predictions, attention, rollout, read-outs after each layer, similarity of features, features as colours, and predicts again
    with patches switched off. More images can be dropped or pasted there. Without images it shows two examples; without a
    checkpoint the included model vitrail-ti8-tiny-imagenet is used.

    With --save it writes the page to a file instead, which works without a server.

    Example: vitrail explore

    Example: vitrail explore runs/pets cat.jpg dog.jpg

    Example: vitrail explore runs/scratch cat.jpg --compare runs/finetuned

    Example: vitrail explore cat.jpg --save cat.html

    Args:
        words: First, if given, the checkpoint: a run or checkpoint folder, an .npz, .pth or .safetensors file, hf:owner/name or an
            included model. Then image files, folders (searched recursively), or .txt files with one path per line.
        compare_with: A second checkpoint, shown next to the first.
        save: Write one HTML file that works without a server, and end.
        overwrite: Replace an existing file.
        no_browser: Only print the address.
        port: Port of the server; 0: any free one.
        device: Device: auto, cpu or cuda.
        preprocess: A preset that replaces the preprocessing of the checkpoints.
    """
    from vitrail.serve.service import Service, models_of

    check_output_file(save, overwrite=overwrite)
    checkpoint, paths = split_checkpoint(words)
    images = _read(paths)
    references = [checkpoint or DEFAULT, *([compare_with] if compare_with else [])]
    if save is not None:
        _save(save, references, images, preprocess, device)
        return
    missing = [name for name in ("fastapi", "uvicorn") if importlib.util.find_spec(name) is None]
    if missing:
        raise VitrailError(f"The explorer needs {', '.join(missing)}: install the extra with pip install 'vitrail[serve]'.")
    from vitrail.serve.server import serve

    logging.getLogger("vitrail.serve").setLevel(logging.WARNING)
    service = Service(models_of(references, preprocess), ServeSettings(device=device))
    service.explorer_images = images
    console, names = Console(stderr=True), list(service.workers)

    def announce(address: str) -> None:
        shown = f"{address}/#model={quote(names[0])}&image2=0&model2={quote(names[1])}" if len(names) > 1 else f"{address}/"
        console.print(f"explore {', '.join(names)} at {shown} (Ctrl-C ends it)", highlight=False, soft_wrap=True)
        if not no_browser:
            threading.Thread(target=webbrowser.open, args=(shown,), daemon=True).start()  # a text browser would block

    token = token_of_environment(os.environ)
    run_and_end(service, lambda: serve(service, host="127.0.0.1", port=port, token=token, cors=(), announce=announce))


def _read(paths: Sequence[str]) -> tuple[NamedImage, ...]:
    from vitrail.evaluate.predictor import find_images
    from vitrail.serve.explorations import NamedImage

    if not paths:
        return ()
    split = find_images(paths)
    if len(split) > _MOST:
        raise VitrailError(
            f"There are {len(split)} images; the explorer takes up to {_MOST}. Give fewer, and drop others on the page."
        )
    names = [printable(Path(split.image_name(number)).name, one_line=True) for number in range(len(split))]
    if len(set(names)) < len(names):  # files of the same name in different folders
        names = [printable(split.image_name(number), one_line=True) for number in range(len(split))]
    return tuple(NamedImage(name, _file_of(split, number)) for number, name in enumerate(names))


def _file_of(split: Split, number: int) -> bytes:
    """Return the bytes of an image's file; an image of a source that stores pixels is encoded."""
    from vitrail.data.pack import encode_lossless
    from vitrail.data.preprocess import read_file
    from vitrail.data.sources.files import FileSplit

    if isinstance(split, FileSplit):
        return read_file(split.image_name(number))
    payload = split.payload(number)
    return payload if isinstance(payload, bytes) else encode_lossless(payload)


def _save(path: Path, references: Sequence[str], images: tuple[NamedImage, ...], preprocess: str | None, device: str) -> None:
    from vitrail.data.embedded import PHOTO_CREDIT
    from vitrail.data.types import BadImage
    from vitrail.serve.explorations import example_images
    from vitrail.serve.saved_page import saved_page
    from vitrail.serve.service import models_of
    from vitrail.train.parallel import choose_device

    console = Console(stderr=True)
    images, credit = images or example_images()[:1], "" if images else PHOTO_CREDIT
    with console.status(f"computing the page of {counted(len(images), 'image')}"):
        models = {name: read() for name, read in models_of(references, preprocess).items()}
        for bundle in models.values():
            bundle.model.to(choose_device(device))
        try:
            page, notes = saved_page(models, images, credit)
        except BadImage as bad:
            raise VitrailError(f"{bad.name}: {bad.reason}. Replace it, or use other images.") from bad
    write_text(path, page)
    for note in notes:
        console.print(note, highlight=False, soft_wrap=True)
    console.print(f"wrote {path} ({len(page) / 1e6:.1f} MB): open it in a browser", highlight=False, soft_wrap=True)
