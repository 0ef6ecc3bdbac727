"""Names of recipes from names of models."""

from __future__ import annotations


def slug(model: str) -> str:
    """`ViT-B/16` is `vit-b16`, `R50+ViT-B/16` is `r50-vit-b16`."""
    return model.lower().replace("/", "").replace("+", "-")
