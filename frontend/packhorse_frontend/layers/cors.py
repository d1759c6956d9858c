"""CORS: lets the pages of some origins (or ``*``) call the API from a browser. See https://fetch.spec.whatwg.org."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from packhorse_frontend.layers.middleware import send_problem
from packhorse_frontend.problems import Problem

_EXPOSED = "x-request-id, retry-after, x-packhorse-queue-ms, x-packhorse-tokenize-ms, x-packhorse-encode-ms"


def is_allowed(origin: str, origins: Sequence[str]) -> bool:
    """Whether pages of this origin may call. ``origins`` is the setting ``cors_allow_origin``."""
    return "*" in origins or origin in (each.rstrip("/") for each in origins)


def origin_headers(origin: str, origins: Sequence[str]) -> dict[str, str]:
    """What every answer to a page of this origin carries, errors included: without it the page cannot even see the status."""
    headers = {}
    if is_allowed(origin, origins):
        headers["access-control-allow-origin"] = "*" if "*" in origins else origin
        headers["access-control-expose-headers"] = _EXPOSED
    if "*" not in origins:
        headers["vary"] = "Origin"
    return headers


class AllowOrigins:
    """Answers preflights, and puts the headers on every answer of a route."""

    def __init__(self, app: ASGIApp, origins: Sequence[str]) -> None:
        self._app = app
        self._origins = tuple(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a preflight, or add what the browser asks for to the answer."""
        requested = Headers(scope=scope) if scope["type"] == "http" else Headers()
        origin = requested.get("origin")
        if origin is None:
            await self._app(scope, receive, send)
            return
        added = origin_headers(origin, self._origins)

        async def send_with_origin(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(raw=list(message.get("headers", [])))
                headers.update(added)
                message["headers"] = headers.raw
            await send(message)

        if scope["method"] == "OPTIONS" and "access-control-request-method" in requested:
            await self._answer_preflight(send_with_origin, origin, requested)
        else:
            await self._app(scope, receive, send_with_origin)

    async def _answer_preflight(self, send: Send, origin: str, requested: Headers) -> None:
        if not is_allowed(origin, self._origins):
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


def _requested_headers(requested: Headers) -> str:
    names = requested.get("access-control-request-headers", "authorization, content-type")
    return names if names.isascii() and names.isprintable() else "authorization, content-type"
