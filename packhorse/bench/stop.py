"""Ending a run early: Ctrl-C or SIGTERM stops sending, and what is open gets a moment; the next one does not wait."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

_GRACE_S = 2.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stop:
    """Whether the run is to end, and the tasks that then must."""

    def __init__(self) -> None:
        self.requested_at: float | None = None
        self.on_request: Callable[[], None] = lambda: None
        """Called once, at the first request."""
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def is_requested(self) -> bool:
        """Whether no more is to be sent."""
        return self.requested_at is not None

    def task(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Start a task that is cancelled when the grace is over."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def request(self) -> None:
        """Send no more; a second call waits no longer."""
        if self.is_requested:
            self._cancel()
            return
        self.requested_at = time.monotonic()
        self.on_request()
        asyncio.get_running_loop().call_later(_GRACE_S, self._cancel)

    @contextmanager
    def on_signals(self) -> Iterator[None]:
        """Take the signals while the load runs."""
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self.request)
        try:
            yield
        finally:
            for number in _SIGNALS:
                loop.remove_signal_handler(number)

    def _cancel(self) -> None:
        for task in self._tasks:
            task.cancel()
