"""The sockets that a frontend listens on.

Every frontend binds the port itself with SO_REUSEPORT, and the kernel spreads connections over them. That option would let a
second server of the same user share the port in silence, so that a lock per address comes first: its file holds the run
directory of the server that listens, and all frontends of that server share it.
"""

from __future__ import annotations

import fcntl
import os
import re
import socket
import stat
import time
from collections.abc import Callable
from pathlib import Path

from packhorse_shared.addresses import Address, bind, check_port_is_free, is_stale_socket, resolve
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
    lock_address(http, run_dir.path, when_first=lambda: check_port_is_free(http))
    return [_listen(address, http) for address in resolve(http)]


def lock_address(
    http: HttpSettings, run_dir: Path, folder: Path = _LOCK_FOLDER, *, when_first: Callable[[], None] = lambda: None
) -> bool:
    """Take this process's share of the address's lock, for its life; returns whether no other process has one.

    ``when_first`` is called in that case, before any other frontend can have a share and so listen. Raises what it raises,
    and CannotStartError when the frontends of another run directory hold the lock.
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
        _begin(descriptor, own, path, when_first)
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


def _begin(descriptor: int, own: bytes, path: Path, when_first: Callable[[], None]) -> None:
    """What the first one does that has the lock, while it has it alone. The lock is given back when that fails."""
    try:
        when_first()
        if os.pread(descriptor, _LONGEST_PATH_BYTES, 0) != own:  # else nothing is to be written, even to a full disk
            os.pwrite(descriptor, own, 0)
            os.ftruncate(descriptor, len(own))
    except OSError as problem:
        os.close(descriptor)
        raise CannotStartError(f"port: cannot write the lock file {path}: {problem.strerror}") from None
    except CannotStartError:
        os.close(descriptor)
        raise


def _try_lock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _listen(address: Address, http: HttpSettings) -> socket.socket:
    bound = bind(address, http, shared=True)
    bound.listen(_BACKLOG)
    bound.setblocking(False)
    return bound


def _listen_unix(path: Path) -> socket.socket:
    """A Unix socket that only this user may connect to (mode 0600). One that a dead process left is replaced."""
    if is_stale_socket(path):
        path.unlink(missing_ok=True)
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
