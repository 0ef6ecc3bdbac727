"""Tell names of weights from paths."""

from __future__ import annotations

import os
from pathlib import Path

from vitrail.checkpoints import hub, published
from vitrail.checkpoints.download import cached_url, shown_url
from vitrail.checkpoints.pretrained import pretrained_models
from vitrail.checkpoints.url import is_url
from vitrail.errors import VitrailError


def is_name(reference: str) -> bool:
    """Tell whether a reference is a name or a URL, not a path: an included model, hf:owner/name, or the name of a published model.

    True also for a model of which there are no published weights: loading it says so.
    """
    if reference in pretrained_models() or reference.startswith("hf:") or is_url(reference):
        return True
    if os.path.lexists(os.path.expanduser(reference)):  # noqa: PTH111 - Path raises for a name that is too long
        return False
    try:
        return published.find(reference) is not None
    except VitrailError:
        return True


def without_download(reference: str) -> str | Path:
    """Return a reference that comes from a file: hf:owner/name and URLs as what the cache has of them, others as they are."""
    if is_url(reference):
        file = cached_url(reference)
        if file.is_file():
            return file
    elif reference.startswith("hf:"):
        repository, _, revision = reference.removeprefix("hf:").partition("@")
        folder = hub.cached(repository, revision or None)
        if folder is not None:
            hub.verify_checksums(folder, reference)
            return folder
    else:
        return reference
    shown = shown_url(reference) if is_url(reference) else reference
    raise VitrailError(
        f"{shown} is not in the local cache, and is not downloaded because only a file names it, not you. Load it once with "
        "`vitrail info`, then run again."
    )
