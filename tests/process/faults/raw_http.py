"""A client without manners: it sends any bytes, at any pace, and tells what became of its connection."""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from http_answers import AnswerReader, HttpAnswer

LONGEST_WAIT_S = 20.0
"""Twice what any test allows: a connection that is open then is called so."""
BODY = b'{"input":"t10 t11"}'
POST = b"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"


@dataclass
class Ending:
    """What came of one connection."""

    answers: list[HttpAnswer] = field(default_factory=list)
    left: bytes = b""
    """Bytes that are no whole answer."""
    is_closed: bool = False
    """Whether the server ended it, in whatever way."""
    seconds: float = 0.0

    @property
    def statuses(self) -> list[int]:
        return [answer.status for answer in self.answers]


def connect(port: int, *, receive_buffer_bytes: int | None = None, longest_wait_s: float = LONGEST_WAIT_S) -> socket.socket:
    """A connection whose calls fail after ``longest_wait_s``. A small buffer makes a client that reads slowly."""
    connection = socket.socket()
    if receive_buffer_bytes is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
    return _connected(connection, ("127.0.0.1", port), longest_wait_s)


def connect_unix(path: str) -> socket.socket:
    return _connected(socket.socket(socket.AF_UNIX), path)


def _connected(
    connection: socket.socket, address: tuple[str, int] | str, longest_wait_s: float = LONGEST_WAIT_S
) -> socket.socket:
    connection.settimeout(longest_wait_s)
    try:
        connection.connect(address)
    except OSError:
        connection.close()
        raise
    return connection


def send(port: int, pieces: bytes | Iterable[bytes], *, pause_s: float = 0.0) -> Ending:
    """Send bytes, piece by piece, whatever the server says to it, then read until the connection ends."""
    began = time.monotonic()
    with connect(port) as connection:
        for piece in [pieces] if isinstance(pieces, bytes) else pieces:
            try:
                connection.sendall(piece)
            except OSError:  # the server has closed, and its last words may wait to be read
                break
            if pause_s:
                if _is_answered(connection):
                    break
                time.sleep(pause_s)
        return read_to_end(connection, began)


def read_to_end(
    connection: socket.socket,
    began: float | None = None,
    *,
    read_before: bytes = b"",
    longest_wait_s: float = LONGEST_WAIT_S,
) -> Ending:
    """All that comes until the server closes, or ``longest_wait_s`` have passed since ``began``."""
    began = time.monotonic() if began is None else began
    ending, reader = Ending(), AnswerReader()
    reader.feed(read_before)
    try:
        while time.monotonic() < began + longest_wait_s:
            received = connection.recv(1 << 16)
            if not received:
                ending.is_closed = True
                break
            reader.feed(received)
    except TimeoutError:
        pass
    except OSError:
        ending.is_closed = True
    ending.seconds = time.monotonic() - began
    while (answer := reader.take()) is not None:
        ending.answers.append(answer)
    ending.left = reader.left
    return ending


def reset(connection: socket.socket) -> None:
    """Close with an RST, as a client does that crashes or is cut off."""
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def post(body: bytes = BODY, *headers: bytes) -> bytes:
    """A request for vectors with a body as it is; ``headers`` are whole lines without their ends."""
    lines = [*headers, b"Content-Length: %d" % len(body)]
    return POST + b"".join(line + b"\r\n" for line in lines) + b"\r\n" + body


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _is_answered(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True
    finally:
        connection.settimeout(LONGEST_WAIT_S)
    return True
