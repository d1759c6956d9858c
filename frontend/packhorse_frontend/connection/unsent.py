"""A client that does not read: what waits for it is held in memory, so it is cut off when it takes nothing for a while."""

from __future__ import annotations

import asyncio
import logging

log = logging.getLogger(__name__)


class UnsentWatch:
    """Watches one connection's unsent bytes between ``start`` and ``stop``."""

    def __init__(self, loop: asyncio.AbstractEventLoop, transport: asyncio.Transport, patience_s: float) -> None:
        self._loop = loop
        self._transport = transport
        self._patience_s = patience_s
        self._timer: asyncio.TimerHandle | None = None
        self._unsent_bytes = 0

    def start(self) -> None:
        """More is written than the client reads: it has so long to take some of it."""
        self._unsent_bytes = self._transport.get_write_buffer_size()
        self._timer = self._loop.call_later(self._patience_s, self._check)

    def stop(self) -> None:
        """The client has caught up, or is gone."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check(self) -> None:
        if self._transport.get_write_buffer_size() < self._unsent_bytes:
            self.start()
        else:
            log.debug("client took nothing of its answer", extra={"seconds": self._patience_s})
            self._transport.abort()
