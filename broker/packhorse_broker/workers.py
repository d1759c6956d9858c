"""What the broker does when a worker speaks, falls silent or dies."""

from __future__ import annotations

import hmac

from packhorse_broker import events as e
from packhorse_broker.leases import Batch, Worker, WorkerState
from packhorse_broker.ledger import Ledger
from packhorse_broker.results import failures_of, results_of
from packhorse_broker.stats import BusyShare
from packhorse_shared.messages import (
    PROTOCOL_VERSION,
    Drain,
    ErrorCode,
    Introduce,
    Join,
    Refused,
    WorkerAnnounce,
    WorkerHello,
)

SILENT_AFTER_S = 1.0
"""A worker that sends nothing for so long counts as hung: its work is moved, it is sent nothing new."""
LOADING_PATIENCE = 6
"""While it loads, a worker may be silent for this many ``worker_timeout``: imports and weights can hold up its I/O thread."""


def announced(ledger: Ledger, event: e.WorkerAnnounced) -> None:
    """A worker exists and loads."""
    if _may_join(ledger, event.worker, event.announce, None):
        _enter(ledger, event.worker, event.announce)


def greeted(ledger: Ledger, event: e.WorkerGreeted) -> None:
    """A worker is ready for work, or was ready all along and follows the request to introduce itself."""
    hello = event.hello
    if not _may_join(ledger, event.worker, hello, hello.model.fingerprint):
        return
    worker = _enter(ledger, event.worker, hello)
    if worker.state is WorkerState.LOADING:
        if ledger.model is None:
            ledger.model = hello.model
        worker.state = WorkerState.READY
        worker.limits = ledger.rules.limits_of(hello.limits)
        ledger.fleet.refresh(worker)
        ledger.patrol_by(ledger.now + _silence_s(ledger))
        ledger.log(e.INFO, "worker ready", worker=worker.name, pid=worker.pid, device=worker.device)
    ledger.actions.append(e.TellWorker(event.worker, Join(ledger.boot_id)))


def outdated(ledger: Ledger, event: e.WorkerOutdated) -> None:
    """A worker of another version: it is told so, once and for all, or it would go on introducing itself."""
    _refuse(ledger, event.worker, _other_version(event.version))


def _may_join(ledger: Ledger, identity: bytes, hello: WorkerAnnounce | WorkerHello, fingerprint: str | None) -> bool:
    """Whether a worker shows what it must; if not, it is told why, in one line."""
    reason = None
    if hello.version != PROTOCOL_VERSION:
        reason = _other_version(hello.version)
    elif not hmac.compare_digest(hello.token.encode(), ledger.worker_token.encode()):
        reason = "its token is not the one in the run directory (worker.token)"
    elif fingerprint is not None and ledger.model is not None and fingerprint != ledger.model.fingerprint:
        reason = (
            f"it serves another model, or the same one in another way, than {ledger.model.name} as the first worker loaded it"
        )
    if reason is None:
        return True
    _refuse(ledger, identity, reason, slot=hello.slot, pid=hello.pid)
    return False


def _refuse(ledger: Ledger, identity: bytes, reason: str, **fields: int) -> None:
    ledger.actions.append(e.TellWorker(identity, Refused(reason)))
    if (worker := ledger.fleet.workers.get(identity)) is not None:
        _take_work(ledger, worker, blame=None)
        ledger.retire(worker)
    ledger.log(e.ERROR, f"worker refused: {reason}", **fields)


def _other_version(version: int) -> str:
    return f"it speaks protocol {version}, this broker {PROTOCOL_VERSION}; run one version of packhorse"


def _enter(ledger: Ledger, identity: bytes, hello: WorkerAnnounce | WorkerHello) -> Worker:
    """The worker of this identity, noted as loading if it is new."""
    worker = ledger.fleet.workers.get(identity)
    if worker is not None and worker.incarnation != hello.incarnation:
        lost(ledger, e.WorkerLost(identity, "restarted under the same identity"))
        worker = None
    if worker is None:
        worker = Worker(identity, hello.slot, hello.pid, hello.incarnation, hello.device, ledger.now, BusyShare(ledger.now))
        ledger.fleet.add(worker)
        ledger.gone.pop(worker.name, None)
        ledger.actions.append(e.WatchWorker(identity, hello.pid))
        ledger.patrol_by(ledger.now + LOADING_PATIENCE * ledger.settings.workers.worker_timeout)
        if isinstance(hello, WorkerAnnounce):
            ledger.log(e.INFO, "worker loads the model", worker=worker.name, pid=worker.pid, device=worker.device)
    worker.last_heard = ledger.now
    return worker


