"""The broker's sockets: who speaks there, what comes in and what it means, and the way out.

Inside the broker a peer's identity begins with one byte that names its socket: nobody can pass for a peer of another one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import zmq

from packhorse_broker import events as e
from packhorse_shared import messages as m
from packhorse_shared.codec import Buffer, Decoder, Header, encode
from packhorse_shared.curve import AllowList
from packhorse_shared.errors import CannotStartError
from packhorse_shared.key_folders import BrokerKeys
from packhorse_shared.run_dir import RunDir
from packhorse_shared.sockets import open_router, open_tcp_router

Socket = zmq.Socket[bytes]
FRONTENDS, WORKERS, REMOTE_WORKERS = b"f", b"w", b"r"
"""The tags of their peers."""

Readings = dict[type[Any], Callable[[bytes, Any, Buffer], e.Event]]
"""The messages that mean an event, and how it is made from peer, message and payload."""
_FROM_FRONTENDS: Readings = {
    m.FrontendHello: lambda peer, hello, _: e.FrontendGreeted(peer, hello),
    m.Submit: lambda peer, submit, payload: e.RequestsSubmitted(peer, submit.requests, payload),
    m.Cancel: lambda peer, cancel, _: e.RequestsCancelled(peer, cancel.rids),
    m.Ping: lambda peer, _, __: e.FrontendPinged(peer),
    m.StatusQuery: lambda peer, _, __: e.StatusAsked(peer),
    m.Tally: lambda peer, tally, _: e.FrontendTallied(peer, tally.changes),
    m.MetricsQuery: lambda peer, _, __: e.MetricsAsked(peer),
}
_FROM_WORKERS: Readings = {
    m.WorkerAnnounce: lambda peer, announce, _: e.WorkerAnnounced(peer, announce),
    m.WorkerHello: lambda peer, hello, _: e.WorkerGreeted(peer, hello),
    m.Beat: lambda peer, beat, _: e.WorkerBeat(peer, beat),
    m.Done: e.BatchFinished,
    m.BatchFailed: lambda peer, failed, _: e.BatchBroke(peer, failed),
    m.Draining: lambda peer, draining, _: e.WorkerDrained(peer, draining.returned),
    m.Bye: lambda peer, bye, _: e.WorkerLeft(peer, bye.reason),
}

COPY_BELOW_BYTES = 64 * 1024
"""Smaller frames are copied: handing one over without a copy costs more than the copy."""
_MOST_FRAMES = 4


class Door:
    """A bound ROUTER. ``tag``: the byte by which its peers are told apart. ``also``: messages that mean no event.

    With an ``allow_list`` only those come in who showed a key of it as they connected.
    """

    def __init__(
        self, socket: Socket, tag: bytes, readings: Readings, *also: type[Any], allow_list: AllowList | None = None
    ) -> None:
        self.socket = socket
        self.tag = tag
        self.readings = readings
        self.decoder = Decoder(*readings, *also)
        self.allow_list = allow_list

    def receive(self) -> tuple[bytes, list[Buffer], bytes] | None:
        """A peer, the frames that it sent, and the public key that it showed, if any; None when nothing waits."""
        try:
            peer = self.socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return None
        frames = self._rest()
        key = b"" if self.allow_list is None else _key_of(frames[0])
        return self.tag + peer, [each.buffer if len(each) >= COPY_BELOW_BYTES else each.bytes for each in frames], key

    def send(self, peer: bytes, message: Header, payload: Buffer = b"") -> bool:
        """Send to a peer of this door; False when there is no such peer any more, or it has read nothing for ages."""
        frames = [peer[1:], *encode(message, payload)]
        try:
            self.socket.send_multipart(frames, zmq.NOBLOCK, copy=len(payload) < COPY_BELOW_BYTES)
        except zmq.Again:
            return False
        except zmq.ZMQError as problem:
            if problem.errno == zmq.EHOSTUNREACH:
                return False
            raise
        return True

    def _rest(self) -> list[zmq.Frame]:
        """The frames behind the sender's identity; more than any message has are read and left out."""
        frames: list[zmq.Frame] = []
        while True:
            frame = self.socket.recv(copy=False)
            if len(frames) < _MOST_FRAMES:
                frames.append(frame)
            if not frame.more:
                return frames


@dataclass(frozen=True)
class RemoteWorkers:
    """Where workers of other machines join, and with which keys."""

    endpoint: str
    keys: BrokerKeys


def open_doors(context: zmq.Context[Socket], run_dir: RunDir) -> list[Door]:
    """The doors for the processes of this machine, the workers' first: answers free what submits fill.

    Raises CannotStartError when one cannot be bound.
    """
    try:
        workers = open_router(context, run_dir.workers_endpoint)
        frontends = open_router(context, run_dir.frontends_endpoint)
    except zmq.ZMQError as problem:
        raise CannotStartError(f"run_dir: cannot listen in {run_dir.path}: {problem}") from None
    return [Door(workers, WORKERS, _FROM_WORKERS, m.SettingsQuery), Door(frontends, FRONTENDS, _FROM_FRONTENDS)]


def open_remote_door(context: zmq.Context[Socket], remote: RemoteWorkers, allow_list: AllowList) -> Door:
    """The door for workers of other machines. Raises CannotStartError when it cannot be bound."""
    try:
        socket = open_tcp_router(context, remote.endpoint, remote.keys)
    except zmq.ZMQError as problem:
        raise CannotStartError(f"broker: cannot listen on {remote.endpoint}: {problem}") from None
    return Door(socket, REMOTE_WORKERS, _FROM_WORKERS, m.SettingsQuery, allow_list=allow_list)


def _key_of(frame: zmq.Frame) -> bytes:
    """What the gate noted as the user of this connection."""
    try:
        return str(frame.get("User-Id")).encode()
    except zmq.ZMQError:
        return b""
