"""The broker's loop: sockets, clock and signals around the core. Nothing is decided here.

Every wake-up drains the workers' socket, then the frontends' (answers free what submits fill), then looks at ended processes
and signals, then lets the core have one dispatch pass.
"""

from __future__ import annotations

import logging
import socket as sockets
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import zmq

from packhorse_broker import events as e
from packhorse_broker.core import BrokerCore
from packhorse_broker.processes import ProcessWatch
from packhorse_broker.signals import read_stop_signals
from packhorse_broker.timer import TimerFd
from packhorse_shared import messages as m
from packhorse_shared.codec import Buffer, Decoder, Header, encode
from packhorse_shared.errors import CannotStartError, MalformedMessageError, OtherVersionError
from packhorse_shared.run_dir import RunDir
from packhorse_shared.sockets import open_router

log = logging.getLogger(__name__)

Socket = zmq.Socket[bytes]

COPY_BELOW_BYTES = 64 * 1024
"""Smaller frames are copied: handing one over without a copy costs more than the copy."""
_MOST_FRAMES = 4
_MOST_MESSAGES_PER_WAKE_UP = 1024
"""Per socket, so that neither starves the other or the dispatch."""
_STALL_S = 0.5
"""Waking up this late means that this process did not run."""
_COMPLAINT_INTERVAL_S = 1.0

_FROM_FRONTENDS: dict[type[Any], Callable[[bytes, Any, Buffer], e.Event]] = {
    m.FrontendHello: lambda peer, hello, _: e.FrontendGreeted(peer, hello),
    m.Submit: lambda peer, submit, payload: e.RequestsSubmitted(peer, submit.requests, payload),
    m.Cancel: lambda peer, cancel, _: e.RequestsCancelled(peer, cancel.rids),
    m.Ping: lambda peer, _, __: e.FrontendPinged(peer),
    m.StatusQuery: lambda peer, _, __: e.StatusAsked(peer),
}
_FROM_WORKERS: dict[type[Any], Callable[[bytes, Any, Buffer], e.Event]] = {
    m.WorkerAnnounce: lambda peer, announce, _: e.WorkerAnnounced(peer, announce),
    m.WorkerHello: lambda peer, hello, _: e.WorkerGreeted(peer, hello),
    m.Beat: lambda peer, beat, _: e.WorkerBeat(peer, beat),
    m.Done: e.BatchFinished,
    m.BatchFailed: lambda peer, failed, _: e.BatchBroke(peer, failed),
    m.Draining: lambda peer, draining, _: e.WorkerDrained(peer, draining.returned),
    m.Bye: lambda peer, bye, _: e.WorkerLeft(peer, bye.reason),
}


def serve(core: BrokerCore, run_dir: RunDir, signals: sockets.socket) -> int:
    """Bind both endpoints and run until the drain is over; returns the exit status.

    Only for the holder of the run directory's lock. Raises CannotStartError when an endpoint cannot be bound.
    """
    context: zmq.Context[Socket] = zmq.Context()
    timer, watch = TimerFd(), ProcessWatch()
    linger_ms: int | None = 0
    try:
        try:
            frontends = open_router(context, run_dir.frontends_endpoint)
            workers = open_router(context, run_dir.workers_endpoint)
        except zmq.ZMQError as problem:
            raise CannotStartError(f"run_dir: cannot listen in {run_dir.path}: {problem}") from None
        log.info("broker listens", extra={"run_dir": str(run_dir.path)})
        status = BrokerLoop(core, frontends, workers, timer=timer, watch=watch, signals=signals).run()
        # After a clean drain what was sent last still goes out, within the sockets' own short limit.
        linger_ms = None if status == 0 else 0
        return status
    finally:
        context.destroy(linger=linger_ms)
        watch.close()
        timer.close()


