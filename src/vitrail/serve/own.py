"""`/v1/predict` and `/v1/attention`: images in, words or maps out."""

from __future__ import annotations

import io
from typing import Annotated, Any, Literal

import numpy as np
import torch
from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse, Response
from PIL import Image
from torch import Tensor

from vitrail.checkpoints import Bundle
from vitrail.inspect.rollout import rollout
from vitrail.serve.errors import ServiceError
from vitrail.serve.form import files_of_form, is_form, lost_bytes
from vitrail.serve.guard import error_answer, read_body
from vitrail.serve.images import ROTATED, stays_rotated
from vitrail.serve.service import Service
from vitrail.serve.worker import ModelWorker, not_finite

_BODY = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {"schema": {"type": "object", "additionalProperties": {"type": "string", "format": "binary"}}},
            "image/*": {"schema": {"type": "string", "format": "binary"}},
        },
    }
}
Model = Annotated[str | None, Query(description="Name of the model; by default the first.", max_length=200)]


def routes(service: Service) -> APIRouter:
    router = APIRouter(tags=["Vitrail"])

    @router.post("/v1/predict", openapi_extra=_BODY)
    async def predict(
        request: Request, model: Model = None, top: Annotated[int, Query(ge=1, le=1000, description="Labels per image.")] = 5
    ) -> JSONResponse:
        """Classify images: one as the body, or several as the files of a form. A bad image among several fails alone."""
        worker = service.worker(model)
        bundle = service.bundle(worker)
        worker.check_head()
        images = await uploaded(request, service, worker)
        found = await service.compute(request, worker, "logits", images)
        if len(found) == 1 and isinstance(found[0], ServiceError):
            return error_answer(found[0])
        preprocess = bundle.stored_preprocess()
        results = [_labels(bundle, one, top) for one in found]
        for result, image in zip(results, images, strict=True):
            if preprocess.exif or "predictions" not in result:
                continue
            if await service.in_pool(stays_rotated, image, preprocess, service.pixels):
                result["warning"] = ROTATED
        return JSONResponse({"model": worker.name, "results": results})

    @router.post("/v1/attention", openapi_extra=_BODY, response_class=Response)
    async def attention(
        request: Request,
        model: Model = None,
        method: Annotated[Literal["rollout", "attention"], Query(description="Over all layers, or of one layer.")] = "rollout",
        layer: Annotated[int, Query(description="Counted from 0; −1 is the last.")] = -1,
        head: Annotated[int | None, Query(ge=0, description="By default the mean of all heads.")] = None,
        query: Annotated[int, Query(ge=0, description="Token that looks: prefix tokens first, then patches by row.")] = 0,
        format: Annotated[Literal["json", "png"], Query()] = "json",
    ) -> Response:
        """Show where the model looks: a map over the patches, as numbers or as a picture of the input's size."""
        if method == "rollout" and (layer != -1 or head is not None or query != 0):
            raise ServiceError(400, "layer, head and query have no effect on rollout; add method=attention, or leave them out.")
        worker = service.worker(model)
        service.bundle(worker)
        images = await uploaded(request, service, worker)
        if len(images) != 1:
            raise ServiceError(400, f"Send one image at a time; there are {len(images)}.")

        def compute(bundle: Bundle, image: Tensor) -> np.ndarray[Any, Any]:
            batch = image[None].to(next(bundle.model.parameters()).device)
            if method == "rollout":
                found: np.ndarray[Any, Any] = rollout(bundle.model, batch)[0]
                return found
            return _one_map(bundle, batch, layer, head, query)

        (found,) = await service.compute(request, worker, compute, images)
        if isinstance(found, ServiceError):
            return error_answer(found)
        if format == "json":
            return JSONResponse({"model": worker.name, "shape": list(found.shape), "map": found.tolist()})
        size = service.bundle(worker).model.config.image_size
        return Response(await service.in_pool(_png, found, size), media_type="image/png")

    return router


async def uploaded(request: Request, service: Service, worker: ModelWorker) -> list[bytes]:
    """Return the files of a form, or the body. If the queue is full, that is the answer before anything is read."""
    worker.check_space()
    body = await read_body(request)
    kind = request.headers.get("content-type", "")
    if is_form(kind):
        files = files_of_form(body, kind, service.settings.max_images)
        if not files:
            raise ServiceError(400, "The form has no file; send at least one, as curl -F image=@cat.jpg does.")
        return files
    if lost_bytes(body, kind):
        raise ServiceError(415, "This is not an image, and has no zero byte and no line end: use curl --data-binary @FILE, not -d.")
    return [body]


def _labels(bundle: Bundle, outputs: Any, top: int) -> dict[str, Any]:
    if isinstance(outputs, ServiceError):
        return {"error": outputs.message, "status": outputs.status}
    key = "value" if bundle.task == "regress" else "probability"
    (found,) = bundle.decode(torch.from_numpy(outputs)[None], top)
    rows: list[dict[str, Any]] = [{"label": one.label, "index": one.index, key: one.score} for one in found]
    if bundle.task == "multilabel":
        rows = [{**row, "chosen": one.chosen} for row, one in zip(rows, found, strict=True)]
    return {"predictions": rows}


def _one_map(bundle: Bundle, batch: Tensor, layer: int, head: int | None, query: int) -> np.ndarray[Any, Any]:
    config = bundle.model.config
    blocks = getattr(config, "blocks", 0)  # a ResNet has none: its attention is an error of its own
    if blocks and not -blocks <= layer < blocks:
        raise ServiceError(422, f"layer is {layer}; the last layer is {blocks - 1}, counted from 0.")
    (_, weights), *_ = list(bundle.model.attention(batch, [layer]))
    heads, tokens = weights.shape[1], weights.shape[2]
    if head is not None and head >= heads:
        raise ServiceError(422, f"head is {head}; the last head is {heads - 1}, counted from 0.")
    if query >= tokens:
        raise ServiceError(422, f"query is {query}; the last token is {tokens - 1}, counted from 0.")
    chosen = weights[0].mean(0) if head is None else weights[0, head]
    found: np.ndarray[Any, Any] = chosen[query, config.prefix :].reshape(config.grid).float().cpu().numpy()  # type: ignore[union-attr]
    if not np.isfinite(found).all():
        raise not_finite()
    return found


def _png(values: np.ndarray[Any, Any], size: tuple[int, int]) -> bytes:
    from matplotlib import colormaps

    scaled = (values - values.min()) / max(float(np.ptp(values)), 1e-12)
    picture = Image.fromarray((colormaps["viridis"](scaled)[..., :3] * 255).round().astype(np.uint8))
    stream = io.BytesIO()
    picture.resize((size[1], size[0]), Image.Resampling.NEAREST).save(stream, "PNG")
    return stream.getvalue()
