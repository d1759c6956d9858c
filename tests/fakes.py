"""Stand-ins that speak the wire protocol over real sockets: a worker without a model, a frontend without HTTP.

``FakeWorker`` runs in threads of the test; ``spawn_worker`` runs one as a process of its own, to be killed or stopped. Neither
needs torch. What the fake model "computes" for an input is ``[number of ids, sum of ids, first id]``, so that a test can tell
whose vector it got.
"""

from __future__ import annotations

import contextlib
import os
import queue
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import zmq

from model_facts import model_facts
from packhorse_shared import messages as m
from packhorse_shared.codec import Decoder, encode
from packhorse_shared.run_dir import RunDir
from packhorse_shared.sockets import new_identity, open_dealer
from packhorse_worker.meeting import RemoteBroker

MODEL = model_facts(name="fake", dimension=3, max_seq_len=4096, vocabulary_rows=1 << 20, fingerprint="fake")
LIMITS = m.WorkerLimits(max_batch_size=4096, max_num_tokens=1 << 22)

Row = Sequence[float] | m.ErrorCode
"""An output vector, or why this input failed."""
EncodeBatch = Callable[[list[Sequence[int]], m.Work], Sequence[Row]]
"""What a fake model is: ids of each input in, one row each out. May raise ``FakeBatchError``."""


def vector_of(ids: Sequence[int]) -> list[float]:
    """What the fake model answers for one input; sums stay exact in float32 below 2**24."""
    return [float(len(ids)), float(sum(ids)), float(ids[0])]


CANARY_ROW = vector_of(MODEL.canary)


class FakeBatchError(Exception):
    """Raised by a fake model: the batch fails as a whole."""

    def __init__(self, code: m.ErrorCode, *, retryable: bool) -> None:
        super().__init__(code.value)
        self.code = code
        self.retryable = retryable


class FakeRequestError(Exception):
    """What ``FakeFrontend.wait`` raises for a request that failed."""

    def __init__(self, failure: m.RequestFailure) -> None:
        super().__init__(failure.message)
        self.failure = failure


def encode_batch(inputs: list[Sequence[int]], _work: m.Work) -> list[Row]:
    """The fake model."""
    return [vector_of(ids) for ids in inputs]


