"""Pages of the explorer in a browser: sizes, addresses, and waiting for what a page shows."""

from __future__ import annotations

import time
from typing import Any

from tests.serve.conftest import Client

PHONE = {"width": 390, "height": 844}


def wait(page: Any, expression: str) -> None:
    """Poll from outside: the page's policy forbids evaluating text inside it."""
    end = time.monotonic() + 20
    while not page.evaluate(f"Boolean({expression})"):
        assert time.monotonic() < end, expression
        page.wait_for_timeout(20)


def address(server: Client, fragment: str = "") -> str:
    return f"http://127.0.0.1:{server.port}/{fragment}"
