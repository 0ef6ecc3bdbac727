"""Download checkpoints from the Hugging Face Hub, through its cache. Nothing else in this package uses the network."""

from __future__ import annotations

from pathlib import Path

from vitrail.errors import VitrailError

_SAFE = ["config.json", "preprocessor_config.json", "model.safetensors", "model-*.safetensors", "model.safetensors.index.json"]
_PICKLED = ["pytorch_model.bin"]


def download(name: str) -> Path:
    """Return the folder of `owner/name` or `owner/name@revision` in the local cache; download it if needed."""
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
            f"hf:{repository} is not in the local cache, and the Hub cannot be reached or is disabled (HF_HUB_OFFLINE). "
            f"Download it once with a network connection: `hf download {repository}`."
        ) from error
    except GatedRepoError as error:
        raise VitrailError(f"hf:{repository} is gated: accept its terms on the Hub and log in with `hf auth login`.") from error
    except RevisionNotFoundError as error:
        raise VitrailError(f"hf:{repository} has no revision {revision!r}.") from error
    except RepositoryNotFoundError as error:
        raise VitrailError(f"There is no repository {repository!r} on the Hub, or it is private. Check its name.") from error
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise VitrailError(f"Cannot download hf:{repository}: {str(error).splitlines()[0]}") from error