class FakeWorker:
    """A worker without a model, in two threads: one for the socket, which also beats, and one that "computes".

    ``pid`` is whom the broker watches; by default nobody (0), since the test's own process would be it. ``canary`` is what it
    answers to the canary; None for no answer. ``run_dir`` may be any meeting point, as the worker's ``RemoteBroker``.
    """

    def __init__(
        self,
        run_dir: RunDir | RemoteBroker,
        *,
        slot: int = 0,
        model: EncodeBatch = encode_batch,
        facts: m.ModelFacts = MODEL,
        limits: m.WorkerLimits = LIMITS,
        token: str | None = None,
        pid: int = 0,
        announce_only: bool = False,
        canary: Sequence[float] | None = CANARY_ROW,
    ) -> None:
        self.run_dir = run_dir
        self.slot = slot
        self.pid = pid
        self.batches: list[list[int]] = []
        """Lengths of the inputs of every batch that came, in order."""
        self.refused: str | None = None
        self.told_to_quit: str | None = None
        self.identity: bytes | None = None
        """Made anew at the start unless it is set."""
        self.is_joined = threading.Event()
        self.is_gone = threading.Event()
        self._model = model
        self._facts = facts
        self._limits = limits
        self._token = token
        self._announce_only = announce_only
        self._canary = canary
        self._incarnation = int.from_bytes(os.urandom(7), "big")
        self._work: queue.SimpleQueue[tuple[m.Work, bytes] | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._stop = threading.Event()
        self._frozen = threading.Event()
        self._running: tuple[int, float] | None = None
        self._threads: list[threading.Thread] = []

    def start(self, *, wait: bool = True) -> FakeWorker:
        """Connect; with ``wait``, return when the broker has let it in."""
        self._threads = [
            threading.Thread(target=target, name=f"fake-worker-{self.slot}", daemon=True)
            for target in (self._serve, self._compute)
        ]
        for thread in self._threads:
            thread.start()
        if wait:
            assert self.is_joined.wait(10), self.refused or "the broker did not let the worker in"
        return self

    def stop(self) -> None:
        """Finish what runs, hand back the rest, say bye."""
        self._stop.set()
        self._nudge()
        self._end()

    def freeze(self) -> None:
        """Say and read nothing more, as if stopped."""
        self._frozen.set()
        self._nudge()

    def thaw(self) -> None:
        """Go on."""
        self._frozen.clear()
        self._nudge()

    def __enter__(self) -> FakeWorker:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.thaw()
        self.stop()

    # ---- the socket's thread ----

    def _serve(self) -> None:
        context: zmq.Context[Any] = zmq.Context()
        identity = self.identity or new_identity("worker", max(self.slot, 0))
        socket = open_dealer(context, self.run_dir.workers_endpoint, identity, self.run_dir.curve_keys)
        try:
            self._introduce(socket)
            self._converse(socket)
        finally:
            context.destroy(linger=500)
            self.is_gone.set()
            self._work.put(None)

    def _converse(self, socket: Any) -> None:
        decoder = Decoder(m.Join, m.Refused, m.Work, m.Drain, m.Quit, m.Introduce)
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        next_beat, is_draining = 0.0, False
        while self.refused is None and self.told_to_quit is None:
            poller.poll(max(0.0, 1000 * (next_beat - time.monotonic())))
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake)
            if self._frozen.is_set():
                next_beat = time.monotonic() + 0.02
                self._wait_frozen()
            self._send_answers(socket)
            with contextlib.suppress(zmq.Again):
                while True:
                    message, payload = decoder.decode(socket.recv_multipart(zmq.NOBLOCK))
                    self._take(socket, message, bytes(payload))
            if self._stop.is_set() and not is_draining:
                is_draining = True
                socket.send_multipart(encode(m.Draining(self._hand_back())))
            if is_draining and self._running is None and self._work.empty() and self._answers.empty():
                socket.send_multipart(encode(m.Bye("")))
                return
            if time.monotonic() >= next_beat:
                self._beat(socket)
                next_beat = time.monotonic() + (0.01 if is_draining else m.BEAT_INTERVAL_S)

    def _wait_frozen(self) -> None:
        while self._frozen.is_set():
            time.sleep(0.005)

    def _introduce(self, socket: Any) -> None:
        token = self.run_dir.token() if self._token is None else self._token
        announce = m.WorkerAnnounce(m.PROTOCOL_VERSION, token, self.slot, self.pid, self._incarnation, "fake")
        socket.send_multipart(encode(announce))
        if not self._announce_only:
            hello = m.WorkerHello(*msgspec.structs.astuple(announce), self._facts, self._limits)
            socket.send_multipart(encode(hello))

    def _take(self, socket: Any, message: Any, payload: bytes) -> None:
        match message:
            case m.Join():
                self.is_joined.set()
            case m.Refused(reason=reason):
                self.refused = reason
            case m.Quit(reason=reason):
                self.told_to_quit = reason
            case m.Introduce():
                self._introduce(socket)
            case m.Drain():
                self._stop.set()
            case m.Work() if message.batch_id >= m.FIRST_CANARY_ID and self._canary is not None:
                row = self._canary
                answer = m.Done(message.boot_id, message.batch_id, [len(row)], [], 0.1)
                socket.send_multipart(encode(answer, array("f", row).tobytes()))
            case m.Work() if message.batch_id >= m.FIRST_CANARY_ID:
                pass
            case m.Work():
                self.batches.append(list(message.lengths))
                if self._stop.is_set():
                    socket.send_multipart(encode(m.Draining([message.batch_id])))
                else:
                    self._work.put((message, payload))

    def _hand_back(self) -> list[int]:
        returned = []
        with contextlib.suppress(queue.Empty):
            while True:
                entry = self._work.get_nowait()
                if entry is not None:
                    returned.append(entry[0].batch_id)
        return returned

    def _send_answers(self, socket: Any) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                socket.send_multipart(encode(*self._answers.get_nowait()))

    def _beat(self, socket: Any) -> None:
        running = self._running
        batch_id, busy_ms = (0, 0.0) if running is None else (running[0], 1000 * (time.monotonic() - running[1]))
        socket.send_multipart(encode(m.Beat(batch_id, busy_ms, 1 << 20)))

    # ---- the model's thread ----

    def _compute(self) -> None:
        while (entry := self._work.get()) is not None:
            work, payload = entry
            self._running = (work.batch_id, time.monotonic())
            self._answers.put(self._answer(work, payload))
            self._running = None
            self._nudge()

    def _answer(self, work: m.Work, payload: bytes) -> tuple[Any, bytes]:
        inputs: list[Sequence[int]] = []
        ids, start = array("i", payload), 0
        for length in work.lengths:
            inputs.append(ids[start : start + length])
            start += length
        began = time.monotonic()
        try:
            rows = self._model(inputs, work)
        except FakeBatchError as error:
            return m.BatchFailed(work.boot_id, work.batch_id, error.code, "the fake model failed", error.retryable), b""
        failures = [m.InputFailure(i, row, "") for i, row in enumerate(rows) if isinstance(row, m.ErrorCode)]
        values = [() if isinstance(row, m.ErrorCode) else row for row in rows]
        done = m.Done(work.boot_id, work.batch_id, [len(row) for row in values], failures, 1000 * (time.monotonic() - began))
        return done, array("f", [value for row in values for value in row]).tobytes()

    def _nudge(self) -> None:
        with contextlib.suppress(OSError):  # its thread may have ended
            os.eventfd_write(self._wake, 1)

    def _end(self) -> None:
        for thread in self._threads:
            thread.join(10)
            assert not thread.is_alive(), f"{thread.name} hangs"
        if self._wake >= 0:
            os.close(self._wake)
            self._wake = -1


