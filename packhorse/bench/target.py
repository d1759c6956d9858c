"""A server to be loaded: how it is reached, and what it says about its model."""

from __future__ import annotations

import os

import msgspec
from aiohttp import ClientError, ClientSession, ClientTimeout, DummyCookieJar, TCPConnector, UnixConnector

from packhorse.bench import BenchError
from packhorse_shared.logs import escape

_PATIENCE_S = 10.0
_UNIX = "unix:"
_READ_BUFFER_BYTES = 1 << 20
"""Answers of many vectors are large; with the library's 64 KiB it would stop and start reading all the time."""


class Target(msgspec.Struct, frozen=True):
    """One server."""

    url: str
    model: str | None
    """The name to ask for; None when the server lists no models."""
    max_seq_len: int | None


class _Card(msgspec.Struct):
    id: str
    max_seq_len: int | None = None


class _Cards(msgspec.Struct):
    data: list[_Card]


def base_url(url: str) -> str:
    """What paths are put behind. Over a Unix socket the host is only a word."""
    return "http://localhost" if url.startswith(_UNIX) else url


def open_session(url: str, api_key: str | None, timeout_s: float) -> ClientSession:
    """A session whose connections are kept and not limited in number: the load decides how many requests are open."""
    connector = UnixConnector(url.removeprefix(_UNIX), limit=0) if url.startswith(_UNIX) else TCPConnector(limit=0)
    # An answer that is compressed for the test alone would cost both sides time.
    headers = {"Content-Type": "application/json", "Accept-Encoding": "identity", "User-Agent": "packhorse-bench"}
    if api_key is not None:
        headers["Authorization"] = f"Bearer {api_key}"
    return ClientSession(
        connector=connector,
        headers=headers,
        timeout=ClientTimeout(total=timeout_s),
        cookie_jar=DummyCookieJar(),
        read_bufsize=_READ_BUFFER_BYTES,
    )


def reason_of(problem: Exception) -> str:
    """What went wrong, in the system's words where it has some."""
    cause = getattr(problem, "os_error", problem)
    number = getattr(cause, "errno", None) or 0
    words = os.strerror(number) if number > 0 else getattr(cause, "strerror", None) or str(cause)
    return escape(words or type(problem).__name__)


async def ask_target(session: ClientSession, url: str, model: str | None) -> Target:
    """Ask /v1/models. Raises BenchError with one line when nobody answers, or when the key is refused.

    A server without that route (text-embeddings-inference) is loaded all the same, without a model name unless one was given.
    """
    try:
        async with session.get(f"{base_url(url)}/v1/models", timeout=ClientTimeout(total=_PATIENCE_S)) as answer:
            status, content = answer.status, await answer.read()
    except TimeoutError:
        raise BenchError(f"{url} did not answer GET /v1/models within {_PATIENCE_S:g} s") from None
    except (ClientError, OSError, ValueError) as problem:
        raise BenchError(f"no server answers at {url}: {reason_of(problem)}") from None
    if status in (401, 403):
        raise BenchError(f"{url} refuses the API key ({status}); give one with PACKHORSE_API_KEY or --api_key_file")
    cards: list[_Card] = []
    if status == 200:
        try:
            cards = msgspec.json.decode(content, type=_Cards).data
        except msgspec.DecodeError:
            raise BenchError(f"{url} answers GET /v1/models with something else than a list of models") from None
    name = model or (cards[0].id if cards else None)
    limits = [card.max_seq_len for card in cards if card.id == name]
    return Target(url, name, limits[0] if limits else None)
