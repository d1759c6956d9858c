"""The frontend's side of the broker: one DEALER socket in the event loop.

ZeroMQ's descriptor tells of changes only (it is edge-triggered), so that after every send and every read the socket itself is
asked whether there is more. All that happens in one turn of the event loop goes out together.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

import zmq

from packhorse_frontend.bodies.inputs import Ids
from packhorse_frontend.exchange import Answered, Encoded, Ending, Exchange, OpenRequest
from packhorse_frontend.hearing import Hearing
from packhorse_frontend.rows import RowShape
from packhorse_shared.codec import Buffer, Decoder, Header, encode
from packhorse_shared.errors import MalformedMessageError
from packhorse_shared.messages import (
    PING_INTERVAL_S,
    PROTOCOL_VERSION,
    BrokerState,
    EncodeOptions,
    ErrorCode,
    FrontendHello,
    Introduce,
    MetricsQuery,
    MetricsReport,
    Ping,
    RequestFailure,
    Result,
    StatusQuery,
    StatusReport,
    Tally,
)
from packhorse_shared.meter import Meter
from packhorse_shared.sockets import new_identity, open_dealer

log = logging.getLogger(__name__)

OWN_GRACE_S = 1.0
"""The broker ends a request at its deadline; if it does not, the frontend does so this much later."""
_COPY_BELOW_BYTES = 65_536
_MESSAGES_PER_TURN = 64


class RequestFailedError(Exception):
    """A request ended without vectors; ``failure`` says why."""

    def __init__(self, failure: RequestFailure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class BrokerClient:
    """Sends requests to the broker and waits for their rows."""

    def __init__(self, endpoint: str, index: int, on_state: Callable[[BrokerState], None], meter: Meter) -> None:
        self._endpoint = endpoint
        self._index = index
        self._on_state = on_state
        self._meter = meter
        self._exchange = Exchange()
        self._rids = itertools.count(1)
        self._futures: dict[int, asyncio.Future[Encoded]] = {}
        self._reports: dict[type[Any], list[asyncio.Future[Any]]] = {StatusReport: [], MetricsReport: []}
        self._decoder = Decoder(BrokerState, Result, RequestFailure, StatusReport, MetricsReport, Introduce)
        self._is_flush_due = False
        self._introducing_to: int | None = None
        self._hearing = Hearing()
        self._was_heard = False
        self._was_gone = False
        self._malformed = 0
        self.state: BrokerState | None = None
        """What the broker said last; None before it said anything."""

    def open(self) -> None:
        """Open the socket in the running event loop, and say hello."""
        self._loop = asyncio.get_running_loop()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._socket = open_dealer(self._context, self._endpoint, new_identity("frontend", self._index))
        self._descriptor = int(self._socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._descriptor, self._read)
        self._say_hello()
        self._ping_timer = self._loop.call_later(PING_INTERVAL_S, self._ping)

    def close(self) -> None:
        """Close the socket; what is open fails."""
        self._send_tally()
        self._ping_timer.cancel()
        self._loop.remove_reader(self._descriptor)
        self._socket.close()
        self._context.term()
        for future in (*self._futures.values(), *itertools.chain(*self._reports.values())):
            future.cancel()

    def is_connected(self) -> bool:
        """Whether the broker was heard within the last second."""
        if self._hearing.look(self._loop.time()):
            return True
        self._read()  # the event loop may have been busy while the answer waits in the socket
        return self._hearing.look(self._loop.time())

    @property
    def open_requests(self) -> int:
        """How many requests wait for rows."""
        return len(self._exchange)

    async def encode(
        self,
        ids: Ids,
        lengths: Sequence[int],
        *,
        shape: RowShape,
        deadline: float,
        priority: int = 0,
        options: EncodeOptions = EncodeOptions(),  # noqa: B008 (frozen)
    ) -> Encoded:
        """The rows of one request, one for each of ``lengths``.

        ``ids`` are the int32 ids of all inputs, joined. Raises RequestFailedError. Cancelling the call gives the request up.
        """
        rid = next(self._rids)
        future: asyncio.Future[Encoded] = self._loop.create_future()
        self._futures[rid] = future
        self._exchange.open(OpenRequest(rid, ids, lengths, deadline, shape, priority, options))
        self._flush_soon()
        timer = self._loop.call_at(deadline + OWN_GRACE_S, self._time_out, rid)
        try:
            return await future
        finally:
            timer.cancel()
            del self._futures[rid]
            self._exchange.give_up(rid)
            self._flush_soon()

    def fail_all(self, code: ErrorCode, message: str) -> None:
        """End every open request with a failure."""
        for rid, future in self._futures.items():
            if not future.done():
                future.set_exception(RequestFailedError(RequestFailure(rid, code, message, 1)))

    async def status(self, timeout_s: float) -> StatusReport:
        """The broker's report of itself. Raises TimeoutError."""
        report: StatusReport = await self._ask(StatusQuery(), StatusReport, timeout_s)
        return report

    async def metrics(self, timeout_s: float) -> MetricsReport:
        """What all processes have counted, this one until now. Raises TimeoutError."""
        self._send_tally()
        report: MetricsReport = await self._ask(MetricsQuery(), MetricsReport, timeout_s)
        return report

    async def _ask(self, query: Header, kind: type[Any], timeout_s: float) -> Any:
        future: asyncio.Future[Any] = self._loop.create_future()
        self._reports[kind].append(future)
        self._send(query)
        try:
            async with asyncio.timeout(timeout_s):
                return await future
        finally:
            if future in self._reports[kind]:
                self._reports[kind].remove(future)

    # ---- sending ----

    def _flush_soon(self) -> None:
        if not self._is_flush_due:
            self._is_flush_due = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._is_flush_due = False
        for submit, payload in self._exchange.take_submits(self._loop.time()):
            self._send(submit, payload)
        for cancel in self._exchange.take_cancels():
            self._send(cancel)

    def _send(self, message: Header, payload: Buffer = b"") -> None:
        if self._socket.closed:
            return
        self._socket.send_multipart(encode(message, payload), copy=len(payload) < _COPY_BELOW_BYTES)
        if int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._loop.call_soon(self._read)

    def _say_hello(self) -> None:
        self._send(FrontendHello(PROTOCOL_VERSION, self._index, os.getpid()))

    def _send_tally(self) -> None:
        """Tell what was counted. While the broker is away it is kept: a new one would not take it from a stranger."""
        if self.is_connected() and (changes := self._meter.take_changes()):
            self._send(Tally(changes))

    def _ping(self) -> None:
        self._send_tally()
        self._send(Ping())
        if self._was_heard and not self.is_connected():
            self._was_heard = False
            self._was_gone = True
            log.warning("broker gone", extra={"open_requests": len(self._exchange)})
        self._ping_timer = self._loop.call_later(PING_INTERVAL_S, self._ping)

    # ---- receiving ----

    def _read(self) -> None:
        if self._socket.closed:
            return
        for _ in range(_MESSAGES_PER_TURN):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                message, payload = self._decoder.decode(frames)
            except MalformedMessageError as problem:
                self._malformed += 1
                log.warning("malformed message dropped", extra={"problem": str(problem), "count": self._malformed})
                continue
            self._hear()
            self._handle(message, payload)
        self._loop.call_soon(self._read)

    def _hear(self) -> None:
        self._hearing.hear(self._loop.time())
        if not self._was_heard:
            self._was_heard = True
            log.log(logging.INFO if self._was_gone else logging.DEBUG, "broker answers")

    def _handle(self, message: object, payload: Buffer) -> None:
        match message:
            case Result():
                self._end(self._exchange.on_result(message, payload))
            case RequestFailure():
                self._end(self._exchange.on_failure(message))
            case BrokerState():
                self._take_state(message)
            case Introduce():
                # Each of our queued messages may bring one of these: one hello answers them all.
                if self._introducing_to != message.boot_id:
                    self._introducing_to = message.boot_id
                    self._say_hello()
                    self._resubmit()
            case StatusReport() | MetricsReport():
                waiting, self._reports[type(message)] = self._reports[type(message)], []
                for future in waiting:
                    if not future.done():
                        future.set_result(message)

    def _take_state(self, state: BrokerState) -> None:
        is_new_broker = self.state is not None and self.state.boot_id != state.boot_id
        if is_new_broker and self._introducing_to != state.boot_id:
            self._resubmit()
        self._introducing_to = None
        self.state = state
        self._on_state(state)

    def _resubmit(self) -> None:
        self._exchange.resubmit()
        self._flush_soon()
        if len(self._exchange):
            log.info("requests resubmitted", extra={"requests": len(self._exchange)})

    def _end(self, endings: list[Ending]) -> None:
        for ending in endings:
            future = self._futures.get(ending.rid)
            if future is None or future.done():
                continue
            if isinstance(ending, Answered):
                future.set_result(ending.encoded)
            else:
                future.set_exception(RequestFailedError(ending))

    def _time_out(self, rid: int) -> None:
        future = self._futures.get(rid)
        if future is not None and not future.done():
            failure = RequestFailure(rid, ErrorCode.TIMEOUT, "the broker did not answer in time")
            future.set_exception(RequestFailedError(failure))
