"""What surrounds every route, as pure ASGI: request ids, CORS (``cors.py``), errors, paths, draining, API keys, in this order.

(Starlette's BaseHTTPMiddleware would hide from the routes that a client left.)
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from packhorse_frontend.bodies.body import ClientGoneError
from packhorse_frontend.layers.keys import Keys
from packhorse_frontend.layers.request_ids import request_id_of
from packhorse_frontend.problems import Problem, unavailable
from packhorse_shared.messages import ErrorCode

log = logging.getLogger(__name__)

_OPEN_PATHS = frozenset({"/live", "/health", "/", "/docs"})
"""The last two are pages without data."""
_DRAINING_PATHS = frozenset({"/live", "/health", "/status", "/metrics", "/"})
_DRAIN_RETRY_S = 1


async def send_problem(send: Send, problem: Problem) -> None:
    """Answer with the error envelope."""
    body = problem.body()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode("ascii"))]
    headers += [(name.encode("latin-1"), value.encode("latin-1")) for name, value in problem.headers.items()]
    if problem.closes:
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": problem.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class NameRequests:
    """Gives every request its id, which every answer carries, and counts what is in flight."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.in_flight = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on under its id."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = request_id_of(dict(scope["headers"]).get(b"x-request-id"))
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), (b"x-request-id", request_id.encode("ascii"))]
            await send(message)

        self.in_flight += 1
        try:
            await self._app(scope, receive, send_with_id)
        finally:
            self.in_flight -= 1


class AnswerProblems:
    """Turns every failure into its envelope. ``on_problem`` hears of those that are problems of ours or of the request."""

    def __init__(self, app: ASGIApp, on_problem: Callable[[Problem], None]) -> None:
        self._app = app
        self._on_problem = on_problem

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and answer it if that fails."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = scope["state"]["request_id"]
        is_started = False

        async def send_noting(message: Message) -> None:
            nonlocal is_started
            is_started = True
            await send(message)

        # Starlette's routes raise for an unknown path or method only where they believe to be within a Starlette app.
        scope["app"] = self
        try:
            await self._app(scope, receive, send_noting)
        except Problem as problem:
            log_problem(problem, request_id)
            self._on_problem(problem)
            await send_problem(send, problem)
        except HTTPException as problem:
            await send_problem(send, _explain_routing(scope, problem))
        except ClientGoneError:
            log.debug("client gone", extra={"request_id": request_id})
        except Exception:
            log.exception("request failed", extra={"request_id": request_id, "status": 500})
            if is_started:
                raise
            await send_problem(send, Problem(500, "something went wrong inside the server", code="internal_error"))


def _explain_routing(scope: Scope, exception: HTTPException) -> Problem:
    path = scope["path"][:200]
    if exception.status_code == 404:
        return Problem(404, f"there is no {path}; embeddings are at POST /v1/embeddings", code="not_found")
    methods = (exception.headers or {}).get("Allow", "").split(", ")
    allowed = {"allow": ", ".join(sorted(methods))}
    message = f"{path} does not take {scope['method']}, only {allowed['allow']}"
    return Problem(exception.status_code, message, code="method_not_allowed", headers=allowed)


def log_problem(problem: Problem, request_id: str) -> None:
    """One line for an error answer: a warning when it is the server's fault, a notice when a body is over the limit that its
    operator set, else for debugging only.

    A 503 is no fault of its own: what it comes of (no worker, a drain) has its line already, and clients that wait for a
    server to be ready would fill the log.
    """
    is_fault = problem.status >= 500 and problem.status != 503 and not problem.is_expected
    level = logging.WARNING if is_fault else logging.INFO if problem.status == 413 else logging.DEBUG
    extra = {"request_id": request_id, "status": problem.status, "code": problem.code, "reason": problem.message}
    log.log(level, "request failed", extra=extra)


class CloseWhileDraining:
    """During a stop every answer ends its connection, also one that says what failed: it is around those that make these."""

    def __init__(self, app: ASGIApp, is_draining: Callable[[], bool]) -> None:
        self._app = app
        self._is_draining = is_draining

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""

        async def send_closing(message: Message) -> None:
            if message["type"] == "http.response.start" and self._is_draining():
                headers = MutableHeaders(raw=list(message.get("headers", [])))
                headers["connection"] = "close"
                message["headers"] = headers.raw
            await send(message)

        await self._app(scope, receive, send_closing)


class RefuseWhileDraining:
    """During a stop new requests get 503."""

    def __init__(self, app: ASGIApp, is_draining: Callable[[], bool]) -> None:
        self._app = app
        self._is_draining = is_draining

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, unless the server stops."""
        if scope["type"] == "http" and self._is_draining() and scope["path"] not in _DRAINING_PATHS:
            message = "the server is stopping"
            raise unavailable(ErrorCode.DRAINING, message, _DRAIN_RETRY_S, is_rejection=True)
        await self._app(scope, receive, send)


class RequireKey:
    """Lets in who shows an API key. Open to all: /live, /health, the pages without data, and OPTIONS."""

    def __init__(self, app: ASGIApp, keys: Keys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on if it may come in. Raises Problem (401)."""
        is_guarded = scope["type"] == "http" and scope["path"] not in _OPEN_PATHS and scope["method"] != "OPTIONS"
        if self._keys and is_guarded and not self._has_key(scope):
            raise Problem(
                401,
                "a valid API key is required: send it as `Authorization: Bearer KEY`",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        await self._app(scope, receive, send)

    def _has_key(self, scope: Scope) -> bool:
        """Of several Authorization headers none counts: it is not clear whose they are."""
        values = [value for name, value in scope["headers"] if name == b"authorization"]
        return len(values) == 1 and self._keys.accept(values[0])


class NormalizePath:
    """Paths without the proxy's prefix and without trailing slashes, so that nobody is redirected (which would lose a POST)."""

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self._app = app
        self._root = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on under its plain path."""
        if scope["type"] == "http":
            scope = {**scope, "path": plain_path(scope["path"], self._root), "root_path": ""}
        await self._app(scope, receive, send)


def plain_path(path: str, root_path: str) -> str:
    """A path without the proxy's prefix and without trailing slashes."""
    root = root_path.rstrip("/")
    # uvicorn puts the prefix before what came; a proxy that does not strip it sends it as well.
    while root and (path == root or path.startswith(root + "/")):
        path = path[len(root) :]
    return path.rstrip("/") or "/"
