"""`/v1/predict` and `/v1/attention`: images in, words or maps out."""

from __future__ import annotations

import io
from typing import Annotated, Any, Literal

import numpy as np
import torch
from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse, Response
from PIL import Image
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from torch import Tensor

from vitrail.checkpoints import Bundle
from vitrail.inspect.rollout import rollout
from vitrail.serve.errors import ServiceError
from vitrail.serve.guard import error_answer
from vitrail.serve.service import ClientLeft, Service

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
        images = await uploaded(request, service)
        bundle = service.bundle(worker)
        bundle.check_head()
        found = await service.compute(request, worker, "logits", images)
        if len(found) == 1 and isinstance(found[0], ServiceError):
            return error_answer(found[0])
        return JSONResponse({"model": worker.name, "results": [_labels(bundle, one, top) for one in found]})

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
        worker = service.worker(model)
        images = await uploaded(request, service)
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
        return Response(_png(found, service.bundle(worker).model.config.image_size), media_type="image/png")

    return router


async def uploaded(request: Request, service: Service) -> list[bytes | Tensor]:
    """Return the files of a form, or the body. File names are ignored."""
    try:
        if not request.headers.get("content-type", "").startswith("multipart/form-data"):
            return [await request.body()]
        limit = service.settings.max_images
        form = await request.form(max_files=limit, max_fields=limit)
        files = [part for _, part in form.multi_items() if isinstance(part, UploadFile)]
        return [await file.read() for file in files]
    except ClientDisconnect:
        raise ClientLeft from None
    except HTTPException as error:
        status = 413 if "Too many" in error.detail else error.status_code
        raise ServiceError(status, f"The form cannot be read: {error.detail}") from error


def _labels(bundle: Bundle, outputs: Any, top: int) -> dict[str, Any]:
    if isinstance(outputs, ServiceError):
        return {"error": outputs.message, "status": outputs.status}
    key = "value" if bundle.task == "regress" else "probability"
    (found,) = bundle.decode(torch.from_numpy(outputs)[None], top)
    return {"predictions": [{"label": one.label, "index": one.index, key: one.score} for one in found]}


def _one_map(bundle: Bundle, batch: Tensor, layer: int, head: int | None, query: int) -> np.ndarray[Any, Any]:
    config = bundle.model.config
    blocks = getattr(config, "blocks", 0)
    if not -blocks <= layer < max(blocks, 1):
        raise ServiceError(422, f"layer is {layer}; {config.name} has {blocks} layers, counted from 0.")
    (_, weights), *_ = list(bundle.model.attention(batch, [layer]))
    heads, tokens = weights.shape[1], weights.shape[2]
    if head is not None and head >= heads:
        raise ServiceError(422, f"head is {head}; {config.name} has {heads} heads, counted from 0.")
    if query >= tokens:
        raise ServiceError(422, f"query is {query}; there are {tokens} tokens, counted from 0.")
    chosen = weights[0].mean(0) if head is None else weights[0, head]
    found: np.ndarray[Any, Any] = chosen[query, config.prefix :].reshape(config.grid).float().cpu().numpy()  # type: ignore[union-attr]
    return found


def _png(values: np.ndarray[Any, Any], size: tuple[int, int]) -> bytes:
    from matplotlib import colormaps

    scaled = (values - values.min()) / max(float(np.ptp(values)), 1e-12)
    picture = Image.fromarray((colormaps["viridis"](scaled)[..., :3] * 255).round().astype(np.uint8))
    stream = io.BytesIO()
    picture.resize((size[1], size[0]), Image.Resampling.NEAREST).save(stream, "PNG")
    return stream.getvalue()
