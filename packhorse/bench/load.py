"""The load itself: one slice on one server, as a closed or an open loop.

Closed loop: so many clients, each sends its next request when it has the answer to the last. What is measured is how much the
server can do for so many clients; a slow server is asked less. Open loop: requests come at random times (Poisson), whatever
became of those before, as from many people who do not know of each other. What is measured is how long they wait. Their time
counts from when they were due, so neither a slow server nor a slow client can hide a wait by asking late.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from packhorse.bench.bodies import Body
from packhorse.bench.pacer import Pacer
from packhorse.bench.samples import Samples
from packhorse.bench.sender import Sender
from packhorse.bench.stop import Stop

_LOOK_EVERY_S = 0.02
_AFTER_FAILURE_S = 0.1
"""What a client of a closed loop waits after a refusal or a failure: it shall not spin on a server that says no at once."""
_LATEST_S = 0.25
"""An open loop whose time is over still sends what was due so shortly before."""

OnLook = Callable[[Samples], None]


class Plan(msgspec.Struct, frozen=True):
    """How one slice is loaded. It ends after ``duration_s``, or with the answers to so many ``requests``."""

    clients: int
    """Of a closed loop; most connections of an open one."""
    rate: float | None
    """Requests/s of an open loop."""
    duration_s: float | None
    requests: int | None


@dataclass
class _Slice:
    """One slice while it runs."""

    plan: Plan
    bodies: Iterator[Body]
    chance: random.Random
    samples: Samples
    cpu_s: float = field(default_factory=time.process_time)

    @property
    def until(self) -> float | None:
        """When no more is sent."""
        return None if self.plan.duration_s is None else self.samples.begun_at + self.plan.duration_s

    @property
    def is_over(self) -> bool:
        """Whether all was sent, or its time is over."""
        return self.samples.begun == self.plan.requests or (self.until is not None and time.monotonic() >= self.until)

    def arrivals(self, rate: float) -> Iterator[float]:
        """When the requests of an open loop are due."""
        due = self.samples.begun_at
        for _ in itertools.count() if self.plan.requests is None else range(self.plan.requests):
            due += self.chance.expovariate(rate)
            if self.until is not None and due >= self.until:
                return
            yield due

    def note_cpu(self) -> None:
        """All is sent; waiting for the last answers costs nothing and shall not hide what sending did."""
        seconds = max(time.monotonic() - self.samples.begun_at, 1e-9)
        self.samples.cpu_share = (time.process_time() - self.cpu_s) / seconds


class Load:
    """Loads one server, slice by slice."""

    def __init__(self, sender: Sender, bodies: Sequence[Body], stop: Stop) -> None:
        self._sender = sender
        self._bodies = bodies
        self._stop = stop

    async def slice(self, plan: Plan, seed: str, on_look: OnLook) -> Samples:
        """Load it once. ``seed`` says where among the bodies to begin, and when requests arrive: the same for servers that
        are compared. ``on_look`` is called every 20 ms with what there is so far."""
        chance = random.Random(seed)  # noqa: S311 (not for secrets)
        first = chance.randrange(len(self._bodies))
        bodies = itertools.cycle([*self._bodies[first:], *self._bodies[:first]])
        running = _Slice(plan, bodies, chance, Samples())
        samples = running.samples
        looking = asyncio.get_running_loop().create_task(_look(samples, on_look))
        try:
            await (self._closed(running) if plan.rate is None else self._open(running, plan.rate))
        finally:
            looking.cancel()
        samples.stopped_at, samples.is_interrupted = self._end_of(running)
        return samples

    def _end_of(self, running: _Slice) -> tuple[float, bool]:
        """When the load ended, and whether before its time. An open loop lasts its time, whenever its last answer came."""
        now, until, asked_at = time.monotonic(), running.until, self._stop.requested_at
        if asked_at is not None and (until is None or asked_at < until):
            return min(now, asked_at), True
        return now if until is None else until, False

    async def _closed(self, running: _Slice) -> None:
        async def client() -> None:
            while not self._stop.is_requested and not running.is_over:
                if not await self._sender.send(next(running.bodies), running.samples):
                    await asyncio.sleep(_AFTER_FAILURE_S)

        await _ended([self._stop.task(client()) for _ in range(running.plan.clients)])
        running.note_cpu()

    async def _open(self, running: _Slice, rate: float) -> None:
        samples = running.samples
        free = asyncio.Semaphore(running.plan.clients)
        tasks: set[asyncio.Task[Any]] = set()
        pacer = Pacer()
        self._stop.on_request = pacer.wake

        async def send(due: float) -> None:
            try:
                await self._sender.send(next(running.bodies), samples, due)
            finally:
                free.release()

        try:
            for due in running.arrivals(rate):
                await pacer.until(due)
                must_wait = free.locked()
                is_free = await _take(free, running.until)
                if self._stop.is_requested:
                    break
                if not is_free:
                    samples.never_sent += 1
                    continue
                samples.waited_for_connection += must_wait
                task = self._stop.task(send(due))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
        finally:
            pacer.close()
        running.note_cpu()
        await _ended(tasks)


async def _take(free: asyncio.Semaphore, until: float | None) -> bool:
    """Wait for a connection; False when the time is over before."""
    patience_s = None if until is None else until + _LATEST_S - time.monotonic()
    if patience_s is not None and patience_s <= 0:
        return False
    try:
        return await asyncio.wait_for(free.acquire(), patience_s) if free.locked() else await free.acquire()
    except TimeoutError:
        return False


async def _ended(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Wait for all of them. Those that were cancelled count as ended; a fault of our own is raised."""
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, Exception):
            raise result


async def _look(samples: Samples, on_look: OnLook) -> None:
    while True:
        due = time.monotonic() + _LOOK_EVERY_S
        await asyncio.sleep(_LOOK_EVERY_S)
        samples.loop_lag.append(time.monotonic() - due)
        on_look(samples)
