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
from vitrail.inspect.inputs import config_at
from vitrail.inspect.rollout import rollout
from vitrail.models import ViT
from vitrail.serve.errors import ServiceError, not_finite
from vitrail.serve.form import files_of_form, is_form, lost_bytes
from vitrail.serve.guard import error_answer, read_body
from vitrail.serve.images import ROTATED
from vitrail.serve.known_queries import KnownQueries
from vitrail.serve.service import Service
from vitrail.serve.worker import ModelWorker

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
    router = APIRouter(tags=["Vitrail"], route_class=KnownQueries)

    @router.post("/v1/predict", openapi_extra=_BODY)
    async def predict(
        request: Request, model: Model = None, top: Annotated[int, Query(ge=1, le=1000, description="Labels per image.")] = 5
    ) -> JSONResponse:
        """Classify images: one as the body, or several as the files of a form. A bad image among several fails alone."""
        worker = service.worker(model)
        bundle = service.bundle(worker)
        worker.check_head()
        images = await uploaded(request, service, worker)
        flight = await service.compute(request, worker, "logits", images)
        if len(images) == 1 and isinstance(flight.results[0], ServiceError):
            return error_answer(flight.results[0], request.scope["path"])
        results = [_labels(bundle, one, top) for one in flight.results]
        for result, rotated in zip(results, flight.rotated, strict=True):
            if rotated and "predictions" in result:
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

        def compute(bundle: Bundle, image: Tensor) -> tuple[np.ndarray[Any, Any], tuple[int, ...]]:
            batch = image[None].to(next(bundle.model.parameters()).device)
            found = rollout(bundle.model, batch)[0] if method == "rollout" else _one_map(bundle, batch, layer, head, query)
            return found, image.shape[1:]

        (answer,) = (await service.compute(request, worker, compute, images)).results
        if isinstance(answer, ServiceError):
            return error_answer(answer, request.scope["path"])
        found, size = answer
        if format == "json":
            return JSONResponse({"model": worker.name, "shape": list(found.shape), "map": found.tolist()})
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
    model = bundle.model
    if isinstance(model, ViT) and not -model.config.blocks <= layer < model.config.blocks:
        raise ServiceError(422, f"layer is {layer}; the last layer is {model.config.blocks - 1}, counted from 0.")
    (_, weights), *_ = list(model.attention(batch, [layer]))  # of a ResNet, an error of its own
    config = config_at(model, batch)  # type: ignore[arg-type]
    heads, tokens = weights.shape[1], weights.shape[2]
    if head is not None and head >= heads:
        raise ServiceError(422, f"head is {head}; the last head is {heads - 1}, counted from 0.")
    if query >= tokens:
        raise ServiceError(422, f"query is {query}; the last token is {tokens - 1}, counted from 0.")
    chosen = weights[0].mean(0) if head is None else weights[0, head]
    found: np.ndarray[Any, Any] = chosen[query, config.prefix :].reshape(config.grid).float().cpu().numpy()
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
