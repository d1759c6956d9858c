"""How a worker goes: it leaves, is lost, refused or killed. In every case its work is taken away first."""

from __future__ import annotations

from packhorse_broker import events as e
from packhorse_broker import measures
from packhorse_broker.leases import Worker, WorkerState
from packhorse_broker.ledger import Ledger
from packhorse_shared.messages import ErrorCode, Refused

BACK_WITHIN_S = 2.0
"""A worker that left and is started again, as supervisord does unless it was told to stop it, has announced itself by then: it
does so before it loads its model. So has one that does not know yet of a broker that has only just started."""


def left(ledger: Ledger, event: e.WorkerLeft) -> None:
    """A worker said bye. One that drained hands back what reached it too late; else what it ran is suspect."""
    worker = ledger.fleet.workers.get(event.worker)
    if worker is None:
        return
    blame = None if worker.state is WorkerState.DRAINING else "the worker that ran this input left"
    moved = _take_work(ledger, worker, blame=blame)
    ledger.retire(worker, has_died=bool(event.reason))
    ledger.meter.count(measures.WORKER_EXITS["left"])
    level, message = (e.ERROR, f"worker left: {event.reason}") if event.reason else (e.INFO, "worker left")
    ledger.log(level, message, worker=worker.name, pid=worker.pid, inputs_moved=moved)


def lost(ledger: Ledger, event: e.WorkerLost) -> None:
    """A worker died: what it had begun is suspect, what it had at hand behind that goes back."""
    worker = ledger.fleet.workers.get(event.worker)
    if worker is None:
        return
    moved = _take_work(ledger, worker, blame="the workers that ran this input died")
    ledger.retire(worker, has_died=worker.state is not WorkerState.DRAINING)
    ledger.meter.count(measures.WORKER_EXITS["lost"])
    ledger.log(e.WARNING, f"worker lost: {event.reason}", worker=worker.name, pid=worker.pid, inputs_moved=moved)


def refuse(ledger: Ledger, identity: bytes, reason: str, **fields: int) -> None:
    """A worker may not join, or not stay: it is told why, and stops."""
    ledger.actions.append(e.TellWorker(identity, Refused(reason)))
    if (worker := ledger.fleet.workers.get(identity)) is not None:
        _take_work(ledger, worker, blame=None)
        ledger.retire(worker)
    ledger.meter.count(measures.WORKER_EXITS["refused"])
    ledger.log(e.ERROR, f"worker refused: {reason}", **fields)


def kill(ledger: Ledger, worker: Worker, reason: str, *, hangs: bool) -> None:
    """End a worker that will not do better. With ``hangs``, the batch that it runs is charged. What it has begun behind that is
    not, because batches end in their order: its turn has not come."""
    moved = _take_work(ledger, worker, blame="the workers that ran this input had to be killed" if hangs else None, hangs=hangs)
    ledger.retire(worker, has_died=worker.state is not WorkerState.DRAINING)
    ledger.meter.count(measures.WORKER_EXITS["killed"])
    ledger.actions.append(e.KillWorker(worker.identity, worker.pid, reason))
    done = "told to end itself" if worker.key_name else "killed"
    ledger.log(e.ERROR, f"worker {done}: {reason}", worker=worker.name, pid=worker.pid, inputs_moved=moved)


def abandoned_at(ledger: Ledger) -> float | None:
    """When the requests of a broker that drains are given up because nobody is left who could run them; None while somebody is.

    Workers that were stopped with the broker do not come back. One that died is started again, and is waited for.
    """
    if ledger.fleet.workers or any(each.has_died for each in ledger.gone.values()):
        return None
    return max(ledger.drain_began_at, ledger.last_gone_at) + BACK_WITHIN_S


def _take_work(ledger: Ledger, worker: Worker, *, blame: str | None, hangs: bool = False) -> int:
    """Take everything away from a worker; with ``blame``, what it had begun is charged, or only the first of it if that
    ``hangs``. Returns the number of inputs."""
    begun, at_hand = ledger.fleet.reclaim(worker)
    charged = 0 if blame is None else 1 if hangs else len(begun)
    ledger.put_back(reversed((*begun[charged:], *at_hand)))
    for batch in begun[:charged]:
        ledger.charge(batch, ErrorCode.WORKER_DIED, str(blame), is_deadly=True, has_hung=hangs)
    return sum(len(batch.items) for batch in (*begun, *at_hand))
