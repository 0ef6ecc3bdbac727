"""`/v1/embeddings` and `/v1/models`, as OpenAI's clients call them."""

from __future__ import annotations

import base64
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter, Request
from pydantic import BaseModel, Field

from vitrail.serve.errors import ServiceError
from vitrail.serve.images import bytes_of_text
from vitrail.serve.service import Service


class ImageUrl(BaseModel):
    url: str


class ImagePart(BaseModel):
    image_url: ImageUrl


Input = Annotated[str, Field(description="data:image/jpeg;base64,…")]


class EmbeddingsRequest(BaseModel):
    input: Input | ImagePart | list[Input | ImagePart]
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"


def routes(service: Service) -> APIRouter:
    router = APIRouter(tags=["OpenAI"])

    @router.get("/v1/models")
    def models() -> dict[str, Any]:
        """List the models."""
        data = [{"id": name, "object": "model", "created": 0, "owned_by": "vitrail"} for name in service.workers]
        return {"object": "list", "data": data}

    @router.post("/v1/embeddings")
    async def embeddings(request: Request, body: EmbeddingsRequest) -> dict[str, Any]:
        """Return a vector per image: the input of the head. Images are data: URIs; addresses are never fetched."""
        worker = service.worker(body.model)
        parts = body.input if isinstance(body.input, list) else [body.input]
        images = [bytes_of_text(part if isinstance(part, str) else part.image_url.url) for part in parts]
        found = await service.compute(request, worker, "embedding", images)
        for number, one in enumerate(found):
            if isinstance(one, ServiceError):
                raise ServiceError(one.status, one.message if len(found) == 1 else f"image {number}: {one.message}")
        data = [
            {"object": "embedding", "index": n, "embedding": _encoded(one, body.encoding_format)} for n, one in enumerate(found)
        ]
        return {"object": "list", "data": data, "model": worker.name, "usage": {"prompt_tokens": 0, "total_tokens": 0}}

    return router


def _encoded(vector: np.ndarray[Any, Any], encoding: str) -> Any:
    return vector.tolist() if encoding == "float" else base64.b64encode(vector.astype("<f4").tobytes()).decode()
