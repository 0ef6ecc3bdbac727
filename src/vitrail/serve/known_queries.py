"""`KnownQueries`: routes that validate a query string once, and refuse parameters that they do not have."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute

from vitrail.serve.errors import ServiceError

_MOST, _LONGEST = 100, 200  # query strings that are kept, and their bytes
_Endpoint = Callable[..., Coroutine[Any, Any, Response]]


class KnownQueries(APIRoute):
    """A route whose function takes the request and parameters of the query, nothing else.

    Clients send the same query again and again, and to validate one takes FastAPI as long as the rest of its work. A misspelled
    parameter would have no effect, so it is an error.
    """

    def __init__(self, path: str, endpoint: _Endpoint, **options: Any) -> None:
        super().__init__(path, endpoint if hasattr(endpoint, "known") else _remembering(endpoint), **options)

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        validate, endpoint = super().get_route_handler(), self.endpoint.endpoint  # type: ignore[attr-defined]
        known: dict[bytes, dict[str, Any]] = self.endpoint.known  # type: ignore[attr-defined]

        async def handle(request: Request) -> Response:
            values = known.get(request.scope["query_string"])
            if values is None:
                _check_names(request, names)
            found: Response = await (validate(request) if values is None else endpoint(request, **values))
            return found

        names = [name for name in inspect.signature(endpoint).parameters if name != "request"]
        return handle


def _check_names(request: Request, names: list[str]) -> None:
    unknown = next((name for name in request.query_params if name not in names), None)
    if unknown is not None:
        raise ServiceError(400, f"There is no parameter {unknown[:40]!r}; {request.url.path} has {', '.join(names)}.")


def _remembering(endpoint: _Endpoint) -> _Endpoint:
    """Return the same function, which also keeps the values of its parameters by the query that they are from."""
    known: dict[bytes, dict[str, Any]] = {}

    async def remember(request: Request, **values: Any) -> Response:
        query = request.scope["query_string"]
        if len(query) <= _LONGEST:
            if len(known) >= _MOST:
                known.clear()
            known[query] = values
        return await endpoint(request, **values)

    same = {"__name__": endpoint.__name__, "__doc__": endpoint.__doc__, "__signature__": inspect.signature(endpoint, eval_str=True)}
    for name, value in {**same, "known": known, "endpoint": endpoint}.items():
        setattr(remember, name, value)
    return remember
