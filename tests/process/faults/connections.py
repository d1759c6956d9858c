"""The connections of a load: kept alive, at most one request on each, taken in turn."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable
from typing import cast

from http_answers import AnswerReader
from report import Sent

MOST_IDLE = 128
"""Connections above these are closed: what one bad moment opened must not be held, and counted as the server's, for ever."""
Ended = asyncio.Future[None] | None
"""Done when the request has ended, for who waits for that."""


class Connections:
    """All connections of one load. ``on_end`` is told of every request that ends, with the transport's problem or ""."""

    def __init__(self, port: int, on_end: Callable[[Sent, str], None]) -> None:
        self.strays: list[bytes] = []
        """What came behind an answer or without a request."""
        self.on_end = on_end
        self.idle: deque[Connection] = deque()
        self.open: set[Connection] = set()
        self._port = port

    def send(self, sent: Sent, ended: Ended) -> bool:
        """Send on the connection that is idle longest; False when there is none."""
        while self.idle:
            connection = self.idle.popleft()
            if connection.is_usable:
                connection.send(sent, ended)
                return True
        return False

    async def connect(self, sent: Sent, ended: Ended) -> None:
        """Open one more connection and send there."""
        sent.sent = time.monotonic()
        try:
            _, connection = await asyncio.get_running_loop().create_connection(
                lambda: Connection(self), "127.0.0.1", self._port
            )
        except OSError as problem:
            self.on_end(sent, type(problem).__name__)
            if ended is not None and not ended.done():
                ended.set_result(None)
        else:
            connection.send(sent, ended)

    def close(self) -> None:
        for connection in self.open.copy():
            connection.close()


class Connection(asyncio.Protocol):
    """One connection with at most one request on it."""

    def __init__(self, all_of_them: Connections) -> None:
        self._all = all_of_them
        self._transport: asyncio.Transport | None = None
        self._reader = AnswerReader()
        self._sent: Sent | None = None
        self._ended: Ended = None

    @property
    def is_usable(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's own is none by its class
        self._all.open.add(self)

    def send(self, sent: Sent, ended: Ended) -> None:
        self._sent, self._ended = sent, ended
        sent.sent = sent.sent or time.monotonic()
        if self._transport is None:
            self._finish("ConnectionResetError")
            return
        sent.local_port = self._transport.get_extra_info("sockname")[1]
        self._transport.write(sent.question.wire)

    def data_received(self, data: bytes) -> None:
        self._reader.feed(data)
        if self._sent is None:
            self._refuse_stray()
            return
        if (answer := self._reader.take()) is None:
            return
        sent = self._sent
        sent.status, sent.headers = answer.status, answer.headers
        if answer.status == 200:
            sent.is_own = sent.question.is_answered_by(answer.body)
        else:
            sent.body = answer.body
        self._finish()
        if self._reader.left:
            self._refuse_stray()
        elif answer.closes or len(self._all.idle) >= MOST_IDLE:
            self.close()
        elif self.is_usable:
            self._all.idle.append(self)

    def connection_lost(self, problem: Exception | None) -> None:
        self._transport = None
        self._all.open.discard(self)
        with contextlib.suppress(ValueError):
            self._all.idle.remove(self)
        self._finish(type(problem).__name__ if problem is not None else "closed without an answer")

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _refuse_stray(self) -> None:
        self._all.strays.append(self._reader.left)
        self.close()

    def _finish(self, problem: str = "") -> None:
        sent, ended, self._sent, self._ended = self._sent, self._ended, None, None
        if sent is not None:
            self._all.on_end(sent, problem)
        if ended is not None and not ended.done():
            ended.set_result(None)
