"""What becomes of a connection to the broker, told by ZeroMQ's monitor of a socket."""

from __future__ import annotations

import enum

import zmq
from zmq.utils.monitor import recv_monitor_message

_DOWN = zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED | zmq.EVENT_CLOSED
_NO_PROOF = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
_WATCHED = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_AUTH | _NO_PROOF | _DOWN


class Connection(enum.Enum):
    """How it stands."""

    UP = "up"
    """The broker answers; over tcp, with the right key."""
    DOWN = "down"
    UNPROVEN = "unproven"
    """Something listens that does not show the broker's key, or nothing came of it."""
    REFUSED = "refused"
    """The broker does not allow our key."""


def open_monitor(socket: zmq.Socket[bytes]) -> zmq.Socket[bytes]:
    """A socket to poll, and to be read with ``read_connection``; ``socket.disable_monitor()`` ends it."""
    return socket.get_monitor_socket(_WATCHED)


def read_connection(monitor: zmq.Socket[bytes]) -> Connection:
    """The next change; to be called when the monitor can be read."""
    event = recv_monitor_message(monitor, zmq.NOBLOCK)["event"]
    if event & zmq.EVENT_HANDSHAKE_SUCCEEDED:
        return Connection.UP
    if event & zmq.EVENT_HANDSHAKE_FAILED_AUTH:
        return Connection.REFUSED
    return Connection.UNPROVEN if event & _NO_PROOF else Connection.DOWN
