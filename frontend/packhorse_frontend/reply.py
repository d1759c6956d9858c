"""Sending an answer: a small one at once, a large one as fast as its client reads.

The text of a large answer is several times the size of its values, and a client may read slowly or not at all. So it is
written piece by piece, in a thread, each piece when the one before has left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from itertools import islice

from starlette.types import Receive, Scope, Send

from packhorse_frontend.layers.disconnect import while_connected

_PIECES_PER_STEP = 4
"""About a megabyte of text: what a client that does not read can make a frontend hold."""
_CONNECTION_BUFFER_BYTES = 64 * 1024
"""What is written to a connection is not waited for below this size."""
_JSON = (b"content-type", b"application/json")

Headers = Sequence[tuple[bytes, bytes]]


async def send_whole(send: Send, body: bytes, headers: Headers = ()) -> None:
    """Send a body of JSON with status 200. Returns when the client has taken it, or left."""
    all_headers = [_JSON, (b"content-length", str(len(body)).encode("ascii")), *headers]
    await send({"type": "http.response.start", "status": 200, "headers": all_headers})
    if len(body) > _CONNECTION_BUFFER_BYTES:
        # What follows waits until the client has read: so long the request has its share of the memory.
        await send({"type": "http.response.body", "body": body, "more_body": True})
        body = b""
    await send({"type": "http.response.body", "body": body})


async def send_pieces(
    scope: Scope, receive: Receive, send: Send, pieces: Iterator[bytes], *, writer: Executor, headers: Headers = ()
) -> None:
    """Send a body of JSON with status 200 whose pieces are made in ``writer``.

    Raises ClientGoneError when the client leaves; one that takes nothing any more is cut off by the connection
    (``http_protocol.py``). A body of a few pieces is sent whole, and any to a client of HTTP/1.0, which knows no chunks.
    """
    most = None if scope.get("http_version") == "1.0" else _PIECES_PER_STEP
    begin, is_all = await asyncio.get_running_loop().run_in_executor(writer, _take, pieces, most)
    if is_all:
        await send_whole(send, begin, headers)
        return
    await while_connected(receive, _send_all(send, begin, pieces, writer, headers))
    # Behind the watch: the end of an answer looks to it like the end of the connection.
    await send({"type": "http.response.body", "body": b""})


async def _send_all(send: Send, begin: bytes, pieces: Iterator[bytes], writer: Executor, headers: Headers) -> None:
    loop = asyncio.get_running_loop()
    await send({"type": "http.response.start", "status": 200, "headers": [_JSON, *headers]})
    await send({"type": "http.response.body", "body": begin, "more_body": True})
    is_all = False
    while not is_all:
        body, is_all = await loop.run_in_executor(writer, _take, pieces, _PIECES_PER_STEP)
        await send({"type": "http.response.body", "body": body, "more_body": True})


def _take(pieces: Iterator[bytes], most: int | None) -> tuple[bytes, bool]:
    """The next pieces, joined, and whether they are known to be the last ones."""
    taken = list(islice(pieces, most))
    return b"".join(taken), most is None or len(taken) < most
