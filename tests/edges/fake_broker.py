"""A broker for the frontend's tests: a ROUTER in a thread that speaks the protocol and encodes with a function.

What it received can be looked at, what it answers can be changed while it runs.
"""

from __future__ import annotations

import os
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import zmq

from model_facts import model_facts
from packhorse_shared.codec import Decoder, encode
from packhorse_shared.messages import (
    BrokerState,
    Cancel,
    FrontendHello,
    Introduce,
    MetricsQuery,
    MetricsReport,
    ModelStatus,
    Ping,
    QueueStatus,
    RateStatus,
    RequestFailure,
    RequestRows,
    Result,
    StatusQuery,
    StatusReport,
    Submit,
    SubmittedRequest,
    Tally,
    WorkerStatus,
)
from packhorse_shared.meter import Meter
from packhorse_shared.sockets import open_router

DIMENSION = 32
MODEL = model_facts(dimension=DIMENSION)
STATE = BrokerState(
    boot_id=1,
    draining=False,
    queue_inputs=0,
    queue_limit=100,
    ready_workers=1,
    loading_workers=0,
    max_num_tokens=8192,
    retry_after_s=3,
    model=MODEL,
)


def encode_ids(ids: Sequence[int], dimension: int = DIMENSION) -> np.ndarray:
    """A vector that depends on every id and on its place, of length 1."""
    seed = np.uint64(7)
    for token_id in ids:
        seed = np.uint64((int(seed) * 6364136223846793005 + token_id + 1442695040888963407) % 2**64)
    vector = np.random.default_rng(int(seed)).standard_normal(dimension).astype(np.float32)
    return vector / np.linalg.norm(vector)


@dataclass(frozen=True)
class Received:
    """One request as the broker got it."""

    identity: bytes
    request: SubmittedRequest
    inputs: list[list[int]]


@dataclass
class FakeBroker:
    """See the module. Change its public fields through ``do``, which runs in its thread."""

    path: Path
    state: BrokerState = STATE
    encode: Callable[[Sequence[int]], np.ndarray] = encode_ids
    batch_size: int = 8
    is_holding: bool = False
    """Whether requests are kept without an answer."""
    is_silent: bool = False
    """Whether nothing at all is answered."""
    failure: Callable[[SubmittedRequest], RequestFailure | None] = lambda _request: None
    submits: list[Submit] = field(default_factory=list)
    received: list[Received] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)
    hellos: list[FrontendHello] = field(default_factory=list)
    known: set[bytes] = field(default_factory=set)
    answered: set[int] = field(default_factory=set)
    meter: Meter = field(default_factory=Meter)
    """What its frontends have told."""

    def __post_init__(self) -> None:
        self._todo: deque[Callable[[], Any]] = deque()
        self._is_ending = False
        self._random = random.Random(7)
        self._decoder = Decoder(FrontendHello, Submit, Cancel, Ping, StatusQuery, Tally, MetricsQuery)
        self._thread = threading.Thread(target=self._run, daemon=True)

    def do(self, action: Callable[[], Any]) -> Any:
        """Run something in the broker's thread, and wait for its result."""
        done = threading.Event()
        outcome: list[Any] = []

        def run() -> None:
            outcome.append(action())
            done.set()

        self._todo.append(run)
        assert done.wait(5), "the fake broker is stuck"
        return outcome[0]

    def change(self, **fields: Any) -> None:
        """Change fields of the state, and tell every frontend."""

        def run() -> None:
            self.state = msgspec.structs.replace(self.state, **fields)
            self._tell_state()

        self.do(run)

    def release(self) -> None:
        """Answer what was held, and hold no more."""

        def run() -> None:
            self.is_holding = False
            for each in self.received:
                if each.request.rid not in self.answered and each.request.rid not in self.cancelled:
                    self._answer(each)

        self.do(run)

    def restart(self, boot_id: int) -> None:
        """Be another broker on the same endpoint: nothing is known any more."""

        def run() -> None:
            self.state = msgspec.structs.replace(self.state, boot_id=boot_id)
            self.known.clear()

        self.do(run)

    def send(self, identity: bytes, message: Any, payload: Any = b"") -> None:
        """Send any message. Only in the broker's thread."""
        try:
            self._router.send_multipart([identity, *encode(message, payload)])
        except zmq.ZMQError:
            self.known.discard(identity)

    def send_rows(self, identity: bytes, rid: int, indexes: Sequence[int], rows: Sequence[np.ndarray]) -> None:
        """Send rows of one request. Only in the broker's thread."""
        part = RequestRows(rid, list(indexes), [len(row) for row in rows], 0.1, 0.2)
        self.send(identity, Result([part]), b"".join(row.astype("<f4").tobytes() for row in rows))

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        self._is_ending = True
        self._thread.join(5)

    def _run(self) -> None:
        context: zmq.Context = zmq.Context()
        self._router = open_router(context, f"ipc://{self.path / 'frontends.ipc'}")
        try:
            while not self._is_ending:
                while self._todo:
                    self._todo.popleft()()
                if self._router.poll(2):
                    identity, *frames = self._router.recv_multipart()
                    message, payload = self._decoder.decode(frames)
                    if not self.is_silent:
                        self._handle(identity, message, payload)
        finally:
            context.destroy(linger=0)

    def _tell_state(self) -> None:
        for identity in list(self.known):
            self.send(identity, self.state)

    def _handle(self, identity: bytes, message: Any, payload: Any) -> None:
        match message:
            case FrontendHello():
                self.hellos.append(message)
                self.known.add(identity)
                self.send(identity, self.state)
            case StatusQuery():
                self.send(identity, self._report())
            case MetricsQuery():
                self.send(identity, MetricsReport(self.meter.values))
            case _ if identity not in self.known:
                self.send(identity, Introduce(self.state.boot_id))
            case Tally():
                self.meter.add(message.changes)
            case Ping():
                self.send(identity, self.state)
            case Cancel():
                self.cancelled.extend(message.rids)
            case Submit():
                self.submits.append(message)
                self._take(identity, message, np.frombuffer(payload, dtype="<i4"))

    def _take(self, identity: bytes, submit: Submit, ids: np.ndarray) -> None:
        start = 0
        for request in submit.requests:
            inputs = []
            for length in request.lengths:
                inputs.append(ids[start : start + length].tolist())
                start += length
            received = Received(identity, request, inputs)
            self.received.append(received)
            if not self.is_holding:
                self._answer(received)

    def _answer(self, received: Received) -> None:
        rid = received.request.rid
        self.answered.add(rid)
        failure = self.failure(received.request)
        if failure is not None:
            self.send(received.identity, failure)
            return
        indexes = list(range(len(received.inputs)))
        self._random.shuffle(indexes)
        for start in range(0, len(indexes), self.batch_size):
            batch = indexes[start : start + self.batch_size]
            self.send_rows(received.identity, rid, batch, [self.encode(received.inputs[index]) for index in batch])

    def _report(self) -> StatusReport:
        worker = WorkerStatus("worker-0", os.getpid(), "cpu", "ready", 0, 1, 2, 3, 0.5, 1024)
        return StatusReport(
            "another version",
            ModelStatus("tiny", "embedding", DIMENSION, 64, "float32"),
            QueueStatus(0, 0, 0.0, self.state.queue_limit),
            [worker],
            RateStatus(1.0, 2.0, 3.0),
        )


@contextmanager
def running_broker(path: Path, **fields: Any) -> Iterator[FakeBroker]:
    """A fake broker in the run directory ``path``, ended with the block."""
    broker = FakeBroker(path, **fields)
    broker.start()
    try:
        yield broker
    finally:
        broker.end()
