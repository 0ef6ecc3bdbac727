"""What every request passes first: shutting down, token, size, and time to upload. Also logs and counts requests."""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vitrail.serve.errors import ServiceError, unavailable
from vitrail.serve.service import ClientLeft, Service
from vitrail.serve.settings import ServeSettings

log = logging.getLogger("vitrail.serve")
_OPEN = ("/v2/health/live", "/v2/health/ready", "/")  # asked without a token: by an orchestrator; the explorer's page has no data
_OPEN_UNDER = "/page/"


class Guard:
    """ASGI middleware around the whole application."""

    def __init__(self, app: ASGIApp, service: Service, token: str | None) -> None:
        self.app, self.service, self.token = app, service, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began, status = time.monotonic(), 499
        body = _Body(receive, self.service.settings)

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if not body.complete:  # the rest is not read
                    message = {**message, "headers": [*message["headers"], (b"connection", b"close")]}
            await send(message)

        try:
            try:
                self._check(scope)
                await self.app(scope, body.receive, noting)
            except ServiceError as error:
                await error_answer(error)(scope, receive, noting)
            except ClientLeft:
                pass
        finally:
            seconds = time.monotonic() - began
            path = getattr(scope.get("route"), "path", "other")
            self.service.metrics.count("vitrail_requests_total", path=path, status=str(status))
            self.service.metrics.observe("vitrail_request_seconds", seconds, path=path)
            log.info(
                "request", extra={"method": scope["method"], "path": scope["path"], "status": status, "seconds": round(seconds, 4)}
            )

    def _check(self, scope: Scope) -> None:
        headers: dict[bytes, bytes] = dict(scope["headers"])
        if self.service.draining and scope["path"] != "/v2/health/live":
            raise unavailable("The service is shutting down.")
        if self.token is not None and scope["path"] not in _OPEN and not scope["path"].startswith(_OPEN_UNDER):
            given = headers.get(b"authorization", b"")
            if not hmac.compare_digest(given, b"Bearer " + self.token.encode()):
                raise ServiceError(401, "A token is needed: send the header Authorization: Bearer TOKEN.")
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or len(length) > 18:
            raise ServiceError(400, "Content-Length is not a number.")
        if int(length) > self.service.settings.max_bytes:
            raise _too_large(self.service.settings)


class _Body:
    """The body of a request while it arrives: counts its bytes, and ends a slow upload."""

    def __init__(self, receive: Receive, settings: ServeSettings) -> None:
        self.complete = False
        self._receive, self._settings, self._received = receive, settings, 0
        self._end = time.monotonic() + settings.upload_seconds

    async def receive(self) -> Message:
        if self.complete:
            return await self._receive()
        try:
            message = await asyncio.wait_for(self._receive(), max(0.0, self._end - time.monotonic()))
        except TimeoutError:
            seconds = self._settings.upload_seconds
            raise ServiceError(408, f"The request was not received within {seconds:g} s.") from None
        if message["type"] == "http.request":
            self._received += len(message.get("body", b""))
            self.complete = not message.get("more_body", False)
            if self._received > self._settings.max_bytes:
                raise _too_large(self._settings)
        return message


def _too_large(settings: ServeSettings) -> ServiceError:
    return ServiceError(413, f"The request is larger than {settings.max_bytes:,} bytes.")


def error_answer(error: ServiceError) -> JSONResponse:
    headers: dict[str, Any] = dict(error.headers)
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse({"error": error.message}, error.status, headers)
