"""`GuardedProtocol`: uvicorn's HTTP/1.1 with the limits that it leaves out."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any, ClassVar

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

LINGER_SECONDS = 2.0
_MOST_LINGERING = 64  # of connections beyond the limit; others are closed at once, so that there is one
_IDLE_SECONDS = 0.1  # on shutdown, for a request that is already on its way
_MOST_HEADERS = 1 << 16  # bytes
_SMALL_CHUNKS, _CHUNK_BYTES = 1000, 256


class GuardedProtocol(H11Protocol):
    """Ends connections that send their headers, or read their answer, too slowly; every answer of its own is JSON.

    A connection whose request was refused before it was read is closed only after the client has had time to read the answer:
    closing at once would reset it, and the client would see no answer at all.
    """

    seconds: ClassVar[float] = 20.0
    max_connections: ClassVar[int] = 1024
    _header_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.conn = _Connection(h11.SERVER, _MOST_HEADERS)

    def connection_made(self, transport: Any) -> None:
        transport.set_write_buffer_limits(high=0)  # pause_writing is then called whenever something cannot be sent at once
        # asyncio sets it only on sockets that name their protocol. A body would wait 40 ms until its headers are acknowledged.
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        super().connection_made(_LingeringTransport(transport, self))  # type: ignore[arg-type]
        if (over := len(self.connections) - self.max_connections) > 0:
            self.refuse(503, "There are too many connections.", linger=over <= _MOST_LINGERING)
        else:
            self._header_timer = self.loop.call_later(self.seconds, self._headers_late)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_header_timer()
        self._stop_write_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():  # what a refused client still sends
            return
        try:
            super().data_received(data)
        except h11.ProtocolError:
            self.send_400_response("")
        if self.busy:  # the headers are complete
            self._stop_header_timer()
        elif self._header_timer is None and not self.transport.is_closing():
            self._header_timer = self.loop.call_later(self.seconds, self._headers_late)

    @property
    def busy(self) -> bool:
        """Whether a request is being answered."""
        return self.cycle is not None and not self.cycle.response_complete

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not HTTP, before a request or in its body."""
        if self.busy:
            self.cycle.disconnected = True  # the application answers nothing more
            self.cycle.message_event.set()
            if self.cycle.response_started:
                self.transport.abort()
                return
        self.refuse(400, "This is not a valid HTTP/1.1 request, its headers are too large, or its chunks are too small.")

    def refuse(self, status: int, message: str, *, linger: bool = True) -> None:
        """Answer without the application, and close."""
        if self.transport.is_closing():
            return
        body = json.dumps({"error": message}).encode()
        head = f"HTTP/1.1 {status} Refused\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close"
        self.transport.write(head.encode() + (b"\r\nretry-after: 1" if status == 503 else b"") + b"\r\n\r\n" + body)
        if linger:
            self.transport.linger()  # type: ignore[attr-defined]
        else:
            self.transport.close()

    def shutdown(self) -> None:
        """Close after the answer that is being computed. An idle connection has a moment longer, then is closed."""
        if self.busy:
            self.cycle.keep_alive = False
        else:
            self.loop.call_later(_IDLE_SECONDS, self._shutdown_idle)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(self.seconds, self.transport.abort)

    def resume_writing(self) -> None:
        self._stop_write_timer()
        super().resume_writing()

    def _shutdown_idle(self) -> None:
        if self.busy:
            self.cycle.keep_alive = False
        elif not self.transport.is_closing():
            self.transport.close()

    def _headers_late(self) -> None:
        self._header_timer = None
        self.refuse(408, f"The headers of the request were not received within {self.seconds:g} s.")

    def _stop_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None


class _Connection(h11.Connection):
    """Refuses a body in too many small chunks: 256 KB in chunks of one byte take 0.4 seconds, while all other clients wait."""

    _chunks = _bytes = 0

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._chunks = self._bytes = 0
        elif isinstance(event, h11.Data):
            self._chunks += event.chunk_start
            self._bytes += len(event.data)
            if self._chunks > _SMALL_CHUNKS + self._bytes // _CHUNK_BYTES:
                raise h11.RemoteProtocolError("The chunks are too small.")
        return event


class _LingeringTransport:
    """A transport that, if the client may still send, ends only its own side first and discards what arrives for a while.

    The headers of an answer are sent with its body, which follows at once: one system call, and one packet if it is small.
    """

    def __init__(self, transport: asyncio.Transport, protocol: GuardedProtocol) -> None:
        self._transport, self._protocol, self._lingering = transport, protocol, False
        self._answered: object = None  # the request whose headers were the last
        self._headers = b""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        return self._lingering or self._transport.is_closing()

    def write(self, data: bytes) -> None:
        cycle = self._protocol.cycle
        if cycle is not None and cycle is not self._answered and cycle.response_started and not cycle.response_complete:
            self._answered, self._headers = cycle, data
            return
        headers, self._headers = self._headers, b""
        self._transport.write(headers + data if headers else data)

    def close(self) -> None:
        if self.is_closing():  # after the end of its own side nothing can be written
            return
        self.write(b"")
        if self._protocol.conn.their_state in (h11.SEND_BODY, h11.ERROR):
            self.linger()
        elif not self.is_closing():
            self._transport.close()

    def linger(self) -> None:
        if self.is_closing():
            return
        self.write(b"")
        self._lingering = True
        try:
            self._transport.write_eof()
        except OSError:  # the client has closed its side, too, so nothing else would end this connection: its body is not read
            self._transport.abort()
            return
        self._protocol.flow.resume_reading()
        self._protocol.loop.call_later(LINGER_SECONDS, self._transport.abort)


def protocol_class(seconds: float, max_connections: int) -> type[GuardedProtocol]:
    """Return the protocol with these limits; uvicorn makes an object of it per connection."""
    return type("Protocol", (GuardedProtocol,), {"seconds": seconds, "max_connections": max_connections})
