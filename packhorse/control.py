"""supervisord's control socket: what runs, start one, stop one (XML-RPC over a Unix socket).

Source: supervisord.org, "XML-RPC API Documentation".
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import xmlrpc.client
from enum import IntEnum
from typing import Any
from xml.parsers.expat import ExpatError

import msgspec

from packhorse_shared.errors import PackhorseError
from packhorse_shared.settings import MAX_PROCESSES

_SCHEME = "unix://"


class ProcessState(IntEnum):
    """supervisord's states of a process."""

    STOPPED = 0
    STARTING = 10
    RUNNING = 20
    BACKOFF = 30
    STOPPING = 40
    EXITED = 100
    FATAL = 200
    UNKNOWN = 1000


class Process(msgspec.Struct, frozen=True):
    """One slot of supervisord.conf and how it stands."""

    group: str
    name: str
    state: ProcessState
    pid: int
    """0 while it does not run."""
    start: int
    """When it was last started, in seconds of the epoch; 0 for never."""
    exitstatus: int
    spawnerr: str = ""
    """Why supervisord could not start it."""

    @property
    def is_up(self) -> bool:
        """Whether it runs, or supervisord means it to."""
        return self.state in {ProcessState.STARTING, ProcessState.RUNNING, ProcessState.BACKOFF}


class Supervisor:
    """A running supervisord. Every call opens its own connection; each raises PackhorseError when there is no answer."""

    def __init__(self, url: str, timeout_s: float = 5.0) -> None:
        self._url = url
        self._timeout_s = timeout_s

    def processes(self) -> dict[str, Process]:
        """Every slot by its name: ``broker``, ``slots``, ``worker-0``, ``frontend-0``, ..."""
        found = msgspec.convert(self._call("supervisor.getAllProcessInfo"), list[Process], strict=False)
        return {process.name: process for process in found}

    def wake(self) -> None:
        """Let supervisord take its next step now: it sleeps up to a second between the end of one process and what
        follows from it. While it shuts down it answers nothing, but it does wake."""
        with contextlib.suppress(PackhorseError):
            self._call("supervisor.getState")

    def start(self, group: str, name: str) -> None:
        """Start one slot, without waiting."""
        self._call("supervisor.startProcess", f"{group}:{name}", False)

    def stop(self, group: str, name: str) -> None:
        """Tell one slot to stop, without waiting. It stays stopped."""
        self._call("supervisor.stopProcess", f"{group}:{name}", False)

    def _call(self, method: str, *arguments: Any) -> Any:
        transport = _UnixTransport(self._url.removeprefix(_SCHEME), self._timeout_s)
        with xmlrpc.client.ServerProxy("http://localhost", transport=transport) as server:
            try:
                return getattr(server, method)(*arguments)
            except xmlrpc.client.Fault as problem:
                raise PackhorseError(f"supervisord refused {method}{arguments}: {problem.faultString}") from None
            except (OSError, http.client.HTTPException, xmlrpc.client.Error, ExpatError) as problem:
                raise PackhorseError(f"no answer from supervisord at {self._url}: {problem}") from None


def set_worker_count(supervisor: Supervisor, count: int) -> tuple[list[str], list[str]]:
    """Start the lowest free worker slots, or stop the highest ones, until ``count`` are up. Those that stay are not touched.

    Returns the names of those started and of those stopped.
    """
    workers = sorted(
        (process for process in supervisor.processes().values() if process.group == "worker"),
        key=lambda process: int(process.name.rpartition("-")[2]),
    )
    assert len(workers) == MAX_PROCESSES, f"{len(workers)} worker slots in supervisord.conf"
    up = [process for process in workers if process.is_up]
    free = [process for process in workers if not process.is_up and process.state != ProcessState.STOPPING]
    started = [process.name for process in free[: max(0, count - len(up))]]
    stopped = [process.name for process in reversed(up[count:])]
    for name in started:
        supervisor.start("worker", name)
    for name in stopped:
        supervisor.stop("worker", name)
    return started, stopped


class _UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path
        self._timeout_s = timeout_s

    def connect(self) -> None:
        """Open the socket."""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self._timeout_s)
        self.sock.connect(self._path)


class _UnixTransport(xmlrpc.client.Transport):
    """XML-RPC over a Unix socket."""

    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__()
        self._path = path
        self._timeout_s = timeout_s

    def make_connection(self, host: Any) -> http.client.HTTPConnection:
        """The connection of one call; the base class closes the one that it knows of."""
        connection = _UnixConnection(self._path, self._timeout_s)
        self._connection = (host, connection)
        return connection
