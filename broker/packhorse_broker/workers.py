"""What the broker does when a worker speaks."""

from __future__ import annotations

from packhorse_broker import events as e
from packhorse_broker import measures
from packhorse_broker.departures import kill
from packhorse_broker.joining import judge, test
from packhorse_broker.leases import Batch, Worker, WorkerState
from packhorse_broker.ledger import Ledger
from packhorse_broker.patrol import has_lost_work, silence_s
from packhorse_broker.requests import Request
from packhorse_broker.results import failures_of, results_of
from packhorse_shared.messages import Drain, ErrorCode, Introduce


def beat(ledger: Ledger, event: e.WorkerBeat) -> None:
    """A worker lives, and tells what it runs."""
    worker, tells = _known(ledger, event.worker), event.beat
    if worker is None:
        return
    worker.memory_bytes = tells.memory_bytes
    if not tells.batch_id:
        worker.idle_beats += 1
        _is_free(ledger, worker)
        return
    worker.idle_beats = 0
    if tells.busy_ms >= 1000 * ledger.settings.workers.batch_timeout:
        kill(ledger, worker, f"a batch runs for {tells.busy_ms / 1000:.1f} s (batch_timeout)", hangs=True)


def _is_free(ledger: Ledger, worker: Worker) -> None:
    """A worker tells that it has nothing to run. Before it does, new work would wait behind what was moved away from it."""
    if worker.is_held:
        worker.is_held = False
        ledger.fleet.refresh(worker)
    if worker.state is WorkerState.DRAINING:
        worker.is_silent = False
        ledger.patrol_by(ledger.now + silence_s(ledger))
    elif worker.is_silent or (worker.state is WorkerState.TESTED and worker.canary is None):
        test(ledger, worker)
    elif has_lost_work(ledger, worker):
        what = "the canary" if worker.canary is not None else "its work"
        ledger.log(e.WARNING, f"worker never got {what}: it is sent again", worker=worker.name, pid=worker.pid)
        if worker.canary is not None:
            test(ledger, worker)
        begun, at_hand = ledger.fleet.reclaim(worker)
        ledger.put_back([*at_hand, *reversed(begun)])


def finished(ledger: Ledger, event: e.BatchFinished) -> None:
    """Rows of a batch: each frontend gets its share, failed inputs fail their requests only."""
    worker, done = _known(ledger, event.worker), event.done
    if worker is not None and _is_canary(ledger, worker, done.boot_id, done.batch_id):
        judge(ledger, worker, done, event.payload)
        return
    if worker is not None:
        _put_back_skipped(ledger, worker, done.boot_id, done.batch_id)
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
    answered: list[tuple[Request, int, int]] = []
    for result in results_of(batch, done, event.payload):
        ledger.actions.append(result.action)
        answered += result.answered
        for request, inputs, tokens in result.answered:
            ledger.answer(request, inputs, tokens)
    measures.came_back(ledger.meter, batch.sent_at, done.encode_ms, answered)


def _put_back_skipped(ledger: Ledger, worker: Worker, boot_id: int, batch_id: int) -> None:
    """A worker answers in the order in which it was sent its batches. When it answers the second one, a link that was cut and
    is back has taken the first one along, or its answer."""
    if boot_id != ledger.boot_id or batch_id not in [batch.batch_id for batch in worker.in_flight[1:]]:
        return
    began = worker.in_flight[0].started_at
    skipped = ledger.fleet.settle(worker, worker.in_flight[0].batch_id, ledger.now)
    assert skipped is not None, "it was open just now"
    worker.in_flight[0].started_at = began
    ledger.put_back([skipped])
    ledger.log(e.WARNING, "worker skipped a batch: it is sent again", worker=worker.name, pid=worker.pid)


def broke(ledger: Ledger, event: e.BatchBroke) -> None:
    """A batch failed as a whole: it is tried again, or its requests fail with what the worker says."""
    worker, failed = _known(ledger, event.worker), event.failed
    if worker is not None and _is_canary(ledger, worker, failed.boot_id, failed.batch_id):
        judge(ledger, worker, failed, b"")
        return
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
        worker.limits = worker.canary = None
        ledger.fleet.refresh(worker)
        ledger.log(e.INFO, "worker drains", worker=worker.name, pid=worker.pid)
    settled = (ledger.fleet.settle(worker, batch_id, ledger.now) for batch_id in event.returned)
    ledger.put_back([batch for batch in settled if batch is not None])


def _is_canary(ledger: Ledger, worker: Worker, boot_id: int, batch_id: int) -> bool:
    return worker.canary is not None and (boot_id, batch_id) == (ledger.boot_id, worker.canary.batch_id)


def _settle(ledger: Ledger, worker: Worker | None, boot_id: int, batch_id: int) -> Batch | None:
    """Close the batch of an answer, if that very batch is open on that very worker; late answers are ignored."""
    if worker is None or boot_id != ledger.boot_id:
        return None
    return ledger.fleet.settle(worker, batch_id, ledger.now)


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
