"""`vitrail serve`: models as an HTTP service."""

from __future__ import annotations

import importlib.util
import os
import sys
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import tyro

from vitrail.checkpoints.pretrained import DEFAULT
from vitrail.commands.terminal import Console
from vitrail.errors import VitrailError
from vitrail.serve.settings import ServeSettings, token_of_environment
from vitrail.text import printable

if TYPE_CHECKING:
    from vitrail.serve.service import Service

Models = Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[NAME=]CHECKPOINT …")]
Settings = Annotated[ServeSettings, tyro.conf.arg(name="")]


def serve(
    models: Models = (DEFAULT,),
    /,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    settings: Settings = ServeSettings(),  # noqa: B008 - it is frozen
    preprocess: str | None = None,
    cors: tuple[str, ...] = (),
) -> None:
    """Serve models over HTTP until Ctrl-C or SIGTERM, then answer what was accepted and end.

    Speaks the Open Inference Protocol (/v2/…), OpenAI's embeddings (/v1/embeddings, /v1/models), and /v1/predict and /v1/attention
    for plain uploads; /metrics is for Prometheus, /openapi.json describes everything. If VITRAIL_TOKEN is set, requests
    need the header "Authorization: Bearer TOKEN".

    Example: vitrail serve

    Example: vitrail serve runs/pets

    Example: vitrail serve pets=runs/pets flowers=runs/flowers --host 0.0.0.0 --port 80

    Args:
        models: Checkpoints, by default the included model; the name in addresses is NAME, or the last part of the checkpoint's.
        host: Address of the service; 0.0.0.0 is reachable from other machines.
        port: Port of the service; 0: any free one.
        settings: Limits and computation.
        preprocess: A preset that replaces the preprocessing of the checkpoints.
        cors: Origins of web pages that may call the service, such as https://example.org; by default none.
    """
    missing = [name for name in ("fastapi", "uvicorn") if importlib.util.find_spec(name) is None]
    if missing:
        raise VitrailError(f"The service needs {', '.join(missing)}: install the extra with pip install 'vitrail[serve]'.")
    from vitrail.serve.server import log_as_json
    from vitrail.serve.server import serve as run
    from vitrail.serve.service import Service, models_of

    token = token_of_environment(os.environ)
    log_as_json()
    service = Service(models_of(models, preprocess), settings)
    console = Console(stderr=True)

    def announce(address: str) -> None:
        names = ", ".join(service.workers)
        console.print(
            f"serving {names} at {address} (loading; {address}/v2/health/ready tells when)", highlight=False, soft_wrap=True
        )

    def start() -> None:
        run(service, host=host, port=port, token=token, cors=cors, announce=announce)

    run_and_end(service, start)


def run_and_end(service: Service, start: Callable[[], None]) -> None:
    """Serve until the end, and end the process even if a model still loads."""
    status = 2
    try:
        start()
        status = 0
    except Exception as error:
        if not service.has_threads:
            raise
        if isinstance(error, VitrailError):
            print(printable(f"vitrail: {error}"), file=sys.stderr)  # noqa: T201
        else:  # os._exit below would hide it
            traceback.print_exception(error)
    finally:
        if service.has_threads:  # of a model that is still loading; Python would crash if it ended while such a thread computes
            sys.stderr.flush()
            os._exit(status)
