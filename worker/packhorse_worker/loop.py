"""The worker's I/O thread: it owns the socket, beats, and talks to the broker.

It starts before the model loads, so that the broker sees the worker load, and it never waits for the model: a stuck kernel
shows as a batch that runs too long, not as silence. It meets the compute thread (``compute.py``) at the ``Desk`` (batches
down) and at a queue of orders (answers up).
"""

from __future__ import annotations

import logging
import os
import queue
import time
from collections.abc import Callable
from pathlib import Path

import zmq

from packhorse_shared import messages as m
from packhorse_shared.codec import Buffer, Decoder, Header, encode
from packhorse_shared.connection import Connection, open_monitor, read_connection
from packhorse_shared.errors import EXIT_CANNOT_START, MalformedMessageError
from packhorse_shared.sockets import connect_again, new_identity, open_dealer
from packhorse_shared.watchdog import Watchdog
from packhorse_worker.answers import failed
from packhorse_worker.desk import Desk, Task
from packhorse_worker.meeting import MeetingPoint
from packhorse_worker.orders import Answer, Break, Finish, Order, Ready, WorkerIdentity

log = logging.getLogger(__name__)

EXIT_FAULT = 1
"""Exit status of a worker that failed but may do better when it is started again."""
GIVE_UP_AFTER_S = 30.0
"""A worker that no supervisord stops ends by itself after this long without a broker."""
_RETRY_TOKEN_S = 0.1
_CONNECT_AGAIN_S = 5.0
"""A connection over tcp that is down for so long is begun anew: ZeroMQ gives one up for good when what listens does not speak
its protocol, as a proxy may do whose broker is away."""
_COPY_BELOW_BYTES = 64 * 1024
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_STATM = Path("/proc/self/statm")


