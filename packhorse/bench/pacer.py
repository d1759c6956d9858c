"""Waiting for a time to the tenth of a millisecond: event loops count whole milliseconds, which is much of a short latency."""

from __future__ import annotations

import asyncio
import time

from packhorse_broker.timer import TimerFd


class Pacer:
    """One waiter at a time. Close it when done."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._timer = TimerFd()
        self._waiting: asyncio.Future[None] | None = None
        self._loop.add_reader(self._timer.descriptor, self._expired)

    async def until(self, when: float) -> None:
        """Return at ``when`` (of time.monotonic()), or as soon as ``wake`` is called. If it is past, others get a turn."""
        if when <= time.monotonic():
            await asyncio.sleep(0)
            return
        self._waiting = self._loop.create_future()
        self._timer.arm(when)
        await self._waiting

    def wake(self) -> None:
        """End the wait, if there is one."""
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def _expired(self) -> None:
        self._timer.clear()
        self.wake()

    def close(self) -> None:
        """Give the timer back."""
        self._loop.remove_reader(self._timer.descriptor)
        self._timer.close()
