"""The explorer: its page at `/`, and what the page asks for under `/explorer/`."""

from __future__ import annotations

import functools
import math
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel
from torch import Tensor

from vitrail.data.embedded import PHOTO_CREDIT
from vitrail.inspect.inputs import Array
from vitrail.inspect.rollout import Fusion
from vitrail.serve import exploration as compute
from vitrail.serve.byte_maps import MAX_REPLY, ByteMaps
from vitrail.serve.errors import ServiceError
from vitrail.serve.exploration import Exploration
from vitrail.serve.explorations import Explorations, NamedImage, content_key, example_images
from vitrail.serve.flight import Flight
from vitrail.serve.guard import read_body
from vitrail.serve.images import ROTATED
from vitrail.serve.json_body import json_schema, parse_json
from vitrail.serve.own import Model, uploaded
from vitrail.serve.page_files import TYPES, page_files, position_bytes
from vitrail.serve.service import Service
from vitrail.serve.worker import ModelWorker, Work

_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
_MAX_PATCHES_BODY = 1 << 20


class PatchesOff(BaseModel):
    """Which patches are switched off."""

    patches: list[int]


Layer = Annotated[int, Query(ge=0, description="Counted from 0.")]
Token = Annotated[int | None, Query(ge=0, description="One query token; by default all.")]


def page_routes() -> APIRouter:
    """Serve the page itself. It contains no data, so it needs no token; what it asks for does."""
    router, files = APIRouter(include_in_schema=False), page_files()

    def answer(name: str) -> Response:
        if name not in files:
            raise ServiceError(404, f"The page has no file {name!r}; open the page at /.")
        kind = TYPES["." + name.rpartition(".")[2]]
        return Response(files[name], media_type=f"{kind}; charset=utf-8", headers=_HEADERS)

    router.add_api_route("/", functools.partial(answer, "index.html"), methods=["GET"])
    router.add_api_route("/page/{name}", answer, methods=["GET"])
    return router


def routes(service: Service) -> APIRouter:
    router = APIRouter(tags=["Explorer"], prefix="/explorer")
    kept = Explorations()
    for add in (_start_routes, _map_routes, _model_routes):
        add(router, service, kept)
    return router


def _start_routes(router: APIRouter, service: Service, kept: Explorations) -> None:
    @functools.cache
    def images() -> tuple[NamedImage, ...]:
        return service.explorer_images or example_images()

    @router.get("/start")
    def start() -> dict[str, Any]:
        """List the models and the images that the page offers. `ready` is false while a model loads."""
        ready = all(worker.state != "loading" for worker in service.workers.values())
        credit = "" if service.explorer_images else PHOTO_CREDIT
        return {"ready": ready, "models": list(service.workers), "images": [one.name for one in images()], "credit": credit}

    @router.get("/images/{number}", response_class=Response)
    def image(number: int) -> Response:
        """Return one of the offered images."""
        if not 0 <= number < len(images()):
            raise ServiceError(404, f"There is no image {number}; /explorer/start lists the images, counted from 0.")
        return Response(images()[number].data, media_type="application/octet-stream", headers=_HEADERS)

    @router.post("/analyse")
    async def analyse(request: Request, model: Model = None) -> JSONResponse:
        """Analyse an image, the body of the request, and keep the result for a while under its id."""
        worker = service.worker(model)
        files = await uploaded(request, service, worker)
        if len(files) != 1:
            raise ServiceError(400, f"Send one image at a time; there are {len(files)}.")
        key = content_key(worker.name, files[0])
        found = kept.find(key)
        if found is None:
            flight = await service.compute(request, worker, compute.analyse, files)
            found = _only(flight)
            preprocess = service.bundle(worker).stored_preprocess()
            if flight.rotated[0]:
                found.info["notes"] = [*found.info["notes"], ROTATED]
            found.photo = await service.in_pool(compute.photo, files[0], preprocess, service.pixels)
            found.info |= {"id": key, "model": worker.name, "photo": bool(found.photo)}
            kept.add(key, found)  # when it is complete: the same image may be asked for meanwhile
        return JSONResponse(found.info)

    @router.get("/{key}/picture", response_class=Response)
    async def picture(key: str) -> Response:
        """Return the model's input as PNG."""
        found = kept[key]
        preprocess = service.bundle(service.worker(found.info["model"])).stored_preprocess()
        return Response(await service.in_pool(compute.picture, found, preprocess), media_type="image/png", headers=_HEADERS)

    @router.get("/{key}/photo", response_class=Response)
    async def photo(key: str) -> Response:
        """Return the same crop of the uploaded image in more pixels, as JPEG."""
        if not kept[key].photo:
            raise ServiceError(404, "The image has no more pixels than the model's input; use /explorer/ID/picture.")
        return Response(kept[key].photo, media_type="image/jpeg", headers=_HEADERS)


