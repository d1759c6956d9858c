"""A stream of requests of all kinds, good and bad, from clients of which some leave: what a server must not grow by."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from http_answers import AnswerReader
from questions import http_request

CONNECTIONS = 16


@dataclass(frozen=True)
class Wire:
    """One request as bytes, and whether its client waits for the answer."""

    request: bytes
    waits: bool = True


@dataclass
class _Client:
    port: int
    reader: AnswerReader = field(default_factory=AnswerReader)
    incoming: asyncio.StreamReader | None = None
    outgoing: asyncio.StreamWriter | None = None

    async def send(self, wire: Wire) -> int:
        """The status of the answer; 0 when the client left."""
        if self.outgoing is None:
            self.incoming, self.outgoing = await asyncio.open_connection("127.0.0.1", self.port)
            self.reader = AnswerReader()
        assert self.incoming is not None
        self.outgoing.write(wire.request)
        await self.outgoing.drain()
        if not wire.waits:
            self.leave()
            return 0
        while (answer := self.reader.take()) is None:
            received = await self.incoming.read(1 << 16)
            assert received, "cut off"
            self.reader.feed(received)
        if answer.closes:
            self.leave()
        return answer.status

    def leave(self) -> None:
        if self.outgoing is not None:
            self.outgoing.close()
            self.outgoing = None


def drive(port: int, count: int, draw: Callable[[int], Wire]) -> Counter[int]:
    """Send ``count`` requests, drawn by their number, from a few connections; how many had each status."""

    async def run() -> Counter[int]:
        numbers = iter(range(count))
        statuses: Counter[int] = Counter()

        async def client() -> None:
            connection = _Client(port)
            for number in numbers:
                statuses[await connection.send(draw(number))] += 1
            connection.leave()

        await asyncio.gather(*(client() for _ in range(CONNECTIONS)))
        return statuses

    return asyncio.run(run())


def mixed(seed: int, *, longest: int = 60) -> Callable[[int], Wire]:
    """Random distinct texts; one in ten is refused, and of one in ten the client leaves."""

    def draw(number: int) -> Wire:
        source = random.Random(seed * 1_000_003 + number)
        words = " ".join(f"t{source.randint(10, 98)}" for _ in range(source.randint(1, longest)))
        kind = source.random()
        body = '{"input":[7,"%s"]}' if kind < 0.1 else '{"input":"%s"}'
        return Wire(http_request((body % words).encode()), waits=kind < 0.9)

    return draw
