"""Watching other processes by pidfd: their end is seen at once, and a kill can never hit another process with a reused pid."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass

from packhorse_broker.events import FrontendLost, WorkerLost


@dataclass(frozen=True, slots=True)
class _Watched:
    descriptor: int
    pid: int
    when_ended: FrontendLost | WorkerLost


class ProcessWatch:
    """The pidfds of peers on this host, by peer."""

    def __init__(self) -> None:
        self._by_peer: dict[bytes, _Watched] = {}
        self._peers: dict[int, bytes] = {}

    def add(self, peer: bytes, pid: int, when_ended: FrontendLost | WorkerLost) -> int | None:
        """Watch a process; returns a descriptor that is readable once it has ended.

        None when the peer is watched already or names no process (pid 0). Raises ProcessLookupError when it has ended.
        """
        if pid == 0 or peer in self._by_peer:
            return None
        descriptor = os.pidfd_open(pid)
        self._by_peer[peer] = _Watched(descriptor, pid, when_ended)
        self._peers[descriptor] = peer
        return descriptor

    def ended(self, descriptor: int) -> FrontendLost | WorkerLost:
        """Stop watching the process of this descriptor. Returns what its end means."""
        watched = self._by_peer.pop(self._peers.pop(descriptor))
        os.close(descriptor)
        return watched.when_ended

    def descriptor_of(self, peer: bytes) -> int | None:
        """The descriptor by which a peer is watched, if it is."""
        watched = self._by_peer.get(peer)
        return None if watched is None else watched.descriptor

    def owns(self, descriptor: int) -> bool:
        """Whether this is one of the watched descriptors."""
        return descriptor in self._peers

    def kill(self, peer: bytes) -> bool:
        """SIGKILL a watched process. False when it is not watched."""
        watched = self._by_peer.get(peer)
        if watched is None:
            return False
        signal.pidfd_send_signal(watched.descriptor, signal.SIGKILL)
        return True

    def close(self) -> None:
        """Stop watching everything."""
        for descriptor in self._peers:
            os.close(descriptor)
        self._by_peer.clear()
        self._peers.clear()
