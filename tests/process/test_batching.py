"""Batches form, queues fill and empty, and clients get through."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from conftest import StackFactory
from texts import text_of
from waiting import wait_until

pytestmark = pytest.mark.process


def test_singles_at_once_share_batches(make_stack: StackFactory) -> None:
    stack = make_stack("--max_batch_size=16", "--max_queue_delay=0.05").start().wait_ready()
    before = stack.workers("ready")[0]
    barrier = threading.Barrier(64)

    def single(number: int) -> int:
        with httpx.Client(timeout=60) as http:
            http.get(f"{stack.url}/live")  # the connection stands before the race begins
            barrier.wait(timeout=30)
            text = text_of(3 + number % 60, seed=number)
            return http.post(f"{stack.url}/v1/embeddings", json={"input": text}).status_code

    with ThreadPoolExecutor(64) as pool:
        assert set(pool.map(single, range(64))) == {200}
    after = stack.workers("ready", "busy")[0]
    inputs, batches = after["inputs"] - before["inputs"], after["batches"] - before["batches"]
    assert inputs == 64
    assert inputs / batches >= 8


def test_full_queue_refuses_at_once_and_the_client_gets_through(make_stack: StackFactory, slow_model: Path) -> None:
    stack = make_stack("--max_queue_size=8", "--max_batch_size=4", "--max_num_tokens=2048", model=slow_model)
    stack.start().wait_ready()
    long_text = "t10 " * 200
    with ThreadPoolExecutor(3) as pool, httpx.Client(timeout=120) as http:
        bulk = [pool.submit(http.post, f"{stack.url}/v1/embeddings", json={"input": [long_text] * 20}) for _ in range(1)]
        wait_until(lambda: stack.status()["queue"]["inputs"] >= 8, 20, "a full queue")
        for refused_input in ("t10", ["t10"], ["t10"] * 3):
            refused = http.post(f"{stack.url}/v1/embeddings", json={"input": refused_input})
            assert refused.status_code == 429, "one rule for singles and lists"
            assert 1 <= int(refused.headers["retry-after"]) <= 30
            assert refused.json()["error"]["code"] == "queue_full"
        with stack.client(max_retries=10) as client:
            assert len(client.embeddings.create(model="slow", input="t11").data[0].embedding) > 0
        assert [answer.result().status_code for answer in bulk] == [200]
    assert stack.status()["queue"] == {"inputs": 0, "requests": 0, "oldest_wait_ms": 0.0, "limit": 8}


def test_a_lone_request_does_not_wait_for_company(make_stack: StackFactory, t_model: Path) -> None:
    """With the automatic delay, an idle server runs a lone input by itself: no batch of these sequential calls holds two."""
    stack = make_stack(model=t_model).start().wait_ready()
    before = stack.workers("ready", "busy")[0]
    with httpx.Client() as http:
        for _ in range(20):
            assert http.post(f"{stack.url}/v1/embeddings", json={"input": "t10"}).status_code == 200
    after = stack.workers("ready", "busy")[0]
    assert after["batches"] - before["batches"] == 20


def test_gone_clients_free_the_queue(make_stack: StackFactory, slow_model: Path) -> None:
    """What a client that left had waiting is never computed."""
    stack = make_stack("--max_batch_size=1", "--max_num_tokens=512", model=slow_model).start().wait_ready()
    inputs_before = stack.workers("ready", "busy")[0]["inputs"]
    with httpx.Client(timeout=120) as http:
        request = http.build_request("POST", f"{stack.url}/v1/embeddings", json={"input": ["t10 " * 500] * 200})
        with socket.create_connection(("127.0.0.1", stack.port)) as connection:
            body = request.read()
            head = f"POST /v1/embeddings HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
            connection.sendall(head.encode() + body)
            wait_until(lambda: stack.status()["queue"]["inputs"] > 100, 20, "a long queue")
        wait_until(lambda: stack.status()["queue"]["inputs"] == 0, 5, "the queue to be dropped")
        wait_until(lambda: stack.workers("ready"), 20, "the worker to be idle again")
    assert stack.workers("ready")[0]["inputs"] - inputs_before < 100
