"""Upload a checkpoint folder to the Hugging Face Hub, with a model card."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal

from vitrail.checkpoints import hub, native
from vitrail.checkpoints.bundle import Bundle
from vitrail.checkpoints.download import first_line, hide_secrets
from vitrail.checkpoints.loading import load
from vitrail.checkpoints.model_card import PLACEHOLDER, is_generated, model_card
from vitrail.checkpoints.public_provenance import public_provenance
from vitrail.errors import VitrailError
from vitrail.files import restore_folder
from vitrail.regular_files import parse_json, read_bytes
from vitrail.text import to_json

if TYPE_CHECKING:
    from huggingface_hub import HfApi

CARD, CONFIG = "README.md", "config.json"
_WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?|pytorch_model\.bin")
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*")
_LOGIN = "Log in with `hf auth login` and a token that may write, or set HF_TOKEN."


def push(
    folder: Path,
    name: str,
    *,
    private: bool = False,
    message: str | None = None,
    token: str | None = None,
    licence: str | None = None,
    card: Literal["keep", "replace"] | None = None,
) -> str:
    """Upload a run or a checkpoint folder to `owner/name` on the Hub, and return its address. `hf:owner/name` then loads it.

    Only the weights, config.json and a model card are uploaded, in one commit. Local paths in the provenance are shortened to their
    last part. The card is the folder's README.md if it has one, else `model_card`.

    Args:
        folder: A run folder or a Vitrail checkpoint folder.
        name: The repository, which is created if it does not exist.
        private: Create a private repository. The visibility of an existing repository is not changed.
        message: The commit message.
        token: A token of the Hub; default: that of the environment or of `hf auth login`.
        licence: The licence of the weights as the Hub writes it, such as apache-2.0. The card states it.
        card: What to do with a README.md of the repository that was edited by hand: "keep" or "replace" it. Default: an error.
    """
    if _NAME.fullmatch(name) is None:
        raise VitrailError(f"{name!r} is not a repository's name. Write it as owner/name, such as my-name/vit-pets.")
    source = _checkpoint(Path(folder))
    bundle = load(source)
    files = _files(source, bundle, name, licence)
    api = _api(name, token)
    with _sentences(name):
        parent, old = _create(api, name, private)
        _check_repository(api, name, old)
        if CARD in old and _keeps_card(api, name, files[CARD], card):
            del files[CARD]
        stale = sorted(one for one in old if _WEIGHTS.fullmatch(one) and one not in files)
        _commit(api, name, files, stale, parent, message or f"Upload {bundle.model.config.name} with Vitrail")
    return f"{api.endpoint}/{name}"


def _checkpoint(folder: Path) -> Path:
    restore_folder(folder)
    if (folder / "checkpoints").is_dir():
        restore_folder(folder / "model")
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise VitrailError(f"{folder} {what}. Give a run folder or a Vitrail checkpoint folder; `vitrail convert` makes one.")
    for one in (folder, folder / "model"):
        if (one / CONFIG).is_file() and native.read_json(one / CONFIG).get("format") == "vitrail":
            return one
    if (folder / "metrics.jsonl").exists() or (folder / "checkpoints").is_dir():
        raise VitrailError(f"{folder} is a run that has no model/ yet. Finish it first: run its training command again to resume.")
    inside = ", ".join(sorted(item.name for item in folder.iterdir())[:8]) or "nothing"
    raise VitrailError(
        f"{folder} is not a Vitrail checkpoint: it contains {inside}, but model.safetensors and a config.json of Vitrail are "
        "expected. `vitrail convert REF FOLDER` makes a checkpoint folder of other weights."
    )


def _files(source: Path, bundle: Bundle, name: str, licence: str | None) -> dict[str, bytes | Path]:
    """Return what is uploaded: nothing else of the folder, and no local path."""
    weights, index = native.weight_files(source), [one for one in (f"{hub.WEIGHTS}.index.json",) if (source / one).is_file()]
    values = native.read_json(source / CONFIG)
    values["provenance"] = public_provenance(values["provenance"])
    files: dict[str, bytes | Path] = {one: source / one for one in (*weights, *index)}
    files[CONFIG] = (to_json(values, indent=2, allow_nan=False) + "\n").encode()
    files[CARD] = _card(source / CARD, bundle, name, licence).encode()
    return files


def _card(own: Path, bundle: Bundle, name: str, licence: str | None) -> str:
    """Return the card of the folder, in which `info --card` did not know the repository's name; or a new one."""
    text = read_bytes(own).decode("utf-8", "replace") if own.is_file() else ""
    if not text or is_generated(text):
        return model_card(bundle, name, licence=licence)
    if licence is not None:
        raise VitrailError(f"--licence {licence} is for a generated card, but {own} will be uploaded. State the licence there.")
    return text.replace(PLACEHOLDER, name)


