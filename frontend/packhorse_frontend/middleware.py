"""What surrounds every route, as pure ASGI, outermost first: request ids, CORS, errors, paths, draining, API keys.

(Starlette's BaseHTTPMiddleware would hide from the routes that a client left.)
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from packhorse_frontend.body import ClientGoneError
from packhorse_frontend.keys import Keys
from packhorse_frontend.problems import Problem, unavailable
from packhorse_frontend.request_ids import request_id_of
from packhorse_shared.messages import ErrorCode

log = logging.getLogger(__name__)

_OPEN_PATHS = frozenset({"/live", "/health"})
_DRAINING_PATHS = frozenset({"/live", "/health", "/status"})
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
    """Turns every failure into its envelope."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

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
    allowed = {"allow": (exception.headers or {}).get("Allow", "")}
    message = f"{path} does not take {scope['method']}, only {allowed['allow']}"
    return Problem(exception.status_code, message, code="method_not_allowed", headers=allowed)


def log_problem(problem: Problem, request_id: str) -> None:
    """One line for an error answer: a warning when it is the server's fault, else for debugging only.

    A 503 is no fault of its own: what it comes of (no worker, a drain) has its line already, and clients that wait for a
    server to be ready would fill the log.
    """
    is_fault = problem.status >= 500 and problem.status != 503 and not problem.is_expected
    level = logging.WARNING if is_fault else logging.DEBUG
    extra = {"request_id": request_id, "status": problem.status, "code": problem.code, "reason": problem.message}
    log.log(level, "request failed", extra=extra)


class AllowOrigins:
    """CORS: lets the pages of some origins (or ``*``) call the API from a browser. See https://fetch.spec.whatwg.org."""

    def __init__(self, app: ASGIApp, origins: Sequence[str]) -> None:
        self._app = app
        self._allows_all = "*" in origins
        self._origins = frozenset(origin.rstrip("/") for origin in origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a preflight, or add what the browser asks for to the answer."""
        origin = Headers(scope=scope).get("origin") if scope["type"] == "http" else None
        if origin is None:
            await self._app(scope, receive, send)
            return
        is_allowed = self._allows_all or origin in self._origins
        send_with_origin = self._with_origin(send, origin, is_allowed=is_allowed)
        requested = Headers(scope=scope)
        if scope["method"] == "OPTIONS" and "access-control-request-method" in requested:
            await self._answer_preflight(send_with_origin, requested, is_allowed=is_allowed)
        else:
            await self._app(scope, receive, send_with_origin)

    async def _answer_preflight(self, send: Send, requested: Headers, *, is_allowed: bool) -> None:
        if not is_allowed:
            problem = Problem(403, "this origin may not call the API (--cors_allow_origin)", code="origin_not_allowed")
            await send_problem(send, problem)
            return
        headers = [
            (b"access-control-allow-methods", b"GET, HEAD, POST, OPTIONS"),
            (b"access-control-allow-headers", _requested_headers(requested).encode("latin-1")),
            (b"access-control-max-age", b"600"),
        ]
        await send({"type": "http.response.start", "status": 204, "headers": headers})
        await send({"type": "http.response.body", "body": b""})

    def _with_origin(self, send: Send, origin: str, *, is_allowed: bool) -> Send:
        async def send_with_origin(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(raw=list(message.get("headers", [])))
                if is_allowed:
                    headers["access-control-allow-origin"] = "*" if self._allows_all else origin
                    headers["access-control-expose-headers"] = "x-request-id, retry-after"
                if not self._allows_all:
                    headers.add_vary_header("Origin")
                message["headers"] = headers.raw
            await send(message)

        return send_with_origin


def _requested_headers(requested: Headers) -> str:
    names = requested.get("access-control-request-headers", "authorization, content-type")
    return names if names.isascii() and names.isprintable() else "authorization, content-type"


class RefuseWhileDraining:
    """During a stop: new requests get 503, and every answer ends its connection."""

    def __init__(self, app: ASGIApp, is_draining: Callable[[], bool]) -> None:
        self._app = app
        self._is_draining = is_draining

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, unless the server stops."""
        if scope["type"] == "http" and self._is_draining() and scope["path"] not in _DRAINING_PATHS:
            raise unavailable(ErrorCode.DRAINING, "the server is stopping", _DRAIN_RETRY_S, closes=True)

        async def send_closing(message: Message) -> None:
            if message["type"] == "http.response.start" and self._is_draining():
                headers = MutableHeaders(raw=list(message.get("headers", [])))
                headers["connection"] = "close"
                message["headers"] = headers.raw
            await send(message)

        await self._app(scope, receive, send_closing)


class RequireKey:
    """Lets in who shows an API key. Open to all: /live, /health and OPTIONS."""

    def __init__(self, app: ASGIApp, keys: Keys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on if it may come in. Raises Problem (401)."""
        is_guarded = scope["type"] == "http" and scope["path"] not in _OPEN_PATHS and scope["method"] != "OPTIONS"
        if self._keys and is_guarded and not self._keys.accept(dict(scope["headers"]).get(b"authorization", b"")):
            raise Problem(
                401,
                "a valid API key is required: send it as `Authorization: Bearer KEY`",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        await self._app(scope, receive, send)


class NormalizePath:
    """Paths without the proxy's prefix and without trailing slashes, so that nobody is redirected (which would lose a POST)."""

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self._app = app
        self._root = root_path.rstrip("/")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on under its plain path."""
        if scope["type"] == "http":
            path: str = scope["path"]
            # uvicorn puts the prefix before what came; a proxy that does not strip it sends it as well.
            while self._root and (path == self._root or path.startswith(self._root + "/")):
                path = path[len(self._root) :]
            scope = {**scope, "path": path.rstrip("/") or "/", "root_path": ""}
        await self._app(scope, receive, send)
