"""Where a worker meets its broker: in the run directory of its machine (``RunDir`` is one), or over tcp with keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from packhorse_shared.key_folders import WorkerKeys


class MeetingPoint(Protocol):
    """What a worker must know of it."""

    @property
    def workers_endpoint(self) -> str:
        """ZeroMQ endpoint on which the broker serves workers."""

    @property
    def curve_keys(self) -> WorkerKeys | None:
        """What the connection is secured with; None where only this user can reach the endpoint."""

    def token(self) -> str:
        """What a worker shows to join. Raises OSError while no broker has left one."""

    def is_live(self) -> bool:
        """Whether a broker is known to be there now."""


@dataclass(frozen=True)
class RemoteBroker:
    """The broker of another machine."""

    workers_endpoint: str
    curve_keys: WorkerKeys

    def token(self) -> str:
        """None is needed: the key was checked when the connection was made."""
        return ""

    def is_live(self) -> bool:
        """Whether it is there cannot be known without a connection."""
        return False
