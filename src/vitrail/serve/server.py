"""Run the application with uvicorn: deadlines for headers, draining on SIGTERM, logs as JSON."""

from __future__ import annotations

import errno
import functools
import json
import logging
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import uvicorn

from vitrail.errors import VitrailError
from vitrail.serve.app import create_app
from vitrail.serve.protocol import protocol_class
from vitrail.serve.service import Service
from vitrail.serve.settings import ServeSettings

log = logging.getLogger("vitrail.serve")


def serve(
    service: Service, *, host: str, port: int, token: str | None, cors: tuple[str, ...], announce: Callable[[str], None]
) -> None:
    """Serve until a signal asks for the end; every accepted request is answered first. A failed load is an error."""
    server_socket = _bind(host, port)
    config = uvicorn.Config(
        create_app(service, token=token, cors=cors),
        http=protocol_class(service.settings.upload_seconds, service.settings.max_connections),
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,  # the client's address is not used
        timeout_keep_alive=65,  # longer than clients and proxies usually keep a connection, which then close it first
        timeout_graceful_shutdown=_drain_seconds(service.settings),
    )
    server = _Server(config, service)
    service.start(on_failure=server.end)
    address, number = server_socket.getsockname()[:2]
    announce(f"http://{f'[{address}]' if ':' in address else address}:{number}")
    server.run(sockets=[server_socket])
    if service.failure is not None:
        raise service.failure


def _drain_seconds(settings: ServeSettings) -> int:
    """Return how long a request can take that was accepted just before the end: to upload it, to wait and to be computed, to read
    the answer. What takes longer is cut off."""
    return math.ceil(2 * (settings.upload_seconds + settings.deadline)) + 5


def log_as_json() -> None:
    """Write the service's log, and what Python and torch warn of, to standard error, one JSON object per line."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter())
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False  # no line says them
    logging.captureWarnings(True)
    for name in ("vitrail.serve", "uvicorn.error", "py.warnings"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(logging.INFO if name == "vitrail.serve" else logging.WARNING)


class _JsonFormatter(logging.Formatter):
    _standard = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}

    def format(self, record: logging.LogRecord) -> str:
        values: dict[str, Any] = {
            "time": _utc(int(record.created)),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
        }
        values |= {key: value for key, value in vars(record).items() if key not in self._standard}
        if record.exc_info:
            values["traceback"] = self.formatException(record.exc_info)
        return json.dumps(values, ensure_ascii=True, default=str)


@functools.lru_cache(1)
def _utc(seconds: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


class _Server(uvicorn.Server):
    """Ends on SIGTERM and SIGINT with exit status 0 after draining; a second signal ends at once."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service

    def end(self) -> None:
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        log.info("shutting down", extra={"connections": len(self.server_state.connections)})
        await super().shutdown(sockets)
        log.info("stopped")

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._service.draining:
            self.force_exit = True
        self._service.draining = True
        self.should_exit = True

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():  # Python delivers signals to the main thread only
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _bind(host: str, port: int) -> socket.socket:
    if not 0 <= port <= 65535:
        raise VitrailError(f"--port is {port}; it must be between 0 and 65535.")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        unknown = isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL
        # The text of an error of create_server repeats the address.
        reason = error.strerror if isinstance(error, socket.gaierror) else os.strerror(error.errno or 0)
        advice = "Check --host." if unknown else "Choose another with --port."
        raise VitrailError(f"Cannot open {host}, port {port}: {reason}. {advice}") from error
