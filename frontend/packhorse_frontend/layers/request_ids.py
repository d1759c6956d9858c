"""The id of a request: its caller's own where that is harmless to log and to send back, else a new one."""

from __future__ import annotations

import re
import secrets

_SANE = re.compile(rb"[A-Za-z0-9._:/+=@~-]{1,128}")


def new_request_id() -> str:
    """32 hexadecimal digits."""
    return secrets.token_hex(16)


def request_id_of(header: bytes | None) -> str:
    """The id to use for a request with this x-request-id header."""
    if header is not None and _SANE.fullmatch(header):
        return header.decode("ascii")
    return new_request_id()
