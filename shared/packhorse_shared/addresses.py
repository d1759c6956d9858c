"""The address that frontends listen on: how it is written, and whether nobody else listens there."""

from __future__ import annotations

import errno
import socket
import stat
from pathlib import Path

from packhorse_shared.errors import CannotStartError
from packhorse_shared.settings import HttpSettings

Address = tuple[socket.AddressFamily, tuple[object, ...]]
"""As ``socket.bind`` takes it, with its family."""


def url_of(http: HttpSettings) -> str:
    """Where the API is: http://host:port, https://host:port, or unix:PATH; with the root path."""
    if http.uds is not None:
        return f"unix:{http.uds}"
    host = f"[{http.host}]" if ":" in http.host else http.host
    return f"{'https' if http.ssl_certfile else 'http'}://{host}:{http.port}{http.root_path.rstrip('/')}"


def resolve(http: HttpSettings) -> list[Address]:
    """Every address of the host. Raises CannotStartError when there is none."""
    try:
        found = socket.getaddrinfo(http.host, http.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as problem:
        raise CannotStartError(f"host: {http.host} cannot be resolved: {problem.strerror}") from None
    return list(dict.fromkeys((family, address) for family, _, _, _, address in found))


def bind(address: Address, http: HttpSettings, *, shared: bool) -> socket.socket:
    """A socket bound to one address, with SO_REUSEPORT when ``shared``. Raises CannotStartError."""
    family, where = address
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        bound.bind(where)
    except OSError as problem:
        bound.close()
        raise _refuse(problem, http) from None
    return bound


def check_port_is_free(http: HttpSettings) -> None:
    """Bind without SO_REUSEPORT, and let go: fails when any program listens, even one that shares the port.

    Raises CannotStartError.
    """
    for address in resolve(http):
        bind(address, http, shared=False).close()


def is_stale_socket(path: Path) -> bool:
    """Whether a dead process left a Unix socket at this path; False when there is nothing.

    Raises CannotStartError when the path cannot be listened on: somebody does, it is no socket, or its folder is missing.
    """
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        if not path.parent.is_dir():
            raise CannotStartError(f"uds: there is no folder {path.parent}") from None
        return False
    except OSError as problem:
        raise CannotStartError(f"uds: cannot look at {path}: {problem.strerror}") from None
    if not stat.S_ISSOCK(mode):
        raise CannotStartError(f"uds: {path} is in the way: it is not a socket, so it was not removed")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return True
        except OSError as problem:
            raise CannotStartError(f"uds: cannot look at {path}: {problem.strerror}") from None
    raise CannotStartError(f"uds: {path} is in use by another program; choose another --uds")


def _refuse(problem: OSError, http: HttpSettings) -> CannotStartError:
    if problem.errno == errno.EADDRINUSE:
        return CannotStartError(f"port: {http.port} on {http.host} is in use by another program; choose another --port")
    if problem.errno == errno.EACCES:
        return CannotStartError(f"port: this user may not listen on port {http.port}; choose a --port from 1024 on")
    return CannotStartError(f"host: cannot listen on {http.host}, port {http.port}: {problem.strerror}")
