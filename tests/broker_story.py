"""Stories for the broker's core: events in, whole action lists out, as short readable lines.

Every token of an input is ``10_000 * rid + index`` and every row is ``(rid, index)``, so that the lines show what the payloads
really hold: a story that reads ``batch 1 -> w0: 7.0 7.1`` proves that the ids were cut right.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from model_facts import model_facts
from packhorse_broker import events as e
from packhorse_broker.core import BrokerCore
from packhorse_shared import messages as m
from packhorse_shared.settings import Settings

TOKEN = "t" * 64
BOOT_ID = 77
INPUTS_PER_RID = 10_000
MODEL = model_facts(max_seq_len=512, vocabulary_rows=1000)
CANARY_ROW = (0.5, -0.5)
ROOMY = m.WorkerLimits(max_batch_size=4096, max_num_tokens=1 << 20)


def settings(**values: Any) -> Settings:
    """Settings with some values changed, by name, wherever they are in the tree."""
    base = Settings()
    for section in ("model", "batching", "http", "workers", "process"):
        part = getattr(base, section)
        mine = {name: value for name, value in values.items() if hasattr(part, name)}
        if mine:
            base = msgspec.structs.replace(base, **{section: msgspec.structs.replace(part, **mine)})
    return base


class Story:
    """One core, a clock, and short words for what happens to it. Every step checks the core's invariants."""

    def __init__(self, **values: Any) -> None:
        self.now = 100.0
        self.settings = settings(**values)
        self.core = BrokerCore(self.settings, boot_id=BOOT_ID, worker_token=TOKEN, now=self.now)
        self.sent: dict[int, e.SendBatch] = {}
        """Every batch that was handed out, by id."""
        self.open: dict[str, list[int]] = {}
        """The batches that each worker was sent and has not answered, in order."""
        self.canaries: dict[str, int] = {}
        """The last canary that each worker was sent."""

    # ---- steps ----

    def feed(self, *events: e.Event) -> list[str]:
        """Some events, then the dispatch pass of their wake-up."""
        lines: list[str] = []
        for event in (*events, e.TimePassed()):
            for action in self.core.handle(event, self.now):
                if isinstance(action, e.SendBatch) and action.work.batch_id >= m.FIRST_CANARY_ID:
                    self.canaries[action.worker.decode()] = action.work.batch_id
                elif isinstance(action, e.SendBatch):
                    self.sent[action.work.batch_id] = action
                    self.open.setdefault(action.worker.decode(), []).append(action.work.batch_id)
                lines.append(line_of(action))
            self.core.check_invariants()
        return lines

    def wait(self, seconds: float) -> list[str]:
        """Let time pass, waking up exactly when the core asks for it."""
        end, lines = self.now + seconds, []
        for _ in range(10_000):
            deadline = self.core.next_deadline()
            if deadline is None or deadline > end:
                break
            self.now = max(self.now, deadline)
            lines += self.feed()
        else:
            raise AssertionError("the core spins")
        self.now = end
        return lines + self.feed()

    def wait_alive(self, seconds: float, *workers: str) -> list[str]:
        """Let time pass while these workers beat."""
        lines, end = [], self.now + seconds
        while self.now < end:
            lines += self.wait(min(0.25, end - self.now))
            lines += self.feed(*(beat(worker, next(iter(self.open.get(worker, ())), 0)) for worker in workers))
        return lines

    def with_frontend(self, name: str = "f0") -> Story:
        """A frontend that said hello."""
        self.feed(e.FrontendGreeted(name.encode(), m.FrontendHello(m.PROTOCOL_VERSION, int(name[1:]), 1000 + int(name[1:]))))
        return self

    def with_workers(self, *names: str, limits: m.WorkerLimits = ROOMY) -> Story:
        """Workers that are ready."""
        for name in names:
            self.feed(hello(name, limits=limits))
            self.passed(name)
        return self

    def passed(self, worker: str, row: Sequence[float] = CANARY_ROW) -> list[str]:
        """A worker answers its canary, by default rightly."""
        return self.feed(self.canary_answer(worker, row))

    def canary_answer(self, worker: str, row: Sequence[float] = CANARY_ROW) -> e.BatchFinished:
        """A worker's answer to its canary."""
        done = m.Done(BOOT_ID, self.canaries[worker], [len(row)], [], 1.0)
        return e.BatchFinished(worker.encode(), done, array("f", row).tobytes())

    def back(self, worker: str) -> list[str]:
        """A worker that was silent beats again, and answers the canary that this brings."""
        return self.feed(beat(worker)) + self.passed(worker)

    def submit(self, rid: int, lengths: Sequence[int] = (1,), **fields: Any) -> list[str]:
        """One request of frontend f0."""
        return self.feed(submit(rid, lengths, **fields))

    def done(self, worker: str, batch_id: int, **fields: Any) -> list[str]:
        """A worker answers a batch with the right rows."""
        return self.feed(self.done_event(worker, batch_id, **fields))

    def done_event(
        self, worker: str, batch_id: int, failures: Iterable[m.InputFailure] = (), boot_id: int = BOOT_ID
    ) -> e.BatchFinished:
        """The right answer to a batch that was handed out."""
        inputs = inputs_of(self.sent[batch_id])
        if batch_id in self.open.get(worker, ()):
            self.open[worker].remove(batch_id)
        failed = {failure.index for failure in failures}
        rows = [() if position in failed else each for position, each in enumerate(inputs)]
        done = m.Done(boot_id, batch_id, [len(row) for row in rows], list(failures), 4.0)
        return e.BatchFinished(worker.encode(), done, array("f", [value for row in rows for value in row]).tobytes())

    def report(self) -> m.StatusReport:
        """GET /status, as the core tells it."""
        actions = self.core.handle(e.StatusAsked(b"s0"), self.now)
        assert isinstance(actions[0], e.TellFrontend)
        assert isinstance(actions[0].message, m.StatusReport)
        return actions[0].message


