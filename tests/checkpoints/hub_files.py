"""Files as timm's repositories on the Hub have them."""

from __future__ import annotations

import json
from typing import Any

import timm


def timm_config_json(name: str, **changes: Any) -> dict[str, Any]:
    """Return the config.json of `timm/NAME`: timm writes its pretrained_cfg without what says where the weights are."""
    architecture, _, tag = name.partition(".")
    config = timm.get_pretrained_cfg(name)
    stored = {
        key: value for key, value in config.to_dict(remove_source=True, remove_null=True).items() if key not in ("architecture",)
    }
    values = {
        "architecture": architecture,
        "num_classes": config.num_classes,
        "pretrained_cfg": {**stored, "tag": tag},
        **changes,
    }
    return dict(json.loads(json.dumps(values)))
