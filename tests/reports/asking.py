"""Asking a server once, and reading what it says of itself."""

from __future__ import annotations

from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from stack import Stack
from waiting import wait_until

PATH = "/v1/embeddings"


def ask(stack: Stack, body: Any, *, path: str = PATH, **options: Any) -> httpx.Response:
    """POST a body: JSON, or bytes as they are."""
    options |= {"content": body} if isinstance(body, bytes) else {"json": body}
    return stack.http.post(path, timeout=60, **options)


def metrics(stack: Stack) -> dict[str, float]:
    """Every series of /metrics, labels included in its name, with its value."""
    answer = stack.http.get("/metrics")
    assert answer.status_code == 200, answer.text
    found = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}"] = sample.value
    return found


def in_system(stack: Stack) -> int:
    """Inputs that wait or run."""
    status = stack.status()
    return int(status["queue"]["inputs"]) + sum(int(worker["in_flight"]) for worker in status["workers"])


def wait_idle(stack: Stack, within_s: float = 20.0) -> None:
    wait_until(lambda: in_system(stack) == 0, within_s, "an idle server")
