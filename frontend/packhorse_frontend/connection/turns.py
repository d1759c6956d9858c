"""Connections that take turns: what one client sends in one go may be more work than the others should wait for."""

from __future__ import annotations

from asyncio import Transport

from uvicorn.protocols.http.flow_control import FlowControl


class TurnFlow(FlowControl):
    """uvicorn's flow control of one connection, whose reading can be held up until its next turn, whatever the app wants."""

    def __init__(self, transport: Transport) -> None:
        super().__init__(transport)
        self._is_held = False
        self._is_pause_wanted = False

    def pause_reading(self) -> None:
        """The app has enough for now."""
        self._is_pause_wanted = True
        super().pause_reading()

    def resume_reading(self) -> None:
        """The app wants more."""
        self._is_pause_wanted = False
        if not self._is_held:
            super().resume_reading()

    def hold(self) -> None:
        """Read nothing until ``release``."""
        self._is_held = True
        super().pause_reading()

    def release(self) -> None:
        """Read again, as far as the app wants it."""
        self._is_held = False
        if not self._is_pause_wanted:
            super().resume_reading()
