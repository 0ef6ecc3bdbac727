"""What every request passes first: shutting down, token, size, and time to upload. Also logs and counts requests."""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import time
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vitrail.serve.errors import ClientLeft, ServiceError, error_body, unavailable
from vitrail.serve.limits import ByteLimit
from vitrail.serve.service import Service
from vitrail.serve.settings import ServeSettings

log = logging.getLogger("vitrail.serve")
# Asked without a token: by an orchestrator; and the pages for people, which have no data.
_OPEN = ("/v2/health/live", "/v2/health/ready", "/", "/docs")
_OPEN_UNDER = "/page/"
_REQUEST_ID = re.compile(rb"[\w.:/+=-]{1,128}")
_DISCARDED, _DISCARD_SECONDS = 1 << 20, 1.0  # of the body of a refused request, so that its connection can be kept


async def read_body(request: Request) -> bytes:
    try:
        return await request.body()
    except ClientDisconnect:
        raise ClientLeft from None


class Guard:
    """ASGI middleware around the whole application."""

    def __init__(self, app: ASGIApp, service: Service, token: str | None) -> None:
        self.app, self.service, self.token = app, service, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        method = scope["method"]
        if method == "HEAD":  # answered as GET; uvicorn, which has the scope as it was, sends no body
            scope = {**scope, "method": "GET"}
        body = _Body(receive, self.service.settings, self.service.bytes, _may_discard(scope))
        answer = _Answer(send, body, self.service, _request_id(scope))
        began = time.monotonic()
        try:
            await self._run(scope, body, answer)
        finally:
            body.release()
            seconds = time.monotonic() - began
            path = getattr(scope.get("route"), "path", "other")
            self.service.metrics.count("vitrail_requests_total", path=path, status=str(answer.status))
            self.service.metrics.observe("vitrail_request_seconds", seconds, path=path)
            values = {"method": method, "path": scope["path"][:500], "status": answer.status, "seconds": round(seconds, 4)}
            log.info("request", extra=values if answer.request_id is None else {**values, "request_id": answer.request_id.decode()})

    async def _run(self, scope: Scope, body: _Body, answer: _Answer) -> None:
        try:
            self._check(scope)
            await self.app(scope, body.receive, answer.send)
        except (ClientLeft, ClientDisconnect):
            answer.status = answer.status or 499
        except asyncio.CancelledError:  # the service does not wait for it any longer
            if answer.status != 0:
                raise
            await error_answer(unavailable("The service is shutting down."), scope["path"])(scope, body.receive, answer.send)
        except Exception as error:
            if not isinstance(error, ServiceError):
                log.exception("unexpected error", extra={"path": scope["path"][:500]})
                error = ServiceError(500, "An unexpected error happened; the server's log says more.")
            if answer.status == 0:
                await error_answer(error, scope["path"])(scope, body.receive, answer.send)

    def _check(self, scope: Scope) -> None:
        headers: dict[bytes, bytes] = dict(scope["headers"])
        if self.service.draining and scope["path"] != "/v2/health/live":
            raise unavailable("The service is shutting down.")
        if self.token is not None and scope["path"] not in _OPEN and not scope["path"].startswith(_OPEN_UNDER):
            scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
            if not hmac.compare_digest(given.strip(), self.token.encode()) or scheme.lower() != b"bearer":
                raise ServiceError(401, "The token is missing or wrong: send the header Authorization: Bearer TOKEN.")
        if self.service.explorer_images and scope["path"].startswith("/explorer/") and not _is_local(headers.get(b"host", b"")):
            raise ServiceError(421, "The explorer shows files of this machine, so it opens only as localhost or 127.0.0.1.")
        encoding = headers.get(b"content-encoding", b"").strip().lower()
        if encoding not in (b"", b"identity"):
            shown = encoding[:40].decode("latin-1")
            raise ServiceError(415, f"The body is compressed (Content-Encoding: {shown}); send it as it is.")
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or len(length) > 18:
            shown = length[:40].decode("latin-1")
            raise ServiceError(400, f"Content-Length is {shown!r}; it must be the number of bytes of the body.")
        if int(length) > self.service.settings.max_bytes:
            raise _too_large(self.service.settings)


def _is_local(host: bytes) -> bool:
    """Whether a Host header names this machine: a web page can let a name of its own point here (DNS rebinding)."""
    return re.fullmatch(rb"(localhost|127\.0\.0\.1|\[::1\])(:\d+)?", host.lower()) is not None


class _Answer:
    """What is sent: notes the status, adds headers, and discards a small body that was not read."""

    def __init__(self, send: Send, body: _Body, service: Service, request_id: bytes | None) -> None:
        self.status, self.request_id = 0, request_id
        self._send, self._body, self._service = send, body, service

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            await self._body.discard()
            headers = [*message["headers"], (b"x-content-type-options", b"nosniff")]
            if self.request_id is not None:
                headers.append((b"x-request-id", self.request_id))
            if not self._body.complete or self._service.draining:
                headers.append((b"connection", b"close"))
            message = {**message, "headers": headers}
        await self._send(message)


class _Body:
    """The body of a request while it arrives: counts its bytes, and ends a slow upload."""

    def __init__(self, receive: Receive, settings: ServeSettings, limit: ByteLimit, may_discard: bool) -> None:
        self.complete, self._may_discard = False, may_discard
        self._receive, self._settings, self._limit, self._received = receive, settings, limit, 0
        self._end = time.monotonic() + settings.upload_seconds

    async def receive(self) -> Message:
        if self.complete:
            return await self._receive()
        try:
            async with asyncio.timeout(max(0.0, self._end - time.monotonic())):
                message = await self._receive()
        except TimeoutError:
            seconds = self._settings.upload_seconds
            raise ServiceError(408, f"The request was not received within {seconds:g} s. Send fewer or smaller images.") from None
        if message["type"] == "http.request":
            self.complete = not message.get("more_body", False)
            count = len(message.get("body", b""))
            if self._received + count > self._settings.max_bytes:
                raise _too_large(self._settings)
            self._limit.take(count)
            self._received += count
        return message

    async def discard(self) -> None:
        """Read what is left of a small body, so that the connection can be used again."""
        end, left = time.monotonic() + _DISCARD_SECONDS, _DISCARDED
        while self._may_discard and not self.complete and left > 0 and (seconds := min(end, self._end) - time.monotonic()) > 0:
            try:
                message = await asyncio.wait_for(self._receive(), seconds)
            except TimeoutError:
                return
            if message["type"] != "http.request":
                return
            left -= len(message.get("body", b""))
            self.complete = not message.get("more_body", False)

    def release(self) -> None:
        self._limit.release(self._received)


def _may_discard(scope: Scope) -> bool:
    """Whether to read the body of a refused request: a client that waits for permission to send it must not get one."""
    headers = dict(scope["headers"])
    length = headers.get(b"content-length", b"0")
    return b"expect" not in headers and length.isdigit() and len(length) < 9 and int(length) <= _DISCARDED


def _request_id(scope: Scope) -> bytes | None:
    given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
    return given if _REQUEST_ID.fullmatch(given) else None


def _too_large(settings: ServeSettings) -> ServiceError:
    return ServiceError(413, f"The request is larger than {settings.max_bytes:,} bytes. Send fewer or smaller images.")


def error_answer(error: ServiceError, path: str) -> JSONResponse:
    headers: dict[str, Any] = dict(error.headers)
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(error_body(error.message, error.status, path), error.status, headers)
