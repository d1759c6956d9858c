"""Watching the workers: who is silent, whose batch runs for too long, who has lost what it was sent."""

from __future__ import annotations

from packhorse_broker import events as e
from packhorse_broker import measures
from packhorse_broker.departures import kill
from packhorse_broker.leases import Worker, WorkerState
from packhorse_broker.ledger import Ledger

SILENT_AFTER_S = 1.0
"""A worker that sends nothing for so long counts as hung: its work is moved, it is sent nothing new."""
LOADING_PATIENCE = 6
"""While it loads, a worker may be silent for this many ``worker_timeout``: imports and weights can hold up its I/O thread."""
LOST_AFTER_S = 1.0
"""A worker that tells of no batch so long after it was sent one never got it."""
_IDLE_BEATS = 2
"""Beats in a row that must tell so: a single one may be sent between the end of a batch and its answer."""


def patrol(ledger: Ledger) -> float | None:
    """Look at every worker's silence and running time; returns when to look again."""
    for worker in list(ledger.fleet.workers.values()):
        _check(ledger, worker)
    return min((_next_check(ledger, worker) for worker in ledger.fleet.workers.values()), default=None)


def unreachable(ledger: Ledger, event: e.WorkerUnreachable) -> None:
    """The link to a worker of another machine is cut: it counts as silent, and is back when it has connected again."""
    worker = ledger.fleet.workers.get(event.worker)
    if worker is None or worker.is_silent or worker.state is WorkerState.LOADING:
        return
    _move_work(ledger, worker)
    ledger.patrol_by(_next_check(ledger, worker))
    ledger.log(e.WARNING, "worker cannot be reached: its work is moved", worker=worker.name, pid=worker.pid)


def has_lost_work(ledger: Ledger, worker: Worker) -> bool:
    """Whether a worker that beats cannot have got what it was sent: a connection broke, and took the message along."""
    sent_at = worker.canary.sent_at if worker.canary is not None else worker.in_flight[0].sent_at if worker.in_flight else None
    return sent_at is not None and worker.idle_beats >= _IDLE_BEATS and ledger.now >= sent_at + LOST_AFTER_S


def silence_s(ledger: Ledger) -> float:
    """How long a worker may send nothing before it counts as hung."""
    return min(SILENT_AFTER_S, ledger.settings.workers.worker_timeout)


def _check(ledger: Ledger, worker: Worker) -> None:
    # Times are compared as ``_next_check`` computes them: a difference could round to just below the limit, and spin.
    settings, now, silent_s = ledger.settings.workers, ledger.now, ledger.now - worker.last_heard
    batch_ends_by = _batch_ends_by(ledger, worker)
    if worker.state is WorkerState.LOADING:
        if now >= worker.last_heard + LOADING_PATIENCE * settings.worker_timeout:
            reason = f"silent for {silent_s:.1f} s while loading ({LOADING_PATIENCE} x worker_timeout)"
            kill(ledger, worker, reason, hangs=False)
        return
    if batch_ends_by is not None and now >= batch_ends_by:
        what = "a batch runs" if worker.canary is None else "it has not answered the canary"
        kill(ledger, worker, f"{what} for over {settings.batch_timeout:g} s (batch_timeout)", hangs=True)
        return
    if not worker.is_silent and now >= worker.last_heard + silence_s(ledger):
        _move_work(ledger, worker)
        ledger.log(e.WARNING, f"worker silent for {silent_s:.1f} s: its work is moved", worker=worker.name, pid=worker.pid)
    if worker.is_silent and now >= worker.last_heard + settings.worker_timeout:
        kill(ledger, worker, f"silent for {silent_s:.1f} s (worker_timeout)", hangs=False)


def _move_work(ledger: Ledger, worker: Worker) -> None:
    worker.is_silent, worker.canary = True, None
    ledger.meter.count(measures.SILENCES)
    begun, at_hand = ledger.fleet.reclaim(worker)
    ledger.put_back(at_hand)
    for batch in reversed(begun):
        ledger.move_silent(batch)


def _next_check(ledger: Ledger, worker: Worker) -> float:
    settings = ledger.settings.workers
    if worker.state is WorkerState.LOADING:
        return worker.last_heard + LOADING_PATIENCE * settings.worker_timeout
    if worker.is_silent:
        return worker.last_heard + settings.worker_timeout
    batch_ends_by = _batch_ends_by(ledger, worker)
    silence_at = worker.last_heard + silence_s(ledger)
    return silence_at if batch_ends_by is None else min(silence_at, batch_ends_by)


def _batch_ends_by(ledger: Ledger, worker: Worker) -> float | None:
    """When the batch that it runs, or the canary, has taken too long."""
    started_at = worker.in_flight[0].started_at if worker.in_flight else None
    if worker.canary is not None:
        started_at = worker.canary.sent_at
    return None if started_at is None else started_at + ledger.settings.workers.batch_timeout
