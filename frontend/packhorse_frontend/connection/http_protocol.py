"""HTTP/1.1 as uvicorn speaks it with httptools, made safe against clients that send too much, too slowly or too cleverly.

- The head of a request is collected here, up to ``MAX_HEAD_BYTES``, and only then given to the parser: 431 beyond. What can be
  none is refused as soon as that is seen (``head.py``).
- From the first byte of a request (or the opening of the connection) until its last one, ``receive_timeout`` runs, longer by
  one second for each MiB of body: 408. It does not run while a kept-alive connection is idle.
- A body that nobody reads, since its request was answered already, has the same limit as any other; then the connection ends.
- What came in one go is taken in turns with other connections: a chunked body may be a call for each of its bytes.
- A client that takes nothing of its answer for ``keep_alive`` seconds is cut off: what waits for it is held in memory.
- Requests of one connection are handled strictly one after the other: what a client sends ahead waits unparsed, within a bound.
- A connection that ends with an answer is closed for writing first and read for a moment more, since closing with unread
  bytes resets it, and the client would never see the answer.
- ``Upgrade`` is ignored, and the body that Java's client sends with its offer of h2c is kept.

Whatever is refused here gets the same envelope as everything else.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from packhorse_frontend.connection.descriptors import overflow_of
from packhorse_frontend.connection.head import (
    MAX_HEAD_BYTES,
    HeaderRules,
    find_end,
    find_fault,
    skip_empty_lines,
    without_upgrade,
)
from packhorse_frontend.connection.lingering import LingeringTransport
from packhorse_frontend.connection.refusal import split_head, write_refusal
from packhorse_frontend.connection.turns import TurnFlow
from packhorse_frontend.connection.unsent import UnsentWatch
from packhorse_frontend.layers.following import CLIENT_LEFT, ENDED_WITH
from packhorse_frontend.problems import Problem
from packhorse_shared.settings import HttpSettings

log = logging.getLogger(__name__)

_MAX_AHEAD_BYTES = 64 * 1024
_MAX_FRAMING_BYTES = 16 * 1024
_BODY_STEP_BYTES = 8 * 1024
"""A chunked body is given to the parser in such steps."""
_PIECES_PER_TURN = 512
_OVERFLOW_TIMEOUT_S = 1.0
_MIB = 1 << 20


class GuardedProtocol(HttpToolsProtocol):
    """One connection. ``guard`` makes a subclass with the limits of some settings."""

    limits = HttpSettings()

    @staticmethod
    def on_refusal(problem: Problem) -> None:
        """Hears of every answer that is given without a request that the app knows of."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._head = bytearray()
        """A head that is not complete yet, or what the client sent ahead."""
        self._waiting = bytearray()
        """What came, and waits for this connection's next turn."""
        self._empty_bytes = 0
        """Bytes of empty lines before it."""
        self._taken_head = b""
        """The head of the request whose body comes."""
        self._is_in_body = False
        """Whether a head was given to the parser and its message is not complete."""
        self._is_begun = False
        self._is_head_parsed = False
        self._rules = HeaderRules()
        self._pieces = 0
        """Pieces of a body that came in this turn."""
        self._body_left: int | None = None
        """Bytes of the body still to come; None for a chunked one."""
        self._body_bytes = 0
        self._framing_bytes = 0
        self._is_broken = False
        """Nothing more is read from this connection."""
        self._is_overflow = False
        self._deadline: asyncio.TimerHandle | None = None
        self._receiving_since = 0.0

    # ---- the connection ----

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        """Count the connection, and start to wait for its first request."""
        super().connection_made(transport)
        self.transport = LingeringTransport(transport, self.loop, self._has_unread)  # type: ignore[assignment]  # a proxy of one
        self.flow = self._turns = TurnFlow(self.transport)
        self._unsent = UnsentWatch(self.loop, self.transport, self.limits.keep_alive)
        excess = len(self.connections) - self.limits.max_connections
        self._is_overflow = excess > 0
        if excess > overflow_of(self.limits.max_connections):
            self._is_broken = True
            transport.abort()
            return
        self._start_receiving()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the request that its client is gone."""
        self._stop_receiving()
        self._unset_keepalive_if_required()
        self._unsent.stop()
        if self._is_answering():
            self.cycle.scope["state"].setdefault(ENDED_WITH, CLIENT_LEFT)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Bytes came: to the head, to the parser, or put by."""
        self._unset_keepalive_if_required()
        if self._is_broken or self.transport.is_closing():
            return
        if self._waiting:
            self._waiting += data
        else:
            self._take(memoryview(data))

    def _take(self, rest: memoryview) -> None:
        """Take bytes in, as many as this connection may in one turn."""
        self._pieces = 0
        while rest and not self._is_broken:
            if self._pieces >= _PIECES_PER_TURN:
                self._waiting = bytearray(rest)
                self._turns.hold()
                self.loop.call_soon(self._take_waiting)
                return
            if self._is_in_body:
                rest = self._take_body(rest)
            else:
                self._head += rest
                rest = memoryview(b"")
                if self._is_answering():
                    self._bound_ahead()
                else:
                    rest = self._take_head()

    def _take_waiting(self) -> None:
        waiting, self._waiting = self._waiting, bytearray()
        if not self.transport.is_closing():
            self._turns.release()
            self._take(memoryview(waiting))

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _has_unread(self) -> bool:
        return self._is_in_body or self._is_broken or bool(self._head) or bool(self._waiting)

    def _bound_ahead(self) -> None:
        """The client sends ahead while its last request is being answered."""
        if len(self._head) > _MAX_AHEAD_BYTES:
            self._end_after_answer()

    def _end_after_answer(self) -> None:
        self._is_broken = True
        self._head.clear()
        self.cycle.keep_alive = False
        if self.cycle.response_complete:
            self.transport.close()
        else:
            self.transport.pause_reading()

    def _take_head(self) -> memoryview:
        """Give the parser a head that is complete; returns the bytes after it."""
        if self._deadline is None:
            self._start_receiving()
        self._empty_bytes += skip_empty_lines(self._head)
        end = find_end(self._head)
        if self._empty_bytes + (end or len(self._head)) > MAX_HEAD_BYTES:
            message = f"the request line and headers are larger than {MAX_HEAD_BYTES} bytes"
            self._refuse(Problem(431, message, code="headers_too_large"))
            return memoryview(b"")
        fault = find_fault(self._head[:end] if end else self._head)
        if fault is not None:
            self._refuse_malformed(fault)
            return memoryview(b"")
        if not end:
            return memoryview(b"")
        if self._is_overflow:
            self._refuse(
                Problem(
                    503,
                    f"{self.limits.max_connections} connections are open, the limit (--max_connections)",
                    code="too_many_connections",
                    headers={"retry-after": "1"},
                    is_rejection=True,
                )
            )
            return memoryview(b"")
        head = without_upgrade(self._head[:end])
        rest = memoryview(bytes(self._head[end:]))
        self._head.clear()
        self._empty_bytes = 0
        self._taken_head = head
        self._is_in_body, self._is_begun, self._is_head_parsed = True, False, False
        self._body_left, self._body_bytes, self._framing_bytes = None, 0, 0
        self._rules = HeaderRules()
        self._feed(head)
        return rest

    def _take_body(self, data: memoryview) -> memoryview:
        """Give the parser what belongs to the body; returns the bytes after it."""
        size = min(len(data), _BODY_STEP_BYTES if self._body_left is None else self._body_left)
        before = self._body_bytes
        self._feed(data[:size])
        if self._body_left is not None:
            self._body_left -= size
        else:
            # A chunked body comes with sizes, extensions and trailers around it, which must not be without bound.
            self._framing_bytes += size - (self._body_bytes - before)
            if self._framing_bytes > _MAX_FRAMING_BYTES + 8 * self._body_bytes:
                self._refuse(Problem(400, "the chunked body is mostly framing", code="bad_request"))
        self._bound_unread()
        return data[size:]

    def _bound_unread(self) -> None:
        """The rest of the body is received though its request was answered: that keeps the connection usable, up to a limit."""
        body_bytes = (self._body_left or 0) + self._body_bytes
        if self._is_in_body and not self._is_answering() and body_bytes > self.limits.max_body_bytes:
            self._close_broken()

    def _feed(self, data: bytes | memoryview) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._refuse(Problem(400, "CONNECT and protocol upgrades are not supported", code="bad_request"))
        except httptools.HttpParserError as problem:
            if self._is_in_body:
                # What one of the callbacks below raised is the parser's problem's context.
                is_ours = isinstance(problem, httptools.HttpParserCallbackError)
                self._refuse_malformed(str(problem.__context__ if is_ours else problem))
            else:
                self._end_after_answer()  # the request was fine, what the client sent ahead is not

    # ---- the parser's callbacks ----

    def on_message_begin(self) -> None:
        """A request begins. One that begins within the bytes of another was sent ahead, right after a chunked body."""
        if self._is_begun:
            raise ValueError("a request ahead of the answer to a chunked one")
        self._is_begun = True
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header. The body's length decides how much of what follows belongs to it. Trailers are read by nobody."""
        if self._is_head_parsed:
            return
        name = name.lower()
        self._rules.check(name, value, self.parser.get_http_version())
        if name == b"content-length":
            self._body_left = int(value)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head is complete: the route starts, and will wait for the body."""
        super().on_headers_complete()
        self._is_head_parsed = True

    def on_body(self, body: bytes) -> None:
        """Some of the body."""
        self._pieces += 1
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is complete."""
        self._is_in_body = False
        self._taken_head = b""
        self._stop_receiving()
        super().on_message_complete()
        if self.cycle.response_complete and not self.transport.is_closing():
            # It was answered before it was read to its end: only now the connection is idle.
            self._unset_keepalive_if_required()
            self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def on_response_complete(self) -> None:
        """An answer is complete. What the client sent ahead comes next."""
        super().on_response_complete()
        if self._is_in_body:
            self._unset_keepalive_if_required()
            self._bound_unread()
        elif self._head:
            self.loop.call_soon(self._resume_ahead)

    def _resume_ahead(self) -> None:
        if self._is_in_body or self._is_answering() or self._is_broken:
            return
        ahead = bytes(self._head)
        self._head.clear()
        self.data_received(ahead)

    # ---- deadlines ----

    def _start_receiving(self) -> None:
        self._receiving_since = self.loop.time()
        self._deadline = self.loop.call_at(self._receiving_until(), self._check_deadline)

    def _stop_receiving(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _receiving_until(self) -> float:
        if self._is_overflow:
            return self._receiving_since + _OVERFLOW_TIMEOUT_S
        announced = min(self._body_left or 0, self.limits.max_body_bytes) if self._is_in_body else 0
        return self._receiving_since + self.limits.receive_timeout + (announced + self._body_bytes) / _MIB

    def _check_deadline(self) -> None:
        until = self._receiving_until()
        if until > self.loop.time():
            self._deadline = self.loop.call_at(until, self._check_deadline)
            return
        self._deadline = None
        waited = self.loop.time() - self._receiving_since
        message = f"the request was not complete after {waited:.1f} s (--receive_timeout {self.limits.receive_timeout:g})"
        self._refuse(Problem(408, message, code="request_timeout"))

    def timeout_keep_alive_handler(self) -> None:
        """The connection was idle for long enough. One whose client does not read its answer is cut off."""
        if self.transport.get_write_buffer_size() > 0:
            self.transport.abort()
        else:
            super().timeout_keep_alive_handler()

    def pause_writing(self) -> None:
        """More is written than the client reads: the answer waits for it, while it reads at all."""
        super().pause_writing()
        self._unsent.start()

    def resume_writing(self) -> None:
        """The client has caught up."""
        self._unsent.stop()
        super().resume_writing()

    # ---- refusals ----

    def send_400_response(self, msg: str) -> None:
        """What uvicorn itself finds wrong gets the envelope too."""
        self._refuse(Problem(400, msg, code="bad_request"))

    def _refuse_malformed(self, what: str) -> None:
        self._refuse(Problem(400, f"this is not a valid HTTP/1.1 request: {what}"[:300], code="bad_request"))

    def _close_broken(self) -> None:
        """Close without an answer: there was one."""
        self._is_broken = True
        self._stop_receiving()
        self._head.clear()
        self.transport.close()

    def _refuse(self, problem: Problem) -> None:
        """Answer outside of any route, and close. A route that waits for the rest of its request learns that it is gone."""
        log.debug("request refused", extra={"status": problem.status, "reason": problem.message})
        if self._is_in_body and self._is_head_parsed and not self._is_answering():
            self._close_broken()
            return
        requested = split_head(self._taken_head if self._is_in_body else self._head)
        self._is_broken = True
        self._stop_receiving()
        self._head.clear()
        if self.transport.is_closing():
            return
        if self._is_answering():
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            if self.cycle.response_started:
                self.transport.abort()
                return
            self.cycle.scope["state"][ENDED_WITH] = problem.status
        else:
            self.on_refusal(problem)
        self.transport.write(write_refusal(problem, requested, self.limits.cors_allow_origin))
        self.transport.close()


def guard(settings: HttpSettings, on_refusal: Callable[[Problem], None]) -> type[GuardedProtocol]:
    """The protocol class with these settings, as uvicorn wants it: a class to make connections of."""
    return type("GuardedProtocol", (GuardedProtocol,), {"limits": settings, "on_refusal": staticmethod(on_refusal)})