def submit(rid: int, lengths: Sequence[int] = (1,), *, frontend: str = "f0", **fields: Any) -> e.RequestsSubmitted:
    """A message with one request."""
    return submit_many([(rid, lengths)], frontend=frontend, **fields)


def submit_many(
    requests: Iterable[tuple[int, Sequence[int]]],
    *,
    frontend: str = "f0",
    ttl_s: float = 60.0,
    priority: int = 0,
    options: m.EncodeOptions | None = None,
    resubmitted: bool = False,
) -> e.RequestsSubmitted:
    """A message with several requests."""
    submitted, ids = [], array("i")
    for rid, lengths in requests:
        submitted.append(
            m.SubmittedRequest(rid, list(lengths), round(1000 * ttl_s), priority, options or m.EncodeOptions(), resubmitted)
        )
        for index, length in enumerate(lengths):
            ids.extend([INPUTS_PER_RID * rid + index] * length)
    return e.RequestsSubmitted(frontend.encode(), submitted, ids.tobytes())


def hello(
    worker: str,
    *,
    limits: m.WorkerLimits = ROOMY,
    token: str = TOKEN,
    version: int = m.PROTOCOL_VERSION,
    model: m.ModelFacts = MODEL,
    incarnation: int = 1,
) -> e.WorkerGreeted:
    """A worker that has loaded; ``w3`` has slot 3 and pid 2003."""
    slot = int(worker[1:])
    return e.WorkerGreeted(worker.encode(), m.WorkerHello(version, token, slot, 2000 + slot, incarnation, "cpu", model, limits))


def announce(worker: str, *, incarnation: int = 1, token: str = TOKEN) -> e.WorkerAnnounced:
    """A worker that begins to load."""
    slot = int(worker[1:])
    announced = m.WorkerAnnounce(m.PROTOCOL_VERSION, token, slot, 2000 + slot, incarnation, "cpu")
    return e.WorkerAnnounced(worker.encode(), announced)


