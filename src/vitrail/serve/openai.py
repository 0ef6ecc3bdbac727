"""`/v1/embeddings` and `/v1/models`, as OpenAI's clients call them."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from vitrail.serve.embeddings_body import EmbeddingsRequest, read_embeddings
from vitrail.serve.errors import ServiceError, first_failure
from vitrail.serve.guard import read_body
from vitrail.serve.json_body import check_values, json_schema
from vitrail.serve.service import Service


def routes(service: Service) -> APIRouter:
    router = APIRouter(tags=["OpenAI"])

    @router.get("/v1/models")
    def models() -> dict[str, Any]:
        """List the models."""
        return {"object": "list", "data": [_description(name) for name in service.workers]}

    @router.get("/v1/models/{name}")
    def model(name: str) -> dict[str, Any]:
        """Describe a model as the list does."""
        return _description(service.worker(name).name)

    @router.post("/v1/embeddings", openapi_extra=json_schema(EmbeddingsRequest))
    async def embeddings(request: Request) -> JSONResponse:
        """Return a vector per image: the input of the head. Images are data: URIs; addresses are never fetched."""
        data, most = await read_body(request), 100 * (1 + service.settings.max_images)
        deadline, values = service.deadline(), check_values(data, len(data), most)
        limits: dict[str, Any] = {"length": len(data), "values": values, "deadline": deadline, "left": request.is_disconnected}
        body, images = await service.json.run(read_embeddings, data, most, **limits)
        worker = service.worker(body.model)
        found = (await service.compute(request, worker, "embedding", images, deadline)).results
        if (error := first_failure(found)) is not None:
            raise error
        if body.dimensions not in (None, len(found[0])):
            raise ServiceError(
                400, f"dimensions is {body.dimensions}; the vectors of {worker.name} have {len(found[0])}. Leave it out."
            )
        vectors = [
            {"object": "embedding", "index": n, "embedding": _encoded(one, body.encoding_format)} for n, one in enumerate(found)
        ]
        usage = {"prompt_tokens": 0, "total_tokens": 0}
        return JSONResponse({"object": "list", "data": vectors, "model": worker.name, "usage": usage})

    return router


def _description(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "vitrail"}


def _encoded(vector: np.ndarray[Any, Any], encoding: str | None) -> Any:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode() if encoding == "base64" else vector.tolist()
