"""Hugging Face's DeiT, DINOv2 and SigLIP vision towers are read as transformers computes them; others are rejected by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from vitrail.checkpoints.loading import load
from vitrail.errors import VitrailError

SIZES: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 32, "patch_size": 8}
MODELS = (
    ("DeiTForImageClassificationWithTeacher", "DeiTConfig", {"intermediate_size": 64, "num_labels": 5}),
    ("DeiTForImageClassification", "DeiTConfig", {"intermediate_size": 64, "num_labels": 5}),
    ("Dinov2Model", "Dinov2Config", {}),
    ("Dinov2WithRegistersModel", "Dinov2WithRegistersConfig", {}),
    ("SiglipVisionModel", "SiglipVisionConfig", {"intermediate_size": 64}),
)


def _saved(name: str, config: str, more: dict[str, Any], folder: Path) -> nn.Module:
    model = getattr(transformers, name)(getattr(transformers, config)(**SIZES, **more)).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            norm_like = parameter.ndim == 1 and not key.endswith("bias")
            parameter.copy_(1 + 0.2 * noise if norm_like else 0.15 * noise)
    model.save_pretrained(folder)
    return model  # type: ignore[no-any-return]


@torch.no_grad()
@pytest.mark.parametrize(("name", "config", "more"), MODELS, ids=[name for name, _, _ in MODELS])
def test_we_compute_transformers_outputs(name: str, config: str, more: dict[str, Any], tmp_path: Path) -> None:
    theirs = _saved(name, config, more, tmp_path / "hf")
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    outputs = theirs(images)
    expected: Tensor = outputs.logits if "logits" in outputs else outputs.pooler_output
    got = load(tmp_path / "hf").model(images)
    assert expected.abs().max() > 0.1
    assert float((got - expected).abs().max()) <= 2e-5


@pytest.mark.parametrize("kind", ["clip_vision_model", "bit", "siglip", "beit", "swin"])
def test_other_models_are_rejected_by_name(kind: str, tmp_path: Path) -> None:
    _saved(*MODELS[0], tmp_path / "hf")
    values = json.loads((tmp_path / "hf" / "config.json").read_text())
    (tmp_path / "hf" / "config.json").write_text(json.dumps({**values, "model_type": kind}))
    with pytest.raises(VitrailError, match=f"model_type='{kind}', which is not supported"):
        load(tmp_path / "hf")


def test_a_classifier_over_class_token_and_patches_is_rejected(tmp_path: Path) -> None:
    _saved("Dinov2ForImageClassification", "Dinov2Config", {"num_labels": 5}, tmp_path / "hf")
    with pytest.raises(VitrailError, match="takes 64 values for a model of width 32"):
        load(tmp_path / "hf")
    assert load(tmp_path / "hf", drop=["classifier.*"]).model.config.outputs == 0
