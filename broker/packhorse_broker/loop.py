"""The broker's loop: sockets, clock and signals around the core. Nothing is decided here.

Every wake-up drains the workers' sockets, then the frontends' (answers free what submits fill), then looks at ended processes
and signals, then lets the core have one dispatch pass.
"""

from __future__ import annotations

import logging
import socket as sockets
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec
import zmq

from packhorse_broker import events as e
from packhorse_broker.core import BrokerCore
from packhorse_broker.doors import FRONTENDS, REMOTE_WORKERS, Door, RemoteWorkers, Socket, open_doors, open_remote_door
from packhorse_broker.processes import ProcessWatch
from packhorse_broker.signals import read_stop_signals
from packhorse_broker.timer import TimerFd
from packhorse_shared import messages as m
from packhorse_shared.codec import Buffer, Header
from packhorse_shared.curve import AllowList, start_gate
from packhorse_shared.errors import MalformedMessageError, OtherVersionError
from packhorse_shared.run_dir import RunDir
from packhorse_shared.watchdog import Watchdog

log = logging.getLogger(__name__)

_MOST_MESSAGES_PER_WAKE_UP = 1024
"""Per socket, so that none starves another or the dispatch."""
_STALL_S = 0.5
"""Waking up this late, or taking this long before time is looked at, means that this process did not run."""
_COMPLAINT_INTERVAL_S = 1.0


def serve(
    core: BrokerCore, run_dir: RunDir, signals: sockets.socket, settings: bytes, remote_workers: RemoteWorkers | None = None
) -> int:
    """Bind all endpoints and run until the drain is over; returns the exit status.

    Only for the holder of the run directory's lock. ``settings``: what workers of other machines are told. Raises
    CannotStartError when an endpoint cannot be bound.
    """
    context: zmq.Context[Socket] = zmq.Context()
    timer, watch = TimerFd(), ProcessWatch()
    linger_ms: int | None = 0
    gate = None
    try:
        doors = open_doors(context, run_dir)
        if remote_workers is not None:
            allow_list = AllowList(remote_workers.keys.allowed)
            gate = start_gate(context, allow_list)
            doors.insert(0, open_remote_door(context, remote_workers, allow_list))
            log.info("workers of other machines may join", extra={"broker": remote_workers.endpoint})
        log.info("broker listens", extra={"run_dir": str(run_dir.path)})
        loop = BrokerLoop(core, doors, settings, timer=timer, watch=watch, signals=signals, watchdog=Watchdog())
        status = loop.run()
        # After a clean drain what was sent last still goes out, within the sockets' own short limit.
        linger_ms = None if status == 0 else 0
        return status
    finally:
        if gate is not None:
            gate.stop()
        context.destroy(linger=linger_ms)
        watch.close()
        timer.close()


class BrokerLoop:
    """Carries messages to the core as events, and its actions out. Sockets are opened and closed by ``serve``."""

    def __init__(
        self,
        core: BrokerCore,
        doors: list[Door],
        settings: bytes,
        *,
        timer: TimerFd,
        watch: ProcessWatch,
        signals: sockets.socket,
        watchdog: Watchdog,
    ) -> None:
        self._core = core
        self._doors = {door.tag: door for door in doors}
        self._settings = settings
        self._timer = timer
        self._watch = watch
        self._signals = signals
        self._watchdog = watchdog
        self._poller = zmq.Poller()
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
        for source in (*(door.socket for door in self._doors.values()), self._timer.descriptor, self._signals):
            self._poller.register(source, zmq.POLLIN)
        while self._exit_status is None:
            planned = self._core.next_deadline()
            self._timer.arm(planned)
            ready = dict(self._poller.poll(int(1000 * self._watchdog.longest_wait_s)))
            self._watchdog.feed()
            if self._timer.descriptor in ready:
                self._timer.clear()
            self._wake_up(ready, planned)
        self._watchdog.rest()
        return self._exit_status

    def _wake_up(self, ready: dict[Any, int], planned: float | None) -> None:
        woke_at = time.monotonic()
        if planned is not None:
            self._tell_stall(planned)
        for door in self._doors.values():
            if door.socket in ready:
                self._drain(door)
        for descriptor in ready:
            if isinstance(descriptor, int) and self._watch.owns(descriptor):
                self._handle(self._stop_watching(descriptor))
        if self._signals.fileno() in ready:
            self._read_signals()
        self._tell_stall(woke_at)
        self._handle(e.TimePassed())
        while self._found:
            while self._found:
                self._handle(self._found.popleft())
            self._handle(e.TimePassed())
        self._complaints.report(woke_at)

    def _tell_stall(self, due_at: float) -> None:
        """What is due now should have come about then."""
        if (stalled_s := time.monotonic() - due_at) > _STALL_S:
            self._handle(e.BrokerStalled(stalled_s))

    def _drain(self, door: Door) -> None:
        """Handle what a socket holds, up to a bound; what is left wakes the poller again at once."""
        for _ in range(_MOST_MESSAGES_PER_WAKE_UP):
            received = door.receive()
            if received is None:
                return
            self._take_in(door, *received)

    def _take_in(self, door: Door, peer: bytes, frames: list[Buffer], public_key: bytes) -> None:
        key_name = None if door.allow_list is None else door.allow_list.name_of(public_key)
        if door.allow_list is not None and key_name is None:
            self._handle(e.WorkerDisallowed(peer))
            return
        try:
            message, payload = door.decoder.decode(frames)
        except OtherVersionError as problem:
            if door.tag != FRONTENDS:
                self._handle(e.WorkerOutdated(peer, problem.version))
                return
            self._complain(problem)
            return
        except MalformedMessageError as problem:
            self._complain(problem)
            return
        if isinstance(message, m.SettingsQuery):
            door.send(peer, m.ServerSettings(), self._settings)
            return
        event = door.readings[type(message)](peer, message, payload)
        if key_name is not None and isinstance(event, e.WorkerAnnounced | e.WorkerGreeted):
            event = msgspec.structs.replace(event, key_name=key_name)
        self._handle(event)

    def _complain(self, problem: Exception) -> None:
        self._complaints.add(str(problem))
        self._core.count_malformed()

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
        self._to_worker(action.worker, action.work, _joined(action.payload))

    def _send_result(self, action: e.SendResult) -> None:
        self._to_frontend(action.frontend, action.result, _joined(action.payload))

    def _fail_request(self, action: e.FailRequest) -> None:
        self._to_frontend(action.frontend, action.failure)

    def _tell_frontend(self, action: e.TellFrontend) -> None:
        self._to_frontend(action.peer, action.message)

    def _tell_worker(self, action: e.TellWorker) -> None:
        self._to_worker(action.peer, action.message)

    def _to_frontend(self, peer: bytes, message: Header, payload: Buffer = b"") -> None:
        if not self._doors[peer[:1]].send(peer, message, payload):
            self._found.append(e.FrontendLost(peer, "unreachable"))

    def _to_worker(self, peer: bytes, message: Header, payload: Buffer = b"") -> None:
        if self._doors[peer[:1]].send(peer, message, payload):
            return
        # A local socket closes with its process. A link that is cut says nothing about the process behind it.
        is_remote = peer[:1] == REMOTE_WORKERS
        self._found.append(e.WorkerUnreachable(peer) if is_remote else e.WorkerLost(peer, "unreachable"))

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
                self._to_worker(action.worker, m.Quit(action.reason))
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


def _joined(payload: e.Payload) -> Buffer:
    return payload[0] if len(payload) == 1 else b"".join(payload)
