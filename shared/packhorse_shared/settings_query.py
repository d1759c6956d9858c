"""Asking the broker of another machine for the settings of its server, before there is anything to join with."""

from __future__ import annotations

import contextlib
import time

import msgspec
import zmq

from packhorse_shared.codec import Decoder, encode
from packhorse_shared.connection import Connection, open_monitor, read_connection
from packhorse_shared.errors import CannotStartError, MalformedMessageError
from packhorse_shared.key_folders import ALLOWED, WorkerKeys
from packhorse_shared.messages import ServerSettings, SettingsQuery
from packhorse_shared.settings import Settings
from packhorse_shared.sockets import new_identity, open_dealer

_ATTEMPT_S = 3.0
"""Then a new connection is tried: ZeroMQ gives one up for good when what listens does not speak its protocol."""
_LOOK_EVERY_MS = 50
_SILENCE = {
    Connection.UP: "{endpoint} takes the key of {folder}, but does not tell its settings",
    Connection.UNPROVEN: "what listens at {endpoint} does not show that {folder}/broker.key is its key",
    Connection.DOWN: "{endpoint} cannot be reached",
}


def query_settings(endpoint: str, keys: WorkerKeys, timeout_s: float) -> Settings:
    """The settings of the server whose broker takes workers at ``endpoint``, without secrets.

    Raises CannotStartError with one line: at once when the key is refused, or when no answer came in time.
    """
    deadline = time.monotonic() + timeout_s
    found = Connection.DOWN
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        while (left_s := deadline - time.monotonic()) > 0:
            socket = open_dealer(context, endpoint, new_identity("settings", 0), keys)
            answer, found = _ask(socket, min(_ATTEMPT_S, left_s))
            if answer is not None:
                return _read(endpoint, answer)
            if found is Connection.REFUSED:
                raise CannotStartError(
                    f"curve_keys: {endpoint} does not allow the key of {keys.folder}; the broker's folder lacks it in {ALLOWED}"
                )
    finally:
        context.destroy(linger=0)
    raise CannotStartError(f"broker: {_SILENCE[found].format(endpoint=endpoint, folder=keys.folder)} (tried {timeout_s:g} s)")


def _ask(socket: zmq.Socket[bytes], timeout_s: float) -> tuple[bytes | None, Connection]:
    """The answer, if one came, and how far the connection got."""
    deadline = time.monotonic() + timeout_s
    monitor, found = open_monitor(socket), Connection.DOWN
    decoder = Decoder(ServerSettings)
    try:
        with contextlib.suppress(zmq.Again):  # the connection was given up already: a send would wait for another one
            socket.send_multipart(encode(SettingsQuery()), zmq.NOBLOCK)
        while found is not Connection.REFUSED and time.monotonic() < deadline:
            if socket.poll(_LOOK_EVERY_MS):
                with contextlib.suppress(MalformedMessageError):
                    return bytes(decoder.decode(socket.recv_multipart())[1]), found
            while monitor.poll(0):
                if (change := read_connection(monitor)) is not Connection.DOWN:
                    found = change
    finally:
        socket.disable_monitor()
        monitor.close(linger=0)
        socket.close(linger=0)
    return None, found


def _read(endpoint: str, text: bytes) -> Settings:
    try:
        return msgspec.json.decode(text, type=Settings)
    except msgspec.DecodeError as problem:
        raise CannotStartError(
            f"broker: {endpoint} tells settings that this version of packhorse cannot read: {problem}"
        ) from None
