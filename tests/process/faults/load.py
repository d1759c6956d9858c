"""A load on a server from a thread of its own, so that the test can do harm meanwhile.

    with Load(stack.port, random_questions(seed), rate=300, seed=seed) as load:
        load.wait_for(200)
        os.kill(pid, signal.SIGKILL)
        load.wait_for(200)
    load.report().assert_invariant()

Open loop (``rate``): each request is sent at its own time, whatever became of those before. Closed loop (``clients``): so
many clients each send the next request when they have the answer to the last.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import uvloop

from connections import Connections
from questions import Question
from report import HUNG, Report, Sent
from waiting import wait_until

_LONGEST_PAUSE_S = 0.05
_AFTER_REFUSAL_S = 0.02
"""What a client of a closed loop waits when it could not connect, so that it does not spin."""


class Load:
    """Sends questions in random order until it is stopped. Leaving the ``with`` block stops it and waits for all answers."""

    def __init__(
        self,
        port: int,
        questions: Sequence[Question],
        *,
        rate: float = 0.0,
        clients: int = 0,
        is_even: bool = False,
        at_most: int | None = None,
        seed: int = 0,
        patience_s: float = 65.0,
    ) -> None:
        """``is_even``: at equal distances instead of at random ones (Poisson). ``at_most``: stop by itself after so many
        requests. ``patience_s``: how long ``stop`` waits for answers before it calls a request hung."""
        assert bool(rate) != bool(clients), "a rate or a number of clients"
        self._questions = questions
        self._rate = rate
        self._clients = clients
        self._is_even = is_even
        self._at_most = at_most
        self._random = random.Random(seed)
        self._patience_s = patience_s
        self._ended: list[Sent] = []
        self._open: set[Sent] = set()
        self._connections = Connections(port, self._end)
        self._begun = 0
        self._stopping = threading.Event()
        self._broke: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="load", daemon=True)

    # ---- for the test ----

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None) -> None:
        if kind is not None:
            self._patience_s = min(self._patience_s, 5.0)  # the test has failed already: let it say so soon
        self.stop()

    def stop(self) -> Report:
        """Send no more, wait for the answers that are due, and close all connections."""
        self._stopping.set()
        self._thread.join(self._patience_s + 10.0)
        assert not self._thread.is_alive(), "the load itself hangs"
        if self._broke is not None:
            raise AssertionError("the load itself failed") from self._broke
        return self.report()

    def report(self) -> Report:
        """Of all that has ended so far."""
        return Report(sorted(self._ended.copy(), key=lambda each: each.sent), self._connections.strays.copy())

    def take(self) -> Report:
        """The same, and forget it: for a load that runs for long."""
        found = [self._ended.pop() for _ in range(len(self._ended))]
        return Report(sorted(found, key=lambda each: each.sent), self._connections.strays.copy())

    @property
    def answered(self) -> int:
        """Requests that have ended so far."""
        return len(self._ended)

    @property
    def begun(self) -> int:
        """Requests that were sent so far, or tried to."""
        return self._begun

    @property
    def is_done(self) -> bool:
        """Whether a load of ``at_most`` requests has all its answers."""
        return not self._thread.is_alive()

    def wait_for(self, more: int, within_s: float = 60.0) -> None:
        """Wait until that many more requests have ended."""
        goal = self.answered + more
        wait_until(lambda: self.answered >= goal or self.is_done, within_s, f"{more} more answers")
        assert self.answered >= goal, f"the load has ended: {self._broke or self.report()}"

    def wait_done(self, within_s: float = 60.0) -> Report:
        """Wait for the end of a load of ``at_most`` requests."""
        wait_until(lambda: self.is_done, within_s, "the end of the load")
        return self.stop()

    # ---- in the thread ----

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(self._serve())
        except BaseException as problem:
            self._broke = problem

    async def _serve(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        asyncio.get_running_loop().set_exception_handler(self._break)
        self._all_ended = asyncio.Event()
        self._all_ended.set()
        if self._rate:
            await self._send_at_times()
        else:
            await asyncio.gather(*(self._send_in_turn() for _ in range(self._clients)))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._all_ended.wait(), self._patience_s)
        for sent in self._open.copy():
            self._end(sent, HUNG)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._connections.close()
        await asyncio.sleep(0)  # lets the loop close them

    def _break(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """A fault of the load itself: it ends, and the test fails."""
        self._broke = context.get("exception") or RuntimeError(context["message"])
        self._patience_s = 0.0

    def _is_over(self) -> bool:
        return (
            self._broke is not None or self._stopping.is_set() or (self._at_most is not None and self._begun >= self._at_most)
        )

    async def _send_at_times(self) -> None:
        due = time.monotonic()
        while not self._is_over():
            wait_s = due - time.monotonic()
            if wait_s > 0:
                await asyncio.sleep(min(wait_s, _LONGEST_PAUSE_S))
                continue
            self._begin(due)
            due += 1 / self._rate if self._is_even else self._random.expovariate(self._rate)

    async def _send_in_turn(self) -> None:
        while not self._is_over():
            ended = asyncio.get_running_loop().create_future()
            sent = self._begin(time.monotonic(), ended)
            await asyncio.wait([ended], timeout=self._patience_s)
            if not ended.done():
                self._end(sent, HUNG)
            elif sent.problem:
                await asyncio.sleep(_AFTER_REFUSAL_S)

    def _begin(self, due: float, ended: asyncio.Future[None] | None = None) -> Sent:
        sent = Sent(self._begun, self._random.choice(self._questions), due)
        self._begun += 1
        self._open.add(sent)
        self._all_ended.clear()
        if self._connections.send(sent, ended):
            return sent
        task = asyncio.get_running_loop().create_task(self._connections.connect(sent, ended))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return sent

    def _end(self, sent: Sent, problem: str = "") -> None:
        if sent not in self._open:
            return
        sent.ended = time.monotonic()
        sent.sent = sent.sent or sent.ended
        sent.problem = problem
        self._open.discard(sent)
        self._ended.append(sent)
        if not self._open:
            self._all_ended.set()
