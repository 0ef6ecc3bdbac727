"""The networks of the paper: Vision Transformers, hybrids and BiT ResNets.

Names are imported on first use, so that importing one small part of this package stays cheap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vitrail.lazy import lazy_attributes

if TYPE_CHECKING:
    from vitrail.models.bit import BiT as BiT
    from vitrail.models.build import Model as Model
    from vitrail.models.build import build_model as build_model
    from vitrail.models.build import create_model as create_model
    from vitrail.models.build import empty_model as empty_model
    from vitrail.models.build import fill_fixed_tables as fill_fixed_tables
    from vitrail.models.config import BiTConfig as BiTConfig
    from vitrail.models.config import ModelConfig as ModelConfig
    from vitrail.models.config import ResNetConfig as ResNetConfig
    from vitrail.models.config import ViTConfig as ViTConfig
    from vitrail.models.cost import flops as flops
    from vitrail.models.cost import needed_flops as needed_flops
    from vitrail.models.cost import parameters as parameters
    from vitrail.models.features import Features as Features
    from vitrail.models.initialisation import initialise as initialise
    from vitrail.models.resample import RULES as RULES
    from vitrail.models.resample import resize_grid as resize_grid
    from vitrail.models.variants import VARIANTS as VARIANTS
    from vitrail.models.variants import canonical_name as canonical_name
    from vitrail.models.variants import model_config as model_config
    from vitrail.models.vit import ViT as ViT

_MODULES = {
    "BiT": "vitrail.models.bit",
    "BiTConfig": "vitrail.models.config",
    "Features": "vitrail.models.features",
    "Model": "vitrail.models.build",
    "ModelConfig": "vitrail.models.config",
    "RULES": "vitrail.models.resample",
    "ResNetConfig": "vitrail.models.config",
    "VARIANTS": "vitrail.models.variants",
    "ViT": "vitrail.models.vit",
    "ViTConfig": "vitrail.models.config",
    "build_model": "vitrail.models.build",
    "canonical_name": "vitrail.models.variants",
    "create_model": "vitrail.models.build",
    "empty_model": "vitrail.models.build",
    "fill_fixed_tables": "vitrail.models.build",
    "flops": "vitrail.models.cost",
    "initialise": "vitrail.models.initialisation",
    "model_config": "vitrail.models.variants",
    "needed_flops": "vitrail.models.cost",
    "parameters": "vitrail.models.cost",
    "resize_grid": "vitrail.models.resample",
}

__all__ = [
    "RULES", "VARIANTS", "BiT", "BiTConfig", "Features", "Model", "ModelConfig", "ResNetConfig", "ViT", "ViTConfig",
    "build_model", "canonical_name", "create_model", "flops", "initialise", "model_config", "needed_flops", "parameters",
    "resize_grid",
]  # fmt: skip

__getattr__, __dir__ = lazy_attributes(__name__, _MODULES)
