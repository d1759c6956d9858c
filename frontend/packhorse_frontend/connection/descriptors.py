"""How many files this process may have open, and how many of them are left to connections.

What the process needs for itself (the broker's socket when it connects again, the files of a tokenizer that is still to be
loaded) must not be at the mercy of how many clients come.
"""

from __future__ import annotations

import logging
import resource

import msgspec

from packhorse_shared.errors import CannotStartError
from packhorse_shared.settings import HttpSettings

log = logging.getLogger(__name__)

_OWN_DESCRIPTORS = 40
"""Beside connections; some 22 are open while nothing happens."""
_MOST_OVERFLOW, _LEAST_OVERFLOW = 256, 8
_OVERFLOW_SHARE = 8
_FEWEST_CONNECTIONS = 8


def overflow_of(max_connections: int) -> int:
    """Connections above the limit that still get a 503; beyond these, new ones are closed without a word."""
    return max(_LEAST_OVERFLOW, min(_MOST_OVERFLOW, max_connections // _OVERFLOW_SHARE))


def fit_descriptors(http: HttpSettings) -> HttpSettings:
    """Raise the limit of open files as far as it is needed and allowed, and give the settings with as many connections as it
    has room for. Raises CannotStartError when these are next to none."""
    wanted = _OWN_DESCRIPTORS + http.max_connections + overflow_of(http.max_connections)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return http
    limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    if limit == wanted:
        return http
    room = limit - _OWN_DESCRIPTORS
    connections = room - overflow_of(max(0, room))
    if connections < _FEWEST_CONNECTIONS:
        fewest = _OWN_DESCRIPTORS + _LEAST_OVERFLOW + _FEWEST_CONNECTIONS
        raise CannotStartError(f"open files: the limit is {limit} (ulimit -n), a frontend needs at least {fewest}; raise it")
    log.warning(
        "fewer connections than max_connections: that is all the limit of open files allows",
        extra={"connections": connections, "max_connections": http.max_connections, "limit": limit, "wanted": wanted},
    )
    return msgspec.structs.replace(http, max_connections=connections)
