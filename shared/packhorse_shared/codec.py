"""Messages to frames and back. Nothing here trusts the bytes: whatever is not exactly a message of the table raises
``MalformedMessageError`` with a reason, before anything else of it is looked at."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from packhorse_shared import messages as m
from packhorse_shared.errors import MalformedMessageError, OtherVersionError

MAX_HEADER_BYTES = 64 * 1024
MAX_MESSAGE_BYTES = 1 << 30
"""ZMQ_MAXMSGSIZE of every socket."""

Buffer = bytes | bytearray | memoryview


class Header(Protocol):
    """Any message of ``messages.py``."""

    def payload_bytes(self) -> int | None:
        """Size that the payload must have, or None where it cannot be known."""


_TYPES: dict[int, type[Any]] = {
    0x01: m.FrontendHello,
    0x02: m.Submit,
    0x03: m.Cancel,
    0x04: m.Ping,
    0x05: m.StatusQuery,
    0x06: m.Tally,
    0x07: m.MetricsQuery,
    0x11: m.BrokerState,
    0x12: m.Result,
    0x13: m.RequestFailure,
    0x14: m.StatusReport,
    0x15: m.MetricsReport,
    0x21: m.WorkerAnnounce,
    0x22: m.WorkerHello,
    0x23: m.Beat,
    0x24: m.Done,
    0x25: m.BatchFailed,
    0x26: m.Draining,
    0x27: m.Bye,
    0x28: m.SettingsQuery,
    0x31: m.Join,
    0x32: m.Refused,
    0x33: m.Work,
    0x34: m.Drain,
    0x35: m.Quit,
    0x36: m.ServerSettings,
    0x41: m.Introduce,
}
_TYPE_BYTES: dict[type[Any], bytes] = {kind: bytes([code]) for code, kind in _TYPES.items()}
_HELLOS = {_TYPE_BYTES[kind] for kind in (m.FrontendHello, m.WorkerAnnounce, m.WorkerHello)}
"""Messages that begin with the sender's version, in every version of the protocol."""
_encoder = msgspec.msgpack.Encoder()


def encode(message: Header, payload: Buffer = b"") -> list[Buffer]:
    """The frames of a message. A header over the limit is our own bug: callers bound what they put into one message."""
    header = _encoder.encode(message)
    assert len(header) <= MAX_HEADER_BYTES, f"{type(message).__name__} header of {len(header)} bytes"
    assert message.payload_bytes() in (None, len(payload)), f"{type(message).__name__} payload of {len(payload)} bytes"
    return [_TYPE_BYTES[type(message)], header, payload]


class Decoder:
    """Decodes the messages that one socket may receive, and no others."""

    def __init__(self, *kinds: type[Any]) -> None:
        self._decoders = {_TYPE_BYTES[kind]: (kind.__name__, msgspec.msgpack.Decoder(kind)) for kind in kinds}

    def decode(self, frames: Sequence[Buffer]) -> tuple[Any, Buffer]:
        """Header and payload of a message.

        Raises MalformedMessageError: a wrong number of frames, an unknown type, a header that is too large, is not
        msgpack or does not fit its schema, or a payload of another size than the header says. OtherVersionError: what does
        not fit is a hello of another protocol version, whose sender can be told so.
        """
        if len(frames) != 3:
            raise MalformedMessageError(f"{len(frames)} frames instead of 3")
        type_frame, header, payload = frames
        known = self._decoders.get(bytes(type_frame)) if len(type_frame) == 1 else None
        if known is None:
            raise MalformedMessageError(f"unknown type {bytes(type_frame[:8]).hex() or 'empty'}")
        name, decoder = known
        if len(header) > MAX_HEADER_BYTES:
            raise MalformedMessageError(f"{name} header of {len(header)} bytes, limit {MAX_HEADER_BYTES}")
        try:
            message = decoder.decode(header)
        except (msgspec.DecodeError, RecursionError) as problem:
            version = _version_of(header) if bytes(type_frame) in _HELLOS else m.PROTOCOL_VERSION
            if version != m.PROTOCOL_VERSION:
                raise OtherVersionError(version) from None
            raise MalformedMessageError(f"{name} header: {problem}") from None
        expected = message.payload_bytes()
        if expected is not None and expected != len(payload):
            raise MalformedMessageError(f"{name} payload of {len(payload)} bytes, its header says {expected}")
        return message, payload


def _version_of(header: Buffer) -> int:
    """The version that a hello begins with; this one's where it cannot be read."""
    try:
        fields = msgspec.msgpack.decode(header, type=list[Any])
    except (msgspec.DecodeError, RecursionError):
        return m.PROTOCOL_VERSION
    return fields[0] if fields and type(fields[0]) is int and 0 <= fields[0] < 1 << 16 else m.PROTOCOL_VERSION
