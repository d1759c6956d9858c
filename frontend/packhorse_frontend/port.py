"""The sockets that a frontend listens on.

Every frontend binds the port itself with SO_REUSEPORT, and the kernel spreads connections over them. That option would let a
second server of the same user share the port in silence, so that a lock per address comes first: its file holds the run
directory of the server that listens, and all frontends of that server share it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import socket
import stat
import time
from collections.abc import Sequence
from pathlib import Path

from packhorse_shared.errors import CannotStartError
from packhorse_shared.run_dir import RunDir
from packhorse_shared.settings import HttpSettings

_LOCK_WITHIN_S = 5.0
_LOCK_RETRY_S = 0.02
_BACKLOG = 2048
_LONGEST_PATH_BYTES = 4096
_LOCK_FOLDER = Path("/tmp")  # noqa: S108 (the file's owner is checked, and a link is not followed)


def listen(http: HttpSettings, run_dir: RunDir) -> list[socket.socket]:
    """Listening sockets for these settings: a Unix socket, or one for each address of the host.

    Raises CannotStartError when the address belongs to another server or program, or cannot be listened on.
    """
    if http.uds is not None:
        return [_listen_unix(Path(http.uds).expanduser().absolute())]
    addresses = _resolve(http)
    is_first = lock_address(http, run_dir.path)
    if is_first:
        _probe(addresses, http)
    return [_bind(family, address, http, shared=True) for family, address in addresses]


def lock_address(http: HttpSettings, run_dir: Path, folder: Path = _LOCK_FOLDER) -> bool:
    """Take this process's share of the address's lock, for its life; returns whether no other process has one.

    Raises CannotStartError when the frontends of another run directory hold it.
    """
    name = re.sub(r"[^A-Za-z0-9.:_-]", "_", http.host)
    path = folder / f"packhorse-{os.geteuid()}-{name}-{http.port}.lock"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as problem:
        raise CannotStartError(f"port: cannot open the lock file {path}: {problem.strerror}") from None
    found = os.fstat(descriptor)
    if found.st_uid != os.geteuid() or not stat.S_ISREG(found.st_mode):
        os.close(descriptor)
        raise CannotStartError(f"port: the lock file {path} is not a file of user {os.geteuid()}; remove it")
    own = os.fsencode(run_dir)
    is_first = _try_lock(descriptor, fcntl.LOCK_EX)
    if is_first:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, own, 0)
    deadline = time.monotonic() + _LOCK_WITHIN_S
    # Going from an exclusive lock to a shared one lets go in between (flock(2)): another may write first, so look again.
    while not _try_lock(descriptor, fcntl.LOCK_SH):
        if time.monotonic() > deadline:
            os.close(descriptor)
            raise CannotStartError(f"port: the lock file {path} is held by another process")
        time.sleep(_LOCK_RETRY_S)
    holder = os.pread(descriptor, _LONGEST_PATH_BYTES, 0)
    if holder != own:
        os.close(descriptor)
        raise CannotStartError(
            f"port: {http.port} is served by the Packhorse of {os.fsdecode(holder)}; choose another --port, or stop that one"
        )
    return is_first


def _try_lock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _resolve(http: HttpSettings) -> Sequence[tuple[socket.AddressFamily, tuple[object, ...]]]:
    try:
        found = socket.getaddrinfo(http.host, http.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as problem:
        raise CannotStartError(f"host: {http.host} cannot be resolved: {problem.strerror}") from None
    return list(dict.fromkeys((family, address) for family, _, _, _, address in found))


def _probe(addresses: Sequence[tuple[socket.AddressFamily, tuple[object, ...]]], http: HttpSettings) -> None:
    """Bind without SO_REUSEPORT, and let go: fails when any other program listens, even one that shares the port."""
    for family, address in addresses:
        _bind(family, address, http, shared=False).close()


def _bind(family: socket.AddressFamily, address: tuple[object, ...], http: HttpSettings, *, shared: bool) -> socket.socket:
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        bound.bind(address)
        bound.listen(_BACKLOG)
    except OSError as problem:
        bound.close()
        raise _refuse(problem, http) from None
    bound.setblocking(False)
    return bound


def _refuse(problem: OSError, http: HttpSettings) -> CannotStartError:
    if problem.errno == errno.EADDRINUSE:
        return CannotStartError(f"port: {http.port} on {http.host} is in use by another program; choose another --port")
    if problem.errno == errno.EACCES:
        return CannotStartError(f"port: this user may not listen on port {http.port}; choose a --port from 1024 on")
    return CannotStartError(f"host: cannot listen on {http.host}, port {http.port}: {problem.strerror}")


def _listen_unix(path: Path) -> socket.socket:
    """A Unix socket that only this user may connect to (mode 0600). One that a dead process left is replaced."""
    _clear(path)
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    mask = os.umask(0o177)
    try:
        bound.bind(str(path))
        bound.listen(_BACKLOG)
    except OSError as problem:
        bound.close()
        raise CannotStartError(f"uds: cannot listen on {path}: {problem.strerror or problem}") from None
    finally:
        os.umask(mask)
    bound.setblocking(False)
    return bound


def _clear(path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except OSError:
        return
    if not stat.S_ISSOCK(mode):
        raise CannotStartError(f"uds: {path} is in the way: it is not a socket, so it was not removed")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
        except OSError as problem:
            raise CannotStartError(f"uds: cannot look at {path}: {problem.strerror}") from None
        else:
            raise CannotStartError(f"uds: {path} is in use by another program; choose another --uds")