class BrokerLoop:
    """Carries messages to the core as events, and its actions out. Sockets are opened and closed by ``serve``."""

    def __init__(
        self,
        core: BrokerCore,
        frontends: Socket,
        workers: Socket,
        *,
        timer: TimerFd,
        watch: ProcessWatch,
        signals: sockets.socket,
    ) -> None:
        self._core = core
        self._frontends = frontends
        self._workers = workers
        self._timer = timer
        self._watch = watch
        self._signals = signals
        self._poller = zmq.Poller()
        self._frontend_decoder = Decoder(*_FROM_FRONTENDS)
        self._worker_decoder = Decoder(*_FROM_WORKERS)
        self._found: deque[e.Event] = deque()
        """Events that came up while actions were carried out."""
        self._signals_seen = 0
        self._exit_status: int | None = None
        self._complaints = _Complaints()
        self._carriers: dict[type[Any], Callable[[Any], None]] = {
            e.SendBatch: self._send_batch,
            e.SendResult: self._send_result,
            e.FailRequest: self._fail_request,
            e.TellFrontend: self._tell_frontend,
            e.TellWorker: self._tell_worker,
            e.WatchFrontend: self._watch_frontend,
            e.WatchWorker: self._watch_worker,
            e.UnwatchFrontend: self._unwatch_frontend,
            e.KillWorker: self._kill_worker,
            e.WriteLog: self._write_log,
            e.Stop: self._stop,
        }

    def run(self) -> int:
        """Serve until a drain is over (0) or a second signal forces the end (128 + its number)."""
        for source in (self._frontends, self._workers, self._timer.descriptor, self._signals):
            self._poller.register(source, zmq.POLLIN)
        while self._exit_status is None:
            planned = self._core.next_deadline()
            self._timer.arm(planned)
            ready = dict(self._poller.poll())
            if self._timer.descriptor in ready:
                self._timer.clear()
            self._wake_up(ready, planned)
        return self._exit_status

    def _wake_up(self, ready: dict[Any, int], planned: float | None) -> None:
        woke_at = time.monotonic()
        if self._workers in ready:
            self._drain(self._workers, self._worker_decoder, _FROM_WORKERS)
        if self._frontends in ready:
            self._drain(self._frontends, self._frontend_decoder, _FROM_FRONTENDS)
        for descriptor in ready:
            if isinstance(descriptor, int) and self._watch.owns(descriptor):
                self._handle(self._stop_watching(descriptor))
        if self._signals.fileno() in ready:
            self._read_signals()
        if planned is not None and woke_at - planned > _STALL_S:
            self._handle(e.BrokerStalled(woke_at - planned))
        self._handle(e.TimePassed())
        while self._found:
            while self._found:
                self._handle(self._found.popleft())
            self._handle(e.TimePassed())
        self._complaints.report(woke_at)

    def _drain(
        self, socket: Socket, decoder: Decoder, events: dict[type[Any], Callable[[bytes, Any, Buffer], e.Event]]
    ) -> None:
        """Handle what a socket holds, up to a bound; what is left wakes the poller again at once."""
        for _ in range(_MOST_MESSAGES_PER_WAKE_UP):
            try:
                peer = socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            frames = _rest_of_message(socket)
            try:
                message, payload = decoder.decode(frames)
            except MalformedMessageError as problem:
                if isinstance(problem, OtherVersionError) and socket is self._workers:
                    self._handle(e.WorkerOutdated(peer, problem.version))
                else:
                    self._complaints.add(str(problem))
                continue
            self._handle(events[type(message)](peer, message, payload))

    def _read_signals(self) -> None:
        for number in read_stop_signals(self._signals):
            self._signals_seen += 1
            if self._signals_seen == 1:
                self._handle(e.DrainBegan())
            else:
                log.warning("second signal: stopping at once", extra={"signal": number})
                self._exit_status = 128 + number

    def _handle(self, event: e.Event) -> None:
        for action in self._core.handle(event, time.monotonic()):
            self._carriers[type(action)](action)

    # ---- actions ----

    def _send_batch(self, action: e.SendBatch) -> None:
        if not _send(self._workers, action.worker, action.work, _joined(action.payload)):
            self._found.append(e.WorkerLost(action.worker, "unreachable"))

    def _send_result(self, action: e.SendResult) -> None:
        self._to_frontend(action.frontend, action.result, _joined(action.payload))

    def _fail_request(self, action: e.FailRequest) -> None:
        self._to_frontend(action.frontend, action.failure)

    def _tell_frontend(self, action: e.TellFrontend) -> None:
        self._to_frontend(action.peer, action.message)

    def _to_frontend(self, peer: bytes, message: Header, payload: Buffer = b"") -> None:
        if not _send(self._frontends, peer, message, payload):
            self._found.append(e.FrontendLost(peer, "unreachable"))

    def _tell_worker(self, action: e.TellWorker) -> None:
        if not _send(self._workers, action.peer, action.message, b""):
            self._found.append(e.WorkerLost(action.peer, "unreachable"))

    def _watch_frontend(self, action: e.WatchFrontend) -> None:
        self._watch_process(action.frontend, action.pid, e.FrontendLost(action.frontend, "its process ended"))

    def _unwatch_frontend(self, action: e.UnwatchFrontend) -> None:
        if (descriptor := self._watch.descriptor_of(action.frontend)) is not None:
            self._stop_watching(descriptor)

    def _stop_watching(self, descriptor: int) -> e.FrontendLost | e.WorkerLost:
        """Returns what the end of this process means."""
        self._poller.unregister(descriptor)
        return self._watch.ended(descriptor)

    def _watch_worker(self, action: e.WatchWorker) -> None:
        self._watch_process(action.worker, action.pid, e.WorkerLost(action.worker, "its process ended"))

    def _watch_process(self, peer: bytes, pid: int, when_ended: e.FrontendLost | e.WorkerLost) -> None:
        try:
            descriptor = self._watch.add(peer, pid, when_ended)
        except ProcessLookupError:
            self._found.append(when_ended)
        except OSError as problem:
            log.warning(f"cannot watch a process, its silence must tell: {problem}", extra={"pid": pid})
        else:
            if descriptor is not None:
                self._poller.register(descriptor, zmq.POLLIN)

    def _kill_worker(self, action: e.KillWorker) -> None:
        try:
            if not self._watch.kill(action.worker):
                log.error("cannot kill a worker that is not watched", extra={"pid": action.pid})
        except ProcessLookupError:
            pass
        except OSError as problem:
            log.error(f"cannot kill a worker: {problem}", extra={"pid": action.pid})  # noqa: TRY400 (the reason says it all)

    @staticmethod
    def _write_log(action: e.WriteLog) -> None:
        log.log(action.level, action.message, extra=dict(action.fields))

    def _stop(self, _: e.Stop) -> None:
        self._exit_status = 0


