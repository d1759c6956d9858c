"""ZeroMQ sockets, made in one place so that every trap is avoided once.

- ``ROUTER_MANDATORY`` makes a send to a peer that left, or that reads nothing any more, an error instead of nothing.
- The broker's high-water marks are far above what waits for a peer that lives: what matters is bounded by its core, in inputs
  and in bytes. They bound what a peer can fill its memory with, by questions whose answers it does not read, or by more than
  the broker can look at. The others' marks are 0: they talk to the broker only.
- ``LINGER`` is short, so that no process hangs at exit; ``MAXMSGSIZE`` bounds what a peer can make us hold.
- Identities are role, index and a random part: fixed ones can be hijacked, and are refused after a restart.
- Over tcp both sides send heartbeats: a link that is cut without a word is noticed. The broker lets a worker that connects
  again take over its identity, since it may not yet know that the old connection is dead.
"""

from __future__ import annotations

import contextlib
import secrets
import time

import zmq

from packhorse_shared.codec import MAX_MESSAGE_BYTES, Decoder, encode
from packhorse_shared.curve import join_curve, serve_curve
from packhorse_shared.errors import MalformedMessageError, PackhorseError
from packhorse_shared.key_folders import BrokerKeys, WorkerKeys
from packhorse_shared.messages import StatusQuery, StatusReport
from packhorse_shared.run_dir import RunDir

MOST_WAITING_MESSAGES = 1 << 16
"""To and from one peer of the broker."""
LINGER_MS = 500
HEARTBEAT_EVERY_MS = 1000
HEARTBEAT_TIMEOUT_MS = 10_000
"""A tcp connection that brings nothing for so long is closed; a worker then connects again."""
_HANDSHAKE_MS = 5000
"""Whoever has not shown a key by then is cut off: strangers can reach this socket, and each holds a descriptor."""
_CONNECT_MS = 3000
_KEEPALIVE = {zmq.TCP_KEEPALIVE: 1, zmq.TCP_KEEPALIVE_IDLE: 5, zmq.TCP_KEEPALIVE_INTVL: 2, zmq.TCP_KEEPALIVE_CNT: 3}


def new_identity(role: str, index: int) -> bytes:
    """A ZeroMQ identity that no other process has: ``worker-0-3f9a01c2d4e5b6a7``."""
    return f"{role}-{index}-{secrets.token_hex(8)}".encode("ascii")


def open_router(context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> zmq.Socket[bytes]:
    """The broker's side of an endpoint in the run directory, bound. Raises zmq.ZMQError when it cannot be bound."""
    socket = context.socket(zmq.ROUTER)
    _set_common(socket, MOST_WAITING_MESSAGES)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.bind(endpoint)
    return socket


def open_tcp_router(context: zmq.Context[zmq.Socket[bytes]], endpoint: str, keys: BrokerKeys) -> zmq.Socket[bytes]:
    """The broker's side of tcp://HOST:PORT, bound, for workers with a key. The context must have its ``curve.start_gate``.

    Raises zmq.ZMQError when it cannot be bound.
    """
    socket = context.socket(zmq.ROUTER)
    _set_common(socket, MOST_WAITING_MESSAGES)
    _set_tcp(socket, endpoint)
    serve_curve(socket, keys)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
    socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
    socket.bind(endpoint)
    return socket


def open_dealer(
    context: zmq.Context[zmq.Socket[bytes]], endpoint: str, identity: bytes, keys: WorkerKeys | None = None
) -> zmq.Socket[bytes]:
    """A frontend's or worker's side, connecting: it reconnects by itself when the broker comes back. tcp:// needs ``keys``.

    Over tcp it does not do so after an answer that is none of ZeroMQ's: ``connect_again`` does.
    """
    socket = context.socket(zmq.DEALER)
    _set_common(socket)
    socket.setsockopt(zmq.IDENTITY, identity)
    socket.setsockopt(zmq.RECONNECT_IVL, 50)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 100)  # a broker is back in half a second: nobody should sleep past that
    if keys is not None:
        _set_tcp(socket, endpoint)
        join_curve(socket, keys)
    socket.connect(endpoint)
    return socket


def connect_again(socket: zmq.Socket[bytes], endpoint: str) -> None:
    """Begin anew with a connection that is down. What waits to be sent is dropped."""
    with contextlib.suppress(zmq.ZMQError):  # ZeroMQ itself has given it up
        socket.disconnect(endpoint)
    socket.connect(endpoint)


def query_status(run_dir: RunDir, timeout_s: float) -> StatusReport:
    """Ask a running broker for its status. Raises PackhorseError when it does not answer in time."""
    deadline = time.monotonic() + timeout_s
    context = zmq.Context()
    try:
        socket = open_dealer(context, run_dir.frontends_endpoint, new_identity("status", 0))
        socket.send_multipart(encode(StatusQuery()))
        decoder = Decoder(StatusReport)
        while socket.poll(max(0, int((deadline - time.monotonic()) * 1000))):
            try:
                report, _ = decoder.decode(socket.recv_multipart())
            except MalformedMessageError:
                continue
            assert isinstance(report, StatusReport)  # the only type this decoder knows
            return report
        raise PackhorseError(f"the broker in {run_dir.path} did not answer within {timeout_s:g} s")
    finally:
        context.destroy(linger=0)


def _set_common(socket: zmq.Socket[bytes], most_waiting: int = 0) -> None:
    socket.setsockopt(zmq.SNDHWM, most_waiting)
    socket.setsockopt(zmq.RCVHWM, most_waiting)
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)


def _set_tcp(socket: zmq.Socket[bytes], endpoint: str) -> None:
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_EVERY_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
    socket.setsockopt(zmq.CONNECT_TIMEOUT, _CONNECT_MS)
    for option, value in _KEEPALIVE.items():
        socket.setsockopt(option, value)
    if "[" in endpoint:
        socket.setsockopt(zmq.IPV6, 1)
