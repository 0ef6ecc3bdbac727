"""Tell names of weights from paths."""

from __future__ import annotations

import os

from vitrail.checkpoints import published
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