class _Complaints:
    """Malformed messages: all are counted, one line a second tells of them."""

    def __init__(self) -> None:
        self._total = 0
        self._unreported = 0
        self._last = ""
        self._reported_at = float("-inf")

    def add(self, problem: str) -> None:
        """One more was dropped."""
        self._total += 1
        self._unreported += 1
        self._last = problem

    def report(self, now: float) -> None:
        """Write the line if it is time."""
        if self._unreported and now - self._reported_at >= _COMPLAINT_INTERVAL_S:
            log.warning(
                f"malformed message dropped: {self._last}", extra={"dropped": self._unreported, "dropped_in_all": self._total}
            )
            self._unreported = 0
            self._reported_at = now


def _rest_of_message(socket: Socket) -> list[Buffer]:
    """The frames behind the sender's identity; more than any message has are read and left out."""
    frames: list[Buffer] = []
    while True:
        frame = socket.recv(copy=False)
        if len(frames) < _MOST_FRAMES:
            frames.append(frame.buffer if len(frame) >= COPY_BELOW_BYTES else frame.bytes)
        if not frame.more:
            return frames


def _joined(payload: e.Payload) -> Buffer:
    return payload[0] if len(payload) == 1 else b"".join(payload)


def _send(socket: Socket, peer: bytes, message: Header, payload: Buffer) -> bool:
    """Send to one peer of a ROUTER; False when there is no such peer any more."""
    try:
        socket.send_multipart([peer, *encode(message, payload)], copy=len(payload) < COPY_BELOW_BYTES)
    except zmq.ZMQError as problem:
        if problem.errno == zmq.EHOSTUNREACH:
            return False
        raise
    return True
