"""One request: sent, read to its end, judged, and noted. Nothing of its answer is kept."""

from __future__ import annotations

import asyncio
import math
import time

import msgspec
from aiohttp import ClientConnectorError, ClientError, ClientResponse, ClientSession

from packhorse.bench.bodies import Body
from packhorse.bench.samples import SERVER_TIMES, Samples
from packhorse.bench.target import reason_of
from packhorse_shared.logs import escape

_EXAMPLE_CHARACTERS = 200
_HEADERS = tuple((name, f"x-packhorse-{name}-ms") for name in SERVER_TIMES)


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    total_tokens: int | None = None


class _Result(msgspec.Struct):
    """Its fields are skipped, not read."""


class _Answer(msgspec.Struct):
    data: list[_Result] | None = None
    results: list[_Result] | None = None
    usage: _Usage | None = None


class _Problem(msgspec.Struct):
    message: str


class _Refusal(msgspec.Struct):
    error: _Problem


_ANSWER = msgspec.json.Decoder(_Answer)
_REFUSAL = msgspec.json.Decoder(_Refusal)


class Sender:
    """Sends requests to one endpoint."""

    def __init__(self, session: ClientSession, url: str) -> None:
        self._session = session
        self._url = url

    async def send(self, body: Body, samples: Samples, due: float | None = None) -> bool:
        """Send one request; True when it was answered rightly. ``due`` is when it should have been sent, None for now."""
        samples.begun += 1
        began = time.monotonic()
        try:
            async with self._session.post(self._url, data=body.content) as answer:
                content = await answer.read()
        except asyncio.CancelledError:
            samples.abandoned += 1
            raise
        except (ClientError, OSError) as problem:
            samples.fail(*_kind(problem), is_transport=True)
            return False
        ended = time.monotonic()
        if answer.status == 429:
            samples.refused += 1
            samples.refusal = samples.refusal or _message(content)
            return False
        if answer.status != 200:
            samples.fail(f"HTTP {answer.status}", _message(content), is_transport=False)
            return False
        tokens = _tokens(content, body, samples)
        if tokens is None:
            return False
        samples.tokens += tokens
        samples.ended.append(ended - samples.begun_at)
        samples.took.append(ended - began)
        samples.late.append(0.0 if due is None else began - due)
        samples.inputs.append(body.inputs)
        _note_server_times(answer, samples)
        return True


def _kind(problem: Exception) -> tuple[str, str]:
    """What happened, and the example."""
    if isinstance(problem, TimeoutError):
        return "no answer in time", "not complete within --timeout"
    kind = "no connection" if isinstance(problem, ClientConnectorError) else "connection lost"
    return kind, reason_of(problem)[:_EXAMPLE_CHARACTERS]


def _tokens(content: bytes, body: Body, samples: Samples) -> int | None:
    """The tokens of the request as the server counted them, 0 when it does not tell. None when the answer is wrong."""
    try:
        answer = _ANSWER.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError) as problem:
        samples.fail("wrong answer", f"status 200, but {escape(str(problem))}"[:_EXAMPLE_CHARACTERS], is_transport=True)
        return None
    results = len(answer.data if answer.data is not None else answer.results or ())
    if results != body.results:
        samples.fail("wrong answer", f"{results} results instead of {body.results}", is_transport=True)
        return None
    usage = answer.usage
    return 0 if usage is None else usage.prompt_tokens or usage.total_tokens or 0


def _message(content: bytes) -> str:
    """What a refusal says: the message of OpenAI's error envelope, else its first characters."""
    try:
        text = _REFUSAL.decode(content).error.message
    except (msgspec.DecodeError, UnicodeDecodeError):
        text = content[:_EXAMPLE_CHARACTERS].decode("utf-8", "replace")
    return escape(text)[:_EXAMPLE_CHARACTERS]


def _note_server_times(answer: ClientResponse, samples: Samples) -> None:
    for name, header in _HEADERS:
        text = answer.headers.get(header)
        try:
            value = math.nan if text is None else float(text)
        except ValueError:
            value = math.nan
        samples.server_ms[name].append(value)
