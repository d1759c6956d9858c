"""Work of one request that keeps a frontend from answering the others."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from aims import Aims
from edges.test_http_embeddings import error
from reports.asking import ask
from stack import Stack

pytestmark = pytest.mark.process

TEXT_BYTES = 20_000_000
ASK_EVERY_S = 0.05


def test_health_is_answered_while_a_huge_text_is_read(stack: Stack, aims: Aims) -> None:
    """Twenty megabytes of text are tokenized on the event loop, and every probe meanwhile runs out of time."""
    waits = []
    with ThreadPoolExecutor(1) as pool, httpx.Client(base_url=stack.url, timeout=10) as http:
        asked = pool.submit(ask, stack, {"input": "t10 " * (TEXT_BYTES // 4)})
        while not asked.done():
            began = time.monotonic()
            assert http.get("/health").status_code == 200
            waits.append(time.monotonic() - began)
            time.sleep(ASK_EVERY_S)
    found = error(asked.result(), 400)
    assert found["code"] == "input_too_long"
    assert "64" in found["message"]
    assert waits
    aims.note(f"/health beside a text of {TEXT_BYTES} bytes, slowest of {len(waits)}", 1000 * max(waits), "ms", at_most=500)
