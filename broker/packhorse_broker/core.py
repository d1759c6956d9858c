"""The broker as a pure, deterministic state machine: events in, actions out, time as an argument.

Feed it every event of a wake-up with ``handle``, then ``TimePassed`` once: only then do limits of time count and batches
leave. ``next_deadline`` tells when to wake up next if nothing happens before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from packhorse_broker import departures, frontends, joining, measures, workers
from packhorse_broker import events as e
from packhorse_broker.admission import NO_WORKER_RETRY_AFTER_S
from packhorse_broker.audit import audit
from packhorse_broker.dispatch import dispatch, next_dispatch
from packhorse_broker.gauges import metrics_asked
from packhorse_broker.ledger import Ledger
from packhorse_broker.patrol import patrol, unreachable
from packhorse_broker.requests import Request
from packhorse_shared.messages import ErrorCode
from packhorse_shared.settings import Settings

QUIET_S = 0.25
"""A drain is over when nothing came and nothing was left to do for so long."""
_LONGEST_QUIET_S = 2.0
_ROOM_AGAIN_SHARE = 0.75
_FULL_LOGGED_EVERY_S = 10.0

_HANDLERS: dict[type[Any], Callable[[Ledger, Any], None]] = {
    e.FrontendGreeted: frontends.greeted,
    e.RequestsSubmitted: frontends.submitted,
    e.RequestsCancelled: frontends.cancelled,
    e.FrontendPinged: frontends.pinged,
    e.FrontendTallied: frontends.tallied,
    e.FrontendLost: frontends.lost,
    e.StatusAsked: frontends.status_asked,
    e.MetricsAsked: metrics_asked,
    e.WorkerAnnounced: joining.announced,
    e.WorkerGreeted: joining.greeted,
    e.WorkerOutdated: joining.outdated,
    e.WorkerDisallowed: joining.disallowed,
    e.WorkerBeat: workers.beat,
    e.BatchFinished: workers.finished,
    e.BatchBroke: workers.broke,
    e.WorkerDrained: workers.drained,
    e.WorkerLeft: departures.left,
    e.WorkerLost: departures.lost,
    e.WorkerUnreachable: unreachable,
}


class BrokerCore:
    """See the module. ``boot_id`` is new for every start and never 0; ``now`` is any monotonic clock in seconds."""

    def __init__(self, settings: Settings, *, boot_id: int, worker_token: str, now: float) -> None:
        self._ledger = Ledger(settings, boot_id, worker_token, now)
        self._is_told_full = False
        self._full_logged_at = float("-inf")
        self._told: tuple[object, ...] = self._what_is_told()
        self._stopped = False

    def handle(self, event: e.Event, now: float) -> list[e.Action]:
        """What must be done because of an event, in order."""
        ledger = self._ledger
        ledger.now = max(now, ledger.now)
        handler = _HANDLERS.get(type(event))
        if handler is not None:
            handler(ledger, event)
        elif isinstance(event, e.TimePassed):
            self._pass_time()
        elif isinstance(event, e.BrokerStalled):
            self._excuse(event.stalled_s)
        else:
            assert isinstance(event, e.DrainBegan), f"unknown event {event!r}"
            self._begin_drain()
        actions, ledger.actions = ledger.actions, []
        return actions

    def next_deadline(self) -> float | None:
        """When ``TimePassed`` is due next; None when only an event can change anything. Ask after ``TimePassed``."""
        ledger = self._ledger
        times = [ledger.next_request_deadline(), next_dispatch(ledger), self._drain_step_at()]
        if ledger.patrol_at != float("inf"):
            times.append(ledger.patrol_at)
        return min((each for each in times if each is not None), default=None)

    def count_malformed(self) -> None:
        """A message was dropped that is none, so that there is no event of it."""
        self._ledger.meter.count(measures.MALFORMED)

    def check_invariants(self) -> None:
        """Assert that all counts agree and every input is in exactly one place. O(everything): for tests."""
        audit(self._ledger)

    def _pass_time(self) -> None:
        ledger = self._ledger
        ledger.expire_requests()
        if ledger.now >= ledger.patrol_at:
            self._patrol()
        dispatch(ledger)
        self._step_drain()
        told = self._what_is_told()
        if told != self._told:
            self._tell_frontends(told)

    def _patrol(self) -> None:
        ledger = self._ledger
        ledger.patrol_at = float("inf")
        while ledger.gone and next(iter(ledger.gone.values())).until <= ledger.now:
            ledger.gone.popitem(last=False)
        for when in (patrol(ledger), frontends.patrol(ledger)):
            if when is not None:
                ledger.patrol_by(when)
        if ledger.gone:
            ledger.patrol_by(next(iter(ledger.gone.values())).until)

    def _excuse(self, stalled_s: float) -> None:
        """The broker heard nobody while it did not run, and took no answer: that is neither their silence nor their slowness.
        What they said meanwhile may still be on its way, so that everybody has time anew."""
        ledger = self._ledger
        for worker in ledger.fleet.workers.values():
            worker.excuse(stalled_s, ledger.now)
        for frontend in ledger.frontends.values():
            frontend.last_heard = ledger.now
        ledger.log(e.WARNING, f"the broker itself did not run for {stalled_s:.1f} s")

    # ---- what frontends know ----

    def _what_is_told(self) -> tuple[object, ...]:
        """The part of the state whose change every frontend is told at once."""
        ledger, capacity = self._ledger, self._ledger.fleet.capacity()
        # Full at the limit, but not full only well below it: under overload the queue touches its limit with every batch.
        floor = _ROOM_AGAIN_SHARE * ledger.settings.batching.max_queue_size if self._is_told_full else None
        self._is_told_full = ledger.is_queue_full() if floor is None else ledger.waiting_inputs() > floor
        return (
            capacity.workers,
            capacity.loading,
            capacity.largest.tokens,
            ledger.model is None,
            ledger.is_draining,
            self._is_told_full,
        )

    def _tell_frontends(self, told: tuple[object, ...]) -> None:
        ledger = self._ledger
        if self._is_told_full and not self._told[-1] and ledger.now >= self._full_logged_at + _FULL_LOGGED_EVERY_S:
            self._full_logged_at = ledger.now
            limit = ledger.settings.batching.max_queue_size
            ledger.log(e.WARNING, "queue is full: new requests get 429", limit=limit)
        self._told = told
        ledger.actions += [e.TellFrontend(identity, ledger.state()) for identity in ledger.frontends]

    # ---- drain ----

    def _begin_drain(self) -> None:
        ledger = self._ledger
        if ledger.is_draining:
            return
        ledger.is_draining = True
        ledger.drain_began_at, ledger.drain_ends_at = ledger.now, ledger.now + ledger.settings.process.shutdown_grace
        ledger.last_traffic_at = ledger.last_closed_at = ledger.now
        ledger.log(e.INFO, "draining: new requests are refused", requests_left=ledger.live_requests)

    def _drain_step_at(self) -> float | None:
        ledger = self._ledger
        if not ledger.is_draining or self._stopped:
            return None
        if ledger.live_requests:
            abandoned_at = departures.abandoned_at(ledger)
            return ledger.drain_ends_at if abandoned_at is None else min(abandoned_at, ledger.drain_ends_at)
        # Clients that keep trying are refused, and do not hold up the end for long.
        return min(ledger.last_traffic_at + QUIET_S, ledger.last_closed_at + _LONGEST_QUIET_S, ledger.drain_ends_at)

    def _step_drain(self) -> None:
        ledger = self._ledger
        step_at = self._drain_step_at()
        if step_at is None or ledger.now < step_at:
            return
        left = frontends.live_requests(ledger)
        if left and ledger.now < ledger.drain_ends_at:
            ledger.log(e.WARNING, "draining: all workers have left, what waits is refused", requests=len(left))
            self._refuse(left, "the server stops, and its workers have left before its turn")
            return
        self._refuse(left, "the server stopped before its turn (shutdown_grace)")
        workers.stop_all(ledger)
        self._stopped = True
        ledger.log(e.INFO, "drained", requests_dropped=len(left))
        ledger.actions.append(e.Stop())

    def _refuse(self, requests: list[Request], message: str) -> None:
        for request in requests:
            self._ledger.fail(request, ErrorCode.DRAINING, message, retry_after=NO_WORKER_RETRY_AFTER_S)
