"""SIGTERM and SIGINT as bytes on a socket, so that they wake the same poller as everything else."""

from __future__ import annotations

import contextlib
import signal
import socket
from collections.abc import Iterator
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def _noted(_number: int, _frame: FrameType | None) -> None:
    """The wakeup descriptor has the number; this only replaces the default action."""


@contextlib.contextmanager
def stop_signals() -> Iterator[socket.socket]:
    """A socket on which each stop signal arrives as one byte, its number. Main thread only."""
    reader, writer = socket.socketpair()
    reader.setblocking(False)
    writer.setblocking(False)
    former_descriptor = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    former = {number: signal.signal(number, _noted) for number in STOP_SIGNALS}
    try:
        yield reader
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(former_descriptor)
        reader.close()
        writer.close()


def read_stop_signals(reader: socket.socket) -> list[int]:
    """The stop signals that arrived since the last call."""
    try:
        return [number for number in reader.recv(64) if number in STOP_SIGNALS]
    except BlockingIOError:
        return []
