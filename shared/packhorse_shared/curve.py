"""CURVE on sockets: workers of other machines join over tcp, encrypted, and only with a key that is allowed.

CURVE alone lets any key in: whose may join is asked of the allow-list in every handshake (ZAP, RFC 27).
"""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import zmq

from packhorse_shared.key_folders import BrokerKeys, WorkerKeys, is_name, load_key

if TYPE_CHECKING:
    from zmq.auth.thread import ThreadAuthenticator

log = logging.getLogger(__name__)

_DOMAIN = "workers"
_LOOK_EVERY_S = 1.0
_COMPLAINT_INTERVAL_S = 1.0


class _Known(NamedTuple):
    """One file of keys, as it was read."""

    stamp: tuple[int, int, int]
    key: bytes | None
    """None when it holds none."""


class AllowList:
    """Whose key may join: the files NAME.key of a folder, looked at again when somebody asks a second after the last time.

    For several threads: what they share is replaced as a whole.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, _Known] = {}
        self._names: dict[bytes, str] = {}
        self._complaints: set[str] = set()
        self._look_again_at = float("-inf")

    def name_of(self, public_key: bytes) -> str | None:
        """The NAME whose key this is (Z85, 40 characters); None when it is not allowed, or no more."""
        now = time.monotonic()
        if now >= self._look_again_at:
            self._look_again_at = now + _LOOK_EVERY_S
            self._look()
        return self._names.get(public_key)

    def _look(self) -> None:
        """Only a file that is gone or changed takes its key away: one that cannot be read just now (no descriptor is left, the
        disk fails) must not part a server from its workers."""
        try:
            with os.scandir(self._folder) as entries:
                names = [entry.name.removesuffix(".key") for entry in entries if entry.name.endswith(".key")]
        except FileNotFoundError:
            names = []
        except OSError as problem:
            self._complain(f"cannot read {self._folder}, the keys known so far stay: {problem.strerror}")
            return
        files = {name: known for name in names if is_name(name) and (known := self._read(name)) is not None}
        before, allowed = set(self._names.values()), {name for name, known in files.items() if known.key is not None}
        for name in sorted(allowed - before):
            log.info("a key may join", extra={"key": name})
        for name in sorted(before - allowed):
            log.warning("a key may no longer join", extra={"key": name})
        self._files = files
        self._names = {known.key: name for name, known in files.items() if known.key is not None}

    def _read(self, name: str) -> _Known | None:
        """A file, read only if it changed: reading all of many would hold the broker up."""
        path, known = self._folder / f"{name}.key", self._files.get(name)
        try:
            found = path.stat()
            stamp = (found.st_mtime_ns, found.st_ino, found.st_size)
            if known is None or known.stamp != stamp:
                known = _Known(stamp, load_key(path)[0])
        except FileNotFoundError:
            return None
        except OSError as problem:
            self._complain(f"cannot read {path}: {problem.strerror}")
        except ValueError as problem:
            self._complain(str(problem))
            return _Known(stamp, None)
        return known

    def _complain(self, problem: str) -> None:
        """Once for each: they are found again every second."""
        if problem not in self._complaints:
            self._complaints.add(problem)
            log.error("%s", problem)


class _Provider:
    """Answers pyzmq's authenticator, in its thread. Whatever is raised here would end that thread."""

    def __init__(self, allow_list: AllowList) -> None:
        self._allow_list = allow_list
        self._complained_at = float("-inf")

    def callback(self, _domain: str, key: bytes) -> bool:
        """Whether this key may come in."""
        if self._allow_list.name_of(key) is not None:
            return True
        now = time.monotonic()
        if now >= self._complained_at + _COMPLAINT_INTERVAL_S:
            self._complained_at = now
            log.warning("refused a connection: its key is not allowed", extra={"public_key_begins": key[:8].decode()})
        return False


def start_gate(context: zmq.Context[zmq.Socket[bytes]], allow_list: AllowList) -> ThreadAuthenticator:
    """Decide who may connect to the CURVE sockets of a context, in a thread of its own; to be stopped before the context ends.

    To be started before any of them is bound.
    """
    from zmq.auth.thread import ThreadAuthenticator  # noqa: PLC0415 (brings asyncio along, which no other broker needs)

    gate = ThreadAuthenticator(context, log=log)
    gate.configure_curve_callback(_DOMAIN, _Provider(allow_list))
    gate.start()
    return gate


def serve_curve(socket: zmq.Socket[bytes], keys: BrokerKeys) -> None:
    """Let a socket be bound for those only that the gate lets in."""
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
    socket.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN.encode())
    # Without this a gate that is not there would let everybody in.
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)


def join_curve(socket: zmq.Socket[bytes], keys: WorkerKeys) -> None:
    """Let a socket connect to the broker of these keys, and to nobody else."""
    socket.setsockopt(zmq.CURVE_SERVERKEY, keys.broker)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
