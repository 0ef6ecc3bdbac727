"""Errors that become HTTP answers."""

from __future__ import annotations


class ServiceError(Exception):
    """An answer other than success; every such answer is JSON with one key, `error`."""

    def __init__(self, status: int, message: str, *, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.status, self.message = status, message
        self.headers = {} if retry_after is None else {"Retry-After": str(retry_after)}


def queue_full(seconds: float) -> ServiceError:
    return ServiceError(429, "The queue is full; try again later.", retry_after=max(1, round(seconds)))


def unavailable(message: str) -> ServiceError:
    return ServiceError(503, message, retry_after=1)
