"""A state machine against the core: whatever happens in whatever order, every input is answered exactly once."""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass, field

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from broker_story import BOOT_ID, CANARY_ROW, TOKEN, announce, beat, hello, inputs_of, lost, submit
from broker_story import settings as broker_settings
from packhorse_broker import events as e
from packhorse_broker.core import BrokerCore
from packhorse_broker.patrol import SILENT_AFTER_S
from packhorse_broker.retries import MAX_ATTEMPTS
from packhorse_shared import messages as m

_HEARD = (e.WorkerAnnounced, e.WorkerGreeted, e.WorkerBeat, e.BatchFinished, e.BatchBroke, e.WorkerDrained)
MAX_BATCH_SIZE = 5
MAX_NUM_TOKENS = 20


@dataclass
class _Asked:
    """A request as its frontend sees it."""

    frontend: str
    lengths: list[int]
    deadline: float
    answered: set[int] = field(default_factory=set)
    outcome: str | None = None
    """``done``, ``failed`` or ``unwanted``, once it is over."""


@dataclass
class _Process:
    """A worker as itself sees it: what it was sent and has not answered, in order."""

    name: str
    limits: m.WorkerLimits
    open: list[e.SendBatch] = field(default_factory=list)
    canary: int | None = None
    """The canary that it was sent last, while it has not answered it."""
    has_passed: bool = False
    """Since it was heard last without a second of silence before."""
    heard_at: float = 0.0
    is_draining: bool = False


