"""Download checkpoints from the Hugging Face Hub, through its cache, which other libraries share.

huggingface_hub keeps the cache. The weights, which are large, are downloaded by `download.fetch`: it resumes after an interruption
(newer versions of huggingface_hub start anew), and compares their SHA-256. Settings of the environment are read at every call, so
that they also work in a notebook: HF_HUB_OFFLINE, HF_ENDPOINT, HF_HUB_CACHE, HF_HOME.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

from vitrail.checkpoints.download import Checksum, fetch, first_line
from vitrail.checkpoints.download_progress import download_bar
from vitrail.checkpoints.native import read_json, weight_files
from vitrail.errors import VitrailError
from vitrail.files import cache_folder, sha256

WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_SAFE = ["config.json", "preprocessor_config.json", WEIGHTS, "model-*.safetensors", _INDEX]
_PICKLED = ["pytorch_model.bin"]
_ETAG_SECONDS = 10.0


def download(name: str, *, label: str | None = None, cache_first: bool = False) -> Path:
    """Return the folder of `owner/name` or `owner/name@revision` in the local cache; download what is missing.

    `label` is what the user typed, for messages. With `cache_first`, the network is not used if the cache has the weights.
    """
    repository, _, revision = name.partition("@")
    label = label or f"hf:{repository}"
    found = cached(repository, revision or None) if cache_first or is_offline() else None
    if found is None:
        with _sentences(repository, revision, label):
            if not is_offline():
                _fetch_weights(repository, revision or None, label)
            found = _snapshot(repository, revision or None, _SAFE)
            if not any(found.glob("model*.safetensors")):
                found = _snapshot(repository, revision or None, _PICKLED)
    verify_checksums(found, label)
    return found


def cached(repository: str, revision: str | None = None) -> Path | None:
    """Return the folder in the cache if it has all that loading needs; never uses the network.

    That is config.json, the weights with all their shards, and preprocessor_config.json of a repository of transformers.
    """
    for patterns in (_SAFE, [_SAFE[0], *_PICKLED]):
        try:
            folder = _snapshot(repository, revision, patterns, local=True)
        except (OSError, ValueError):  # not there, or not complete
            continue
        if _is_complete(folder):
            return folder
    return None


def _is_complete(folder: Path) -> bool:
    try:
        config = read_json(folder / "config.json")
        weights = weight_files(folder)
    except (OSError, VitrailError):  # not there, or corrupted: download it again
        return False
    needed = [*weights, *(["preprocessor_config.json"] if "model_type" in config else [])]
    return all((folder / name).is_file() for name in needed)


def is_offline() -> bool:
    """Tell whether the Hub is disabled, by HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE."""
    from huggingface_hub import constants

    given = [os.environ.get(name, "").upper() for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")]
    return constants.HF_HUB_OFFLINE or any(value in ("1", "ON", "YES", "TRUE") for value in given)


def cache_root() -> Path:
    """Return the cache of huggingface_hub."""
    from huggingface_hub import constants

    given = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    if given is None and "HF_HOME" in os.environ:
        given = str(Path(os.environ["HF_HOME"]) / "hub")
    return Path(given or constants.HF_HUB_CACHE).expanduser()


def how_to_get(repository: str, revision: str = "") -> str:
    """Say how to bring the weights to a machine without a network."""
    folder = repository.partition("/")[2] or repository
    timm = repository.startswith("timm/")  # timm's config.json has the preprocessing
    files = f"config.json {WEIGHTS}" if timm else f"config.json preprocessor_config.json {WEIGHTS}"
    option = f" --revision {revision}" if revision else ""
    shards = f"If it has {_INDEX}, name this and the files that it lists instead of {WEIGHTS}. "
    return (
        f"On a machine with a network connection run `hf download {repository} {files}{option} --local-dir {folder}`, copy "
        f"the folder {folder} to this machine, and give its path instead of the name: PATH/{folder}."
        f"{'' if timm else f' {shards}If it has no preprocessor_config.json, leave that out.'}"
    )


def verify_checksums(folder: Path, label: str) -> None:
    """Compare weights with their SHA-256, by which the cache names them. Each file is read once, then remembered."""
    for file in (*folder.glob("*.safetensors"), *folder.glob("*.bin")):
        blob = file.resolve()
        if re.fullmatch("[0-9a-f]{64}", blob.name) is None or _is_verified(blob):
            continue
        if sha256(blob) != blob.name:
            for one in {file, blob}:
                with suppress(OSError):
                    one.unlink()
            raise VitrailError(
                f"{file.name} of {label} in the cache is corrupted: its SHA-256 is not {blob.name}. It was deleted; run again to "
                "download it anew."
            )
        _remember(blob)


def _fetch_weights(repository: str, revision: str | None, label: str) -> None:
    """Download model.safetensors into the cache, if the repository has one; `_snapshot` links it and gets the small files."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, OfflineModeIsEnabled
    from huggingface_hub.file_download import repo_folder_name
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    url = hf_hub_url(repository, WEIGHTS, revision=revision, endpoint=endpoint())
    unreachable = network_errors()
    try:
        found = get_hf_file_metadata(url, timeout=_ETAG_SECONDS)
    except (EntryNotFoundError, OfflineModeIsEnabled):
        return
    except unreachable as error:
        if isinstance(error, HfHubHTTPError):  # an answer of the server
            raise
        return  # `_snapshot` looks for other files, or in the cache
    if re.fullmatch("[0-9a-f]{64}", found.etag or "") is None:
        return  # small enough to be in Git itself
    assert found.etag is not None
    blob = cache_root() / repo_folder_name(repo_id=repository, repo_type="model") / "blobs" / found.etag
    if blob.exists():
        return
    same_host = urlsplit(found.location).netloc == urlsplit(url).netloc
    with download_bar(f"{label} from {urlsplit(url).netloc}") as show:
        fetch(
            found.location,
            blob,
            checksum=Checksum("sha256", found.etag),
            size=found.size,
            headers=build_hf_headers() if same_host else {},  # a login is for the Hub only
            progress=show,
        )
    _remember(blob)


