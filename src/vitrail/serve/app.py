"""The application: routes around a `Service`."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp

from vitrail.errors import VitrailError
from vitrail.serve import explorer, open_inference, openai, own
from vitrail.serve.errors import OPENAI_RESPONSES, RESPONSES, ClientLeft, ServiceError
from vitrail.serve.guard import Guard, error_answer
from vitrail.serve.json_body import first_problem
from vitrail.serve.reference import STYLE, reference_page
from vitrail.serve.service import Service
from vitrail.serve.tensors import HEADER

_STYLE_HASH = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
_DOCS_HEADERS = {
    "Content-Security-Policy": f"default-src 'none'; style-src 'sha256-{_STYLE_HASH}'; base-uri 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
}
_READABLE = (HEADER, "Retry-After", "X-Request-Id")  # by pages of other origins; binary tensors cannot be read without the first


def create_app(service: Service, *, token: str | None = None, cors: tuple[str, ...] = ()) -> ASGIApp:
    """Build the ASGI application; its workers must have been started."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        service.close()

    # The documentation pages of FastAPI load scripts from elsewhere, so `reference_page` takes their place.
    app = FastAPI(
        title="Vitrail", docs_url=None, redoc_url=None, openapi_url="/openapi.json", lifespan=lifespan, redirect_slashes=False
    )
    for module in (own, openai, open_inference, explorer):
        app.include_router(module.routes(service), responses=OPENAI_RESPONSES if module is openai else RESPONSES)
    app.include_router(explorer.page_routes())

    @app.get("/metrics", response_class=PlainTextResponse)
    def metrics() -> str:
        """Counters and histograms in Prometheus' text format."""
        return service.metrics.text()

    @app.get("/docs", include_in_schema=False)
    def reference() -> HTMLResponse:
        return HTMLResponse(reference_page(app.openapi()), headers=_DOCS_HEADERS)

    @app.exception_handler(ServiceError)
    async def service_error(request: Request, error: ServiceError) -> JSONResponse:
        return error_answer(error, request.scope["path"])

    @app.exception_handler(VitrailError)
    async def vitrail_error(request: Request, error: VitrailError) -> JSONResponse:
        return error_answer(ServiceError(422, str(error)), request.scope["path"])

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        return error_answer(ServiceError(400, first_problem(error.errors())), request.scope["path"])

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        path, headers = request.scope["path"][:200], dict(error.headers or {})
        message = {
            404: f"There is nothing at {path}; see /docs.",
            405: f"{request.method[:20]} is not possible at {path}; use {headers.get('Allow')}.",
        }.get(error.status_code, str(error.detail))
        response = error_answer(ServiceError(error.status_code, message), path)
        response.headers.update(headers)
        return response

    @app.exception_handler(ClientLeft)
    @app.exception_handler(ClientDisconnect)
    async def client_left(_: Request, error: Exception) -> Response:
        return Response(status_code=499)  # it reaches no client, but is counted and logged as what it is

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> JSONResponse:
        return error_answer(ServiceError(500, "An unexpected error happened; the server's log says more."), request.scope["path"])

    guarded: ASGIApp = Guard(app, service, token)
    allowed: dict[str, Any] = {"allow_origins": cors, "allow_methods": ["GET", "POST"], "allow_headers": ["*"]}
    return _Cors(guarded, **allowed, expose_headers=_READABLE) if cors else guarded


class _Cors(CORSMiddleware):
    """Answers what web pages of other origins ask first; a refusal is JSON, too."""

    def preflight_response(self, request_headers: Headers) -> Response:
        answer = super().preflight_response(request_headers)
        if answer.status_code < 400:
            return answer
        reason = bytes(answer.body).decode()
        refused = ServiceError(answer.status_code, f"{reason}. `vitrail serve --cors` names the origins that may call.")
        return error_answer(refused, "")
