"""Runs the batches of the desk: one at a time, or the next one begun while one runs.

A device that runs beside the host is only told what to do (``Backend.start_batch``), and would stand still while the host waits
for its results, answers, and prepares the next batch. So there a second thread waits and answers, and this one begins the next.
What a batch raises is told when its turn to finish comes, whichever thread met it: the broker takes answers in order, and when
the device is lost as a batch is begun, the one before it may still have its answer.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

from packhorse_shared.messages import ErrorCode
from packhorse_worker.answers import answer, failed, inputs_of
from packhorse_worker.backend import Backend, DeviceLostError, EncodedBatch
from packhorse_worker.desk import MOST_AT_HAND, Task
from packhorse_worker.loop import Link
from packhorse_worker.orders import Answer, Break

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Begun:
    """A batch that the device was given, or could not be given."""

    task: Task
    results: Callable[[], EncodedBatch] | Exception
    """Waits for them; or what was raised when the batch was begun."""


def run_in_turn(link: Link, backend: Backend) -> bool:
    """Encode one batch after the other in this thread until the desk is closed. False when the device is lost, which the broker
    is then told."""
    while (task := link.desk.take()) is not None:
        try:
            _finish(link, backend, _begin(task, backend))
        except DeviceLostError as problem:
            log.critical("the device is lost, ending: %s", problem)
            link.order(Break())
            return False
    return True


def run_overlapped(link: Link, backend: Backend) -> bool:
    """Likewise, but while a batch runs the next one is begun; another thread answers."""
    finisher = Finisher(link, backend)
    while (task := link.desk.take(most_begun=MOST_AT_HAND)) is not None:
        # Nothing of a batch is held on to while the next one is waited for, here or there: it may hold memory of the device.
        if not finisher.hand(_begin(task, backend)):
            break
    return finisher.close()


class Finisher:
    """A thread that answers batches in the order in which they were begun.

    A daemon: one that waits for a stuck kernel cannot hold the process. The broker sees it as a batch that runs for too long.
    """

    def __init__(self, link: Link, backend: Backend) -> None:
        self._link = link
        self._backend = backend
        self._begun: queue.SimpleQueue[Begun | None] = queue.SimpleQueue()
        self._has_failed = False
        self._thread = threading.Thread(target=self._run, name="finisher", daemon=True)
        self._thread.start()

    def hand(self, begun: Begun) -> bool:
        """Have a batch answered when its turn comes. False when no other can be begun after it: the device was lost."""
        self._begun.put(begun)
        return not isinstance(begun.results, DeviceLostError)

    def close(self) -> bool:
        """Wait until all is answered. False when the device is lost."""
        self._begun.put(None)
        self._thread.join()
        return not self._has_failed

    def _run(self) -> None:
        try:
            while self._finish_next():
                pass
        except DeviceLostError as problem:
            log.critical("the device is lost, ending: %s", problem)
            self._fail()
        except BaseException:
            log.exception("the thread that answers failed")
            self._fail()

    def _finish_next(self) -> bool:
        begun = self._begun.get()
        if begun is None:
            return False
        _finish(self._link, self._backend, begun)
        return True

    def _fail(self) -> None:
        """End the worker. The other thread may be waiting at the desk, or for a device that never comes back."""
        self._has_failed = True
        self._link.order(Break(at_once=True))
        self._link.desk.close()


def _begin(task: Task, backend: Backend) -> Begun:
    try:
        return Begun(task, backend.start_batch(*inputs_of(task)))
    except Exception as problem:  # told by ``_finish``, when the batch's turn comes
        return Begun(task, problem)


def _finish(link: Link, backend: Backend, begun: Begun) -> None:
    """Wait for a batch and answer it. Raises DeviceLostError."""
    outcome = _outcome(begun)
    ran_ms = link.desk.finished()
    link.order(_answer(begun.task, outcome, ran_ms))
    link.memory_bytes = backend.memory_bytes()


def _outcome(begun: Begun) -> EncodedBatch | Exception:
    try:
        if isinstance(begun.results, Exception):
            raise begun.results
        return begun.results()
    except DeviceLostError:
        raise
    except Exception as problem:  # the batch is over all the same, and then it is told
        return problem


def _answer(task: Task, outcome: EncodedBatch | Exception, ran_ms: float) -> Answer:
    try:
        if isinstance(outcome, Exception):
            raise outcome
        return Answer(*answer(task, outcome, ran_ms))
    except Exception as problem:
        # The backend isolates what inputs can do, so this is a fault of ours: it must not cost the worker.
        log.exception("a batch failed as a whole", extra={"batch_id": task.work.batch_id})
        message = f"the worker failed: {type(problem).__name__}"
        return Answer(failed(task, ErrorCode.FORWARD_FAILED, message, retryable=False), b"")