class Link:
    """The I/O thread. Only ``order``, ``desk`` and ``memory_bytes`` are for the other thread while it runs.

    ``signals``: a non-blocking file descriptor from which a byte can be read for each SIGTERM or SIGINT. The first drains,
    the second calls ``exit_now`` at once, as does the first one while the model loads. ``watchdog``: for a worker that nobody
    can kill when this thread is stuck.
    """

    def __init__(
        self,
        meeting: MeetingPoint,
        who: WorkerIdentity,
        signals: int,
        exit_now: Callable[[int], None],
        give_up_after_s: float,
        *,
        watchdog: Watchdog | None = None,
    ) -> None:
        self.desk = Desk()
        self.memory_bytes: int | None = None
        self.status: int | None = None
        self._meeting = meeting
        self._who = who
        self._signals = signals
        self._exit_now = exit_now
        self._give_up_after_s = give_up_after_s
        self._watchdog = watchdog
        self._orders: queue.SimpleQueue[Order] = queue.SimpleQueue()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._decoder = Decoder(m.Join, m.Refused, m.Work, m.Drain, m.Quit, m.Introduce)
        self._ready: Ready | None = None
        self._boot_id: int | None = None
        self._is_introduced = False
        self._is_connected: bool | None = None
        self._is_draining = False
        self._is_over = False
        self._signals_seen = 0
        self._lost_since = time.monotonic()
        self._connect_at = self._lost_since + _CONNECT_AGAIN_S
        self._next_beat = 0.0

    def order(self, order: Order) -> None:
        """Hand something to the I/O thread and wake it."""
        self._orders.put(order)
        os.eventfd_write(self._bell, 1)

    def run(self) -> None:
        """The I/O thread's whole life."""
        try:
            self._serve()
        except Exception:
            log.exception("the I/O thread failed")
            self._exit_now(EXIT_FAULT)
        if self.status is not None:
            self._exit_now(self.status)  # the other thread loads a model, or runs a batch for nobody, and cannot be interrupted

    def _serve(self) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        identity = new_identity("worker", self._who.slot if self._who.slot >= 0 else self._who.pid)
        self._socket = open_dealer(context, self._meeting.workers_endpoint, identity, self._meeting.curve_keys)
        monitor = open_monitor(self._socket)
        poller = zmq.Poller()
        for source in (self._socket, monitor, self._bell, self._signals):
            poller.register(source, zmq.POLLIN)
        try:
            while not self._is_over:
                ready = dict(poller.poll(self._tick()))
                if monitor in ready:
                    self._watch(read_connection(monitor))
                if self._bell in ready:
                    os.eventfd_read(self._bell)
                    self._obey()
                if self._signals in ready:
                    self._count_signals()
                if self._socket in ready:
                    self._receive()
        finally:
            if self._watchdog is not None:
                self._watchdog.rest()
            self._socket.disable_monitor()
            monitor.close(linger=0)
            self._socket.close()
            context.term()

    def _tick(self) -> int:
        """What is due now; returns the milliseconds until something is again."""
        now = time.monotonic()
        if self._watchdog is not None:
            self._watchdog.feed()
        if not self._is_introduced:
            self._introduce()
        if self._is_connected is not True and not self._who.supervised and now - self._lost_since > self._give_up_after_s:
            self._give_up()
        if self._is_connected is not True and self._meeting.curve_keys is not None and now >= self._connect_at:
            self._connect_at = now + _CONNECT_AGAIN_S
            connect_again(self._socket, self._meeting.workers_endpoint)
        if now >= self._next_beat:
            self._next_beat = now + m.BEAT_INTERVAL_S
            # Beats to a broker that is away would pile up and reach the next one all at once.
            if self._is_introduced and self._is_connected is not False:
                batch_id, busy_ms = self.desk.running()
                self._send(m.Beat(batch_id, busy_ms, self._memory()))
        wait_s = self._next_beat - now if self._is_introduced else _RETRY_TOKEN_S
        return 0 if self._is_over else int(wait_s * 1000) + 1

    def _introduce(self) -> None:
        """Send the hello, or the announcement while the model loads; later, if there is no token yet."""
        try:
            token = self._meeting.token()
        except OSError:
            return
        who, ready = self._who, self._ready
        if ready is None:
            self._send(m.WorkerAnnounce(m.PROTOCOL_VERSION, token, who.slot, who.pid, who.incarnation, who.device))
        else:
            hello = (m.PROTOCOL_VERSION, token, who.slot, who.pid, who.incarnation, who.device, ready.facts, ready.limits)
            self._send(m.WorkerHello(*hello))
        self._is_introduced = True

    def _watch(self, connection: Connection) -> None:
        was_connected = self._is_connected
        self._is_connected = connection is Connection.UP
        if connection is Connection.REFUSED:
            log.error("the broker no longer allows this worker's key")
            self._end(EXIT_CANNOT_START)
        elif was_connected and not self._is_connected:
            self._lost_since = time.monotonic()
            self._connect_at = self._lost_since + _CONNECT_AGAIN_S
            log.warning("lost the broker, waiting for it")
        elif self._is_connected and was_connected is False:
            self._next_beat = 0.0  # a broker that does not know us answers with Introduce
            log.info("connected to the broker again")

    def _obey(self) -> None:
        while not self._orders.empty():
            order = self._orders.get_nowait()
            match order:
                case Ready():
                    self._ready = order
                    self._is_introduced = False
                case Answer(message, payload):
                    self._send(message, payload)
                case Finish(reason):
                    self._send(m.Bye(reason))
                    self._is_over = True
                case Break(at_once):
                    if at_once:
                        self.status = EXIT_FAULT
                    self._is_over = True

    def _count_signals(self) -> None:
        self._signals_seen += len(os.read(self._signals, 16))
        if self._signals_seen > 1:
            log.warning("second signal, ending at once")
            self._exit_now(EXIT_FAULT)
        self._drain("signal")

    def _receive(self) -> None:
        while not self._is_over:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                message, payload = self._decoder.decode(frames)
            except MalformedMessageError as problem:
                log.warning("dropped a malformed message: %s", problem)
                continue
            self._handle(message, payload)

    def _handle(self, message: object, payload: Buffer) -> None:
        match message:
            case m.Work():
                self._take_in(Task(message, payload))
            case m.Join(boot_id):
                self._meet(boot_id)
                log.debug("joined the broker", extra={"boot_id": boot_id})
            case m.Introduce(boot_id):
                self._meet(boot_id)
                if not self._is_draining:
                    self._introduce()
            case m.Drain():
                self._drain("broker")
            case m.Refused(reason):
                log.error("the broker refused this worker: %s", reason)
                self._end(EXIT_CANNOT_START)
            case m.Quit(reason):
                log.error("the broker gave this worker up, ending at once: %s", reason)
                self._end(EXIT_FAULT)

    def _meet(self, boot_id: int) -> None:
        """A broker of another start resubmits by itself: what it did not send is dropped unless it runs already."""
        if boot_id != self._boot_id and (dropped := self.desk.drop_other_boots(boot_id)):
            log.info("dropped batches of a broker that is gone", extra={"batches": dropped})
        self._boot_id = boot_id

    def _take_in(self, task: Task) -> None:
        work = task.work
        self._meet(work.boot_id)
        if self._is_draining:
            self._send(m.Draining([work.batch_id]))
        elif len(work.options) not in (0, len(work.lengths)):
            message = f"{len(work.options)} options for {len(work.lengths)} inputs"
            self._send(failed(task, m.ErrorCode.FORWARD_FAILED, message, retryable=False))
        elif self._ready is None or not self.desk.put(task):
            self._send(failed(task, m.ErrorCode.NO_WORKER, "this worker takes no batch now", retryable=True))

    def _drain(self, cause: str) -> None:
        """Hand back what is not begun and let the running batch finish; a worker that still loads just leaves."""
        if self._is_draining:
            return
        self._is_draining = True
        if self._ready is None:
            log.info("stopped while loading", extra={"cause": cause})
            self._send(m.Bye(""))
            self._end(0)
            return
        returned = self.desk.close()
        self._send(m.Draining(returned))
        log.info("draining", extra={"cause": cause, "returned_batches": len(returned)})

    def _give_up(self) -> None:
        if not self._meeting.is_live():
            log.error("no broker at %s for %g s; start the server first", self._meeting.workers_endpoint, self._give_up_after_s)
            self._end(EXIT_CANNOT_START if self._boot_id is None else EXIT_FAULT)
        self._lost_since = time.monotonic()

    def _end(self, status: int) -> None:
        self.status = status
        self.desk.close()
        self._is_over = True

    def _memory(self) -> int:
        if self.memory_bytes is not None:
            return self.memory_bytes
        return int(_STATM.read_text(encoding="ascii").split()[1]) * _PAGE_BYTES

    def _send(self, message: Header, payload: Buffer = b"") -> None:
        try:
            self._socket.send_multipart(encode(message, payload), zmq.NOBLOCK, copy=len(payload) < _COPY_BELOW_BYTES)
        except zmq.Again:  # ZeroMQ has given the connection up, and would wait for another one
            log.warning("a message for the broker is lost: there is no connection")
