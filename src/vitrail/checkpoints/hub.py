"""Checkpoints from the Hugging Face hub, through its own cache. Nothing else here ever touches a network."""

from __future__ import annotations

from pathlib import Path

from vitrail.errors import VitrailError

_SAFE = ["config.json", "preprocessor_config.json", "model.safetensors", "model-*.safetensors", "model.safetensors.index.json"]
_PICKLED = ["pytorch_model.bin"]


def fetch(name: str) -> Path:
    """The folder of `owner/name` or `owner/name@revision` in the local cache, fetched first if need be."""
    repository, _, revision = name.partition("@")
    folder = _snapshot(repository, revision or None, _SAFE)
    if not any(folder.glob("model*.safetensors")):
        folder = _snapshot(repository, revision or None, _PICKLED)
    return folder


def _snapshot(repository: str, revision: str | None, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        return Path(snapshot_download(repository, revision=revision, allow_patterns=patterns))
    except LocalEntryNotFoundError as error:
        raise VitrailError(
            f"hf:{repository} is not in the local cache, and the hub cannot be reached or is switched off (HF_HUB_OFFLINE). "
            f"Fetch it once on a machine with a network: `hf download {repository}`."
        ) from error
    except GatedRepoError as error:
        raise VitrailError(f"hf:{repository} is gated: accept its terms on the hub and log in with `hf auth login`.") from error
    except RevisionNotFoundError as error:
        raise VitrailError(f"hf:{repository} has no revision {revision!r}.") from error
    except RepositoryNotFoundError as error:
        raise VitrailError(f"There is no repository {repository!r} on the hub, or it is private. Check its name.") from error
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise VitrailError(f"hf:{repository} cannot be fetched: {str(error).splitlines()[0]}") from error