def beat(ledger: Ledger, event: e.WorkerBeat) -> None:
    """A worker lives, and tells what it runs."""
    worker = _known(ledger, event.worker)
    if worker is None:
        return
    worker.memory_bytes = event.beat.memory_bytes
    if worker.is_held and event.beat.batch_id == 0:
        worker.is_held = False
        ledger.fleet.refresh(worker)
    if event.beat.batch_id and event.beat.busy_ms >= 1000 * ledger.settings.workers.batch_timeout:
        _kill(ledger, worker, f"a batch runs for {event.beat.busy_ms / 1000:.1f} s (batch_timeout)", blame=True)
    elif worker.is_silent and event.beat.batch_id == 0:
        # While it still runs a batch that was moved, new work would wait behind it.
        worker.is_silent = False
        ledger.fleet.refresh(worker)
        ledger.patrol_by(ledger.now + _silence_s(ledger))
        ledger.log(e.INFO, "worker is back", worker=worker.name, pid=worker.pid)


def finished(ledger: Ledger, event: e.BatchFinished) -> None:
    """Rows of a batch: each frontend gets its share, failed inputs fail their requests only."""
    worker, done = _known(ledger, event.worker), event.done
    batch = _settle(ledger, worker, done.boot_id, done.batch_id)
    if worker is None or batch is None:
        return
    if len(done.row_values) != len(batch.items):
        ledger.log(e.ERROR, "worker answered another number of rows than it was sent inputs", worker=worker.name)
        ledger.charge(
            batch, ErrorCode.FORWARD_FAILED, f"a worker gave {len(done.row_values)} rows for {len(batch.items)} inputs"
        )
        return
    worker.ran(batch, ledger.now)
    for failure in failures_of(batch, done):
        request, index = batch.items[failure.index]
        if not request.closed:
            ledger.fail(request, failure.code, failure.message, index=index)
    for result in results_of(batch, done, event.payload):
        ledger.actions.append(result.action)
        for request, inputs, tokens in result.answered:
            ledger.answer(request, inputs, tokens)


def broke(ledger: Ledger, event: e.BatchBroke) -> None:
    """A batch failed as a whole: it is tried again, or its requests fail with what the worker says."""
    worker, failed = _known(ledger, event.worker), event.failed
    batch = _settle(ledger, worker, failed.boot_id, failed.batch_id)
    if worker is None or batch is None:
        return
    if failed.code is ErrorCode.NO_WORKER and failed.retryable:
        _hold(ledger, worker, failed.message)
        ledger.put_back([batch])
        return
    ledger.log(
        e.WARNING,
        "batch failed",
        worker=worker.name,
        code=failed.code.value,
        inputs=len(batch.items),
        tokens=batch.tokens,
        reason=failed.message,
    )
    if failed.retryable:
        ledger.charge(batch, failed.code, failed.message)
        return
    for request, _ in batch.items:
        if not request.closed:
            ledger.fail(request, failed.code, failed.message)


def _hold(ledger: Ledger, worker: Worker, reason: str) -> None:
    """A worker would not begin a batch, for which no input is to blame. It is sent nothing until its next beat says that it is
    free, so that batch and refusal cannot chase each other."""
    if not worker.is_held:
        ledger.log(e.WARNING, f"worker refused a batch: {reason}", worker=worker.name, pid=worker.pid)
    worker.is_held = True
    ledger.fleet.refresh(worker)


def drained(ledger: Ledger, event: e.WorkerDrained) -> None:
    """A worker stops: what it has not begun goes back."""
    worker = _known(ledger, event.worker)
    if worker is None:
        return
    if worker.state is not WorkerState.DRAINING:
        worker.state = WorkerState.DRAINING
        worker.limits = None
        ledger.fleet.refresh(worker)
        ledger.log(e.INFO, "worker drains", worker=worker.name, pid=worker.pid)
    settled = (ledger.fleet.settle(worker, batch_id, ledger.now) for batch_id in event.returned)
    ledger.put_back([batch for batch in settled if batch is not None])


def left(ledger: Ledger, event: e.WorkerLeft) -> None:
    """A worker said bye. One that drained hands back what reached it too late; else what it ran is suspect."""
    worker = ledger.fleet.workers.get(event.worker)
    if worker is None:
        return
    blame = None if worker.state is WorkerState.DRAINING else "the worker that ran this input left"
    moved = _take_work(ledger, worker, blame=blame)
    ledger.retire(worker)
    level, message = (e.ERROR, f"worker left: {event.reason}") if event.reason else (e.INFO, "worker left")
    ledger.log(level, message, worker=worker.name, pid=worker.pid, inputs_moved=moved)


def lost(ledger: Ledger, event: e.WorkerLost) -> None:
    """A worker died: what it ran is suspect, what it had at hand goes back."""
    worker = ledger.fleet.workers.get(event.worker)
    if worker is None:
        return
    moved = _take_work(ledger, worker, blame="the workers that ran this input died")
    ledger.retire(worker)
    ledger.log(e.WARNING, f"worker lost: {event.reason}", worker=worker.name, pid=worker.pid, inputs_moved=moved)


