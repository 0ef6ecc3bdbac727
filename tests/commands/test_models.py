"""`vitrail models` on the command line."""

from __future__ import annotations

import importlib.metadata
import json

import pytest

import vitrail
from vitrail.cli import main
from vitrail.models import VARIANTS


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    out, err = capsys.readouterr()
    return int(exit_.value.code or 0), out, err


def test_the_table_lists_every_variant(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "models")
    assert status == 0 and all(name in out for name in VARIANTS)
    assert "86,567,656" in out and f"{len(VARIANTS)} models" in out
    assert "vitrail-ti8-tiny-imagenet: ViT-Ti/8" in out and "59.0 % top-1" in out


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "models", "B/16", "r50x5", "--image-size", "384", "--json")
    vit, bit = json.loads(out)
    assert status == 0 and vit["name"] == "ViT-B/16" and vit["tokens"] == 577 and bit["name"] == "BiT-R50x5"
    included = json.loads(run(capsys, "models", "--json")[1])[-1]
    assert included["name"] == "vitrail-ti8-tiny-imagenet" and included["model"] == "ViT-Ti/8" and included["outputs"] == 200


def test_models_that_do_not_support_a_size_are_left_out_or_explained(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "models", "--image-size", "384")
    assert "ViT-B/16" in out and "ViT-H/14" not in out
    status, _, err = run(capsys, "models", "H/14", "--image-size", "384")
    assert status == 2 and "Nearest: 378×378, 392×392" in err


def test_errors_are_clear(capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = run(capsys, "models", "ViT-B/x")
    assert status == 2 and "There is no model 'ViT-B/x'" in err and "Traceback" not in err
    status, _, err = run(capsys, "modles")
    assert status == 2 and "Did you mean models?" in err


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert "Commands:" in run(capsys)[1]
    assert run(capsys, "--version")[1].strip() == f"vitrail {vitrail.__version__}"
    assert vitrail.__version__ == importlib.metadata.version("vitrail")
