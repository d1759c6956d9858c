"""Everything the broker knows, and the few ways in which it changes.

The handlers of ``frontends.py``, ``workers.py`` and ``dispatch.py`` work on one ``Ledger``; what must be done gathers in
``actions``. An accepted request leaves the ledger by exactly one of three doors: ``answer`` (rows for its last input),
``fail``, or ``forget`` (its client no longer wants it).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from packhorse_broker import events as e
from packhorse_broker import measures
from packhorse_broker.admission import NO_WORKER_RETRY_AFTER_S, estimated_wait_s, retry_after_s
from packhorse_broker.batching import DispatchRules
from packhorse_broker.canary import Canaries
from packhorse_broker.fairness import FairQueue
from packhorse_broker.leases import Batch, Fleet, Worker
from packhorse_broker.quarantine import Quarantine
from packhorse_broker.requests import Item, Request, RequestHeap
from packhorse_broker.retries import MAX_ATTEMPTS, Suspects
from packhorse_broker.stats import Rates
from packhorse_shared.messages import BrokerState, ErrorCode, ModelFacts, RequestFailure, WorkerStatus
from packhorse_shared.meter import Meter
from packhorse_shared.settings import Settings

GONE_SHOWN_S = 60.0
"""How long a worker that left stays in the status."""
_MOST_GONE_SHOWN = 64
_LONGEST_MESSAGE = 4096


@dataclass(frozen=True, slots=True)
class Gone:
    """A worker that went lately, as the status shows it."""

    status: WorkerStatus
    until: float
    """How long it is shown, and waited for."""
    has_died: bool
    """Then it is started again, and has not been seen since."""


@dataclass(slots=True)
class Frontend:
    """One frontend process and its live requests by rid."""

    identity: bytes
    index: int
    pid: int
    last_heard: float
    requests: dict[int, Request] = field(default_factory=dict)


class Ledger:
    """The broker's books. ``now`` is the time of the event at hand."""

    def __init__(self, settings: Settings, boot_id: int, worker_token: str, now: float) -> None:
        self.settings = settings
        self.boot_id = boot_id
        self.worker_token = worker_token
        self.now = now
        self.frontends: dict[bytes, Frontend] = {}
        self.queue = FairQueue()
        self.suspects = Suspects()
        self.quarantine = Quarantine()
        self.fleet = Fleet()
        self.canaries = Canaries(boot_id)
        self.rules = DispatchRules(settings.batching)
        self.model: ModelFacts | None = None
        self.is_draining = False
        self.drain_began_at = self.drain_ends_at = 0.0
        self.last_traffic_at = now
        """When a request last came or was closed."""
        self.last_closed_at = now
        self.live_requests = 0
        self.held_bytes = 0
        self.started_at = now
        self.meter = Meter()
        """What GET /metrics counts."""
        self.rates = Rates(now, 3)
        """Finished requests, inputs and tokens."""
        self.gone: OrderedDict[str, Gone] = OrderedDict()
        """Workers that went lately, by name."""
        self.last_gone_at = now
        self.patrol_at = float("inf")
        """When limits on silence and running time are next looked at."""
        self.actions: list[e.Action] = []
        self._deadlines = RequestHeap(_is_open)

    # ---- requests ----

    def admit(self, frontend: Frontend, request: Request) -> None:
        """Queue a request that was let in."""
        frontend.requests[request.rid] = request
        self.live_requests += 1
        self.held_bytes += request.held_bytes
        self.queue.add(request)
        self.rules.arrivals.arrived(self.now)
        self._deadlines.push(request.deadline, request, self.live_requests)

    def answer(self, request: Request, inputs: int, tokens: int) -> None:
        """Rows for ``inputs`` inputs of a request go out; with the last one it is complete."""
        request.unanswered -= inputs
        self.rates.add(self.now, 0, inputs, tokens)
        if not request.unanswered:
            self.rates.add(self.now, 1)
            self.forget(request)

    def fail(self, request: Request, code: ErrorCode, message: str, *, index: int | None = None, retry_after: int = 0) -> None:
        """Answer a request with an error; what is left of it is dropped."""
        self.forget(request)
        measures.failed(self.meter, code)
        self.refuse(request.frontend, request.rid, code, message, index=index, retry_after=retry_after)

    def refuse(
        self, frontend: bytes, rid: int, code: ErrorCode, message: str, *, index: int | None = None, retry_after: int = 0
    ) -> None:
        """Tell a frontend that a request failed."""
        self.actions.append(e.FailRequest(frontend, RequestFailure(rid, code, message[:_LONGEST_MESSAGE], retry_after, index)))

    def forget(self, request: Request) -> None:
        """Close a request: its waiting inputs are dropped, rows of those that run are ignored."""
        assert not request.closed, f"request {request.rid} is closed twice"
        request.closed = True
        del self.frontends[request.frontend].requests[request.rid]
        self.live_requests -= 1
        self.held_bytes -= request.held_bytes
        self.queue.remove(request)
        self.suspects.remove(request)
        request.payload = memoryview(b"")
        self.last_traffic_at = self.last_closed_at = self.now

    def next_request_deadline(self) -> float | None:
        """When the next live request runs out of time."""
        first = self._deadlines.first()
        return None if first is None else first[0]

    def expire_requests(self) -> None:
        """Fail every request whose time is over."""
        while (first := self._deadlines.first()) is not None and first[0] <= self.now:
            request = first[1]
            done = len(request.lengths) - request.unanswered
            waited_s = request.deadline - request.arrived
            self.fail(
                request,
                ErrorCode.TIMEOUT,
                f"the request ran out of time (request_timeout) after {waited_s:.3g} s in the queue, with {done} of "
                f"{len(request.lengths)} inputs done",
            )

    # ---- batches that come back undone ----

    def put_back(self, batches: Iterable[Batch]) -> None:
        """Requeue batches that were never begun, or whose worker cannot be blamed: no attempt is charged."""
        for batch in batches:
            items = [item for item in batch.items if not item[0].closed]
            if batch.is_suspect:
                self.suspects.put_back(items)
                continue
            by_request: dict[Request, list[int]] = {}
            for request, index in items:
                by_request.setdefault(request, []).append(index)
            for request, indexes in reversed(by_request.items()):
                self.queue.put_back(request, indexes)

    def charge(self, batch: Batch, code: ErrorCode, message: str, *, is_deadly: bool = False, has_hung: bool = False) -> None:
        """Charge an attempt to every input of a batch that was lost; out of attempts, its request fails with ``code``.

        ``is_deadly``: the worker died of it, or had to be killed. Then an input that is out of attempts is guilty.
        ``has_hung``: it had to be killed because the batch ran for too long.
        """
        for request, index in batch.items:
            if request.closed:
                continue
            attempts = request.attempts[index] = request.attempts.get(index, 0) + 1
            if attempts >= MAX_ATTEMPTS:
                if is_deadly and index not in request.silences:
                    self.quarantine.add(request.slice_of(index, index), self.now)
                self.fail(request, code, f"{message} ({attempts} attempts, input {index})", index=index)
        names = self.gone.keys() | {worker.name for worker in self.fleet.workers.values()}
        items = [item for item in batch.items if not item[0].closed]
        self.meter.count(measures.RETRIES, len(items))
        self.suspects.add(items, self.now, known_workers=len(names) if is_deadly else 0, alone=has_hung)

    def move_silent(self, batch: Batch) -> None:
        """Move a batch away from a worker that fell silent. A silence may be nobody's fault (a stopped process, a machine out
        of breath), so the first one is forgiven; an input that sees a second one is charged."""
        innocent: list[Item] = []
        charged: list[Item] = []
        for request, index in batch.items:
            if request.closed:
                continue
            (charged if index in request.silences or batch.is_suspect else innocent).append((request, index))
            request.silences.add(index)
        if innocent:
            batch.items = innocent
            self.meter.count(measures.RETRIES, len(innocent))
            self.put_back([batch])
        if charged:
            batch.items = charged
            self.charge(batch, ErrorCode.WORKER_DIED, "the workers that ran this input stopped answering")

    # ---- workers ----

    def retire(self, worker: Worker, *, has_died: bool = False) -> None:
        """A worker is gone; its work was taken away before. ``has_died``: whoever started it will start it again."""
        self.fleet.remove(worker)
        if worker.has_passed and not any(each.has_passed for each in self.fleet.workers.values()):
            self.canaries.forget()
        status = msgspec.structs.replace(worker.status(self.now), state="gone", in_flight=0, busy=0.0, memory_bytes=0)
        self.gone.pop(worker.name, None)
        self.gone[worker.name] = Gone(status, self.now + GONE_SHOWN_S, has_died)
        self.last_gone_at = self.now
        self.patrol_by(self.now + GONE_SHOWN_S)
        if len(self.gone) > _MOST_GONE_SHOWN:
            self.gone.popitem(last=False)

    def patrol_by(self, when: float) -> None:
        """Look at the limits on silence and running time no later than this."""
        self.patrol_at = min(self.patrol_at, when)

    # ---- what is told ----

    def waiting_inputs(self) -> int:
        """Accepted inputs that no worker has."""
        return self.queue.inputs + self.suspects.inputs

    def is_queue_full(self) -> bool:
        """Whether new requests are refused."""
        return self.waiting_inputs() >= self.settings.batching.max_queue_size

    def wait_s(self, priority: int) -> float | None:
        """How long a new request of this priority would wait for its answer; None when that cannot be told."""
        capacity = self.fleet.capacity()
        if not capacity.workers:
            return None
        inputs, tokens = self.queue.ahead_of(priority)
        inputs, tokens = inputs + self.suspects.inputs, tokens + self.suspects.tokens
        return estimated_wait_s(inputs, tokens, capacity)

    def retry_after_s(self, priority: int) -> int:
        """What a refusal made now tells the client."""
        return retry_after_s(self.wait_s(priority)) if self.fleet.capacity().workers else NO_WORKER_RETRY_AFTER_S

    def state(self) -> BrokerState:
        """How things are, for frontends."""
        capacity = self.fleet.capacity()
        return BrokerState(
            boot_id=self.boot_id,
            draining=self.is_draining,
            queue_inputs=self.waiting_inputs(),
            queue_limit=self.settings.batching.max_queue_size,
            ready_workers=capacity.workers,
            loading_workers=capacity.loading,
            max_num_tokens=capacity.largest.tokens,
            retry_after_s=self.retry_after_s(0),
            model=self.model,
        )

    def log(self, level: int, message: str, **fields: str | int | float) -> None:
        """One line for the log."""
        self.actions.append(e.WriteLog(level, message, tuple(fields.items())))


def _is_open(request: Request) -> bool:
    return not request.closed
