"""Which part of a run cannot start, told from successive looks at supervisord's slots. Pure: no clock, no socket.

The broker, the frontends and the slots program must start and keep starting. A worker must start too, but one that fails
when it is started again, or when it was added to a running server, does not end a server whose other workers serve.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from packhorse.control import Process, ProcessState
from packhorse_shared.arguments import EXIT_USAGE
from packhorse_shared.errors import EXIT_CANNOT_START

_HOPELESS = (EXIT_USAGE, EXIT_CANNOT_START)
_STARTS_BEFORE_READY = 3
"""A server that was never ready and whose part has died so often will not become ready by one more try."""
_EXITED = re.compile(r" exited: (\S+) \((?:terminated by (.+?)(?: \(core dumped\))?;)?")


@dataclass(frozen=True)
class PartFailed:
    """One part has ended, and starting it again will not help."""

    name: str
    spawn_error: str
    """Why supervisord could not even start it; empty when it ended by itself."""
    ends_server: bool


class FailureWatch:
    """Remembers first starts, so that a part that never ran is told from one that ran before."""

    def __init__(self) -> None:
        self._first_start: dict[str, int] = {}
        self._first_workers: set[str] = set()
        self._slots_are_filled = False
        self._told: set[tuple[str, int]] = set()
        self._pids: dict[str, set[int]] = {}

    def look(self, processes: Mapping[str, Process], *, was_ready: bool) -> list[PartFailed]:
        """What failed since the last look. ``was_ready``: whether the server has ever been ready to serve."""
        self._remember(processes)
        if not was_ready and (crashing := self._find_crashing(processes)) is not None:
            return [PartFailed(crashing.name, crashing.spawnerr, ends_server=True)]
        failed = [each for each in processes.values() if _has_failed(each) and (each.name, each.start) not in self._told]
        self._told |= {(each.name, each.start) for each in failed}
        is_serving = any(each.group == "worker" and each.is_up for each in processes.values())
        return [PartFailed(each.name, each.spawnerr, self._ends_server(each, is_serving)) for each in failed]

    def _remember(self, processes: Mapping[str, Process]) -> None:
        for each in processes.values():
            if each.start:
                self._first_start.setdefault(each.name, each.start)
            if each.pid:
                self._pids.setdefault(each.name, set()).add(each.pid)
        if not self._slots_are_filled:
            self._first_workers |= {each.name for each in processes.values() if each.group == "worker" and each.start}
            slots = processes.get("slots")
            self._slots_are_filled = slots is not None and slots.state == ProcessState.EXITED and slots.exitstatus == 0

    def _find_crashing(self, processes: Mapping[str, Process]) -> Process | None:
        """A part that was started more often than a server needs to become ready."""
        for each in processes.values():
            if len(self._pids.get(each.name, ())) > _STARTS_BEFORE_READY and (each.name, 0) not in self._told:
                self._told.add((each.name, 0))
                return each
        return None

    def _ends_server(self, process: Process, is_serving: bool) -> bool:
        if process.group != "worker" or not is_serving:
            return True
        return process.name in self._first_workers and process.start == self._first_start[process.name]


def killed_by(name: str, supervisord_log: str) -> str | None:
    """The signal (SIGKILL) that the part's last life ended by, as supervisord tells; None where it ended by itself."""
    found = [each[2] for each in _EXITED.finditer(supervisord_log) if each[1] == name]
    return found[-1] if found else None


def _has_failed(process: Process) -> bool:
    if process.state == ProcessState.FATAL:
        return True
    return process.state == ProcessState.EXITED and process.exitstatus in _HOPELESS
