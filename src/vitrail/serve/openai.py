"""`/v1/embeddings` and `/v1/models`, as OpenAI's clients call them."""

from __future__ import annotations

import base64
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field

from vitrail.serve.errors import ServiceError
from vitrail.serve.images import bytes_of_text
from vitrail.serve.json_body import json_schema, parse_json, read_body
from vitrail.serve.service import Service


class ImageUrl(BaseModel):
    url: str


class ImagePart(BaseModel):
    image_url: ImageUrl


Input = Annotated[str, Field(description="data:image/jpeg;base64,…")]


class EmbeddingsRequest(BaseModel):
    input: Input | ImagePart | list[Input | ImagePart]
    model: str | None = Field(None, max_length=200)
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(None, description="If given, the length of the model's vectors; others are refused.")


def routes(service: Service) -> APIRouter:
    router = APIRouter(tags=["OpenAI"])

    @router.get("/v1/models")
    def models() -> dict[str, Any]:
        """List the models."""
        data = [{"id": name, "object": "model", "created": 0, "owned_by": "vitrail"} for name in service.workers]
        return {"object": "list", "data": data}

    @router.post("/v1/embeddings", openapi_extra=json_schema(EmbeddingsRequest))
    async def embeddings(request: Request) -> JSONResponse:
        """Return a vector per image: the input of the head. Images are data: URIs; addresses are never fetched."""
        body = parse_json(await read_body(request), EmbeddingsRequest, 100 * (1 + service.settings.max_images))
        worker = service.worker(body.model)
        worker.check_space()
        parts = body.input if isinstance(body.input, list) else [body.input]
        images = [bytes_of_text(part if isinstance(part, str) else part.image_url.url) for part in parts]
        found = await service.compute(request, worker, "embedding", images)
        for number, one in enumerate(found):
            if isinstance(one, ServiceError):
                raise ServiceError(one.status, one.message if len(found) == 1 else f"image {number}: {one.message}")
        if body.dimensions not in (None, len(found[0])):
            raise ServiceError(
                400, f"dimensions is {body.dimensions}; the vectors of {worker.name} have {len(found[0])}. Leave it out."
            )
        data = [
            {"object": "embedding", "index": n, "embedding": _encoded(one, body.encoding_format)} for n, one in enumerate(found)
        ]
        usage = {"prompt_tokens": 0, "total_tokens": 0}
        return JSONResponse({"object": "list", "data": data, "model": worker.name, "usage": usage})

    return router


def _encoded(vector: np.ndarray[Any, Any], encoding: str) -> Any:
    return vector.tolist() if encoding == "float" else base64.b64encode(vector.astype("<f4").tobytes()).decode()
