"""Answers that no route gives: the connection is refused or broken, and the bytes are written as they are.

They carry what every answer carries, as far as the request's head came: its own id, and what a browser needs to see them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from packhorse_frontend.layers.cors import origin_headers
from packhorse_frontend.layers.request_ids import request_id_of
from packhorse_frontend.problems import Problem

Headers = Iterable[tuple[bytes, bytes]]


def split_head(head: bytes | bytearray) -> list[tuple[bytes, bytes]]:
    """Names (in lower case) and values of a head that was not parsed, and may be broken anywhere."""
    lines = bytes(head).split(b"\r\n")[1:-1]
    return [(name.lower(), value.strip()) for name, colon, value in (line.partition(b":") for line in lines) if colon]


def write_refusal(problem: Problem, requested: Headers, cors_allow_origin: Sequence[str]) -> bytes:
    """The whole answer to a request with these headers. The connection ends with it."""
    asked = dict(requested)
    body = problem.body()
    headers = {
        "content-type": "application/json",
        "content-length": str(len(body)),
        "x-request-id": request_id_of(asked.get(b"x-request-id")),
        "connection": "close",
        **problem.headers,
    }
    origin = asked.get(b"origin", b"").decode("latin-1")
    if origin.isprintable() and origin and cors_allow_origin:
        headers.update(origin_headers(origin, cors_allow_origin))
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return b"".join((STATUS_LINE[problem.status], lines.encode("latin-1"), b"\r\n", body))
