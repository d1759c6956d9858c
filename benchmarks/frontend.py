"""How long /health waits while a frontend is busy with large requests: ``python benchmarks/frontend.py [--port 8000]``.

Asks a running server (``packhorse embeddings``) with one frontend, in about a minute. Each row is one kind of request, sent
three times in a row, while a second connection asks /health every 5 ms. The table has the median and the longest answer time
of /health, the time of the request, and its status. Refusals are part of it: what matters is what a body costs others.

With ``--render`` it asks nobody, and measures how long the text of an answer takes to write: 32 inputs of 1024 dimensions, in
floats and in base64, median and fastest of 200.
"""

from __future__ import annotations

import argparse
import http.client
import json
import statistics
import threading
import time

import numpy as np
from rich.console import Console
from rich.table import Table

from packhorse_frontend.endpoints.render import render_embeddings
from packhorse_frontend.schema import Usage

MIB = 1 << 20
TIMES = 3
ASK_EVERY_S = 0.005
RENDERED = (32, 1024)
"""Inputs and dimensions of the answer that is rendered."""
RENDER_TIMES = 200


def fill(begin: bytes, piece: bytes, end: bytes, size: int = 32 * MIB) -> bytes:
    """A body of about ``size`` bytes."""
    return begin + piece * ((size - len(begin) - len(end)) // len(piece)) + end


def bodies() -> dict[str, bytes]:
    """Every kind of request, by its name."""
    ids = json.dumps([101, *[7592] * 253, 102]).encode()
    return {
        "idle": b"",
        "7 MB: one list of ids": fill(b'{"input":[', b"7592, ", b"102]}", 7_000_000),
        "32 MiB: one list of ids": fill(b'{"input":[', b"7592,", b"102]}"),
        "32 MiB: ids of one digit, cut": fill(b'{"truncate_prompt_tokens":-1,"input":[', b"7,", b"7]}"),
        "2.9 MB: 2048 lists of 255 ids": b'{"input":[' + b",".join([ids] * 2047) + b",[-1]]}",
        "32 MiB: millions of lists": fill(b'{"input":[', b"[1],", b"[1]]}"),
        "32 MiB: millions of texts": fill(b'{"input":[', b'"a",', b'"a"]}'),
        "20 MB: one text": fill(b'{"input":"', b"hello ", b'"}', 20_000_000),
        "20 MB: one text, cut": fill(b'{"truncate_prompt_tokens":-1,"input":"', b"hello ", b'"}', 20_000_000),
        "32 MiB: one text of escapes": fill(b'{"input":"', b"\\u4e2d", b'"}'),
        "32 MiB: one text of UTF-8": fill(b'{"input":"', "中文".encode(), b'"}'),
        "32 MiB: 2048 texts, cut": fill(b'{"truncate_prompt_tokens":-1,"input":[', b'"' + b"hello " * 2700 + b'",', b'"a"]}'),
        "32 MiB: unknown fields": fill(b'{"input":"a","x":[', b"1,", b"1]}"),
        "32 MiB: spaces": fill(b"{", b" ", b'"input":"a"}'),
        "2048 inputs, float answer": json.dumps({"input": ["hello"] * 2048}).encode(),
        "2048 inputs, base64 answer": json.dumps({"input": ["hello"] * 2048, "encoding_format": "base64"}).encode(),
    }


def ask(port: int, body: bytes) -> tuple[int, float]:
    """Status and seconds of one request."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    began = time.perf_counter()
    connection.request("POST", "/v1/embeddings", body)
    answer = connection.getresponse()
    answer.read()
    connection.close()
    return answer.status, time.perf_counter() - began


def watch_health(port: int, until: threading.Event) -> list[float]:
    """Seconds of each answer of /health."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    took = []
    while not until.is_set():
        began = time.perf_counter()
        connection.request("GET", "/health")
        connection.getresponse().read()
        took.append(time.perf_counter() - began)
        time.sleep(ASK_EVERY_S)
    connection.close()
    return took


def measure(port: int, body: bytes) -> tuple[list[float], list[tuple[int, float]]]:
    """Answer times of /health meanwhile, and the outcomes of the requests."""
    ended = threading.Event()
    outcomes: list[tuple[int, float]] = []

    def load() -> None:
        for _ in range(TIMES):
            outcomes.append(ask(port, body))
        ended.set()

    if body:
        threading.Thread(target=load, daemon=True).start()
    else:
        threading.Timer(2.0, ended.set).start()
    return watch_health(port, ended), outcomes


def render_table() -> Table:
    """Size and time of an answer's text, on one core."""
    rows = np.random.default_rng(7).standard_normal(RENDERED, dtype=np.float32)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    table = Table("encoding", "bytes a value", "median ms", "fastest ms")
    for encoding_format in ("float", "base64"):
        took = []
        for _ in range(RENDER_TIMES):
            began = time.perf_counter()
            text = render_embeddings(rows, RENDERED[1], encoding_format, "model", Usage(prompt_tokens=1, total_tokens=1))
            took.append(1000 * (time.perf_counter() - began))
        table.add_row(encoding_format, f"{len(text) / rows.size:.1f}", f"{statistics.median(took):.2f}", f"{min(took):.2f}")
    return table


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--render", action="store_true", help="how long the text of an answer takes, without a server")
    parsed = parser.parse_args()
    port = parsed.port
    if parsed.render:
        Console(width=110).print(render_table())
        return
    table = Table("request", "status", "request ms", "/health median ms", "/health longest ms")
    for name, body in bodies().items():
        waits, outcomes = measure(port, body)
        status = ", ".join(sorted({str(status) for status, _ in outcomes}))
        seconds = statistics.median(took for _, took in outcomes) if outcomes else 0.0
        table.add_row(
            name, status, f"{seconds * 1000:.0f}", f"{statistics.median(waits) * 1000:.1f}", f"{max(waits) * 1000:.1f}"
        )
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
