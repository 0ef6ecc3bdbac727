"""The Open Inference Protocol, version 2, as KServe's, Triton's and MLServer's clients call it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from fastapi import APIRouter, Request
from fastapi.responses import Response
from torch import Tensor

from vitrail.checkpoints import Bundle
from vitrail.data.types import Array
from vitrail.serve.errors import ServiceError, first_failure
from vitrail.serve.guard import read_body
from vitrail.serve.json_body import check_values, json_schema
from vitrail.serve.service import Service
from vitrail.serve.tensors import (
    ENCODED,
    HEADER,
    IMAGES,
    OUTPUT,
    PIXELS,
    InferRequest,
    answer,
    json_length,
    max_values,
    read_images,
)
from vitrail.serve.worker import ModelWorker
from vitrail.version import __version__

VERSION = "1"


def routes(service: Service) -> APIRouter:
    router = APIRouter(prefix="/v2", tags=["Open Inference Protocol"])

    @router.get("")
    def server() -> dict[str, Any]:
        """Describe the service."""
        return {"name": "vitrail", "version": __version__, "extensions": ["binary_tensor_data"]}

    @router.get("/health/live")
    def live() -> dict[str, bool]:
        """Tell that the process answers, also while models are loading."""
        return {"live": True}

    @router.get("/health/ready")
    async def ready() -> dict[str, bool]:
        """Tell whether every model's worker answers."""
        await service.ready()
        return {"ready": True}

    @router.get("/models/{name}")
    @router.get("/models/{name}/versions/{version}")
    def metadata(name: str, version: str = VERSION) -> dict[str, Any]:
        """Describe the inputs and outputs of a model."""
        worker = _worker(name, version)
        bundle = service.bundle(worker)
        image = {"name": IMAGES, "datatype": "FP32", "shape": [-1, *_image_shape(bundle)]}
        pixels = {"name": PIXELS, "datatype": "UINT8", "shape": image["shape"]}
        encoded = {"name": ENCODED, "datatype": "BYTES", "shape": [-1]}
        logits = {"name": OUTPUT, "datatype": "FP32", "shape": [-1, bundle.model.config.outputs]}
        return {
            "name": name,
            "versions": [VERSION],
            "platform": "vitrail_pytorch",
            "inputs": [image, pixels, encoded],
            "outputs": [logits],
        }

    @router.get("/models/{name}/ready")
    @router.get("/models/{name}/versions/{version}/ready")
    async def model_ready(name: str, version: str = VERSION) -> dict[str, Any]:
        """Tell whether the worker of one model answers."""
        await service.ready(_worker(name, version).name)
        return {"name": name, "ready": True}

    @router.post("/models/{name}/infer", openapi_extra=json_schema(InferRequest))
    @router.post("/models/{name}/versions/{version}/infer", openapi_extra=json_schema(InferRequest))
    async def infer(request: Request, name: str, version: str = VERSION) -> Response:
        """Compute logits of `images`, normalised FP32 tensors, of `pixels`, UINT8, or of `encoded_images`, files in base64."""
        worker = _worker(name, version)
        bundle = service.bundle(worker)
        worker.check_head()
        worker.check_space()
        expected = _image_shape(bundle)
        data, deadline = await read_body(request), service.deadline()
        length, most = json_length(request.headers.get(HEADER), len(data)), service.settings.max_images
        values = check_values(data, length, max_values(expected, most))
        limits: dict[str, Any] = {"length": length, "values": values, "deadline": deadline, "left": request.is_disconnected}
        body, tensors = await service.json.run(read_images, data, length, expected, most, **limits)
        images = tensors if isinstance(tensors, list) else _unstacked(tensors, bundle)
        found = (await service.compute(request, worker, "logits", images, deadline)).results
        if (error := first_failure(found)) is not None:
            raise error
        return await answer(name, VERSION, body, np.stack(found))

    def _worker(name: str, version: str) -> ModelWorker:
        if version != VERSION:
            raise ServiceError(404, f"There is no version {version[:40]!r} of {name}; the only version is {VERSION}.")
        return service.worker(name)

    return router


def _unstacked(tensors: Array, bundle: Bundle) -> list[Array] | list[Tensor]:
    """Return images as the worker takes them: arrays of pixels, which it normalises, or what a client has normalised."""
    if tensors.dtype != np.uint8:
        return list(torch.from_numpy(tensors))
    if (largest := bundle.stored_preprocess().max_value) != 255:
        raise ServiceError(400, f"This model's pixels have values up to {largest}, not 255; send {IMAGES}, normalised, in FP32.")
    return list(tensors)


def _image_shape(bundle: Bundle) -> list[int]:
    """Return the shape of an input as the preprocessing makes it: a ResNet accepts other sizes than that of its config."""
    preprocess = bundle.stored_preprocess()
    return [preprocess.channels, *preprocess.size]
