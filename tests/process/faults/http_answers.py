"""Reads HTTP/1.1 answers off a stream of bytes: heads, bodies by content-length, and chunks. For loads, so it is quick."""

from __future__ import annotations

from dataclasses import dataclass

_HEAD_END = b"\r\n\r\n"


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """One whole answer."""

    status: int
    headers: dict[bytes, bytes]
    """Names in lower case."""
    body: bytes

    @property
    def closes(self) -> bool:
        return self.headers.get(b"connection", b"").lower() == b"close"


class AnswerReader:
    """Takes what one connection receives; ``take`` gives the next whole answer, or None as long as there is none."""

    def __init__(self) -> None:
        self._held = bytearray()
        self._head: tuple[int, dict[bytes, bytes]] | None = None
        self._chunks = bytearray()

    @property
    def left(self) -> bytes:
        """What was received and belongs to no answer that was taken."""
        return bytes(self._held)

    def feed(self, data: bytes) -> None:
        self._held += data

    def take(self) -> HttpAnswer | None:
        if self._head is None:
            self._head = self._take_head()
        if self._head is None:
            return None
        status, headers = self._head
        body = self._take_chunked() if b"transfer-encoding" in headers else self._cut(int(headers.get(b"content-length", 0)))
        if body is None:
            return None
        self._head = None
        return HttpAnswer(status, headers, body)

    def _take_head(self) -> tuple[int, dict[bytes, bytes]] | None:
        end = self._held.find(_HEAD_END)
        if end < 0:
            return None
        first, *lines = bytes(self._held[:end]).split(b"\r\n")
        del self._held[: end + len(_HEAD_END)]
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines)}
        return int(first.split()[1]), headers

    def _take_chunked(self) -> bytes | None:
        while (line_end := self._held.find(b"\r\n")) >= 0:
            size = int(self._held[:line_end], 16)
            if len(self._held) < line_end + 2 + size + 2:
                return None
            self._chunks += self._held[line_end + 2 : line_end + 2 + size]
            del self._held[: line_end + 2 + size + 2]
            if size == 0:
                body, self._chunks = bytes(self._chunks), bytearray()
                return body
        return None

    def _cut(self, size: int) -> bytes | None:
        if len(self._held) < size:
            return None
        body = bytes(self._held[:size])
        del self._held[:size]
        return body
