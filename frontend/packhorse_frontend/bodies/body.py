"""Reading a request's body: counted while it streams, unpacked in small steps, never more than the limits in memory.

One body is bounded by ``max_body_bytes``, and the bodies and answers of all requests of a frontend together by ``BodyMemory``.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

from starlette.datastructures import Headers
from starlette.types import Receive, Scope

from packhorse_frontend.problems import Problem, invalid
from packhorse_shared.messages import BYTES_PER_VALUE

_GZIP = zlib.MAX_WBITS | 16
_STEP_BYTES = 1 << 20
_LEAST_MEMORY_BYTES = 256 << 20
_BODIES_IN_MEMORY = 4
_MOST_MEMBERS = 1024
"""Gzip files that a body may be joined of; that tools join a handful is usual."""
LARGEST_INLINE_BYTES = 64 * 1024
"""A body up to this size is parsed on the event loop, a larger one in a thread, and counted."""
_SMALL_ANSWER_BYTES = 16 * 1024
"""So many values make an answer whose text fits into a connection's buffer: it is not counted."""


class ClientGoneError(Exception):
    """The client closed its connection: nobody is left to answer."""


class BodyShare:
    """What one request has of the memory for bodies and answers. Small ones cost nothing: the number of connections bounds
    them."""

    def __init__(self, memory: BodyMemory, field: str) -> None:
        """``field`` holds the inputs, and is to blame for an answer that is too large."""
        self._memory = memory
        self._field = field
        self._body_bytes = 0
        self._answer_bytes = 0

    @property
    def bytes(self) -> int:
        """What the request holds."""
        return self._body_bytes + self._answer_bytes

    def grow(self, body_bytes: int) -> None:
        """The body has so many bytes by now. Raises Problem (503) where that is too much beside the bodies of others."""
        if body_bytes > LARGEST_INLINE_BYTES:
            self._memory.take(body_bytes - self._body_bytes)
            self._body_bytes = body_bytes

    def expect_answer(self, values: int) -> None:
        """The answer will be so many float32 values; few tokens may ask for very many. Its text is at most four times as much,
        and does not count for itself. What becomes known in steps is told again, as it grows.

        Raises Problem: 400 where it could never be held beside its body, 503 where it is too much beside what others hold.
        """
        answer_bytes = BYTES_PER_VALUE * values
        most = self._memory.max_bytes - self._body_bytes
        if answer_bytes > most:
            raise invalid(
                f"the answer would have {values} values, the limit beside a body of this size is {most // BYTES_PER_VALUE}; "
                "send fewer or shorter inputs in one request",
                self._field,
                "answer_too_large",
            )
        if answer_bytes > max(_SMALL_ANSWER_BYTES, self._answer_bytes):
            self._memory.take(answer_bytes - self._answer_bytes)
            self._answer_bytes = answer_bytes


class BodyMemory:
    """The bytes of all large bodies and of the values of all large answers that a frontend holds: from a body's arrival, or
    from the moment at which an answer is asked for, until the client has its answer."""

    def __init__(self, max_body_bytes: int) -> None:
        self.max_bytes = max(_LEAST_MEMORY_BYTES, _BODIES_IN_MEMORY * max_body_bytes)
        self.held_bytes = 0

    @contextmanager
    def share(self, field: str) -> Iterator[BodyShare]:
        """The share of one request whose inputs are in ``field``, given back in the end."""
        share = BodyShare(self, field)
        try:
            yield share
        finally:
            self.held_bytes -= share.bytes

    def take(self, more_bytes: int) -> None:
        """Hold so many bytes more. Raises Problem (503)."""
        if self.held_bytes + more_bytes > self.max_bytes:
            raise Problem(
                503,
                f"the bodies and answers of open requests fill the {self.max_bytes} bytes that this server keeps for them; "
                "try again later",
                code="too_many_large_bodies",
                headers={"retry-after": "1"},
                closes=True,
                is_rejection=True,
            )
        self.held_bytes += more_bytes


async def read_body(scope: Scope, receive: Receive, max_bytes: int, share: BodyShare) -> bytes:
    """The whole body, unpacked. ``max_bytes`` bounds it both as sent and as unpacked.

    Raises Problem: 413 beyond the limit, 415 for a coding other than gzip, 400 for broken gzip, 503 when all bodies together
    are too many bytes. Raises ClientGoneError.
    """
    headers = Headers(scope=scope)
    announced = headers.get("content-length", "")
    if announced.isascii() and announced.isdigit() and int(announced) > max_bytes:
        raise _too_large(max_bytes)
    is_packed = _is_gzip(headers)
    chunks = _bounded_chunks(receive, max_bytes)
    if is_packed:
        return await _unpack(chunks, max_bytes, share)
    received: list[bytes] = []
    size = 0
    async for chunk in chunks:
        size += len(chunk)
        share.grow(size)
        received.append(chunk)
    return b"".join(received)


def _is_gzip(headers: Headers) -> bool:
    codings = [word.strip().lower() for line in headers.getlist("content-encoding") for word in line.split(",")]
    codings = [word for word in codings if word not in ("", "identity")]
    if not codings:
        return False
    if codings in (["gzip"], ["x-gzip"]):
        return True
    raise Problem(
        415,
        f"content-encoding {', '.join(codings)[:100]} is not supported; send the body plain or as gzip",
        code="unsupported_content_encoding",
        headers={"accept-encoding": "gzip"},
    )


async def _bounded_chunks(receive: Receive, max_bytes: int) -> AsyncIterator[bytes]:
    received = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        chunk: bytes = message.get("body", b"")
        received += len(chunk)
        if received > max_bytes:
            raise _too_large(max_bytes)
        if chunk:
            yield chunk
        if not message.get("more_body", False):
            return


async def _unpack(chunks: AsyncIterator[bytes], max_bytes: int, share: BodyShare) -> bytes:
    unpacked: list[bytes] = []
    size = 0
    unpacker = zlib.decompressobj(_GZIP)
    is_begun, members = False, 1
    try:
        async for chunk in chunks:
            rest = chunk
            while rest:
                if unpacker.eof:  # gzip files may be joined
                    unpacker, is_begun, members = zlib.decompressobj(_GZIP), False, members + 1
                    if members > _MOST_MEMBERS:
                        raise invalid(f"the body is joined of more than {_MOST_MEMBERS} gzip members", None)
                piece = unpacker.decompress(rest, _STEP_BYTES)
                is_begun = True
                size += len(piece)
                if size > max_bytes:
                    raise _too_large(max_bytes)
                share.grow(size)
                unpacked.append(piece)
                rest = unpacker.unused_data if unpacker.eof else unpacker.unconsumed_tail
                if len(piece) == _STEP_BYTES:
                    await asyncio.sleep(0)
    except zlib.error as problem:
        raise invalid(f"the body is not valid gzip, as content-encoding says it is: {problem}", None) from None
    if is_begun and not unpacker.eof:
        raise invalid("the body is not valid gzip, as content-encoding says it is: it ends too early", None)
    return b"".join(unpacked)


def _too_large(max_bytes: int) -> Problem:
    return Problem(
        413, f"the body is larger than {max_bytes} bytes, the limit (--max_body_bytes)", code="body_too_large", closes=True
    )
