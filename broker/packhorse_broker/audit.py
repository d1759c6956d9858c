"""Checks that the ledger's counts agree with what they count. Used by tests after every step; never in production."""

from __future__ import annotations

from collections import Counter

from packhorse_broker.leases import CREDITS, HELD_UP_S, WorkerState
from packhorse_broker.ledger import Ledger
from packhorse_broker.requests import Item, Request
from packhorse_broker.retries import MAX_ATTEMPTS
from packhorse_shared.messages import WORST_PRIORITY


def audit(ledger: Ledger) -> None:
    """Raise AssertionError when anything disagrees. O(everything)."""
    live = {request for frontend in ledger.frontends.values() for request in frontend.requests.values()}
    assert ledger.live_requests == len(live)
    assert ledger.held_bytes == sum(request.held_bytes for request in live)
    _audit_queue(ledger, live)
    _audit_suspects(ledger)
    _audit_workers(ledger)
    places = _places(ledger)
    assert all(count == 1 for count in places.values()), "an input is in two places"
    held = Counter(request for request, _ in places)
    for request in live:
        assert not request.closed
        assert held[request] == request.unanswered, f"{held[request]} inputs held, {request.unanswered} unanswered"
        assert all(count < MAX_ATTEMPTS for count in request.attempts.values())


def _audit_queue(ledger: Ledger, live: set[Request]) -> None:
    queue, waiting = ledger.queue, ledger.queue.waiting_requests()
    assert len(waiting) == len(set(waiting)) == queue.requests
    assert set(waiting) == {request for request in live if request.queued}
    assert queue.inputs == sum(request.queued for request in waiting)
    assert queue.tokens == sum(request.queued_tokens for request in waiting)
    assert queue.returned == sum(len(request.returned) for request in waiting)
    assert (queue.inputs, queue.tokens) == queue.ahead_of(WORST_PRIORITY + 1)
    assert queue.oldest_arrival() == min((request.arrived for request in waiting), default=None)
    for request in waiting:
        indexes = _queued_indexes(request)
        assert len(indexes) == request.queued
        assert sum(request.lengths[index] for index in indexes) == request.queued_tokens


def _audit_suspects(ledger: Ledger) -> None:
    suspects = ledger.suspects.waiting()
    assert ledger.suspects.inputs == len(suspects)
    assert ledger.suspects.tokens == sum(request.lengths[index] for request, index in suspects)
    assert all(request.attempts[index] >= 1 for request, index in suspects)


def _audit_workers(ledger: Ledger) -> None:
    fleet = ledger.fleet
    batches = [batch for worker in fleet.workers.values() for batch in worker.in_flight]
    assert len({batch.batch_id for batch in batches}) == len(batches)
    suspects = [batch.batch_id for batch in batches if batch.is_suspect]
    assert sorted(suspects) == sorted(batch.batch_id for batch in fleet.suspect_batches)
    assert sum(batch.sent_at + HELD_UP_S > ledger.now for batch in fleet.suspect_batches) <= 1
    assert set(fleet.idle) == {worker for worker in fleet.live() if not worker.in_flight}
    for worker in fleet.workers.values():
        assert len(worker.in_flight) <= CREDITS
        assert len(worker.in_flight) == 1 or not any(batch.is_suspect for batch in worker.in_flight), "a suspect in company"
        assert not (worker.is_silent and worker.in_flight)
        assert not (worker.state in (WorkerState.LOADING, WorkerState.TESTED) and worker.in_flight)
        assert worker.canary is None or (worker.state is WorkerState.TESTED and not worker.is_silent)
        assert worker.has_passed or worker.state is not WorkerState.READY
        assert [batch.started_at is not None for batch in worker.in_flight] == [True, False][: len(worker.in_flight)]


def _places(ledger: Ledger) -> Counter[Item]:
    """How often each unanswered input is held, wherever it is."""
    places: Counter[Item] = Counter()
    for request in ledger.queue.waiting_requests():
        places.update((request, index) for index in _queued_indexes(request))
    places.update(ledger.suspects.waiting())
    for worker in ledger.fleet.workers.values():
        for batch in worker.in_flight:
            places.update(item for item in batch.items if not item[0].closed)
    return places


def _queued_indexes(request: Request) -> list[int]:
    return [*request.returned, *range(request.next_index, len(request.lengths))]
