"""A small HTTP server in a thread, to be loaded by ``packhorse bench``: it notes what it gets and answers as it is told."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from aiohttp import web

Answer = Callable[["BenchServer", web.Request, dict[str, Any]], Awaitable[web.Response]]

SERVER_TIMES = {"x-packhorse-queue-ms": "1.5", "x-packhorse-tokenize-ms": "0.25", "x-packhorse-encode-ms": "4"}


async def right(_server: BenchServer, request: web.Request, body: dict[str, Any]) -> web.Response:
    """What the endpoint answers; 10 tokens an input."""
    name = request.path.rpartition("/")[2]
    value = body[{"rerank": "documents", "score": "text_2"}.get(name, "input")]
    count = len(value) if isinstance(value, list) else 1
    results = [{"index": index, "embedding": [0.5, 1.0]} for index in range(count)]
    usage = {"prompt_tokens": 10 * count, "total_tokens": 10 * count}
    answer = {"results" if name == "rerank" else "data": results, "usage": usage}
    return web.json_response(answer, headers=SERVER_TIMES)


def refusal(status: int, message: str) -> Answer:
    """Every request is refused."""

    async def answer(_server: BenchServer, _request: web.Request, _body: dict[str, Any]) -> web.Response:
        return web.json_response({"error": {"message": message, "type": "x", "param": None, "code": None}}, status=status)

    return answer


async def hang(server: BenchServer, _request: web.Request, _body: dict[str, Any]) -> web.Response:
    """No answer before the server ends."""
    await server.ending.wait()
    return web.Response()


async def drop(_server: BenchServer, request: web.Request, _body: dict[str, Any]) -> web.Response:
    """The connection is cut."""
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


class BenchServer:
    """What a running server has seen."""

    def __init__(self, answer: Answer, models: list[dict[str, Any]] | None) -> None:
        self.answer = answer
        self.models = models
        self.paths: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.peers: set[Any] = set()
        self.open = 0
        self.most_open = 0
        self.port = 0
        self.ending: asyncio.Event

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def _models(self, request: web.Request) -> web.Response:
        self.headers.append(dict(request.headers))
        return web.json_response({"data": self.models}) if self.models is not None else web.Response(status=404)

    async def _post(self, request: web.Request) -> web.Response:
        body = json.loads(await request.read())
        self.paths.append(request.path)
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        assert request.transport is not None
        self.peers.add(request.transport.get_extra_info("peername"))
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            return await self.answer(self, request, body)
        finally:
            self.open -= 1

    async def serve(self, started: threading.Event, stop: Callable[[Callable[[], None]], None]) -> None:
        self.ending = asyncio.Event()
        loop = asyncio.get_running_loop()
        stop(lambda: loop.call_soon_threadsafe(self.ending.set))
        app = web.Application(client_max_size=64 << 20)
        app.add_routes([web.get("/v1/models", self._models), web.post("/{path:.*}", self._post)])
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.port = runner.addresses[0][1]
        started.set()
        await self.ending.wait()
        await runner.cleanup()


@contextmanager
def bench_server(answer: Answer = right, models: list[dict[str, Any]] | None = None) -> Iterator[BenchServer]:
    """A running server that lists one model with a limit of 64 tokens, or those given; its ``answer`` may be changed."""
    server = BenchServer(answer, models if models is not None else [{"id": "tiny", "max_seq_len": 64}])
    started = threading.Event()
    stops: list[Callable[[], None]] = []
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(started, stops.append)), daemon=True)
    thread.start()
    assert started.wait(20)
    try:
        yield server
    finally:
        stops[0]()
        thread.join(20)
        assert not thread.is_alive()