def _api(name: str, token: str | None) -> HfApi:
    from huggingface_hub import HfApi, get_token

    if hub.is_offline():
        raise VitrailError(f"Cannot upload to {name}: the Hub is disabled (HF_HUB_OFFLINE). Unset it and run again.")
    token = token or get_token()
    if not token:
        raise VitrailError(f"Cannot upload to {name}: there is no token of the Hub. {_LOGIN}")
    return HfApi(endpoint=hub.endpoint(), token=token, library_name="vitrail")


def _create(api: HfApi, name: str, private: bool) -> tuple[str | None, set[str]]:
    """Create the repository if there is none; return its last commit and the names of its files."""
    api.create_repo(name, private=private or None, exist_ok=True)
    info = api.model_info(name)
    if private and not info.private:
        raise VitrailError(
            f"{name} already exists and is public, but --private was given. Nothing was uploaded. Make it private in its settings "
            "on the Hub, or choose another name."
        )
    return info.sha, {one.rfilename for one in info.siblings or ()}


def _check_repository(api: HfApi, name: str, old: set[str]) -> None:
    """Raise an error for a repository with another library's model, whose files would not fit ours."""
    others = sorted(one for one in old if one != CARD and not one.startswith("."))
    if not others:
        return
    try:
        ours = CONFIG in old and parse_json(_read(api, name, CONFIG)).get("format") == "vitrail"
    except (ValueError, AttributeError):  # not JSON, or not an object
        ours = False
    if not ours:
        raise VitrailError(
            f"{name} has files that are not a Vitrail checkpoint ({', '.join(others[:4])}). Nothing was uploaded. Choose another "
            "name, or delete these files on the Hub first."
        )


def _keeps_card(api: HfApi, name: str, new: bytes | Path, card: str | None) -> bool:
    """Tell whether the repository's card stays. Raise an error if it was edited by hand and `card` does not say what to do."""
    if card is not None:
        return card == "keep"
    old = _read(api, name, CARD)
    if old == new or is_generated(old.decode("utf-8", "replace")):
        return False
    raise VitrailError(
        f"README.md of {name} was edited by hand, and would be replaced. Nothing was uploaded. Add --card keep to leave it, or "
        "--card replace to replace it."
    )


def _read(api: HfApi, name: str, file: str) -> bytes:
    """Read a small file of the repository, as it is now."""
    with TemporaryDirectory() as temporary, hub.without_bars():
        return read_bytes(Path(api.hf_hub_download(name, file, local_dir=temporary)))


def _commit(api: HfApi, name: str, files: dict[str, bytes | Path], stale: list[str], parent: str | None, message: str) -> None:
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    additions = [CommitOperationAdd(path_in_repo=path, path_or_fileobj=content) for path, content in files.items()]
    deletions = [CommitOperationDelete(path_in_repo=path) for path in stale]
    with nullcontext() if sys.stderr is not None and sys.stderr.isatty() else hub.without_bars():
        api.create_commit(name, [*additions, *deletions], commit_message=message, parent_commit=parent)


@contextmanager
def _sentences(name: str) -> Iterator[None]:
    """Raise the errors of huggingface_hub as sentences."""
    from huggingface_hub.errors import HfHubHTTPError

    others: tuple[type[Exception], ...] = (OSError, ValueError, RuntimeError, *hub.network_errors())
    try:
        yield
    except VitrailError:
        raise
    except HfHubHTTPError as error:
        raise VitrailError(_answer(error, name)) from error
    except others as error:
        raise VitrailError(
            f"Cannot upload to {name}: {first_line(error)}. Check the network connection, and run again: files that are already "
            "there are not uploaded twice."
        ) from error


def _answer(error: Any, name: str) -> str:
    owner, status = name.partition("/")[0], error.response.status_code
    message = getattr(error, "server_message", None)
    said = f" The Hub says: {hide_secrets(message).rstrip('.')}." if message else ""
    if status == 401:
        return f"Cannot upload to {name}: the Hub does not accept the token (HTTP 401).{said} {_LOGIN}"
    if status in (403, 404):
        return (
            f"Cannot upload to {name}: the token may not write there (HTTP {status}).{said} Use your own name or one of your "
            f"organisations instead of {owner!r}, and a token that may write."
        )
    if status in (409, 412):
        return f"Cannot upload to {name}: another commit was made meanwhile (HTTP {status}).{said} Run again."
    return f"Cannot upload to {name}: HTTP {status}.{said or f' {first_line(error)}'} Nothing was committed; run again."