def _snapshot(repository: str, revision: str | None, patterns: list[str], *, local: bool = False) -> Path:
    from huggingface_hub import snapshot_download

    with without_bars():  # the files that are left are small
        found = snapshot_download(
            repository,
            revision=revision,
            allow_patterns=patterns,
            cache_dir=cache_root(),
            endpoint=endpoint(),
            local_files_only=local or is_offline(),
        )
    return Path(found)


@contextmanager
def without_bars() -> Iterator[None]:
    """Hide the progress bars of huggingface_hub."""
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    shown = not are_progress_bars_disabled()
    disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            enable_progress_bars()


@contextmanager
def _sentences(repository: str, revision: str, label: str) -> Iterator[None]:
    """Raise the errors of huggingface_hub as sentences."""
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    network: tuple[type[Exception], ...] = (HfHubHTTPError, *network_errors())
    try:
        yield
    except VitrailError:
        raise
    except LocalEntryNotFoundError as error:
        why = "the Hub is disabled (HF_HUB_OFFLINE)" if is_offline() else "the Hub cannot be reached"
        raise VitrailError(
            f"{label} is not in the local cache ({cache_root()}), and {why}. {how_to_get(repository, revision)}"
        ) from error
    except GatedRepoError as error:
        raise VitrailError(f"hf:{repository} is gated: accept its terms on the Hub and log in with `hf auth login`.") from error
    except RevisionNotFoundError as error:
        raise VitrailError(f"hf:{repository} has no revision {revision!r}. Give a branch, tag or commit of it, or none.") from error
    except RepositoryNotFoundError as error:
        raise VitrailError(f"There is no repository {repository!r} on the Hub, or it is private. Check its name.") from error
    except HFValidationError as error:
        raise VitrailError(
            f"{repository!r} is not a repository's name. Write it as hf:owner/name, such as hf:google/vit-base-patch16-224."
        ) from error
    except network as error:
        raise VitrailError(f"Cannot download {label}: {first_line(error)}. {how_to_get(repository, revision)}") from error
    except (OSError, ValueError) as error:
        raise VitrailError(
            f"Cannot download {label}: {first_line(error)}. Check the cache folder {cache_root()}, or set HF_HOME to another "
            "folder."
        ) from error


def network_errors() -> tuple[type[Exception], ...]:
    """Return the base errors of the HTTP library that this version of huggingface_hub uses."""
    found: list[type[Exception]] = []
    with suppress(ImportError):
        import httpx

        found.append(httpx.HTTPError)
    with suppress(ImportError):
        import requests

        found.append(requests.RequestException)
    return tuple(found)


def endpoint() -> str | None:
    given = os.environ.get("HF_ENDPOINT")
    return given.rstrip("/") if given else None


def _marker(blob: Path) -> Path:
    return cache_folder() / "verified" / blob.name


def _state(blob: Path) -> str:
    status = blob.stat()
    return f"{status.st_size} {status.st_mtime_ns}"


def _is_verified(blob: Path) -> bool:
    try:
        return _marker(blob).read_text(encoding="utf-8") == _state(blob)
    except OSError:
        return False


def _remember(blob: Path) -> None:
    with suppress(OSError):  # a read-only cache: the file is read again next time
        _marker(blob).parent.mkdir(parents=True, exist_ok=True)
        _marker(blob).write_text(_state(blob), encoding="utf-8")
