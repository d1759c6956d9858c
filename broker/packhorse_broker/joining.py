"""How a worker comes in: it shows its token, says what it serves, and answers the canary. Before, it sees no user's input."""

from __future__ import annotations

import hmac

import msgspec

from packhorse_broker import events as e
from packhorse_broker import measures
from packhorse_broker.departures import kill, lost, refuse
from packhorse_broker.leases import Worker, WorkerState
from packhorse_broker.ledger import Ledger
from packhorse_broker.patrol import LOADING_PATIENCE, silence_s
from packhorse_broker.stats import BusyShare
from packhorse_shared.codec import Buffer
from packhorse_shared.messages import (
    MAX_FACTS_BYTES,
    PROTOCOL_VERSION,
    BatchFailed,
    Done,
    ErrorCode,
    Join,
    ModelFacts,
    WorkerAnnounce,
    WorkerHello,
)


def announced(ledger: Ledger, event: e.WorkerAnnounced) -> None:
    """A worker exists and loads."""
    if _may_join(ledger, event, event.announce, None):
        _enter(ledger, event, event.announce)


def greeted(ledger: Ledger, event: e.WorkerGreeted) -> None:
    """A worker is ready for work, or was ready all along and follows the request to introduce itself."""
    hello = event.hello
    if not _may_join(ledger, event, hello, hello.model):
        return
    worker = _enter(ledger, event, hello)
    if worker.state in (WorkerState.LOADING, WorkerState.TESTED):
        worker.facts = hello.model
        worker.limits = ledger.rules.limits_of(hello.limits)
        worker.overlaps = hello.limits.overlaps
        test(ledger, worker)
    else:
        ledger.actions.append(e.TellWorker(event.worker, Join(ledger.boot_id)))


def outdated(ledger: Ledger, event: e.WorkerOutdated) -> None:
    """A worker of another version: it is told so, once and for all, or it would go on introducing itself."""
    refuse(ledger, event.worker, _other_version(event.version))


def disallowed(ledger: Ledger, event: e.WorkerDisallowed) -> None:
    """A worker's key was taken away. It is told once; whatever else it says is not heard."""
    if event.worker in ledger.fleet.workers:
        refuse(ledger, event.worker, "its key was taken away")


def test(ledger: Ledger, worker: Worker) -> None:
    """Send a worker the canary."""
    facts = ledger.model or worker.facts
    assert facts is not None, f"{worker.name} has not said hello"
    worker.state, worker.is_silent = WorkerState.TESTED, False
    ledger.fleet.refresh(worker)
    worker.canary, action = ledger.canaries.send(worker.identity, facts, ledger.now)
    ledger.actions.append(action)
    ledger.patrol_by(ledger.now + min(silence_s(ledger), ledger.settings.workers.batch_timeout))


def judge(ledger: Ledger, worker: Worker, answer: Done | BatchFailed, payload: Buffer) -> None:
    """A worker answered the canary."""
    assert worker.canary is not None, f"{worker.name} has no canary"
    worker.canary = None
    assert worker.facts is not None, f"{worker.name} has not said hello"
    if isinstance(answer, BatchFailed) and answer.code is ErrorCode.NO_WORKER and answer.retryable:
        return  # it had no room yet: its next beat that tells of none brings another canary
    if ledger.model is not None and worker.facts.fingerprint != ledger.model.fingerprint:
        # Another worker with another model passed meanwhile.
        refuse(ledger, worker.identity, _other_model(ledger.model.name), slot=worker.slot, pid=worker.pid)
        return
    if (fault := ledger.canaries.find_fault(ledger.model or worker.facts, answer, payload)) is not None:
        ledger.meter.count(measures.CANARY_FAILURES)
        kill(ledger, worker, f"its answer to the canary is wrong: {fault}", hangs=False)
        return
    message = "worker is back" if worker.has_passed else "worker ready"
    ledger.model = ledger.model or worker.facts
    worker.state, worker.has_passed = WorkerState.READY, True
    ledger.fleet.refresh(worker)
    ledger.log(e.INFO, message, worker=worker.name, pid=worker.pid, device=worker.device)
    ledger.actions.append(e.TellWorker(worker.identity, Join(ledger.boot_id)))


def _may_join(
    ledger: Ledger, event: e.WorkerAnnounced | e.WorkerGreeted, hello: WorkerAnnounce | WorkerHello, model: ModelFacts | None
) -> bool:
    """Whether a worker shows what it must; if not, it is told why, in one line. One that has shown a key needs no token."""
    reason = None
    if hello.version != PROTOCOL_VERSION:
        reason = _other_version(hello.version)
    elif not event.key_name and not hmac.compare_digest(hello.token.encode(), ledger.worker_token.encode()):
        reason = "its token is not the one in the run directory (worker.token)"
    elif model is not None and ledger.model is not None and model.fingerprint != ledger.model.fingerprint:
        reason = _other_model(ledger.model.name)
    elif model is not None and (size := len(msgspec.msgpack.encode(model))) > MAX_FACTS_BYTES:
        reason = f"what it tells of its model takes {size} bytes, limit {MAX_FACTS_BYTES}"
    if reason is None:
        return True
    refuse(ledger, event.worker, reason, slot=hello.slot, pid=hello.pid)
    return False


def _other_version(version: int) -> str:
    return f"it speaks protocol {version}, this broker {PROTOCOL_VERSION}; run one version of packhorse"


def _other_model(name: str) -> str:
    return f"it serves another model, or the same one in another way, than {name} as the first worker loaded it"


def _enter(ledger: Ledger, event: e.WorkerAnnounced | e.WorkerGreeted, hello: WorkerAnnounce | WorkerHello) -> Worker:
    """The worker of this identity, noted as loading if it is new."""
    identity = event.worker
    worker = ledger.fleet.workers.get(identity)
    if worker is not None and worker.incarnation != hello.incarnation:
        lost(ledger, e.WorkerLost(identity, "restarted under the same identity"))
        worker = None
    if worker is None:
        worker = Worker(identity, hello.slot, hello.pid, hello.incarnation, hello.device, ledger.now, BusyShare(ledger.now))
        worker.key_name = event.key_name
        ledger.fleet.add(worker)
        ledger.gone.pop(worker.name, None)
        # The pid of another machine means nothing here: silence must tell.
        ledger.actions.append(e.WatchWorker(identity, 0 if event.key_name else hello.pid))
        ledger.patrol_by(ledger.now + LOADING_PATIENCE * ledger.settings.workers.worker_timeout)
        if isinstance(hello, WorkerAnnounce):
            ledger.log(e.INFO, "worker loads the model", worker=worker.name, pid=worker.pid, device=worker.device)
    worker.last_heard = ledger.now
    return worker
