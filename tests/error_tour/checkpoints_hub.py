"""Errors of the network: downloads, the Hugging Face Hub, and uploads. The servers are on this machine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.checkpoints.hub_server import HubServer
from tests.error_tour.case import at
from tests.error_tour.checkpoint_files import environment, own, place, repository, server
from tests.error_tour.files import scratch
from vitrail.checkpoints import download, hub, push, url
from vitrail.checkpoints.references import without_download

COPY = "or give the path of the file instead of the name."


def fetched(prepare: Callable[[HubServer], object], **options: int) -> None:
    """Download a file of 100 bytes from a server that is prepared first."""
    with server() as running:
        running.files["/bucket/x.bin"] = bytes(100)
        prepare(running)
        download.fetch(f"{running.address}/bucket/x.bin", scratch() / "x.bin", **options)  # type: ignore[arg-type]


def interrupt(running: HubServer) -> None:
    running.cut_after = [40, *[0] * download.ATTEMPTS]


def absent_file() -> None:
    with server() as running:
        url.download(f"{running.address}/none.npz")


def no_server() -> None:
    with environment():
        url.download("http://127.0.0.1:9/x.npz")


def time_out(*arguments: object) -> None:
    raise hub.network_errors()[0]("timed out")


def cache_is_a_file() -> None:
    with server(vit=repository(config_json="{}")), pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_CACHE", "notes.txt")
        hub.download("ada/vit")


def corrupted_in_the_cache() -> None:
    folder = scratch()
    (folder / ("0" * 64)).write_bytes(b"other")
    (folder / "model.safetensors").symlink_to("0" * 64)
    with environment():
        hub.verify_checksums(folder, "ViT-B/16")


def offline(run: Callable[[], object]) -> None:
    with environment(HF_HUB_OFFLINE="1"):
        run()


def from_hub(name: str, *, gated: bool = False) -> None:
    with server(vit=repository(config_json="{}")) as running:
        running.gated |= {"ada/vit"} if gated else set()
        hub.download(name)


def pushed(folder: str = "model", name: str = "ada/vit", *, token: str = "hf_ada", private: bool = False, **files: str) -> None:
    """Upload a checkpoint to a repository that has these files."""
    with server(**{"vit": repository(**files)} if files else {}):
        push.push(Path(folder), name, token=token, private=private)


def unreachable() -> None:
    with environment(HF_ENDPOINT="http://127.0.0.1:9"):
        push.push(Path("model"), "ada/vit", token="hf_ada")


def unfinished_run() -> None:
    (place("run") / "checkpoints").mkdir(parents=True)
    push.push(Path("weights/run"), "ada/vit")


def own_card() -> None:
    folder = Path(own())
    (folder / "README.md").write_text("# Mine")
    push.push(folder, "ada/vit", licence="mit")


def without_token() -> None:
    with environment():
        push.push(Path("model"), "ada/vit")


# fmt: off
CASES = (
    at("checkpoints/download.py:fetch", lambda: fetched(lambda running: setattr(running, "corrupt", True)),
       "/bucket/x.bin is corrupted: its MD5 is not 6d0bb00954ceb7fbee436bb55a8397a9.",
       "It was deleted; run again to download it anew."),
    at("checkpoints/download.py:_receive#1", absent_file, "/none.npz: there is no such file (HTTP 404).", "Check the URL."),
    at("checkpoints/download.py:_receive#2", lambda: fetched(interrupt),
       "/bucket/x.bin: the connection ended after 40 of 100 bytes.", "40 bytes are kept in", "x.bin.part: run again to resume."),
    at("checkpoints/download.py:_request", lambda: fetched(lambda running: None, size=50),
       "/bucket/x.bin has 100 bytes; 50 are expected.", "Nothing was stored; run again."),
    at("checkpoints/download.py:_check_space", lambda: download._check_space(Path("model/x.part"), 10**18),
       "GB of free space; the download needs 1000000000.0 GB.",
       "Free some space, or set HF_HOME (weights from the Hub) or VITRAIL_CACHE (other files) to a folder on another disk."),
    at("checkpoints/download.py:_write_errors", lambda: download.fetch("http://127.0.0.1:9/x.bin", Path("notes.txt/x.bin")),
       "Cannot write notes.txt/x.bin: File exists.", "Check the permissions of its folder."),
    at("checkpoints/hub.py:verify_checksums", corrupted_in_the_cache,
       f"model.safetensors of ViT-B/16 in the cache is corrupted: its SHA-256 is not {'0' * 64}.",
       "It was deleted; run again to download it anew."),
    at("checkpoints/hub.py:_sentences#1", lambda: offline(lambda: hub.download("ada/vit")),
       "hf:ada/vit is not in the local cache (", "and the Hub is disabled (HF_HUB_OFFLINE).",
       "On a machine with a network connection run `hf download ada/vit config.json", "and give its path instead of the name"),
    at("checkpoints/hub.py:_sentences#2", lambda: from_hub("ada/vit", gated=True),
       "hf:ada/vit is gated:", "accept its terms on the Hub and log in with `hf auth login`."),
    at("checkpoints/hub.py:_sentences#3", lambda: from_hub("ada/vit@v9"),
       "hf:ada/vit has no revision 'v9'.", "Give a branch, tag or commit of it, or none."),
    at("checkpoints/hub.py:_sentences#4", lambda: from_hub("ada/absent"),
       "There is no repository 'ada/absent' on the Hub, or it is private.", "Check its name."),
    at("checkpoints/hub.py:_sentences#5", lambda: from_hub("not a name!"),
       "'not a name!' is not a repository's name.", "Write it as hf:owner/name, such as hf:google/vit-base-patch16-224."),
    at("checkpoints/hub.py:_sentences#6", lambda: from_hub("ada/vit"),
       "Cannot download hf:ada/vit: timed out.", "On a machine with a network connection run `hf download ada/vit config.json",
       patch=lambda patch: patch.setattr(hub, "_fetch_weights", time_out)),
    at("checkpoints/hub.py:_sentences#7", cache_is_a_file,
       "Cannot download hf:ada/vit: [Errno 20] Not a directory: ",
       "Check the cache folder notes.txt, or set HF_HOME to another folder."),
    at("checkpoints/push.py:push", lambda: push.push(Path("model"), "vit"),
       "'vit' is not a repository's name.", "Write it as owner/name, such as my-name/vit-pets."),
    at("checkpoints/push.py:_checkpoint#1", lambda: push.push(Path("notes.txt"), "ada/vit"),
       "notes.txt is a file.", "Give a run folder or a Vitrail checkpoint folder; `vitrail convert` makes one."),
    at("checkpoints/push.py:_checkpoint#2", unfinished_run,
       "weights/run is a run that has no model/ yet.", "Finish it first: run its training command again to resume."),
    at("checkpoints/push.py:_checkpoint#3", lambda: push.push(Path("photos"), "ada/vit"),
       "photos is not a Vitrail checkpoint: it contains train, val,",
       "but model.safetensors and a config.json of Vitrail are expected.",
       "`vitrail convert REF FOLDER` makes a checkpoint folder of other weights."),
    at("checkpoints/push.py:_card", own_card,
       "--licence mit is for a generated card, but weights/own/README.md will be uploaded.", "State the licence there."),
    at("checkpoints/push.py:_api#1", lambda: offline(lambda: push.push(Path("model"), "ada/vit")),
       "Cannot upload to ada/vit: the Hub is disabled (HF_HUB_OFFLINE).", "Unset it and run again."),
    at("checkpoints/push.py:_api#2", without_token,
       "Cannot upload to ada/vit: there is no token of the Hub.",
       "Log in with `hf auth login` and a token that may write, or set HF_TOKEN."),
    at("checkpoints/push.py:_create", lambda: pushed(private=True, README_md="# vit"),
       "ada/vit already exists and is public, but --private was given.", "Nothing was uploaded.",
       "Make it private in its settings on the Hub, or choose another name."),
    at("checkpoints/push.py:_check_repository", lambda: pushed(config_json='{"architecture": "vit_base_patch16_224"}'),
       "ada/vit has files that are not a Vitrail checkpoint (config.json).", "Nothing was uploaded.",
       "Choose another name, or delete these files on the Hub first."),
    at("checkpoints/push.py:_keeps_card", lambda: pushed(README_md="# by hand"),
       "README.md of ada/vit was edited by hand, and would be replaced.", "Nothing was uploaded.",
       "Add --card keep to leave it, or --card replace to replace it."),
    at("checkpoints/push.py:_sentences#1", lambda: pushed(name="grace/vit"),
       "Cannot upload to grace/vit: the token may not write there (HTTP 403).",
       "Use your own name or one of your organisations instead of 'grace', and a token that may write."),
    at("checkpoints/push.py:_sentences#2", unreachable,
       "Cannot upload to ada/vit: ", "Check the network connection, and run again:"),
    at("checkpoints/references.py:without_download", lambda: offline(lambda: without_download("hf:ada/vit")),
       "hf:ada/vit is not in the local cache, and is not downloaded because only a file names it, not you.",
       "Load it once with `vitrail info`, then run again."),
    at("checkpoints/url.py:download#1", lambda: url.download("https://host/"),
       "https://host/ is not the URL of a file.", "Give one such as https://host/folder/weights.npz."),
    at("checkpoints/url.py:download#2", lambda: offline(lambda: url.download("https://host/x.npz")),
       "https://host/x.npz is not in the local cache, and downloads are disabled (HF_HUB_OFFLINE).",
       "On a machine with a network connection download https://host/x.npz, and copy it to", COPY),
    at("checkpoints/url.py:download#3", no_server,
       "Cannot download http://127.0.0.1:9/x.npz:", "Connection refused.",
       "On a machine with a network connection download http://127.0.0.1:9/x.npz", COPY),
)
# fmt: on