class BrokerMachine(RuleBasedStateMachine):
    """Frontends, workers and a clock, all unreliable."""

    @initialize(delay=st.sampled_from([0.0, 0.01, "auto"]), queue_size=st.sampled_from([3, 1000]), workers=st.integers(0, 2))
    def start(self, delay: float | str, queue_size: int, workers: int) -> None:
        self.now = 50.0
        self.core = BrokerCore(
            broker_settings(
                max_batch_size=MAX_BATCH_SIZE,
                max_num_tokens=MAX_NUM_TOKENS,
                max_queue_delay=delay,
                max_queue_size=queue_size,
                batch_timeout=5.0,
                worker_timeout=3.0,
            ),
            boot_id=BOOT_ID,
            worker_token=TOKEN,
            now=self.now,
        )
        self.asked: dict[int, _Asked] = {}
        self.workers: dict[str, _Process] = {}
        self.zombies: list[_Process] = []
        self.last_rid = 0
        self.last_worker = -1
        self.batch_ids: set[int] = set()
        self.attempts: dict[tuple[int, int], int] = {}
        self.stopped = False
        for name in ("f0", "f1"):
            self.greet(name)
        for _ in range(workers):
            self.join(limit=MAX_NUM_TOKENS)

    # ---- what the core says ----

    def feed(self, *events: e.Event) -> None:
        for event in (*events, e.TimePassed()):
            if isinstance(event, _HEARD) and (worker := self.workers.get(event.worker.decode())) is not None:
                worker.has_passed = worker.has_passed and self.now < worker.heard_at + SILENT_AFTER_S
                worker.heard_at = self.now
            for action in self.core.handle(event, self.now):
                self.carry_out(action)

    def carry_out(self, action: e.Action) -> None:
        match action:
            case e.SendBatch(worker=worker, work=work):
                self.take_batch(self.workers[worker.decode()], action, work)
            case e.SendResult(frontend=frontend, result=result, payload=payload):
                self.take_result(frontend.decode(), result, payload)
            case e.FailRequest(frontend=frontend, failure=failure):
                asked = self.asked[failure.rid]
                assert asked.outcome is None, f"request {failure.rid} is over already: {asked.outcome}"
                assert asked.frontend == frontend.decode()
                asked.outcome = "failed"
            case e.KillWorker(worker=worker):
                self.zombies.append(self.workers.pop(worker.decode()))
            case e.Stop():
                self.stopped = True

    def take_batch(self, worker: _Process, action: e.SendBatch, work: m.Work) -> None:
        assert not worker.is_draining
        if work.batch_id >= m.FIRST_CANARY_ID:
            worker.canary, worker.has_passed = work.batch_id, False
            return
        assert worker.has_passed, "a worker was sent users' inputs before it answered its canary"
        assert self.now < worker.heard_at + SILENT_AFTER_S, "a silent worker was sent work"
        assert work.batch_id not in self.batch_ids, "a batch id was used twice"
        self.batch_ids.add(work.batch_id)
        assert len(work.lengths) <= MAX_BATCH_SIZE
        assert sum(work.lengths) <= min(MAX_NUM_TOKENS, worker.limits.max_num_tokens)
        for (rid, index), length in zip(inputs_of(action), work.lengths, strict=True):
            asked = self.asked[rid]
            assert asked.outcome is None, "an input of a request that is over was sent"
            assert index not in asked.answered, "an answered input was sent again"
            assert asked.lengths[index] == length
        worker.open.append(action)

    def take_result(self, frontend: str, result: m.Result, payload: e.Payload) -> None:
        values = array("f", b"".join(bytes(piece) for piece in payload))
        rows = [(request.rid, index) for request in result.requests for index in request.indexes]
        assert len({request.rid for request in result.requests}) == len(result.requests), "a request is listed twice"
        assert [int(value) for value in values] == [number for row in rows for number in row]
        for rid, index in rows:
            asked = self.asked[rid]
            assert asked.frontend == frontend
            assert asked.outcome is None, f"rows for a request that is {asked.outcome}"
            assert index not in asked.answered, "an input was answered twice"
            asked.answered.add(index)
            if len(asked.answered) == len(asked.lengths):
                asked.outcome = "done"

    # ---- frontends ----

    def greet(self, name: str) -> None:
        self.feed(e.FrontendGreeted(name.encode(), m.FrontendHello(m.PROTOCOL_VERSION, int(name[1:]), 1)))

    @rule(
        frontend=st.sampled_from(["f0", "f1"]),
        lengths=st.lists(st.integers(1, 12), min_size=1, max_size=12),
        ttl_s=st.sampled_from([0.0, 0.5, 30.0, 30.0, 30.0]),
        priority=st.sampled_from([0, 0, 0, -1, 7]),
        resubmitted=st.booleans(),
    )
    def ask(self, frontend: str, lengths: list[int], ttl_s: float, priority: int, resubmitted: bool) -> None:
        self.last_rid += 1
        self.asked[self.last_rid] = _Asked(frontend, lengths, self.now + ttl_s)
        event = submit(self.last_rid, lengths, frontend=frontend, ttl_s=ttl_s, priority=priority, resubmitted=resubmitted)
        self.feed(event)
        if self.asked[self.last_rid].outcome is None:
            self.feed(event)  # a second live copy: it must change nothing

    def open_rids(self) -> list[int]:
        return [rid for rid, asked in self.asked.items() if asked.outcome is None]

    @precondition(lambda self: self.open_rids())
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        rid = data.draw(st.sampled_from(self.open_rids()))
        self.asked[rid].outcome = "unwanted"
        self.feed(e.RequestsCancelled(self.asked[rid].frontend.encode(), [rid]))

    @rule(frontend=st.sampled_from(["f0", "f1"]))
    def frontend_restarts(self, frontend: str) -> None:
        for asked in self.asked.values():
            if asked.frontend == frontend and asked.outcome is None:
                asked.outcome = "unwanted"
        self.feed(e.FrontendLost(frontend.encode(), "its process ended"))
        self.greet(frontend)

    # ---- workers ----

    @precondition(lambda self: len(self.workers) < 3)
    @rule(
        limit=st.sampled_from([MAX_NUM_TOKENS, MAX_NUM_TOKENS, 12]),
        sings=st.sampled_from([True, True, False]),
        overlaps=st.booleans(),
    )
    def join(self, limit: int, sings: bool = True, overlaps: bool = False) -> None:
        self.last_worker += 1
        name = f"w{self.last_worker}"
        limits = m.WorkerLimits(max_batch_size=100, max_num_tokens=limit, overlaps=overlaps)
        self.workers[name] = _Process(name, limits)
        self.feed(announce(name))
        self.feed(hello(name, limits=limits))
        if sings:
            self.sing(self.workers[name])

    @rule(data=st.data(), row=st.sampled_from([CANARY_ROW, CANARY_ROW, CANARY_ROW, (0.5, math.nan), (0.5,), (9.0, -9.0)]))
    @precondition(lambda self: self.tested_workers())
    def answer_canary(self, data: st.DataObject, row: tuple[float, ...]) -> None:
        self.sing(self.workers[data.draw(st.sampled_from(self.tested_workers()))], row)

    def tested_workers(self) -> list[str]:
        return [worker.name for worker in self.workers.values() if worker.canary is not None]

    def sing(self, worker: _Process, row: tuple[float, ...] = CANARY_ROW) -> None:
        """Answer the canary. Who gives rows that no model gives must never be sent an input."""
        assert worker.canary is not None
        done = m.Done(BOOT_ID, worker.canary, [len(row)], [], 1.0)
        worker.canary, worker.has_passed = None, len(row) == 2 and not math.isnan(row[1])
        self.feed(e.BatchFinished(worker.name.encode(), done, array("f", row).tobytes()))

    def answer(self, worker: _Process, batch: e.SendBatch, failures: tuple[int, ...] = ()) -> None:
        rows = inputs_of(batch)
        failed = [m.InputFailure(position, m.ErrorCode.FORWARD_FAILED, "") for position in failures]
        kept = [() if position in failures else row for position, row in enumerate(rows)]
        done = m.Done(BOOT_ID, batch.work.batch_id, [len(row) for row in kept], failed, 1.0)
        payload = array("f", [number for row in kept for number in row]).tobytes()
        self.feed(e.BatchFinished(worker.name.encode(), done, payload))

    def busy_workers(self) -> list[str]:
        return [worker.name for worker in self.workers.values() if worker.open]

    @precondition(lambda self: self.busy_workers())
    @rule(data=st.data(), fail=st.sampled_from([False, False, True]), again=st.booleans())
    def finish(self, data: st.DataObject, fail: bool, again: bool) -> None:
        worker = self.workers[data.draw(st.sampled_from(self.busy_workers()))]
        batch = worker.open.pop(0)
        position = data.draw(st.integers(0, len(batch.work.lengths) - 1))
        self.answer(worker, batch, (position,) if fail else ())
        if again:
            self.answer(worker, batch)

    @precondition(lambda self: self.busy_workers())
    @rule(data=st.data(), retryable=st.booleans())
    def break_batch(self, data: st.DataObject, retryable: bool) -> None:
        worker = self.workers[data.draw(st.sampled_from(self.busy_workers()))]
        batch = worker.open.pop(0)
        failed = m.BatchFailed(BOOT_ID, batch.work.batch_id, m.ErrorCode.OUT_OF_MEMORY, "boom", retryable)
        self.feed(e.BatchBroke(worker.name.encode(), failed))

    @precondition(lambda self: self.workers)
    @rule(data=st.data(), late=st.booleans())
    def die(self, data: st.DataObject, late: bool) -> None:
        worker = self.workers.pop(data.draw(st.sampled_from(sorted(self.workers))))
        self.feed(lost(worker.name))
        if late and worker.open:
            self.answer(worker, worker.open[0])

    @precondition(lambda self: self.workers)
    @rule(data=st.data(), leaves=st.booleans())
    def drain_worker(self, data: st.DataObject, leaves: bool) -> None:
        worker = self.workers[data.draw(st.sampled_from(sorted(self.workers)))]
        begun = 2 if worker.limits.overlaps else 1
        returned, worker.open = worker.open[begun:], worker.open[:begun]
        worker.is_draining = True
        self.feed(e.WorkerDrained(worker.name.encode(), [batch.work.batch_id for batch in returned]))
        if leaves:
            del self.workers[worker.name]
            self.feed(e.WorkerLeft(worker.name.encode(), ""))

    @precondition(lambda self: self.workers)
    @rule(data=st.data(), answered=st.booleans())
    def lose_messages(self, data: st.DataObject, answered: bool) -> None:
        """A connection breaks and takes along what was on its way: batches down, or with ``answered`` the first answer up."""
        worker = self.workers[data.draw(st.sampled_from(sorted(self.workers)))]
        worker.canary = None
        del worker.open[: 1 if answered else None]

    @precondition(lambda self: self.workers)
    @rule(data=st.data(), returns=st.booleans())
    def cut_link(self, data: st.DataObject, returns: bool) -> None:
        worker = self.workers[data.draw(st.sampled_from(sorted(self.workers)))]
        self.feed(e.WorkerUnreachable(worker.name.encode()))
        worker.has_passed = False
        if returns and not worker.is_draining:
            self.feed(hello(worker.name, limits=worker.limits))

    @precondition(lambda self: self.workers)
    @rule(data=st.data())
    def disallow(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.workers)))
        self.feed(e.WorkerDisallowed(name.encode()))
        del self.workers[name]

    @precondition(lambda self: self.workers)
    @rule(data=st.data(), batch_id=st.sampled_from([0, 1, m.FIRST_CANARY_ID]), busy_ms=st.sampled_from([0.0, 4999.0]))
    def beat_oddly(self, data: st.DataObject, batch_id: int, busy_ms: float) -> None:
        self.feed(beat(data.draw(st.sampled_from(sorted(self.workers))), batch_id, busy_ms))

    @precondition(lambda self: self.workers)
    @rule(data=st.data())
    def refuse_batch(self, data: st.DataObject) -> None:
        """It has no room, as while it runs what was moved away from it."""
        worker = self.workers[data.draw(st.sampled_from(sorted(self.workers)))]
        if worker.open:
            batch_id = worker.open.pop().work.batch_id
            failed = m.BatchFailed(BOOT_ID, batch_id, m.ErrorCode.NO_WORKER, "no room", retryable=True)
            self.feed(e.BatchBroke(worker.name.encode(), failed))

    # ---- time ----

    @rule(stalled_s=st.sampled_from([0.6, 3.0, 40.0]))
    def stall(self, stalled_s: float) -> None:
        """The broker itself did not run."""
        self.now += stalled_s
        for worker in self.workers.values():
            worker.heard_at = self.now
        self.feed(e.BrokerStalled(stalled_s))

    def pass_time(self, seconds: float, beating: set[str]) -> None:
        end = self.now + seconds
        next_beat = self.now
        steps = 0
        while self.now < end:
            steps += 1
            assert steps < 5000, "the core spins"
            if self.now >= next_beat:
                self.feed(*(beat(name, self.running(name)) for name in sorted(beating & self.workers.keys())))
                self.feed(e.FrontendPinged(b"f0"), e.FrontendPinged(b"f1"))
                next_beat = self.now + 0.25
            deadline = self.core.next_deadline()
            self.now = min(end, next_beat, math.inf if deadline is None else max(deadline, self.now))
            self.feed()

    def running(self, name: str) -> int:
        worker = self.workers[name]
        return worker.canary or (worker.open[0].work.batch_id if worker.open else 0)

    @rule(seconds=st.sampled_from([0.001, 0.02, 0.3, 1.2, 3.5, 6.0]), data=st.data())
    def wait(self, seconds: float, data: st.DataObject) -> None:
        beating = data.draw(st.sets(st.sampled_from(sorted(self.workers)))) if self.workers else set()
        self.pass_time(seconds, beating)

    @precondition(lambda self: self.workers)
    @rule(data=st.data())
    def fall_silent(self, data: st.DataObject) -> None:
        """One worker says nothing for a while, has lost what it had at hand, and comes back."""
        worker = self.workers[data.draw(st.sampled_from(sorted(self.workers)))]
        self.pass_time(1.2, self.workers.keys() - {worker.name})
        worker.open.clear()
        self.pass_time(0.3, set(self.workers))

    # ---- what must hold ----

    @invariant()
    def counts_agree(self) -> None:
        if hasattr(self, "core"):
            self.core.check_invariants()

    @invariant()
    def no_request_outlives_its_time(self) -> None:
        for rid in self.open_rids() if hasattr(self, "core") else ():
            assert self.asked[rid].deadline > self.now - 0.001

    def teardown(self) -> None:
        """A healthy worker and some time: everything that was asked is over, and what is done is complete."""
        if not hasattr(self, "core"):
            return
        self.feed(*(lost(name) for name in self.workers))
        self.workers.clear()
        self.join(MAX_NUM_TOKENS)
        (worker,) = self.workers.values()
        for _ in range(200 * MAX_ATTEMPTS):
            if not self.open_rids():
                break
            while worker.open:
                self.answer(worker, worker.open.pop(0))
            self.pass_time(0.02, {worker.name})
        self.core.check_invariants()
        assert not self.open_rids(), "a request hangs"
        for asked in self.asked.values():
            assert asked.outcome != "done" or len(asked.answered) == len(asked.lengths)
        self.feed(e.DrainBegan())
        self.pass_time(1.0, {worker.name})
        assert self.stopped, "the drain does not end"


BrokerMachine.TestCase.settings = settings(
    max_examples=100,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestBrokerMachine = BrokerMachine.TestCase
