"""Very many requests of clients that make up models, keys, paths, methods and lengths, and now and then leave."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import orjson
import uvloop

KEY = "the-right-key"
LEFT = 0
"""Counts requests whose client did not wait for the answer."""
_CLIENTS = 16
_RIGHT = f"Bearer {KEY}"
_METHODS = ("GET", "PUT", "DELETE", "PATCH", "OPTIONS", "PROPFIND", "SEARCH")
_PATHS = ("/v1/embeddings", "/embeddings/", "/v1/models", "/status", "/live")


def send_strange_requests(port: int, count: int, seed: int) -> Counter[int]:
    """Send so many requests; returns how many got which status."""
    statuses: Counter[int] = Counter()
    left = iter(range(count))

    async def run() -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(_CLIENTS):
                group.create_task(_client(port, left, random.Random(1000 * seed + number), statuses))

    uvloop.run(run())
    return statuses


async def _client(port: int, left: object, dice: random.Random, statuses: Counter[int]) -> None:
    streams = None
    for _ in left:  # type: ignore[attr-defined]  # an iterator that all clients share
        streams = streams or await asyncio.open_connection("127.0.0.1", port)
        reader, writer = streams
        method, wire = _strange_request(dice)
        writer.write(wire)
        if dice.random() < 0.01:
            writer.close()
            statuses[LEFT] += 1
            streams = None
            continue
        status, stays_open = await asyncio.wait_for(_answer(reader, method), 60)
        statuses[status] += 1
        if not stays_open:
            writer.close()
            streams = None
    if streams is not None:
        streams[1].close()


async def _answer(reader: asyncio.StreamReader, method: str) -> tuple[int, bool]:
    """The status, and whether the connection can be used again."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower().split("\r\n")
    headers = dict(line.split(": ", 1) for line in head[1:] if line)
    if method != "HEAD":
        await reader.readexactly(int(headers.get("content-length", "0")))
    return int(head[0].split()[1]), headers.get("connection") != "close"


def _strange_request(dice: random.Random) -> tuple[str, bytes]:
    word = f"{dice.getrandbits(60):x}"
    kind = dice.random()
    method, path, key, body = "POST", dice.choice(_PATHS[:2]), _RIGHT, {"input": _texts(dice)}
    if kind < 0.2:
        body["model"] = word  # type: ignore[assignment]
    elif kind < 0.4:
        key = dice.choice((f"Bearer {word}", word, ""))
    elif kind < 0.6:
        path = f"/{word}/{dice.choice(_PATHS).strip('/')}?{word}={word}"
    elif kind < 0.7:
        method, path = dice.choice((*_METHODS, "HEAD", word[:9].upper() if dice.random() < 0.1 else "GET")), dice.choice(_PATHS)
    elif kind < 0.75:
        path = f"/v1/models/{word}"
        method = "GET"
    elif kind < 0.8:
        body = {"input": dice.choice((None, [], [[]], "", {word: word}, [1, word]))}  # type: ignore[dict-item]
    payload = orjson.dumps(body) if method == "POST" else b""
    head = f"{method} {path} HTTP/1.1\r\nHost: {word}\r\nAuthorization: {key}\r\nX-Request-Id: {word}\r\nUser-Agent: {word}\r\n"
    return method, f"{head}Content-Length: {len(payload)}\r\n\r\n".encode() + payload


def _texts(dice: random.Random) -> list[str]:
    return [
        " ".join(f"t{dice.randrange(10, 90)}" for _ in range(dice.randrange(1, 50))) for _ in range(dice.choice((1, 1, 1, 5)))
    ]
