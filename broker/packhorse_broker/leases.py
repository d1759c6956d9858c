"""What is in flight on which worker.

A worker has two credits: the batch that it runs, and one at hand so that it never waits for the next. A batch id is new for
every hand-over; an answer settles a batch only if that very id is open on the worker that sends it, so late answers of moved
work fall flat.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from dataclasses import dataclass, field, replace

from packhorse_broker.canary import Canary
from packhorse_broker.fairness import Limits
from packhorse_broker.requests import Item
from packhorse_broker.stats import BusyShare, MovingAverage
from packhorse_shared.messages import ModelFacts, WorkerStatus

CREDITS = 2
HELD_UP_S = 1.0
"""A batch of suspects holds up those that wait for no longer than this."""
_SPEED_WEIGHT = 0.2
_FULL_COUNTS_S = 5.0
"""How long the time of full batches is believed while all batches are small ones. Under load there is always a full one."""


class WorkerState(enum.StrEnum):
    """Where a worker is in its life; that it is silent is told apart."""

    LOADING = "loading"
    TESTED = "tested"
    """It has loaded, or came back from a silence, and the canary is with it."""
    READY = "ready"
    DRAINING = "draining"


@dataclass(slots=True, eq=False)
class Batch:
    """Inputs that were handed to a worker together."""

    batch_id: int
    items: list[Item]
    tokens: int
    sent_at: float
    started_at: float | None
    """When its turn on the worker came; None while it is at hand behind another."""
    is_full: bool
    is_suspect: bool


class Speed:
    """How fast a worker is, learned from its batches."""

    def __init__(self) -> None:
        self.s_per_token = MovingAverage(_SPEED_WEIGHT)
        self.full_s_per_token = MovingAverage(_SPEED_WEIGHT)
        """Of full batches only: small ones cost more per token and say little about what a long queue will take."""
        self.s_per_full_batch = MovingAverage(_SPEED_WEIGHT)
        self._full_at = float("-inf")

    def predicted_s(self, batch: Batch) -> float:
        """What a batch should take; 0 while nothing is known."""
        predictions = (self.s_per_full_batch.value, None if (each := self.s_per_token.value) is None else each * batch.tokens)
        return min((each for each in predictions if each is not None), default=0.0)

    def ran(self, batch: Batch, took_s: float, now: float) -> None:
        """Learn from a finished batch.

        A full one that something held up, as the first one of a cold device, makes new requests be refused. Then none may
        ever fill a batch again and tell better, so what was learned from full batches is forgotten when no more come.
        """
        took_s = max(took_s, 1e-6)
        self.s_per_token.add(took_s / batch.tokens)
        if batch.is_full:
            self._full_at = now
            self.full_s_per_token.add(took_s / batch.tokens)
            self.s_per_full_batch.add(took_s)
        elif now >= self._full_at + _FULL_COUNTS_S:
            self.full_s_per_token.value = self.s_per_full_batch.value = None


@dataclass(slots=True, eq=False)
class Worker:
    """One worker process, as far as the broker knows."""

    identity: bytes
    slot: int
    pid: int
    incarnation: int
    device: str
    last_heard: float
    busy: BusyShare
    key_name: str = ""
    """Of the key with which it joined from another machine; empty for one of this machine."""
    state: WorkerState = WorkerState.LOADING
    is_silent: bool = False
    canary: Canary | None = None
    """While it is tested, unless the canary has yet to be sent."""
    has_passed: bool = False
    """Whether it ever answered a canary rightly."""
    is_held: bool = False
    """It would not begin a batch: it is sent nothing until a beat says that it is free."""
    facts: ModelFacts | None = None
    limits: Limits | None = None
    """Both None while it loads."""
    overlaps: bool = False
    """Whether it begins the batch at hand while the first one runs: then either may be what it dies of."""
    idle_beats: int = 0
    """Beats in a row that told of no batch."""
    in_flight: list[Batch] = field(default_factory=list)
    """At most ``CREDITS``; the first one runs."""
    speed: Speed = field(default_factory=Speed)
    memory_bytes: int = 0
    batches: int = 0
    inputs: int = 0
    tokens: int = 0

    @property
    def name(self) -> str:
        """What people see: by slot under supervisord, by pid when started by hand, by key and pid on another machine."""
        if self.key_name:
            return f"worker-{self.key_name}-{self.pid}"
        return f"worker-{self.slot if self.slot >= 0 else self.pid}"

    @property
    def is_live(self) -> bool:
        """Whether it may be sent work."""
        return self.state is WorkerState.READY and not (self.is_silent or self.is_held)

    def ready_limits(self) -> Limits:
        """What fits one batch of a worker that has said hello."""
        assert self.limits is not None, f"{self.name} has not said hello"
        return self.limits

    def predicted_end(self) -> float | None:
        """When the running batch should end, if any batch of this worker ever did."""
        running, speed = self.in_flight[0], self.speed
        if running.started_at is None or speed.s_per_token.value is None:
            return None
        return running.started_at + speed.predicted_s(running)

    def excuse(self, stalled_s: float, now: float) -> None:
        """The broker did not run for so long, until now: that time does not count for anything that is awaited from here."""
        self.last_heard = now
        if self.canary is not None:
            self.canary = replace(self.canary, sent_at=min(now, self.canary.sent_at + stalled_s))
        for batch in self.in_flight:
            batch.sent_at = min(now, batch.sent_at + stalled_s)
            if batch.started_at is not None:
                batch.started_at = min(now, batch.started_at + stalled_s)

    def ran(self, batch: Batch, now: float) -> None:
        """Count a batch that it answered, and learn from it."""
        assert batch.started_at is not None, "it never began"
        self.speed.ran(batch, now - batch.started_at, now)
        self.busy.ran(batch.started_at, now)
        self.batches += 1
        self.inputs += len(batch.items)
        self.tokens += batch.tokens

    def status(self, now: float) -> WorkerStatus:
        """Its row of GET /status."""
        running = self.in_flight[0].started_at if self.in_flight else None
        return WorkerStatus(
            id=self.name,
            pid=self.pid,
            device=self.device,
            state=self._shown_state(),
            in_flight=sum(len(batch.items) for batch in self.in_flight),
            batches=self.batches,
            inputs=self.inputs,
            tokens=self.tokens,
            busy=self.busy.share(now, running),
            memory_bytes=self.memory_bytes,
        )

    def _shown_state(self) -> str:
        if self.is_silent:
            return "gone"
        if self.state is WorkerState.TESTED:
            return "gone" if self.has_passed else "loading"
        return "busy" if self.is_live and self.in_flight else self.state.value


@dataclass(frozen=True, slots=True)
class Capacity:
    """What all live workers can do together."""

    workers: int
    loading: int
    """Workers that will be live when they have loaded and answered the canary."""
    largest: Limits
    """Most inputs and most tokens that one batch of any of them holds."""
    tokens_per_s: float | None
    """In full batches; None while none was seen."""
    batches_per_s: float | None
    """Likewise."""


class Fleet:
    """All workers that are not gone, and every batch in flight."""

    def __init__(self) -> None:
        self.workers: dict[bytes, Worker] = {}
        self.idle: OrderedDict[Worker, None] = OrderedDict()
        """Live workers with nothing in flight, the one idle longest first."""
        self.suspect_batches: list[Batch] = []
        """Batches of suspects in flight, each alone on its worker."""
        self._last_batch_id = 0
        self._capacity: Capacity | None = None

    def add(self, worker: Worker) -> None:
        """A worker appeared."""
        self.workers[worker.identity] = worker
        self.refresh(worker)

    def live(self) -> list[Worker]:
        """Workers that may be sent work. O(workers)."""
        return [worker for worker in self.workers.values() if worker.is_live]

    def capacity(self) -> Capacity:
        """What the live workers can do. O(workers) after a batch or a change among them, else O(1)."""
        if self._capacity is None:
            self._capacity = _capacity_of(list(self.workers.values()))
        return self._capacity

    def refresh(self, worker: Worker) -> None:
        """Note that a worker's state or what it has in flight changed."""
        self._capacity = None
        if worker.is_live and not worker.in_flight and self.workers.get(worker.identity) is worker:
            self.idle.setdefault(worker)
        else:
            self.idle.pop(worker, None)

    def lend(self, worker: Worker, items: list[Item], tokens: int, now: float, *, is_full: bool, is_suspect: bool) -> Batch:
        """Record a hand-over."""
        assert worker.is_live, f"{worker.name} is not live"
        assert len(worker.in_flight) < CREDITS, f"{worker.name} has no credit"
        self._last_batch_id += 1
        started_at = None if worker.in_flight else now
        batch = Batch(self._last_batch_id, items, tokens, now, started_at, is_full, is_suspect)
        worker.in_flight.append(batch)
        if is_suspect:
            self.suspect_batches.append(batch)
        self.refresh(worker)
        return batch

    def settle(self, worker: Worker, batch_id: int, now: float) -> Batch | None:
        """Close a batch that its worker answered; None when it is not open there. The next one's turn begins."""
        for position, batch in enumerate(worker.in_flight):
            if batch.batch_id == batch_id:
                del worker.in_flight[position]
                self._settle_suspects(batch)
                if worker.in_flight and worker.in_flight[0].started_at is None:
                    worker.in_flight[0].started_at = now
                self.refresh(worker)
                return batch
        return None

    def reclaim(self, worker: Worker) -> tuple[list[Batch], list[Batch]]:
        """Take everything away from a worker: what it may have begun, and what it had at hand behind that."""
        batches, worker.in_flight = worker.in_flight, []
        self._settle_suspects(*batches)
        self.refresh(worker)
        most_begun = CREDITS if worker.overlaps else 1
        return batches[:most_begun], batches[most_begun:]

    def held_up_until(self) -> float:
        """Until when suspects wait for the ones that run."""
        return max((batch.sent_at + HELD_UP_S for batch in self.suspect_batches), default=float("-inf"))

    def free_workers(self) -> int:
        """Live workers that no batch of suspects is with. O(workers)."""
        return sum(not any(batch.is_suspect for batch in worker.in_flight) for worker in self.live())

    def _settle_suspects(self, *batches: Batch) -> None:
        for batch in batches:
            if batch.is_suspect:
                self.suspect_batches.remove(batch)

    def remove(self, worker: Worker) -> None:
        """Forget a worker, whose work was reclaimed."""
        assert not worker.in_flight, f"{worker.name} still has work"
        del self.workers[worker.identity]
        self.refresh(worker)


def _capacity_of(workers: list[Worker]) -> Capacity:
    live = [worker for worker in workers if worker.is_live]
    limits = [worker.ready_limits() for worker in live]
    tokens_per_s = [1 / value for worker in live if (value := worker.speed.full_s_per_token.value) is not None]
    batches_per_s = [1 / value for worker in live if (value := worker.speed.s_per_full_batch.value) is not None]
    measured = len(tokens_per_s)
    return Capacity(
        workers=len(live),
        loading=sum(worker.state in (WorkerState.LOADING, WorkerState.TESTED) and not worker.is_silent for worker in workers),
        largest=Limits(max((each.inputs for each in limits), default=0), max((each.tokens for each in limits), default=0)),
        # Workers that have run no full batch yet are taken to be like the others.
        tokens_per_s=sum(tokens_per_s) / measured * len(live) if measured else None,
        batches_per_s=sum(batches_per_s) / measured * len(live) if measured else None,
    )
