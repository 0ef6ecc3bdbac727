"""`vitrail info` on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import vitrail
from tests.checkpoints.small_models import KINDS, STORABLE, SUFFIX, bundle_of
from vitrail.checkpoints import write
from vitrail.cli import main
from vitrail.models import ViTConfig


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    captured = capsys.readouterr()
    return int(stop.value.code or 0), captured.out + captured.err


@pytest.mark.parametrize(("name", "kind"), [(name, kind) for name, kinds in STORABLE.items() for kind in (kinds[0], kinds[-1])])
def test_every_format_is_described(name: str, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = KINDS[kind]
    write(bundle_of(config), tmp_path / f"x{SUFFIX[name]}", name)
    arguments = ["info", str(tmp_path / f"x{SUFFIX[name]}"), "--json"]
    if name != "vitrail":
        arguments += ["--grid", *map(str, config.grid)] + (["--heads", str(config.heads)] if isinstance(config, ViTConfig) else [])
    code, out = run(capsys, *arguments)
    assert code == 0, out
    found = json.loads(out)
    assert found["format"] == name and found["head"] == ("set" if config.outputs else "none")
    assert found["parameters"] == sum(tensor.numel() for tensor in bundle_of(config).model.state_dict().values())
    assert found["model"]["outputs"] == config.outputs and found["preprocess"]["size"] == list(found["model"]["image_size"])
    code, out = run(capsys, *[one for one in arguments if one != "--json"])
    assert code == 0 and "preprocessing" in out and "parameters" in out


def test_the_provenance_of_a_run_says_nothing_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    which = {"checkpoint": "last", "step": 8, "steps_taken": 8, "weights": "averaged"}
    told = {"recipe": "small", "steps": 8, "weights": "averaged weights of the last step, 8", "checkpoint": which}
    vitrail.save(tmp_path / "x", bundle_of(KINDS["plain"]).model, provenance=told)
    out = run(capsys, "info", str(tmp_path / "x"))[1]
    assert "weights: averaged weights of the last step, 8" in out and "recipe: small" in out
    assert "checkpoint: " not in out and "steps: " not in out


def test_a_zero_head_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = bundle_of(KINDS["plain"])
    bundle.model.replace_head(21)
    write(bundle, tmp_path / "x.npz", "google")
    assert "all zeros: only a backbone" in run(capsys, "info", str(tmp_path / "x.npz"))[1]


def test_verify_detects_replaced_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    vitrail.save(tmp_path / "x", bundle_of(KINDS["plain"]).model)
    code, out = run(capsys, "info", str(tmp_path / "x"), "--verify")
    assert code == 0 and "SHA-256" in out
    vitrail.save(tmp_path / "y", bundle_of(KINDS["plain"], seed=8, dtype=torch.float32).model)
    (tmp_path / "x" / "model.safetensors").write_bytes((tmp_path / "y" / "model.safetensors").read_bytes())
    code, out = run(capsys, "info", str(tmp_path / "x"), "--verify")
    assert code == 2 and "SHA-256" in out


def test_a_missing_checkpoint_gives_a_clear_error(capsys: pytest.CaptureFixture[str]) -> None:
    code, out = run(capsys, "info", "nowhere")
    assert code == 2 and "There is no checkpoint 'nowhere'" in out


def test_qk_norm_is_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    vitrail.save(tmp_path / "x", vitrail.create_model("ViT-Ti/4", image_size=8, width=32, depth=1, heads=2, mlp=32, qk_norm=True))
    assert "qk norm" in " ".join(run(capsys, "info", str(tmp_path / "x"))[1].split())