def beat(worker: str, batch_id: int = 0, busy_ms: float = 0.0) -> e.WorkerBeat:
    """A sign of life."""
    return e.WorkerBeat(worker.encode(), m.Beat(batch_id, busy_ms, 1))


def lost(worker: str) -> e.WorkerLost:
    """A worker's process ended."""
    return e.WorkerLost(worker.encode(), "its process ended")


def inputs_of(action: e.SendBatch) -> list[tuple[int, int]]:
    """(rid, index) of each input of a batch, read from its payload."""
    ids = array("i", b"".join(bytes(piece) for piece in action.payload))
    inputs, start = [], 0
    for length in action.work.lengths:
        tokens = set(ids[start : start + length])
        assert len(tokens) == 1, f"ids of several inputs in one: {tokens}"
        inputs.append(divmod(tokens.pop(), INPUTS_PER_RID))
        start += length
    assert start == len(ids), "ids are left over"
    return inputs


def line_of(action: e.Action) -> str:  # noqa: PLR0911 (one return per kind of action)
    """An action in one line."""
    match action:
        case e.SendBatch(worker=worker, work=work):
            assert work.boot_id == BOOT_ID
            if work.batch_id >= m.FIRST_CANARY_ID:
                assert array("i", b"".join(bytes(piece) for piece in action.payload)) == array("i", MODEL.canary)
                return f"canary -> {worker.decode()}"
            return f"batch {work.batch_id} -> {worker.decode()}: {_names(inputs_of(action))}"
        case e.SendResult(frontend=frontend, result=result, payload=payload):
            return f"result -> {frontend.decode()}: {_names(_rows(result, payload))}"
        case e.FailRequest(frontend=frontend, failure=failure):
            index = "" if failure.index is None else f" input {failure.index}"
            retry = f" retry {failure.retry_after_s}" if failure.retry_after_s else ""
            return f"fail -> {frontend.decode()}: {failure.rid} {failure.code}{index}{retry}"
        case e.TellFrontend(peer=peer, message=m.BrokerState() as state):
            flags = " draining" if state.draining else ""
            counts = f"ready {state.ready_workers} loading {state.loading_workers} queue {state.queue_inputs}"
            return f"state -> {peer.decode()}: {counts}{flags}"
        case e.TellFrontend(peer=peer, message=message) | e.TellWorker(peer=peer, message=message):
            return f"{type(message).__name__.lower()} -> {peer.decode()}"
        case e.WatchFrontend(frontend=peer, pid=pid) | e.WatchWorker(worker=peer, pid=pid):
            return f"watch {peer.decode()} {pid}"
        case e.UnwatchFrontend(frontend=peer):
            return f"unwatch {peer.decode()}"
        case e.KillWorker(worker=worker, pid=pid):
            return f"kill {worker.decode()} {pid}"
        case e.WriteLog(message=message):
            return f"log: {message}"
        case e.Stop():
            return "stop"
    raise AssertionError(f"unknown action {action!r}")


def without_logs(lines: list[str]) -> list[str]:
    """Only what leaves the process."""
    return [line for line in lines if not line.startswith("log: ")]


def _rows(result: m.Result, payload: e.Payload) -> list[tuple[int, int]]:
    """(rid, index) of each row, after checking that the row says the same."""
    values = array("f", b"".join(bytes(piece) for piece in payload))
    named = [(request.rid, index) for request in result.requests for index in request.indexes]
    sizes = [size for request in result.requests for size in request.row_values]
    assert sizes == [2] * len(named)
    held = [(int(values[2 * position]), int(values[2 * position + 1])) for position in range(len(values) // 2)]
    assert held == named, f"rows {held[:9]} are called {named[:9]}"
    return named


def _names(inputs: Iterable[tuple[int, int]]) -> str:
    return " ".join(f"{rid}.{index}" for rid, index in inputs)
