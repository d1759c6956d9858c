"""One frontend: its ASGI application, and what is opened when the event loop starts."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.routing import Router
from starlette.types import ASGIApp

from packhorse_frontend.bodies.body import BodyMemory
from packhorse_frontend.client import BrokerClient
from packhorse_frontend.layers.cors import AllowOrigins
from packhorse_frontend.layers.following import EndedRequest, FollowRequests
from packhorse_frontend.layers.keys import Keys
from packhorse_frontend.layers.metering import count_ended, count_refusal, count_rejection
from packhorse_frontend.layers.middleware import (
    AnswerProblems,
    CloseWhileDraining,
    NameRequests,
    NormalizePath,
    RefuseWhileDraining,
    RequireKey,
)
from packhorse_frontend.problems import Problem
from packhorse_frontend.routes import make_routes
from packhorse_frontend.state import FrontendState
from packhorse_frontend.tokens.pool import TokenizerPool
from packhorse_frontend.tokens.texts import load_tokenizer
from packhorse_shared.errors import CannotStartError
from packhorse_shared.messages import BrokerState, ErrorCode
from packhorse_shared.meter import Meter
from packhorse_shared.run_dir import RunDir
from packhorse_shared.settings import HttpSettings

if TYPE_CHECKING:
    from packhorse_frontend.layers.tracing import Tracing

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FrontendPlan:
    """All that a frontend is made of, before anything is opened."""

    http: HttpSettings
    run_dir: RunDir
    index: int
    served_names: tuple[str, ...]
    keys: Keys
    threads: int
    """Threads that tokenize."""
    created: int
    """Unix time that /v1/models gives."""
    url: str
    find_model: Callable[[], Path]
    """Finds the model's folder, which may take a download. Called in a thread."""
    tracing: Tracing | None = None
    """What makes traces of requests, if they are wanted. Closed by who opened it."""


class Frontend:
    """What a process serves: ``app`` for uvicorn, which runs its lifespan."""

    def __init__(self, plan: FrontendPlan, on_fault: Callable[[], None]) -> None:
        self._plan = plan
        self._on_fault = on_fault
        self._is_announced = False
        self._tokenizers = ThreadPoolExecutor(plan.threads, "tokenizer")
        self._renderer = ThreadPoolExecutor(1, "renderer")
        self._body_reader = ThreadPoolExecutor(1, "body-reader")
        meter = Meter()
        self.state = FrontendState(
            http=plan.http,
            served_names=plan.served_names,
            created=plan.created,
            client=BrokerClient(plan.run_dir.frontends_endpoint, plan.index, self._on_broker_state, meter),
            meter=meter,
            pool=TokenizerPool(self._tokenizers, plan.threads),
            renderer=self._renderer,
            body_reader=self._body_reader,
            body_memory=BodyMemory(plan.http.max_body_bytes),
        )
        self.fault: CannotStartError | None = None
        """Why this process cannot serve, once that is known; ``on_fault`` was called then."""
        self._requests = NameRequests(_surround(self._make_routes(), self.state, plan))
        observers: list[Callable[[EndedRequest], None]] = [partial(count_ended, meter)]
        if plan.tracing is not None:
            observers.append(plan.tracing.record)
        self.app: ASGIApp = FollowRequests(self._requests, plan.http.root_path, observers)

    @property
    def in_flight(self) -> int:
        """HTTP requests that are being answered."""
        return self._requests.in_flight

    def on_refusal(self, problem: Problem) -> None:
        """A connection was refused before there was a request."""
        count_refusal(self.state.meter, problem)

    def begin_drain(self) -> None:
        """From now on new requests get 503."""
        self.state.is_draining = True

    def give_up(self) -> None:
        """Answer what waits for the broker with 503: there is no time left."""
        self.state.client.fail_all(ErrorCode.DRAINING, "the server stopped before this request was done (--shutdown_grace)")

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Open everything, and close it in the end. The tokenizer loads meanwhile."""
        self.state.client.open()
        loading = asyncio.create_task(self._load_tokenizer())
        try:
            yield
        finally:
            loading.cancel()
            self.state.client.close()
            for threads in (self._tokenizers, self._renderer, self._body_reader):
                threads.shutdown(wait=False, cancel_futures=True)

    def _make_routes(self) -> ASGIApp:
        @contextlib.asynccontextmanager
        async def lifespan(_app: ASGIApp) -> AsyncIterator[None]:
            async with self.running():
                yield

        return Router(make_routes(self.state), redirect_slashes=False, lifespan=lifespan)

    async def _load_tokenizer(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            self.state.tokenizer = await loop.run_in_executor(self._tokenizers, lambda: load_tokenizer(self._plan.find_model()))
        except CannotStartError as problem:
            self.fault = problem
            self._on_fault()
        else:
            log.debug("tokenizer loaded")
            self._announce()

    def _on_broker_state(self, _state: BrokerState) -> None:
        if not self._is_announced:
            self._announce()

    def _announce(self) -> None:
        """Say once that requests are answered; one frontend says it for all."""
        model = self.state.model()
        if self._is_announced or model is None or self.state.outage() is not None:
            return
        self._is_announced = True
        fields = {"model": self._plan.served_names[0], "dimension": model.dimension, "max_seq_len": self.state.longest_input()}
        log.log(logging.DEBUG if self._plan.index else logging.INFO, "ready on %s", self._plan.url, extra=fields)


def _surround(routes: ASGIApp, state: FrontendState, plan: FrontendPlan) -> ASGIApp:
    """The layers around the routes; see ``middleware.py``. The first to see a request is the last one put on."""
    app: ASGIApp = RequireKey(routes, plan.keys) if plan.keys else routes
    app = RefuseWhileDraining(app, lambda: state.is_draining)
    app = AnswerProblems(NormalizePath(app, plan.http.root_path), lambda problem: count_rejection(state.meter, problem))
    app = CloseWhileDraining(app, lambda: state.is_draining)
    return AllowOrigins(app, plan.http.cors_allow_origin) if plan.http.cors_allow_origin else app
