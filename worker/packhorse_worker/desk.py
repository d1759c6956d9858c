"""The batches at hand: the I/O thread lays them down, the compute thread takes them up, in order.

What is not begun can be taken back, at a drain or when the broker that sent it is gone. No sockets here, and no torch.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from packhorse_shared.codec import Buffer
from packhorse_shared.messages import Work

MOST_AT_HAND = 2
"""Of one start of the broker: the running batch and the next one. A third gains nothing, and would only wait behind a stuck
one. What still runs for a broker that is gone is not counted: the new one knows nothing of it."""


@dataclass(frozen=True)
class Task:
    """A batch as it came: its header and the token ids of its inputs, joined."""

    work: Work
    payload: Buffer


class Desk:
    """A queue of at most two batches, those that are begun included, between the I/O thread and the compute thread.

    Batches finish in the order in which they were begun. The first of them runs; one that was begun behind it has its turn when
    that is finished, and its time counts from then. ``clock`` gives seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._waiting: deque[Task] = deque()
        self._begun: deque[Task] = deque()
        self._running_since = 0.0
        """When the turn of the first of ``_begun`` came."""
        self._closed = False

    def put(self, task: Task) -> bool:
        """Lay a batch down. False, and nothing done, when two are at hand or the desk is closed."""
        with self._changed:
            at_hand = sum(each.work.boot_id == task.work.boot_id for each in (*self._begun, *self._waiting))
            if self._closed or at_hand >= MOST_AT_HAND:
                return False
            self._waiting.append(task)
            self._changed.notify()
            return True

    def take(self, most_begun: int = 1) -> Task | None:
        """The next batch, which is begun from now on; None once the desk is closed and empty.

        Blocks until there is one, and until fewer than ``most_begun`` are begun and not finished.
        """
        with self._changed:
            while not self._closed and (not self._waiting or len(self._begun) >= most_begun):
                self._changed.wait()
            if not self._waiting:
                return None
            task = self._waiting.popleft()
            if not self._begun:
                self._running_since = self._clock()
            self._begun.append(task)
            return task

    def finished(self) -> float:
        """The running batch is done; returns the milliseconds that it ran. The next one's turn begins.

        To be called before its answer is sent: the broker may send the next one at once.
        """
        with self._changed:
            assert self._begun, "nothing runs"
            self._begun.popleft()
            now = self._clock()
            ran_ms = (now - self._running_since) * 1000
            self._running_since = now
            self._changed.notify()
            return ran_ms

    def running(self) -> tuple[int, float]:
        """Id of the running batch and the milliseconds that it has run; (0, 0.0) when none is at hand.

        Between two batches it is the one that begins next: 0 means that there is room for two.
        """
        with self._changed:
            if not self._begun:
                return (self._waiting[0].work.batch_id if self._waiting else 0), 0.0
            return self._begun[0].work.batch_id, (self._clock() - self._running_since) * 1000

    def drop_other_boots(self, boot_id: int) -> int:
        """Forget batches not begun that another start of the broker sent; returns how many those were."""
        with self._changed:
            kept = [task for task in self._waiting if task.work.boot_id == boot_id]
            dropped = len(self._waiting) - len(kept)
            self._waiting = deque(kept)
            return dropped

    def close(self) -> list[int]:
        """Take nothing any more; returns the ids of the batches not begun, which are forgotten."""
        with self._changed:
            self._closed = True
            returned = [task.work.batch_id for task in self._waiting]
            self._waiting.clear()
            self._changed.notify_all()
            return returned
