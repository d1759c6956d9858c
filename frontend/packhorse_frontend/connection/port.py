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
    is_first = lock_address(http, run_dir.path)
    if is_first:
        check_port_is_free(http)
    return [_listen(address, http) for address in resolve(http)]


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
    if is_first and os.pread(descriptor, _LONGEST_PATH_BYTES, 0) != own:  # else nothing is to be written, even to a full disk
        _write(descriptor, own, path)
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


def _write(descriptor: int, content: bytes, path: Path) -> None:
    try:
        os.pwrite(descriptor, content, 0)
        os.ftruncate(descriptor, len(content))
    except OSError as problem:
        os.close(descriptor)
        raise CannotStartError(f"port: cannot write the lock file {path}: {problem.strerror}") from None


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
