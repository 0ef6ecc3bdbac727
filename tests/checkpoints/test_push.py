"""`vitrail push`, against a server on this machine with the Hub's layout."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import vitrail
from tests.checkpoints.hub_server import HubServer, hub_server
from tests.checkpoints.small_models import KINDS, assert_same_model, bundle_of
from vitrail.checkpoints import save
from vitrail.checkpoints.bundle import Bundle
from vitrail.checkpoints.push import push
from vitrail.cli import main
from vitrail.errors import VitrailError

NAME = "ada/vit-pets"
CONFIG = KINDS["plain"]
CLASSES = ("cat", "dog|wolf", "fish <b>", "bird", "horse")
PROVENANCE = {
    "recipe": "any-folder",
    "start": "/home/ada-lovelace/runs/base/model",
    "data": "folder:/home/ada-lovelace/secret project/pets",
    "trained_on": [{"source": "folder:/home/ada-lovelace/secret project/pets", "location": "0123456789abcdef", "images": 90}],
    "validation": {"loss": 0.31, "accuracy": 0.9, "images": 40.0, "predicted_classes": 5.0},
    "steps": 7,
    "notes": r"copied from C:\Users\ada-lovelace\x and https://ada-lovelace:pw@host/a?sig=1 by ~/bin/copy.sh",
}


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    from huggingface_hub import constants

    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_TOKEN"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    monkeypatch.setenv("no_proxy", "127.0.0.1,localhost")
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # its storage has a protocol of its own
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    with hub_server() as running:
        monkeypatch.setenv("HF_ENDPOINT", running.address)
        running.root = tmp_path / "hub"
        running.root.mkdir()
        running.tokens = {"hf_ada": ("ada",)}
        monkeypatch.setenv("HF_TOKEN", "hf_ada")
        yield running


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    """A checkpoint in a run folder, as training leaves it."""
    made = bundle_of(CONFIG)
    run = tmp_path / "run"
    save(run / "model", made.model, preprocess=made.preprocess, classes=CLASSES, provenance=PROVENANCE)
    (run / "checkpoints").mkdir()
    (run / "checkpoints" / "optimizer.pt").write_bytes(b"state")
    (run / "metrics.jsonl").write_text("{}\n")
    (run / "config.json").write_text("{}\n")
    return made


def uploaded(server: HubServer) -> Path:
    return server.repositories[NAME]


def test_what_was_pushed_loads_equal_bit_for_bit(server: HubServer, bundle: Bundle, tmp_path: Path) -> None:
    assert push(tmp_path / "run", NAME) == f"{server.address}/{NAME}"
    assert {file.name for file in uploaded(server).iterdir()} == {
        ".gitattributes",
        "README.md",
        "config.json",
        "model.safetensors",
    }
    loaded = vitrail.load(f"hf:{NAME}", verify="full")
    assert_same_model(loaded.model, bundle.model, CONFIG)
    assert loaded.classes == CLASSES and loaded.preprocess == bundle.preprocess and NAME not in server.private


def test_nothing_private_is_uploaded(server: HubServer, bundle: Bundle, tmp_path: Path) -> None:
    push(tmp_path / "run", NAME)
    for file in ("config.json", "README.md"):
        text = (uploaded(server) / file).read_text()
        for private in ("lovelace", "secret", "/home", "Users", "pw@", "sig=1", "0123456789abcdef", str(tmp_path)):
            assert private not in text, (file, private)
    provenance = json.loads((uploaded(server) / "config.json").read_text())["provenance"]
    assert (provenance["start"], provenance["data"], provenance["trained_on"][0]["source"]) == (
        "base",
        "folder:pets",
        "folder:pets",
    )
    assert provenance["notes"] == "copied from x and https://host/a?… by copy.sh"
    assert provenance["validation"] == PROVENANCE["validation"]


def test_a_second_push_replaces_files_in_one_commit(server: HubServer, bundle: Bundle, tmp_path: Path) -> None:
    push(tmp_path / "run", NAME)
    first = vitrail.load(f"hf:{NAME}")
    other = bundle_of(CONFIG, seed=3)
    save(tmp_path / "shards", other.model, classes=CLASSES, shard_size=20_000)
    push(tmp_path / "shards", NAME, message="Train longer")
    assert (uploaded(server) / "model.safetensors.index.json").is_file() and not (uploaded(server) / "model.safetensors").exists()
    again = vitrail.load(f"hf:{NAME}")
    assert_same_model(again.model, other.model, CONFIG)
    push(tmp_path / "run", NAME)  # shards of the other model must not stay
    assert_same_model(vitrail.load(f"hf:{NAME}").model, first.model, CONFIG)
    assert server.messages == ["Upload small with Vitrail", "Train longer", "Upload small with Vitrail"]


def test_an_edited_card_is_not_overwritten_without_asking(server: HubServer, bundle: Bundle, tmp_path: Path) -> None:
    push(tmp_path / "run", NAME)
    card = uploaded(server) / "README.md"
    card.write_text(card.read_text().replace("## Limits", "## Limits\n\nNot for wolves."))
    commits = len(server.messages)
    with pytest.raises(VitrailError, match=r"README.md of ada/vit-pets was edited by hand.*--card keep.*--card replace"):
        push(tmp_path / "run", NAME)
    assert len(server.messages) == commits
    push(tmp_path / "run", NAME, card="keep")
    assert "Not for wolves." in card.read_text()
    push(tmp_path / "run", NAME, card="replace", licence="cc-by-4.0")
    assert "Not for wolves." not in card.read_text() and "license: cc-by-4.0" in card.read_text()


def test_a_card_in_the_folder_is_uploaded(server: HubServer, bundle: Bundle, tmp_path: Path) -> None:
    (tmp_path / "run" / "model" / "README.md").write_text("# My own card\n")
    push(tmp_path / "run" / "model", NAME)
    assert (uploaded(server) / "README.md").read_text() == "# My own card\n"
    with pytest.raises(VitrailError, match=r"--licence mit is for a generated card, but .*README.md will be uploaded"):
        push(tmp_path / "run", NAME, licence="mit")


@pytest.mark.parametrize("edited", [False, True])
def test_a_card_that_info_wrote_gets_the_repositorys_name(
    server: HubServer, bundle: Bundle, tmp_path: Path, edited: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["info", str(tmp_path / "run"), "--card"])
    text = capsys.readouterr().out.replace("## Limits", "## Limits of mine" if edited else "## Limits")
    (tmp_path / "run" / "model" / "README.md").write_text(text, encoding="utf-8")
    push(tmp_path / "run", NAME)
    card = (uploaded(server) / "README.md").read_text(encoding="utf-8")
    assert f'vitrail.load("hf:{NAME}")' in card and "OWNER" not in card and ("of mine" in card) is edited


def test_private_repositories(server: HubServer, bundle: Bundle, tmp_path: Path) -> None:
    push(tmp_path / "run", NAME, private=True)
    assert NAME in server.private
    server.private.clear()
    commits = len(server.messages)
    with pytest.raises(VitrailError, match=r"already exists and is public, but --private was given. Nothing was uploaded"):
        push(tmp_path / "run", NAME, private=True)
    assert len(server.messages) == commits


def test_a_repository_of_another_library_is_left_alone(server: HubServer, bundle: Bundle, tmp_path: Path) -> None:
    server.repositories[NAME] = tmp_path / "theirs"
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "config.json").write_text('{"architecture": "vit_base_patch16_224"}')
    with pytest.raises(VitrailError, match=r"has files that are not a Vitrail checkpoint \(config.json\). Nothing was uploaded"):
        push(tmp_path / "run", NAME)
    assert server.messages == []


def test_errors_are_sentences(server: HubServer, bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(VitrailError, match=r"'vit' is not a repository's name. Write it as owner/name"):
        push(tmp_path / "run", "vit")
    with pytest.raises(VitrailError, match=r"may not write there \(HTTP 403\).*don't have the rights.*instead of 'grace'"):
        push(tmp_path / "run", "grace/vit")
    with pytest.raises(VitrailError, match=r"does not accept the token \(HTTP 401\).*hf auth login"):
        push(tmp_path / "run", NAME, token="hf_wrong")
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(VitrailError, match=r"there is no token of the Hub\. Log in with `hf auth login`"):
        push(tmp_path / "run", NAME)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(VitrailError, match=r"the Hub is disabled \(HF_HUB_OFFLINE\)"):
        push(tmp_path / "run", NAME, token="hf_ada")
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(VitrailError, match=r"Cannot upload to ada/vit-pets: .*refused.*run again"):
        push(tmp_path / "run", NAME, token="hf_ada")
    assert server.messages == []


def test_only_checkpoints_are_pushed(tmp_path: Path) -> None:
    with pytest.raises(VitrailError, match="does not exist"):
        push(tmp_path / "nothing", NAME)
    (tmp_path / "file").write_text("x")
    with pytest.raises(VitrailError, match="is a file"):
        push(tmp_path / "file", NAME)
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.jpg").write_bytes(b"x")
    with pytest.raises(VitrailError, match=r"is not a Vitrail checkpoint: it contains a.jpg.*vitrail convert"):
        push(tmp_path / "photos", NAME)
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    with pytest.raises(VitrailError, match="is a run that has no model/ yet"):
        push(tmp_path / "run", NAME)


def test_corrupted_weights_are_not_pushed(server: HubServer, bundle: Bundle, tmp_path: Path) -> None:
    file = tmp_path / "run" / "model" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(VitrailError, match="the weights are not those that were saved"):
        push(tmp_path / "run", NAME)
    assert NAME not in server.repositories


def test_the_command(server: HubServer, bundle: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["push", str(tmp_path / "run"), NAME, "--json", "--licence", "mit"])
    assert not end.value.code
    assert json.loads(capsys.readouterr().out) == {"url": f"{server.address}/{NAME}", "reference": f"hf:{NAME}"}
    with pytest.raises(SystemExit) as end:
        main(["info", str(tmp_path / "run"), "--card"])
    shown = capsys.readouterr().out
    assert not end.value.code and shown.splitlines()[-1].startswith("<!-- Generated by Vitrail")
    assert "90.0%" in shown


def test_a_bundle_pushes_what_the_command_pushes(server: HubServer, bundle: Bundle, tmp_path: Path) -> None:
    loaded = vitrail.load(tmp_path / "run")
    assert loaded.push(NAME, licence="apache-2.0") == push(tmp_path / "run", "ada/from-folder", licence="apache-2.0").replace(
        "from-folder", "vit-pets"
    )
    one, two = server.repositories[NAME], server.repositories["ada/from-folder"]
    assert (one / "model.safetensors").read_bytes() == (two / "model.safetensors").read_bytes()
    configs = [json.loads((folder / "config.json").read_text(encoding="utf-8")) for folder in (one, two)]
    for config in configs:
        config.pop("golden")  # computed again when a bundle is saved, to within rounding
    assert configs[0] == configs[1]
    again = vitrail.load(f"hf:{NAME}")
    assert_same_model(again.model, loaded.model, CONFIG)
    assert again.classes == CLASSES