def patrol(ledger: Ledger) -> float | None:
    """Look at every worker's silence and running time; returns when to look again."""
    for worker in list(ledger.fleet.workers.values()):
        _check(ledger, worker)
    return min((_next_check(ledger, worker) for worker in ledger.fleet.workers.values()), default=None)


def _check(ledger: Ledger, worker: Worker) -> None:
    # Times are compared as ``_next_check`` computes them: a difference could round to just below the limit, and spin.
    settings, now, silent_s = ledger.settings.workers, ledger.now, ledger.now - worker.last_heard
    batch_ends_by = _batch_ends_by(ledger, worker)
    if worker.state is WorkerState.LOADING:
        if now >= worker.last_heard + LOADING_PATIENCE * settings.worker_timeout:
            _kill(
                ledger, worker, f"silent for {silent_s:.1f} s while loading ({LOADING_PATIENCE} x worker_timeout)", blame=False
            )
        return
    if batch_ends_by is not None and now >= batch_ends_by:
        _kill(ledger, worker, f"a batch runs for over {settings.batch_timeout:g} s (batch_timeout)", blame=True)
        return
    if not worker.is_silent and now >= worker.last_heard + _silence_s(ledger):
        worker.is_silent = True
        running, at_hand = ledger.fleet.reclaim(worker)
        ledger.put_back(at_hand)
        if running is not None:
            ledger.move_silent(running)
        ledger.log(e.WARNING, f"worker silent for {silent_s:.1f} s: its work is moved", worker=worker.name, pid=worker.pid)
    if worker.is_silent and now >= worker.last_heard + settings.worker_timeout:
        _kill(ledger, worker, f"silent for {silent_s:.1f} s (worker_timeout)", blame=False)


def _next_check(ledger: Ledger, worker: Worker) -> float:
    settings = ledger.settings.workers
    if worker.state is WorkerState.LOADING:
        return worker.last_heard + LOADING_PATIENCE * settings.worker_timeout
    if worker.is_silent:
        return worker.last_heard + settings.worker_timeout
    batch_ends_by = _batch_ends_by(ledger, worker)
    silence_at = worker.last_heard + _silence_s(ledger)
    return silence_at if batch_ends_by is None else min(silence_at, batch_ends_by)


def _batch_ends_by(ledger: Ledger, worker: Worker) -> float | None:
    """When the batch that it runs has taken too long."""
    started_at = worker.in_flight[0].started_at if worker.in_flight else None
    return None if started_at is None else started_at + ledger.settings.workers.batch_timeout


def _kill(ledger: Ledger, worker: Worker, reason: str, *, blame: bool) -> None:
    _take_work(ledger, worker, blame="the workers that ran this input had to be killed" if blame else None)
    ledger.retire(worker)
    ledger.actions.append(e.KillWorker(worker.identity, worker.pid))
    ledger.log(e.ERROR, f"worker killed: {reason}", worker=worker.name, pid=worker.pid)


def _take_work(ledger: Ledger, worker: Worker, *, blame: str | None) -> int:
    """Take everything away from a worker; with ``blame``, what it ran is charged. Returns the number of inputs."""
    running, at_hand = ledger.fleet.reclaim(worker)
    ledger.put_back(at_hand)
    if running is not None and blame is None:
        ledger.put_back([running])
    elif running is not None and blame is not None:
        ledger.charge(running, ErrorCode.WORKER_DIED, blame)
    return sum(len(batch.items) for batch in (running, *at_hand) if batch is not None)


def _settle(ledger: Ledger, worker: Worker | None, boot_id: int, batch_id: int) -> Batch | None:
    """Close the batch of an answer, if that very batch is open on that very worker; late answers are ignored."""
    if worker is None or boot_id != ledger.boot_id:
        return None
    return ledger.fleet.settle(worker, batch_id, ledger.now)


def _silence_s(ledger: Ledger) -> float:
    return min(SILENT_AFTER_S, ledger.settings.workers.worker_timeout)


def _known(ledger: Ledger, identity: bytes) -> Worker | None:
    """The worker of this identity, heard now; a stranger is asked to introduce itself."""
    worker = ledger.fleet.workers.get(identity)
    if worker is None:
        ledger.actions.append(e.TellWorker(identity, Introduce(ledger.boot_id)))
        return None
    worker.last_heard = ledger.now
    return worker


def stop_all(ledger: Ledger) -> None:
    """Tell every worker that the broker stops."""
    ledger.actions += [e.TellWorker(identity, Drain()) for identity in ledger.fleet.workers]
