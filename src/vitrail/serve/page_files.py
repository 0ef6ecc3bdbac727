"""The files of the explorer page, and what it needs besides an image. Nothing here needs the HTTP libraries."""

from __future__ import annotations

from importlib import resources

from vitrail.checkpoints import Bundle
from vitrail.errors import VitrailError
from vitrail.inspect.inputs import Array, finite
from vitrail.inspect.weights import position_vectors
from vitrail.models import ViT
from vitrail.serve.byte_maps import signed_to_bytes

TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
_PACKAGE = "vitrail.serve.explorer_page"


def page_files() -> dict[str, bytes]:
    """Return the files of the page by name."""
    files = resources.files(_PACKAGE).iterdir()
    return {file.name: file.read_bytes() for file in files if "." + file.name.rpartition(".")[2] in TYPES}


def position_bytes(bundle: Bundle, image_size: tuple[int, int], query: int | None = None) -> Array:
    """Return the position similarity of an image of this size, as bytes [patch, patch], or that of one patch to all.

    It reads weights alone, so any thread may compute it.
    """
    if not isinstance(bundle.model, ViT):
        raise VitrailError(f"{bundle.model.config.name} is a ResNet: it has no position embeddings. ViTs and hybrids have.")
    vectors = position_vectors(bundle.model, image_size=image_size).flatten(0, 1)
    values = vectors @ (vectors.T if query is None else vectors[query])
    return signed_to_bytes(finite(values.float().numpy(), "the position similarity"))