def _map_routes(router: APIRouter, service: Service, kept: Explorations) -> None:
    @router.get("/{key}/attention", response_class=Response)
    async def attention(
        request: Request, key: str, layer: Annotated[int | None, Query(ge=0)] = None, query: Token = None
    ) -> Response:
        """Return one layer [head, query, key], one query of all layers [layer, head, key], or one query of one layer [head, key].

        First the scales, one float32 per row, then one byte per weight; a weight is byte · scale / 255.
        """
        found = kept[key]
        _check(found, layer, query, attention=True)
        rows = slice(None) if query is None else query
        if found.attention is not None:
            return _bytes(found.attention[:, :, rows] if layer is None else found.attention[layer, :, rows])
        if layer is None:
            raise ServiceError(422, "The attention of this model is too large for all layers at once; give the parameter layer.")
        worker = service.worker(found.info["model"])
        work = functools.partial(compute.attention_of_layer, found, layer)
        maps: ByteMaps = await _computed(request, service, worker, work, found.image)
        kept.shrink()
        return _bytes(maps[:, rows])

    @router.get("/{key}/similarity", response_class=Response)
    async def similarity(key: str, layer: Layer = 0, query: Token = None) -> Response:
        """Return the cosine similarity of all tokens after a layer [query, key]: a byte b stands for b / 127.5 − 1."""
        found = kept[key]
        if layer >= len(found.features):
            raise ServiceError(422, f"layer is {layer}; the last layer is {len(found.features) - 1}, counted from 0.")
        _check(found, None, query)
        tokens = found.features.shape[1]
        _check_size(tokens * tokens if query is None else tokens)  # before a second of work
        return _bytes(await service.in_pool(found.similarity, layer, query))

    @router.get("/{key}/positions", response_class=Response)
    async def positions(key: str, query: Token = None) -> Response:
        """Return the cosine similarity of the position embeddings of patches [query, key]: b stands for b / 127.5 − 1."""
        found = kept[key]
        bundle = service.bundle(service.worker(found.info["model"]))
        patches = math.prod(found.info["grid"])
        if query is not None and query >= patches:
            raise ServiceError(422, f"query is {query}; the last patch is {patches - 1}, counted from 0.")
        _check_size(patches * patches if query is None else patches)
        return _bytes(await service.in_pool(position_bytes, bundle, found.info["image_size"], query))

    @router.get("/{key}/colours", response_class=Response)
    async def colours(key: str) -> Response:
        """Return three principal components of the patch features after each layer, as colours [layer, patch, 3]."""
        found = kept[key]
        if "colours" not in found.results:
            found.results["colours"] = await service.in_pool(found.colours)
        return _bytes(found.results["colours"])


def _model_routes(router: APIRouter, service: Service, kept: Explorations) -> None:
    """Add what is computed by the model: in its thread, behind its queue."""

    @router.get("/{key}/rollout")
    async def rollout(request: Request, key: str, fusion: Fusion = "mean", residual: bool = True) -> dict[str, Any]:
        """Return the attention rollout, one weight per patch: heads fused by mean, max or min, with or without the residual."""
        found, name = kept[key], f"rollout {fusion} {residual}"
        _check(found, None, None, attention=True)
        if name not in found.results:
            work = functools.partial(compute.rolled_out, fusion=fusion, residual=residual)
            worker = service.worker(found.info["model"])
            found.results[name] = await _computed(request, service, worker, work, found.image)
        return {"weights": found.results[name]}

    @router.get("/{key}/distance")
    async def distance(request: Request, key: str) -> dict[str, Any]:
        """Return the mean attention distance by layer and head in pixels, and that of uniform attention."""
        found = kept[key]
        _check(found, None, None, attention=True)
        if "distance" not in found.results:
            worker = service.worker(found.info["model"])
            found.results["distance"] = await _computed(request, service, worker, compute.distances, found.image)
        answer: dict[str, Any] = found.results["distance"]
        return answer

    @router.post("/{key}/masked", openapi_extra=json_schema(PatchesOff))
    async def masked(request: Request, key: str) -> dict[str, Any]:
        """Predict again with some patches replaced by the preprocessing's mean colour. Patches are counted by row from 0."""
        found = kept[key]
        worker = service.worker(found.info["model"])
        bundle = service.bundle(worker)
        worker.check_head()
        worker.check_space()
        body = await read_body(request)
        if len(body) > _MAX_PATCHES_BODY:
            raise ServiceError(413, f"The list of patches has {len(body):,} bytes; at most {_MAX_PATCHES_BODY:,} are read.")
        off = set(parse_json(body, PatchesOff, _MAX_PATCHES_BODY).patches)
        rows, columns = found.info["grid"]
        unknown = min((patch for patch in off if not 0 <= patch < rows * columns), default=None)
        if unknown is not None:
            raise ServiceError(422, f"There is no patch {unknown}; the patches are 0 to {rows * columns - 1}.")
        work = functools.partial(compute.masked_outputs, found.info["grid"], off)
        outputs = await _computed(request, service, worker, work, found.image)
        also = [one["index"] for one in found.info["predictions"]]
        return {"predictions": compute.predictions(bundle, outputs, also)}


async def _computed(request: Request, service: Service, worker: ModelWorker, work: Work, image: Tensor) -> Any:
    """Compute one image in the model's thread; what fails is raised."""
    return _only(await service.compute(request, worker, work, [image]))


def _only(flight: Flight) -> Any:
    (found,) = flight.results
    if isinstance(found, ServiceError):
        raise found
    return found


def _check(found: Exploration, layer: int | None, query: int | None, *, attention: bool = False) -> None:
    if attention and found.info["attention"] is None:
        raise ServiceError(404, f"{found.info['name']} is a ResNet: it has no attention. ViTs and hybrids have.")
    if layer is not None and layer >= found.info["layers"]:
        raise ServiceError(422, f"layer is {layer}; the last layer is {found.info['layers'] - 1}, counted from 0.")
    tokens = found.features.shape[1]
    if query is not None and query >= tokens:
        raise ServiceError(422, f"query is {query}; the last token is {tokens - 1}, counted from 0.")


def _check_size(size: int) -> None:
    if size > MAX_REPLY:
        raise ServiceError(413, f"This is {size:,} bytes; at most {MAX_REPLY:,} are sent at once. Ask for single queries.")


def _bytes(part: ByteMaps | Array) -> Response:
    _check_size(part.nbytes)
    body = part.encoded() if isinstance(part, ByteMaps) else part.tobytes()
    return Response(body, media_type="application/octet-stream", headers=_HEADERS)
