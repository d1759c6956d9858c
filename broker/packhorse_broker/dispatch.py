"""The dispatch pass: which worker is sent what, now; and when to look again.

First suspects, one group at a time unless one takes long, and only on a worker with nothing else; then idle workers, the one
idle longest first; then second credits: a batch at hand behind a running one. What is at hand has left the queue, so that
nobody can go before it any more: a full batch is sent in the last part of the running one, and one that is not full just before
its end, because until then it would grow. While any worker is idle nothing is queued behind a busy one.
"""

from __future__ import annotations

from collections.abc import Iterator

from packhorse_broker import measures
from packhorse_broker.events import Payload, SendBatch
from packhorse_broker.leases import Worker
from packhorse_broker.ledger import Ledger
from packhorse_broker.requests import Item
from packhorse_shared.messages import EncodeOptions, Work

HAND_OVER_LEAD_S = 0.002
"""A batch that is not full is handed over this long before the running one should end."""
FULL_LEAD_SHARE = 0.3
"""A full batch may be handed over in this last part of the running one's time: predictions are no better than this."""
FULL_LEAD_S = 0.01
"""And always this long before its end: short batches must never wait for a busy broker."""
_NO_OPTIONS = EncodeOptions()


def dispatch(ledger: Ledger) -> None:
    """Send every batch that may leave now."""
    if ledger.suspects.inputs:
        _send_suspects(ledger)
    if ledger.queue.inputs and ledger.fleet.idle:
        _send_to_idle(ledger)
    if ledger.queue.inputs:
        _send_ahead(ledger)


def next_dispatch(ledger: Ledger) -> float | None:
    """When a batch may leave next without anything else happening. Asked right after a pass."""
    times = [_suspects_go_at(ledger)]
    if ledger.queue.inputs and ledger.fleet.idle:
        times.append(_due_at(ledger))
    elif ledger.queue.inputs:
        times += [_hand_over_at(ledger, worker) for worker in _with_free_credit(ledger)]
    # What is due and did not leave fits no worker that could take it: only an event can change that.
    return min((each for each in times if ledger.now < each < float("inf")), default=None)


def _send_suspects(ledger: Ledger) -> None:
    fleet = ledger.fleet
    for worker in list(fleet.idle):
        if not ledger.suspects.inputs or ledger.now < fleet.held_up_until():
            return
        items, tokens = ledger.suspects.draw(worker.ready_limits(), fleet.free_workers(), ledger.now)
        if items:
            _send(ledger, worker, items, tokens, is_suspect=True)


def _send_to_idle(ledger: Ledger) -> None:
    due = ledger.now >= _due_at(ledger)
    for worker in list(ledger.fleet.idle):
        if not due and not ledger.rules.is_full(ledger.queue, worker.ready_limits()):
            continue
        _send_from_queue(ledger, worker)
        if not ledger.queue.inputs:
            return
        due = ledger.now >= _due_at(ledger)


def _send_ahead(ledger: Ledger) -> None:
    for worker in sorted(_with_free_credit(ledger), key=_end_or_never):
        if not ledger.queue.inputs:
            return
        if ledger.now >= _hand_over_at(ledger, worker):
            _send_from_queue(ledger, worker)


def _with_free_credit(ledger: Ledger) -> Iterator[Worker]:
    """Workers that may be given a batch behind the one that they run."""
    fleet = ledger.fleet
    if fleet.idle or _suspects_go_at(ledger) <= ledger.now:
        # Waiting suspects need a worker to run empty.
        return
    for worker in fleet.workers.values():
        if worker.is_live and len(worker.in_flight) == 1 and not worker.in_flight[0].is_suspect:
            yield worker


def _suspects_go_at(ledger: Ledger) -> float:
    if not ledger.suspects.inputs:
        return float("inf")
    return max(ledger.suspects.goes_at(ledger.fleet.free_workers()), ledger.fleet.held_up_until())


def _end_or_never(worker: Worker) -> float:
    end = worker.predicted_end()
    return float("inf") if end is None else end


def _hand_over_at(ledger: Ledger, worker: Worker) -> float:
    """When a worker may be given what waits behind the batch that it runs; infinity while nothing tells."""
    end, running = worker.predicted_end(), worker.in_flight[0]
    is_full = ledger.rules.is_full(ledger.queue, worker.ready_limits())
    if end is None or running.started_at is None:
        return ledger.now if is_full else float("inf")
    if is_full:
        return end - max(FULL_LEAD_S, FULL_LEAD_SHARE * (end - running.started_at))
    return max(_due_at(ledger), end - HAND_OVER_LEAD_S)


def _due_at(ledger: Ledger) -> float:
    return ledger.rules.due_at(ledger.queue, alone=ledger.live_requests == 1)


def _send_from_queue(ledger: Ledger, worker: Worker) -> None:
    items, tokens = ledger.queue.draw(worker.ready_limits())
    if items:
        _send(ledger, worker, items, tokens, is_suspect=False)


def _send(ledger: Ledger, worker: Worker, items: list[Item], tokens: int, *, is_suspect: bool) -> None:
    limits = worker.ready_limits()
    # What is left over tells that the batch was closed by rule 2 even where its own size does not.
    is_full = not is_suspect and (len(items) >= limits.inputs or tokens >= limits.tokens or ledger.queue.inputs > 0)
    batch = ledger.fleet.lend(worker, items, tokens, ledger.now, is_full=is_full, is_suspect=is_suspect)
    if batch.started_at is not None:
        ledger.patrol_by(ledger.now + ledger.settings.workers.batch_timeout)
    measures.handed_over(ledger.meter, len(items), tokens, limits)
    options = [request.options for request, _ in items]
    work = Work(
        boot_id=ledger.boot_id,
        batch_id=batch.batch_id,
        lengths=[request.lengths[index] for request, index in items],
        options=options if any(each != _NO_OPTIONS for each in options) else [],
    )
    ledger.actions.append(SendBatch(worker.identity, work, _ids_of(items)))


def _ids_of(items: list[Item]) -> Payload:
    """The ids of a batch's inputs, neighbours of one request in one piece."""
    pieces = []
    request, first = items[0]
    last = first
    for other, index in items[1:]:
        if other is not request or index != last + 1:
            pieces.append(request.slice_of(first, last))
            request, first = other, index
        last = index
    pieces.append(request.slice_of(first, last))
    return tuple(pieces)
