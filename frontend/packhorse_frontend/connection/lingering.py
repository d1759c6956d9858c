"""Closing a connection so that its last answer arrives.

A socket that is closed while bytes of the client are unread, or still under way, resets the connection, and the reset may
overtake the answer. So the sending side is closed first, and what still comes is read and dropped, for a moment.
(nginx calls it lingering_close.)
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

_LINGER_S = 2.0


class LingeringTransport:
    """A transport whose ``close`` waits for the client to close too, where bytes are unread. All else is the transport's."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, has_unread: Callable[[], bool]) -> None:
        self._transport = transport
        self._loop = loop
        self._has_unread = has_unread
        self._is_closing = False
        self._unsent_bytes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        """Whether the connection is at its end."""
        return self._is_closing or self._transport.is_closing()

    def close(self) -> None:
        """Send what is left, then end the connection."""
        if self.is_closing():
            return
        if not self._has_unread():
            self._transport.close()
            return
        self._is_closing = True
        try:
            if self._transport.can_write_eof():  # not with TLS, where the client closes when it has its answer
                self._transport.write_eof()
            self._transport.resume_reading()
        except (OSError, RuntimeError):
            self._transport.close()
            return
        self._wait()

    def _wait(self) -> None:
        self._unsent_bytes = self._transport.get_write_buffer_size()
        self._loop.call_later(_LINGER_S, self._end)

    def _end(self) -> None:
        if self._transport.is_closing():
            return
        if 0 < self._transport.get_write_buffer_size() < self._unsent_bytes:
            self._wait()  # the client is slow, but it reads
        else:
            self._transport.abort()
