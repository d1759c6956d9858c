"""A worker in threads of the test: the real loop and compute thread, with a fake model that can be held up."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from model_facts import model_facts
from packhorse_shared import messages as m
from packhorse_worker.backend import Backend, EncodedBatch
from packhorse_worker.compute import run_worker
from packhorse_worker.meeting import MeetingPoint
from packhorse_worker.orders import WorkerIdentity

FACTS = model_facts()
LIMITS = m.WorkerLimits(4, 256)


class FakeModel:
    """Gives (sum of ids, prompt tokens) as the vector of an input; a batch can be held up or made to fail."""

    overlaps = False

    def __init__(self) -> None:
        self.facts = FACTS
        self.limits = LIMITS
        self.gate = threading.Event()
        self.gate.set()
        self.failure: Exception | None = None
        self.begun = 0

    def start_batch(self, ids: Sequence[NDArray[np.int32]], options: Sequence[m.EncodeOptions]) -> Callable[[], EncodedBatch]:
        self.begun += 1
        assert self.gate.wait(20)
        if self.failure is not None:
            raise self.failure
        rows = [(each.sum(), option.prompt_tokens) for each, option in zip(ids, options, strict=True)]
        batch = EncodedBatch(np.array(rows, dtype=np.float32).ravel(), [2] * len(ids), [])
        return lambda: batch

    def memory_bytes(self) -> int | None:
        return None


class RunningWorker:
    """``run_worker`` in a thread of the test."""

    def __init__(
        self,
        meeting: MeetingPoint,
        *,
        supervised: bool = True,
        give_up_after_s: float = 30.0,
        model: FakeModel | None = None,
    ) -> None:
        self.model = model or FakeModel()
        self.loaded = threading.Event()
        self.load_error: Exception | None = None
        self.exits: list[int] = []
        self.status: int | None = None
        self._signals, self._signal = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        who = WorkerIdentity(slot=3, device="cpu", pid=os.getpid(), incarnation=99, supervised=supervised)

        def run() -> None:
            self.status = run_worker(
                meeting, who, self._load, self._signals, exit_now=self.exits.append, give_up_after_s=give_up_after_s
            )

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    def _load(self) -> Backend:
        assert self.loaded.wait(20)
        if self.load_error is not None:
            raise self.load_error
        return self.model

    def signal(self) -> None:
        os.write(self._signal, b"\x0f")

    def exit_status(self) -> int | None:
        self._thread.join(10)
        assert not self._thread.is_alive()
        return self.status

    def end(self) -> None:
        self.model.gate.set()
        self.loaded.set()
        self.signal()
        self._thread.join(10)
        os.close(self._signal)
