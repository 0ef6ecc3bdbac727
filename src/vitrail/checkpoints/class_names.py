"""Class names of weights that do not store them: ImageNet's, known from where the weights come, or assumed and listed as such."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vitrail.checkpoints.bundle import Bundle
from vitrail.checkpoints.huggingface import label_names
from vitrail.checkpoints.published import PublishedWeights, of_timm_config
from vitrail.data import imagenet
from vitrail.data.imagenet import ClassSet

_SETS = {"1k": "ImageNet-1k", "21k": "ImageNet-21k"}
# Tags of timm, and file names of Google's ViT and BiT, DeiT's and torchvision's weights.
_TAGS = {"1k": re.compile(r"(^|_)in1k(_|$)"), "21k": re.compile(r"(^|_)in21k$")}
_FILES = {
    "1k": re.compile(
        r"imagenet2012|ILSVRC2012|BiT-S-R\d+x\d+\.npz$|(deit|deit_3)_\w+(-[0-9a-f]{8}|_1k|_21k)\.pth$|vit_[bhl]_\d+(_\w+)?-[0-9a-f]{8}\.pth$"
    ),
    "21k": re.compile(r"i(mage)?(net)?21k.*\.npz$|BiT-M-R\d+x\d+\.npz$"),
}
_PUBLISHERS = ("hf:google/", "hf:facebook/")


def known_classes(
    bundle: Bundle, fmt: str, config: Mapping[str, Any], path: Path, published: PublishedWeights | None = None
) -> None:
    """Set the class names of a bundle from another library's file, and say in its report where they come from if not from there."""
    outputs = bundle.model.config.outputs
    stored = _stored(fmt, config, outputs)
    if stored is not None:
        bundle.classes = imagenet.unique_names(stored)
        return
    which = imagenet.SETS.get(outputs)
    if which is None or bundle.head != "set":
        return
    bundle.classes = imagenet.labels(which)
    evidence = _evidence(which, bundle.report.source, config, path, published)
    if evidence:
        bundle.report.notes.append(f"class names of {_SETS[which]}, by {evidence}")
        return
    bundle.classes_assumed = True
    bundle.report.assumptions.append(
        f"{outputs:,} {_ASSUMED} {_SETS[which]} in its usual order; change them with classes= (`vitrail convert --classes`)"
    )


_ASSUMED = "outputs without class names: assumed"


def set_classes(bundle: Bundle, classes: tuple[str, ...] | None) -> None:
    """Replace the class names of a bundle; those that were assumed are no longer listed."""
    bundle.classes, bundle.classes_assumed = classes, False
    bundle.report.assumptions[:] = [text for text in bundle.report.assumptions if _ASSUMED not in text]


def _stored(fmt: str, config: Mapping[str, Any], outputs: int) -> tuple[str, ...] | None:
    if fmt == "hf" and outputs:
        return label_names(config)
    names = config.get("label_names") if fmt == "timm" else None
    return tuple(map(str, names)) if isinstance(names, list) and len(names) == outputs else None


def _evidence(
    which: ClassSet, source: str, config: Mapping[str, Any], path: Path, published: PublishedWeights | None
) -> str | None:
    """Return what shows that the outputs are this set of classes."""
    if published is not None and published.class_set == which:
        return f"the name {published.reference}"
    pretrained = config.get("pretrained_cfg", config)
    tag = pretrained.get("tag") if isinstance(pretrained, Mapping) else None
    if isinstance(tag, str) and "architecture" in config:
        weights = of_timm_config(str(config["architecture"]), tag)
        if (weights is not None and weights.class_set == which) or _TAGS[which].search(tag):
            return f"the tag {tag} in config.json"
    if source.startswith(_PUBLISHERS) and "LABEL_0" in str(config.get("id2label", "LABEL_0")):
        return f"its publisher ({source})"
    if path.is_file() and _FILES[which].search(f"{path.parent.name}/{path.name}"):
        return f"the file's name {path.name}"
    return None
