"""Download weight files that are not on the Hub: Google's `.npz`, and any URL that the user gives."""

from __future__ import annotations

from pathlib import Path
from urllib.error import HTTPError
from urllib.parse import urlsplit

from vitrail.checkpoints import hub
from vitrail.checkpoints.download import NOT_FOUND, cached_url, fetch, is_url, shown_url
from vitrail.checkpoints.download_progress import download_bar
from vitrail.errors import VitrailError

__all__ = ["download", "is_url"]


def download(address: str, *, label: str | None = None) -> Path:
    """Return the file of a URL in the local cache; download it if needed."""
    parts = urlsplit(address)
    if not parts.netloc or not Path(parts.path).name:
        raise VitrailError(f"{shown_url(address)} is not the URL of a file. Give one such as https://host/folder/weights.npz.")
    target, label = cached_url(address), label or shown_url(address)
    if target.exists():
        return target
    if hub.is_offline():
        raise VitrailError(
            f"{label} is not in the local cache, and downloads are disabled (HF_HUB_OFFLINE). {_how_to_get(address, target)}"
        )
    try:
        with download_bar(f"{label} from {parts.netloc.rpartition('@')[2]}") as show:
            return fetch(address, target, progress=show)
    except VitrailError as error:
        if isinstance(error.__cause__, HTTPError) and error.__cause__.code in NOT_FOUND:
            raise
        raise VitrailError(f"{error} {_how_to_get(address, target)}") from error


def _how_to_get(address: str, target: Path) -> str:
    return (
        f"On a machine with a network connection download {shown_url(address)}, and copy it to {target}; or give the path of the "
        "file instead of the name."
    )
