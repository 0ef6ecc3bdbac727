"""The Open Inference Protocol, version 2, as KServe's, Triton's and MLServer's clients call it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from torch import Tensor

from vitrail.serve.errors import ServiceError
from vitrail.serve.guard import error_answer
from vitrail.serve.images import bytes_of_text
from vitrail.serve.service import Service
from vitrail.serve.worker import ModelWorker

VERSION = "1"
_FLOATS = ("FP32", "FP64")


class InputTensor(BaseModel):
    name: str
    shape: list[int]
    datatype: str
    data: list[Any]


class InferRequest(BaseModel):
    id: str | None = None
    inputs: list[InputTensor]


def routes(service: Service) -> APIRouter:
    router = APIRouter(prefix="/v2", tags=["Open Inference Protocol"])

    @router.get("")
    def server() -> dict[str, Any]:
        from importlib.metadata import version

        return {"name": "vitrail", "version": version("vitrail"), "extensions": []}

    @router.get("/health/live")
    def live() -> dict[str, bool]:
        return {"live": True}

    @router.get("/health/ready")
    async def ready() -> dict[str, bool]:
        """Tell whether every model's worker answers."""
        await service.ready()
        return {"ready": True}

    @router.get("/models/{name}")
    @router.get("/models/{name}/versions/{version}")
    def metadata(name: str, version: str = VERSION) -> dict[str, Any]:
        worker = _worker(name, version)
        config = service.bundle(worker).model.config
        image = {"name": "images", "datatype": "FP32", "shape": [-1, config.channels, *config.image_size]}
        encoded = {"name": "encoded_images", "datatype": "BYTES", "shape": [-1]}
        logits = {"name": "logits", "datatype": "FP32", "shape": [-1, config.outputs]}
        return {"name": name, "versions": [VERSION], "platform": "vitrail_pytorch", "inputs": [image, encoded], "outputs": [logits]}

    @router.get("/models/{name}/ready")
    @router.get("/models/{name}/versions/{version}/ready")
    async def model_ready(name: str, version: str = VERSION) -> dict[str, Any]:
        await service.ready(_worker(name, version).name)
        return {"name": name, "ready": True}

    @router.post("/models/{name}/infer")
    @router.post("/models/{name}/versions/{version}/infer")
    async def infer(request: Request, body: InferRequest, name: str, version: str = VERSION) -> JSONResponse:
        """Compute logits of `images`, normalised FP32 tensors, or of `encoded_images`, files in base64."""
        worker = _worker(name, version)
        images = _images(body, service, worker)
        found = await service.compute(request, worker, "logits", images)
        for number, one in enumerate(found):
            if isinstance(one, ServiceError):
                return error_answer(ServiceError(one.status, f"image {number}: {one.message}"))
        rows = np.stack(found)
        output = {"name": "logits", "datatype": "FP32", "shape": list(rows.shape), "data": rows.ravel().tolist()}
        answer: dict[str, Any] = {"model_name": name, "model_version": VERSION, "outputs": [output]}
        return JSONResponse(answer if body.id is None else {**answer, "id": body.id})

    def _worker(name: str, version: str) -> ModelWorker:
        if version != VERSION:
            raise ServiceError(404, f"{name} has only version {VERSION}.")
        return service.worker(name)

    return router


def _images(body: InferRequest, service: Service, worker: ModelWorker) -> list[bytes | Tensor]:
    if len(body.inputs) != 1:
        raise ServiceError(400, f"Give one input, images or encoded_images; there are {len(body.inputs)}.")
    given = body.inputs[0]
    if given.datatype == "BYTES":
        if given.shape != [len(given.data)] or not all(isinstance(text, str) for text in given.data):
            raise ServiceError(400, f"{given.name} must have the shape [{len(given.data)}] and base64 texts.")
        return [bytes_of_text(text) for text in given.data]
    if given.datatype not in _FLOATS:
        raise ServiceError(400, f"datatype is {given.datatype}; it must be FP32 (normalised images) or BYTES (files in base64).")
    config = service.bundle(worker).model.config
    expected = [config.channels, *config.image_size]
    if len(given.shape) != 4 or given.shape[1:] != expected or not 0 < given.shape[0] <= service.settings.max_images:
        raise ServiceError(400, f"The shape is {given.shape}; it must be [images, {', '.join(map(str, expected))}].")
    try:
        values = np.asarray(given.data, dtype=np.float32).ravel()
    except (ValueError, TypeError, OverflowError) as error:
        raise ServiceError(400, "The data must be numbers, in one list or nested evenly.") from error
    if values.size != math.prod(given.shape) or not np.isfinite(values).all():
        raise ServiceError(400, f"The data must be {math.prod(given.shape)} finite numbers; there are {values.size}.")
    return list(torch.from_numpy(values.reshape(given.shape)))
