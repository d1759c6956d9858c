"""The routes of the two pages and of /openapi.json: all are answered from memory.

A page is one file to the browser: its style and scripts are put into it here, once. It holds no data and needs no key; what it
shows, it asks for. The content security policy names their digests, and lets nothing else in.
"""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from packhorse_frontend.api.document import make_document
from packhorse_frontend.api.operations import HTML, JSON
from packhorse_frontend.api.rules import Served
from packhorse_frontend.state import FrontendState

_FOLDER = Path(__file__).parent / "pages"
_PART = re.compile(r"<!-- (style|script): ([\w. ]+) -->")
_POLICY = (
    "default-src 'none'; style-src {style}; script-src {script}; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class _Body:
    """Bytes that a client may keep, as long as it asks every time whether they are still the same."""

    def __init__(self, body: bytes, media_type: str, headers: dict[str, str] | None = None) -> None:
        self._body = body
        self._media_type = media_type
        self._headers = {
            "etag": f'"{hashlib.sha256(body).hexdigest()[:32]}"',
            "cache-control": "no-cache",
            "x-content-type-options": "nosniff",
            **(headers or {}),
        }

    def answer(self, request: Request) -> Response:
        """The bytes, or 304 for a client that has them."""
        known = [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]
        if self._headers["etag"] in known:
            return Response(status_code=304, headers=self._headers)
        return Response(self._body, media_type=self._media_type, headers=self._headers)


class _Page:
    """One of the files in ``pages``, with its parts put in."""

    def __init__(self, name: str) -> None:
        digests: dict[str, list[str]] = {"style": [], "script": []}

        def fill(found: re.Match[str]) -> str:
            kind, names = found[1], found[2].split()
            text = "\n" + "\n".join((_FOLDER / each).read_text(encoding="utf-8") for each in names)
            digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode("ascii")
            digests[kind].append(f"'sha256-{digest}'")
            return f"<{kind}>{text}</{kind}>"

        html = _PART.sub(fill, (_FOLDER / name).read_text(encoding="utf-8"))
        policy = _POLICY.format(**{kind: " ".join(found) for kind, found in digests.items()})
        headers = {"content-security-policy": policy, "referrer-policy": "no-referrer"}
        self._body = _Body(html.encode(), HTML, headers)

    async def get(self, request: Request) -> Response:
        return self._body.answer(request)


class _Description:
    """The OpenAPI document, made anew when the model becomes known or is another one."""

    def __init__(self, state: FrontendState) -> None:
        self._state = state
        self._served: Served | None = None
        self._body = _Body(b"", JSON)

    async def get(self, request: Request) -> Response:
        served = _look(self._state)
        if served != self._served:
            self._body = _Body(msgspec.json.encode(make_document(served)), JSON)
            self._served = served
        return self._body.answer(request)


def make_page_routes(state: FrontendState) -> list[Route]:
    """GET / and /docs, open to all, and GET /openapi.json."""
    return [
        Route("/", _Page("status.html").get, methods=["GET"]),
        Route("/docs", _Page("docs.html").get, methods=["GET"]),
        Route("/openapi.json", _Description(state).get, methods=["GET"]),
    ]


def _look(state: FrontendState) -> Served:
    http = state.http
    return Served(
        names=state.served_names,
        max_inputs=http.max_inputs,
        root_path=http.root_path,
        needs_key=bool(http.api_key or http.api_key_file),
        model=state.model(),
        longest_input=state.longest_input(),
    )
