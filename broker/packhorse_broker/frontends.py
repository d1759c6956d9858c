"""What the broker does when a frontend speaks, falls silent or dies."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from packhorse_broker import events as e
from packhorse_broker import measures
from packhorse_broker.admission import MAX_HELD_BYTES, NO_WORKER_RETRY_AFTER_S, WAIT_SHARE, Refusal, in_quarantine, too_long
from packhorse_broker.dispatch import dispatch
from packhorse_broker.ledger import Frontend, Ledger
from packhorse_broker.requests import Request, accept
from packhorse_shared import __version__
from packhorse_shared.codec import Buffer
from packhorse_shared.messages import (
    BYTES_PER_TOKEN,
    PROTOCOL_VERSION,
    ErrorCode,
    Introduce,
    ModelFacts,
    ModelStatus,
    QueueStatus,
    RateStatus,
    StatusReport,
    SubmittedRequest,
    WorkerStatus,
)

_MOST_WORKERS_BYTES = 60_000
"""Of a report, whose header may have 64 KiB."""
FRONTEND_SILENT_S = 30.0
"""A frontend that sends nothing for so long is given up. Its death is seen at once by its pid; this is for a frozen one."""


def greeted(ledger: Ledger, event: e.FrontendGreeted) -> None:
    """A frontend introduces itself, maybe again."""
    hello = event.hello
    if hello.version != PROTOCOL_VERSION:
        ledger.log(
            e.ERROR,
            f"frontend refused: it speaks protocol {hello.version}, this broker {PROTOCOL_VERSION}",
            frontend=hello.index,
            pid=hello.pid,
        )
        return
    if event.frontend not in ledger.frontends:
        ledger.frontends[event.frontend] = Frontend(event.frontend, hello.index, hello.pid, ledger.now)
        ledger.patrol_by(ledger.now + FRONTEND_SILENT_S)
        ledger.actions.append(e.WatchFrontend(event.frontend, hello.pid))
        ledger.log(e.INFO, "frontend joined", frontend=hello.index, pid=hello.pid)
    ledger.actions.append(e.TellFrontend(event.frontend, ledger.state()))


def submitted(ledger: Ledger, event: e.RequestsSubmitted) -> None:
    """Requests arrive: each is let in or refused, as a whole and by itself."""
    frontend = _known(ledger, event.frontend)
    if frontend is None:
        return
    ledger.last_traffic_at = ledger.now
    payload = memoryview(event.payload)
    start, has_dispatched = 0, False
    for each in event.requests:
        end = start + BYTES_PER_TOKEN * sum(each.lengths)
        ids, start = payload[start:end], end
        if each.rid in frontend.requests:
            continue
        if not has_dispatched and ledger.is_queue_full():
            # What a worker can take this moment does not wait: it must not count against the newcomers.
            dispatch(ledger)
            has_dispatched = True
        refusal = _refusal(ledger, each, ids)
        if refusal is None:
            ledger.admit(frontend, accept(event.frontend, each, ids, ledger.now))
        else:
            measures.rejected(ledger.meter, refusal.code)
            ledger.refuse(
                event.frontend,
                each.rid,
                refusal.code,
                refusal.message,
                index=refusal.index,
                retry_after=refusal.retry_after_s,
            )


def _refusal(ledger: Ledger, request: SubmittedRequest, ids: Buffer) -> Refusal | None:
    """Why this request is not let in now. One that a former broker had accepted is held to its own limits only."""
    if request.ttl_ms == 0:
        return Refusal(ErrorCode.TIMEOUT, "the request's time (request_timeout) was over before it reached the queue")
    capacity = ledger.fleet.capacity()
    if capacity.workers and (refusal := too_long(request.lengths, capacity.largest.tokens)) is not None:
        return refusal
    if (index := ledger.quarantine.find(request.lengths, ids, ledger.now)) is not None:
        return in_quarantine(index)
    return None if request.resubmitted else _refusal_by_load(ledger, request)


def _refusal_by_load(ledger: Ledger, request: SubmittedRequest) -> Refusal | None:
    """Why a request that is new to the server is not let in now."""
    capacity = ledger.fleet.capacity()
    if ledger.is_draining:
        return Refusal(ErrorCode.DRAINING, "the server is stopping", NO_WORKER_RETRY_AFTER_S)
    if not capacity.workers and ledger.model is None:
        return Refusal(ErrorCode.LOADING, "the model is still loading", NO_WORKER_RETRY_AFTER_S)
    if not capacity.workers:
        return Refusal(ErrorCode.NO_WORKER, "no worker is running; a restart is under way", NO_WORKER_RETRY_AFTER_S)
    if ledger.is_queue_full() or ledger.held_bytes >= MAX_HELD_BYTES:
        waiting, limit = ledger.waiting_inputs(), ledger.settings.batching.max_queue_size
        return Refusal(
            ErrorCode.QUEUE_FULL,
            f"{waiting} inputs wait already, the limit is {limit} (max_queue_size); try again later",
            ledger.retry_after_s(request.priority),
        )
    wait_s = ledger.wait_s(request.priority)
    if wait_s is not None and wait_s > WAIT_SHARE * request.ttl_ms / 1000:
        return Refusal(
            ErrorCode.WAIT_TOO_LONG,
            f"the wait is about {wait_s:.1f} s, and {request.ttl_ms / 1000:.1f} s are left of request_timeout; try again later",
            ledger.retry_after_s(request.priority),
        )
    return None


def cancelled(ledger: Ledger, event: e.RequestsCancelled) -> None:
    """Nobody waits for these requests any more."""
    frontend = _known(ledger, event.frontend)
    if frontend is None:
        return
    for rid in event.rids:
        if (request := frontend.requests.get(rid)) is not None:
            ledger.forget(request)


def pinged(ledger: Ledger, event: e.FrontendPinged) -> None:
    """A frontend wants to know how things are, and tells that it lives."""
    if _known(ledger, event.frontend) is not None:
        ledger.actions.append(e.TellFrontend(event.frontend, ledger.state()))


def tallied(ledger: Ledger, event: e.FrontendTallied) -> None:
    """A frontend tells what it has counted: it stays counted when the frontend is gone."""
    if _known(ledger, event.frontend) is not None:
        ledger.meter.add(event.changes)


def lost(ledger: Ledger, event: e.FrontendLost) -> None:
    """A frontend is gone: nobody waits for its requests."""
    frontend = ledger.frontends.get(event.frontend)
    if frontend is None:
        return
    dropped = list(frontend.requests.values())
    for request in dropped:
        ledger.forget(request)
    del ledger.frontends[event.frontend]
    ledger.actions.append(e.UnwatchFrontend(event.frontend))
    level = e.WARNING if dropped else e.INFO
    fields = {"frontend": frontend.index, "pid": frontend.pid, "requests_dropped": len(dropped)}
    ledger.log(level, f"frontend left: {event.reason}", **fields)


def patrol(ledger: Ledger) -> float | None:
    """Give up frontends that were silent for too long; returns when to look again."""
    for frontend in list(ledger.frontends.values()):
        if ledger.now >= frontend.last_heard + FRONTEND_SILENT_S:
            lost(ledger, e.FrontendLost(frontend.identity, f"silent for {FRONTEND_SILENT_S:g} s"))
    return min((each.last_heard + FRONTEND_SILENT_S for each in ledger.frontends.values()), default=None)


def status_asked(ledger: Ledger, event: e.StatusAsked) -> None:
    """Somebody wants the body of GET /status."""
    ledger.actions.append(e.TellFrontend(event.peer, _report(ledger)))


def _report(ledger: Ledger) -> StatusReport:
    now, model = ledger.now, ledger.model
    oldest = oldest_arrival(ledger)
    suspect_only = {request for request, _ in ledger.suspects.waiting() if not request.queued}
    requests_per_s, inputs_per_s, tokens_per_s = (round(rate, 2) for rate in ledger.rates.per_second(now))
    return StatusReport(
        version=__version__,
        model=None if model is None else _model_status(model, ledger.fleet.capacity().largest.tokens),
        queue=QueueStatus(
            inputs=ledger.waiting_inputs(),
            requests=ledger.queue.requests + len(suspect_only),
            oldest_wait_ms=0.0 if oldest is None else round(1000 * (now - oldest), 3),
            limit=ledger.settings.batching.max_queue_size,
        ),
        workers=sorted(_those_that_fit(worker_statuses(ledger)), key=lambda status: (len(status.id), status.id)),
        rates=RateStatus(requests_per_s=requests_per_s, inputs_per_s=inputs_per_s, tokens_per_s=tokens_per_s),
    )


def oldest_arrival(ledger: Ledger) -> float | None:
    """When the input came that has waited longest; None while none waits."""
    arrivals = [request.arrived for request, _ in ledger.suspects.waiting()]
    if (queued := ledger.queue.oldest_arrival()) is not None:
        arrivals.append(queued)
    return min(arrivals, default=None)


def worker_statuses(ledger: Ledger) -> list[WorkerStatus]:
    """Every worker, and those that left lately."""
    live = [worker.status(ledger.now) for worker in ledger.fleet.workers.values()]
    names = {status.id for status in live}
    gone = [each.status for name, each in ledger.gone.items() if each.until > ledger.now and name not in names]
    return [*live, *gone]


def _those_that_fit(workers: list[WorkerStatus]) -> Iterator[WorkerStatus]:
    """The first ones, as many as a message holds: some 300."""
    left = _MOST_WORKERS_BYTES
    for each in workers:
        left -= len(msgspec.msgpack.encode(each))
        if left < 0:
            return
        yield each


def _model_status(model: ModelFacts, batch_tokens: int) -> ModelStatus:
    """``batch_tokens``: of the largest batch that a worker takes, 0 while none is ready; no input can be longer."""
    return ModelStatus(
        name=model.name,
        task=model.task,
        dimension=model.dimension,
        max_seq_len=min(model.max_seq_len, batch_tokens or model.max_seq_len),
        dtype=model.dtype,
    )


def live_requests(ledger: Ledger) -> list[Request]:
    """Every live request. O(n): for the end of a drain and for tests."""
    return [request for frontend in ledger.frontends.values() for request in frontend.requests.values()]


def _known(ledger: Ledger, identity: bytes) -> Frontend | None:
    """The frontend of this identity, heard now; a stranger is asked to introduce itself."""
    frontend = ledger.frontends.get(identity)
    if frontend is None:
        ledger.actions.append(e.TellFrontend(identity, Introduce(ledger.boot_id)))
        return None
    frontend.last_heard = ledger.now
    return frontend
