"""The outermost layer: notes when a request begins and ends, and with which status, and tells those who want to know."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from packhorse_frontend.layers.middleware import plain_path
from packhorse_shared.metrics import OTHER

ENDED_WITH = "ended_with"
"""In the state of a request's scope, if its connection ended before its answer was complete: the status that this counts as.
The app does not see that: what it sends is dropped then."""
CLIENT_LEFT = 499
"""nginx's word for it."""

_ENDPOINTS = {
    "embeddings": "/v1/embeddings /embeddings",
    "rerank": "/v1/rerank /v2/rerank /rerank",
    "score": "/v1/score",
    "classify": "/v1/classify",
    "tokenize": "/tokenize",
    "detokenize": "/detokenize",
    "models": "/v1/models",
    "operators": "/ /live /health /status /metrics /openapi.json /docs",
}
_ENDPOINT_OF = {path: endpoint for endpoint, paths in _ENDPOINTS.items() for path in paths.split()}


def endpoint_of(path: str) -> str:
    """Which endpoint a plain path belongs to (``plain_path``): one of a fixed list of words."""
    found = _ENDPOINT_OF.get(path)
    if found is not None:
        return found
    return "models" if path.startswith("/v1/models/") else OTHER


@dataclass(frozen=True)
class EndedRequest:
    """A request that is over."""

    method: str
    endpoint: str
    """``other`` for OPTIONS: it is answered before any route."""
    headers: Sequence[tuple[bytes, bytes]]
    state: dict[str, Any]
    """Of its scope: what the layers within noted."""
    status: int
    """499 where the client left before its answer was complete."""
    began: float
    """By ``time.monotonic``, as ``ended``."""
    ended: float


class FollowRequests:
    """Tells every observer of each request, in turn, when it is over."""

    def __init__(self, app: ASGIApp, root_path: str, observers: Sequence[Callable[[EndedRequest], None]]) -> None:
        self._app = app
        self._root_path = root_path
        self._observers = observers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state: dict[str, Any] = scope.setdefault("state", {})
        began = time.monotonic()
        status, is_complete = CLIENT_LEFT, False

        async def send_noting(message: Message) -> None:
            nonlocal status, is_complete
            await send(message)
            if message["type"] == "http.response.start":
                status = message["status"]
            else:
                is_complete = not message.get("more_body", False)

        try:
            await self._app(scope, receive, send_noting)
        except BaseException:
            status, is_complete = 500, True
            raise
        finally:
            status = state.get(ENDED_WITH, status if is_complete else CLIENT_LEFT)
            is_options = scope["method"] == "OPTIONS"
            endpoint = OTHER if is_options else endpoint_of(plain_path(scope["path"], self._root_path))
            over = EndedRequest(scope["method"], endpoint, scope["headers"], state, status, began, time.monotonic())
            for observe in self._observers:
                observe(over)
