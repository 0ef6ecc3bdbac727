"""A small part of `benchmarks/fuzz_service.py`: 240 requests of all kinds."""

from __future__ import annotations

import pytest

from benchmarks.fuzz_service import fuzz
from tests.serve.conftest import Client, until


@pytest.mark.slow
def test_fuzzed_requests_are_answered_or_refused(client: Client) -> None:
    outcomes = fuzz(client.port, "tiny", 240, seed=1)
    assert sum(sum(found.values()) for found in outcomes.values()) >= 240
    assert {"200", "400", "415", "422"} <= set().union(*outcomes.values())
    assert until(lambda: client.service.workers["tiny"]._in_flight == 0 and client.service.bytes.held == 0)
    assert client.call("GET", "/v2/health/ready")[0] == 200
