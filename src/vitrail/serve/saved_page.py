"""The explorer as one HTML file that works without a server: the page's files, and the answers it would ask for, as base64."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any, get_args

import numpy as np

from vitrail.checkpoints import Bundle
from vitrail.data.decode import MAX_PIXELS
from vitrail.errors import VitrailError
from vitrail.inspect.rollout import Fusion
from vitrail.serve import exploration as compute
from vitrail.serve.exploration import Exploration
from vitrail.serve.explorations import NamedImage, content_key
from vitrail.serve.limits import PixelLimit
from vitrail.serve.page_files import page_files, position_bytes

MAX_MAPS = 12 << 20
"""Most bytes of attention and similarity per image and model. Of a larger model, evenly spaced layers are included."""
_IMPORT = re.compile(r'^import \{([^}]*)\} from "\./(\w+)\.js";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?:async )?(?:const|let|class|function) (\w+)", re.MULTILINE)


def saved_page(models: Mapping[str, Bundle], images: Sequence[NamedImage], credit: str = "") -> tuple[str, list[str]]:
    """Return the page with every image analysed by every model, and notes about layers that are left out."""
    items: list[dict[str, Any]] = []
    notes = []
    for image, (name, bundle) in product(images, models.items()):
        found = _explored(bundle, name, image)
        layers = _included_layers(found)
        if len(layers) < found.info["layers"]:
            text = ", ".join(map(str, layers))
            notes.append(f"{name}: the page includes the maps of {len(layers)} of {found.info['layers']} layers ({text}).")
        found.info["saved_layers"] = layers
        items.append({"name": image.name, "info": found.info, "answers": _answers(bundle, found, layers)})
    data = {"names": [image.name for image in images], "items": items, "credit": credit}
    return _page(data), list(dict.fromkeys(notes))


def _explored(bundle: Bundle, name: str, image: NamedImage) -> Exploration:
    preprocess = bundle.stored_preprocess()
    found = compute.analyse(bundle, preprocess(image.data, name=image.name))
    if found.info["attention"] is not None and found.attention is None:
        raise VitrailError(
            f"The attention of {found.info['name']} is too large for a saved page; run `vitrail explore` without --save."
        )
    found.photo = compute.photo(image.data, preprocess, PixelLimit(MAX_PIXELS))
    found.info |= {"id": content_key(name, image.data), "model": name, "photo": bool(found.photo)}
    if found.info["attention"] is not None:
        found.info["attention"]["send"] = "layer"  # a file has no limit per answer
    return found


def _included_layers(found: Exploration) -> list[int]:
    """Return all layers, or as many evenly spaced ones, the first and last included, as fit."""
    count, tokens = max(1, found.info["layers"]), found.features.shape[1]
    per_layer = tokens * tokens + (found.attention.nbytes // count if found.attention is not None else 0)
    fitting = min(count, max(2, MAX_MAPS // per_layer))
    return sorted({int(layer) for layer in np.linspace(0, count - 1, min(fitting, count)).round()})


def _answers(bundle: Bundle, found: Exploration, layers: Sequence[int]) -> dict[str, str]:
    """Return everything the page may ask for, by the path it asks with."""
    answers = {"picture": compute.picture(found, bundle.stored_preprocess()), "colours": found.colours().tobytes()}
    if found.photo:
        answers["photo"] = found.photo
    if found.info["positions"]:
        answers["positions"] = position_bytes(bundle, found.info["image_size"]).tobytes()
    for layer in layers:
        answers[f"similarity?layer={layer}"] = found.similarity(layer).tobytes()
    if found.attention is not None:
        for layer in layers:
            answers[f"attention?layer={layer}"] = found.attention[layer].encoded()
        for fusion, residual in product(get_args(Fusion), (True, False)):
            weights = compute.rolled_out(bundle, found.image, fusion, residual)
            answers[f"rollout?fusion={fusion}&residual={str(residual).lower()}"] = json.dumps({"weights": weights}).encode()
        answers["distance"] = json.dumps(compute.distances(bundle, found.image)).encode()
    return {path: _text(content) for path, content in answers.items()}


def _text(content: bytes) -> str:
    return base64.b64encode(content).decode()


def _page(data: Mapping[str, Any]) -> str:
    files = {name: content.decode() for name, content in page_files().items()}
    script, style = joined_script(files), files["style.css"]
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; connect-src 'none'; base-uri 'none'; "
        "form-action 'none'"
    )
    page = files["index.html"]
    page = re.sub(r'<link rel="icon"[^>]*>\n', f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n', page)
    page = page.replace('<link rel="stylesheet" href="/page/style.css">', f"<style>{style}</style>")
    block = json.dumps(data, ensure_ascii=True).replace("<", "\\u003c")  # no text of the data can end the block
    scripts = f'<script type="application/json" id="saved-data">{block}</script>\n<script type="module">{script}</script>\n</body>'
    return page.replace('<script type="module" src="/page/main.js"></script>\n', "").replace("</body>", scripts)


def joined_script(files: Mapping[str, str], name: str = "main.js") -> str:
    """Join the modules into one script: a browser loads no modules from files. Each stays a scope of its own."""
    order: list[str] = []

    def visit(module: str) -> None:
        for _, imported in _IMPORT.findall(files[f"{module}.js"]):
            visit(imported)
        if module not in order:
            order.append(module)

    visit(name.removesuffix(".js"))
    parts = []
    for module in order:
        code = _IMPORT.sub(lambda found: f"const {{{found[1]}}} = module_{found[2]};\n", files[f"{module}.js"])
        names = ", ".join(_EXPORT.findall(code))
        code = re.sub(r"^export ", "", code, flags=re.MULTILINE)
        parts.append(f"const module_{module} = (() => {{\n{code}return {{ {names} }};\n}})();\n")
    return "".join(parts)


def _hash(content: str) -> str:
    return f"sha256-{_text(hashlib.sha256(content.encode()).digest())}"
