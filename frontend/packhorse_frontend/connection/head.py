"""What the head of a request may look like, decided before the parser gets it.

Garbage (TLS, SSH, a binary protocol) is known by its first byte or its first line, and need not wait for a deadline. And what
servers and proxies read differently is how one request is smuggled past one of them inside another: bare line feeds, other
versions, and transfer codings besides the one that is spoken here.
"""

from __future__ import annotations

import re

MAX_HEAD_BYTES = 16 * 1024
_END = b"\r\n\r\n"
_TLS_HANDSHAKE = 0x16
_REQUEST_LINE = re.compile(rb"[A-Z-]+ [^ \r\n]+ HTTP/1\.[01]\r\n")
_UPGRADE = re.compile(rb"(?im)^(upgrade|http2-settings):")


def skip_empty_lines(head: bytearray) -> int:
    """Take off what some clients send between two requests; returns how many bytes that were."""
    lines = (len(head) - len(head.lstrip(b"\r\n"))) // 2
    if lines and head.startswith(b"\r\n" * lines):
        del head[: 2 * lines]
        return 2 * lines
    return 0


def find_end(head: bytearray) -> int:
    """Where the head ends (the first byte after it); 0 while it does not."""
    end = head.find(_END)
    return end + len(_END) if end >= 0 else 0


def find_fault(head: bytearray) -> str | None:
    """Why this head, as far as it came, is none of HTTP/1.1; None as long as it may become one."""
    if not head or head == b"\r":
        return None
    if head[0] == _TLS_HANDSHAKE:
        return "this port speaks plain HTTP, not TLS: use http://, or serve with --ssl_certfile"
    if not ord("A") <= head[0] <= ord("Z"):
        return "a request begins with a method in capital letters"
    if head.count(b"\n") != head.count(b"\r\n"):
        return "a line of the head ends with LF alone, not with CR and LF"
    if b"\n" in head and not _REQUEST_LINE.match(head):
        return "the first line is not METHOD TARGET HTTP/1.1"
    return None


def without_upgrade(head: bytes | bytearray) -> bytes:
    """The head with its offers of another protocol renamed: the parser would end the request at them, and lose its body."""
    return _UPGRADE.sub(rb"x-ignored-\1:", head)


class HeaderRules:
    """Checks the headers of one request as the parser finds them. Raises ValueError."""

    def __init__(self) -> None:
        self._is_chunked = False
        self._has_host = False

    def check(self, name: bytes, value: bytes, http_version: str) -> None:
        """``name`` in lower case. What is left to the parser: Content-Length, alone and beside Transfer-Encoding."""
        if name == b"transfer-encoding":
            if self._is_chunked or value.strip(b" \t").lower() != b"chunked" or http_version != "1.1":
                raise ValueError("the only Transfer-Encoding that is read is one chunked, with HTTP/1.1")
            self._is_chunked = True
        elif name == b"host":
            if self._has_host:
                raise ValueError("more than one Host")
            self._has_host = True