class FakeFrontend:
    """A frontend without HTTP. Not a thread: it reads when it is asked to."""

    def __init__(self, run_dir: RunDir, *, index: int = 0, pid: int = 0) -> None:
        self.state: m.BrokerState | None = None
        self.introductions: list[m.Introduce] = []
        self.rows: dict[int, dict[int, list[float]]] = {}
        """Per rid, the rows that came, by input index."""
        self.failures: dict[int, m.RequestFailure] = {}
        self.results = 0
        """Result messages that came."""
        self._index = index
        self._pid = pid
        self._context: zmq.Context[Any] = zmq.Context()
        self.socket = open_dealer(self._context, run_dir.frontends_endpoint, new_identity("frontend", index))
        self._decoder = Decoder(m.BrokerState, m.Result, m.RequestFailure, m.Introduce, m.StatusReport)
        self._inputs: dict[int, int] = {}
        self._report: m.StatusReport | None = None

    def __enter__(self) -> FakeFrontend:
        return self.greet()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._context.destroy(linger=0)

    def greet(self) -> FakeFrontend:
        """Say hello and wait for the broker's state."""
        self.state = None
        self.send(m.FrontendHello(m.PROTOCOL_VERSION, self._index, self._pid))
        self.read_until(lambda: self.state is not None, what="an answer to the hello")
        return self

    def send(self, message: Any, payload: bytes = b"") -> None:
        """Send any message."""
        self.socket.send_multipart(encode(message, payload))

    def submit(self, rid: int, inputs: Sequence[Sequence[int]], **fields: Any) -> None:
        """Send one request; see ``submit_many``."""
        self.submit_many({rid: inputs}, **fields)

    def submit_many(
        self,
        requests: dict[int, Sequence[Sequence[int]]],
        *,
        ttl_s: float = 60.0,
        priority: int = 0,
        resubmitted: bool = False,
    ) -> None:
        """Send requests, given by rid as lists of ids, in one message."""
        submitted, ids = [], array("i")
        for rid, inputs in requests.items():
            lengths = [len(each) for each in inputs]
            submitted.append(m.SubmittedRequest(rid, lengths, round(1000 * ttl_s), priority, m.EncodeOptions(), resubmitted))
            self._inputs[rid] = len(inputs)
            for each in inputs:
                ids.extend(each)
        self.send(m.Submit(submitted), ids.tobytes())

    def wait(self, rid: int, within_s: float = 10.0) -> list[list[float]]:
        """The rows of a request, in input order. Raises FakeRequestError when it failed."""
        self.read_until(lambda: self.is_over(rid), within_s, f"request {rid}")
        if rid in self.failures:
            raise FakeRequestError(self.failures[rid])
        return [self.rows[rid][index] for index in range(self._inputs[rid])]

    def is_over(self, rid: int) -> bool:
        """Whether all rows of a request came, or its failure."""
        return rid in self.failures or len(self.rows.get(rid, ())) == self._inputs[rid]

    def status(self) -> m.StatusReport:
        """Ask for GET /status."""
        self._report = None
        self.send(m.StatusQuery())
        self.read_until(lambda: self._report is not None, what="a status report")
        assert self._report is not None
        return self._report

    def read_until(self, predicate: Callable[[], bool], within_s: float = 10.0, what: str = "what was waited for") -> None:
        """Read messages until the predicate holds."""
        deadline = time.monotonic() + within_s
        while not predicate():
            left_ms = 1000 * (deadline - time.monotonic())
            assert left_ms > 0, f"{what} did not come within {within_s:g} s"
            if self.socket.poll(left_ms):
                self._take(*self._decoder.decode(self.socket.recv_multipart()))

    def _take(self, message: Any, payload: Any) -> None:
        match message:
            case m.BrokerState():
                self.state = message
            case m.Introduce():
                self.introductions.append(message)
            case m.StatusReport():
                self._report = message
            case m.RequestFailure():
                assert message.rid not in self.failures, f"request {message.rid} failed twice"
                self.failures[message.rid] = message
            case m.Result():
                self.results += 1
                self._take_rows(message, payload)

    def _take_rows(self, result: m.Result, payload: Any) -> None:
        values, start = array("f", bytes(payload)), 0
        for request in result.requests:
            rows = self.rows.setdefault(request.rid, {})
            for index, size in zip(request.indexes, request.row_values, strict=True):
                assert index not in rows, f"input {index} of request {request.rid} was answered twice"
                rows[index] = list(values[start : start + size])
                start += size


def spawn_worker(
    run_dir: RunDir, *, slot: int = 0, seconds_per_batch: float = 0.0, poison: int = -1
) -> subprocess.Popen[bytes]:
    """A fake worker as a process of its own. It dies of a batch that holds the id ``poison``."""
    arguments = [str(run_dir.path), str(slot), str(seconds_per_batch), str(poison)]
    return subprocess.Popen([sys.executable, __file__, *arguments])


def _run_worker(path: str, slot: str, seconds_per_batch: str, poison: str) -> None:
    def model(inputs: list[Sequence[int]], work: m.Work) -> list[Row]:
        if any(int(poison) in ids for ids in inputs):
            os._exit(1)
        time.sleep(float(seconds_per_batch))
        return encode_batch(inputs, work)

    worker = FakeWorker(RunDir(Path(path)), slot=int(slot), model=model, pid=os.getpid())
    worker.start(wait=False)
    worker.is_gone.wait()


if __name__ == "__main__":
    _run_worker(*sys.argv[1:])
