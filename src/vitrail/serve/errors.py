"""Errors that become HTTP answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class ServiceError(Exception):
    """An answer other than success; every such answer is JSON with one key, `error` (`error_body`)."""

    def __init__(self, status: int, message: str, *, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.status, self.message = status, message
        self.headers = {} if retry_after is None else {"Retry-After": str(retry_after)}


class ClientLeft(Exception):
    """The client closed its connection before the answer."""


def queue_full(seconds: float) -> ServiceError:
    wait = max(1, round(seconds))
    return ServiceError(429, f"The queue is full. Try again in {wait} s.", retry_after=wait)


def unavailable(message: str) -> ServiceError:
    return ServiceError(503, f"{message} Try again later.", retry_after=1)


def too_many_images(most: int) -> ServiceError:
    return ServiceError(413, f"The request has too many images: more than {most}. Split it into several requests.")


def first_failure(results: Sequence[Any]) -> ServiceError | None:
    """Return the error of the first image that failed, with its number, for protocols that have no answer per image."""
    number, error = next(((n, one) for n, one in enumerate(results) if isinstance(one, ServiceError)), (0, None))
    if error is None or len(results) == 1:
        return error
    numbered = ServiceError(error.status, f"image {number}: {error.message}")
    numbered.headers = error.headers
    return numbered


_SCHEMA = {"type": "object", "required": ["error"], "properties": {"error": {"type": "string"}}}
_MEANINGS = {
    400: "The request is not as described here.",
    401: "The token is missing or wrong.",
    404: "There is no such model.",
    408: "The request arrived too slowly.",
    413: "The request, or its number of images, is too large.",
    415: "This is not an image, or the body is compressed.",
    422: "The image cannot be decoded or computed.",
    429: "The queue is full.",
    503: "The model is loading, the service is shutting down, or the deadline passed.",
}
_OPENAI_SCHEMA = {
    **_SCHEMA,
    "properties": {"error": {"type": "object", "required": ["message"], "properties": {"message": {"type": "string"}}}},
}
_OWN = ("/v1/predict", "/v1/attention")


def responses(schema: dict[str, Any]) -> dict[int | str, dict[str, Any]]:
    """Return what OpenAPI says about errors."""
    content = {"application/json": {"schema": schema}}
    return {status: {"description": meaning, "content": content} for status, meaning in _MEANINGS.items()}


RESPONSES, OPENAI_RESPONSES = responses(_SCHEMA), responses(_OPENAI_SCHEMA)


def error_body(message: str, status: int, path: str) -> dict[str, Any]:
    """Return the JSON of an error. OpenAI's clients show the text only if it is the `message` of an object."""
    if not path.startswith("/v1/") or path in _OWN:
        return {"error": message}
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}


def not_finite() -> ServiceError:
    return ServiceError(422, "The model's output for this image is not finite. Check its values, or serve the model in fp32.")
