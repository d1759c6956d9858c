"""uvicorn's server with our own way to stop.

The first SIGTERM or SIGINT begins a drain: the sockets stay open, new requests get 503, and the process ends once nothing
is in flight, at the latest after ``shutdown_grace``. A second signal ends it at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import select
import signal
import socket
from collections.abc import Callable, Iterator
from typing import Protocol

from starlette.types import ASGIApp
from uvicorn import Config, Server

from packhorse_frontend.connection.http_protocol import guard
from packhorse_frontend.problems import Problem
from packhorse_shared.settings import HttpSettings

log = logging.getLogger(__name__)

_QUIET_S = 0.25
"""Nothing in flight for so long ends a drain: a request that the kernel has already accepted still gets its 503."""
_LOOK_EVERY_S = 0.05
_LAST_WORDS_S = 1.0
_LAST_CALL_S = 0.5
"""The longest that connections which the kernel has accepted are taken in before the sockets are closed."""
_LAST_ANSWERS_S = 0.1
"""Enough for a 503 to whoever was let in last."""
_TICK_S = 1.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Drainable(Protocol):
    """What a server has to know of its application to stop well."""

    @property
    def in_flight(self) -> int:
        """Requests that are being answered."""

    def begin_drain(self) -> None:
        """Refuse new requests from now on."""

    def give_up(self) -> None:
        """Answer what is in flight with an error."""


def uvicorn_config(http: HttpSettings, app: ASGIApp, on_refusal: Callable[[Problem], None]) -> Config:
    """How uvicorn is to serve the app. ``on_refusal`` hears of answers that the app does not give."""
    config = Config(
        app,
        http=guard(http, on_refusal),
        ws="none",
        lifespan="on",
        interface="asgi3",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        root_path=http.root_path.rstrip("/"),
        ssl_keyfile=http.ssl_keyfile,
        ssl_certfile=http.ssl_certfile,
        timeout_graceful_shutdown=5,
    )
    config.timeout_keep_alive = http.keep_alive  # type: ignore[assignment]  # declared int, used as any number of seconds
    return config


class DrainingServer(Server):
    """Serves until a drain that a signal began has ended. ``on_round`` is called at least every few seconds while it does."""

    def __init__(self, config: Config, app: Drainable, *, grace_s: float, on_round: Callable[[], None] = lambda: None) -> None:
        super().__init__(config)
        self._on_round = on_round
        self._app = app
        self._grace_s = grace_s
        self._stop = asyncio.Event()
        self._draining: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Our handlers instead of uvicorn's, which would stop listening at the first signal."""
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self.on_signal, number)
        try:
            yield
        finally:
            for number in _SIGNALS:
                loop.remove_signal_handler(number)

    def on_signal(self, number: int) -> None:
        """Begin to drain, or, when that was begun already, end now."""
        if self._draining is not None:
            log.warning("second signal, ending at once", extra={"signal": signal.Signals(number).name})
            os._exit(128 + number)
        log.info("draining", extra={"signal": signal.Signals(number).name, "in_flight": self._app.in_flight})
        self._app.begin_drain()
        self._draining = asyncio.create_task(self._drain())

    def stop(self) -> None:
        """Stop without a drain: the process cannot serve."""
        self.should_exit = True
        self._stop.set()

    async def main_loop(self) -> None:
        """uvicorn's own, but it wakes once a second instead of ten times."""
        while not await self.on_tick(0):
            self._on_round()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), _TICK_S)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """uvicorn's own, but whoever has connected by then still gets an answer: it would reset or close them unread."""
        listening = list(sockets or [])
        await self._take_in(listening)
        for server in self.servers:
            server.close()
        for each in listening:
            each.close()
        await asyncio.sleep(_LAST_ANSWERS_S)
        await super().shutdown(sockets)

    @staticmethod
    async def _take_in(listening: list[socket.socket]) -> None:
        """Wait until no connection waits in the kernel for being taken in, which the event loop does one at a time."""
        loop = asyncio.get_running_loop()
        end = loop.time() + _LAST_CALL_S
        while select.select(listening, [], [], 0)[0] and loop.time() < end:  # noqa: ASYNC110 (nobody can set an event here)
            await asyncio.sleep(0)

    async def _drain(self) -> None:
        if not await self._is_quiet(_QUIET_S, self._grace_s):
            log.warning("shutdown_grace is over", extra={"in_flight": self._app.in_flight})
            self._app.give_up()
            if not await self._is_quiet(0, _LAST_WORDS_S):
                for connection in list(self.server_state.connections):
                    connection.transport.abort()
        self.stop()

    async def _is_quiet(self, quiet_s: float, within_s: float) -> bool:
        """Wait until nothing was in flight for so long; whether that came to be in time."""
        loop = asyncio.get_running_loop()
        quiet_since = loop.time()
        end = quiet_since + within_s
        while loop.time() < end:
            if self._app.in_flight:
                quiet_since = loop.time()
            elif loop.time() - quiet_since >= quiet_s:
                return True
            await asyncio.sleep(_LOOK_EVERY_S)
        return False
