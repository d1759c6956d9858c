"""Messages that no part of Packhorse would send: damaged, of other kinds, pickled, oversized, or about others' work."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from packhorse_shared import messages as m
from packhorse_shared.codec import MAX_HEADER_BYTES, Decoder, encode
from packhorse_shared.errors import MalformedMessageError, OtherVersionError

Frames = list[bytes]

_MANY = 2000
"""Request and batch ids of other peers are guessed below this."""


class _Bomb:
    """Unpickled, it makes a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.mkdir, (self._folder,)


class Forger:
    """Makes forged messages of every kind in turn, from a seed."""

    def __init__(self, seed: int, bomb: Path) -> None:
        self._random = Random(seed)
        self._pickle = pickle.dumps(_Bomb(bomb))
        self._kinds: list[Callable[[], Frames]] = [
            self._noise,
            self._truncated,
            self._changed,
            self._pickled,
            self._too_large,
            self._too_many_frames,
            self._wrong_payload,
        ]

    def frames(self) -> Frames:
        return self._random.choice(self._kinds)()

    def stream(self, size: int) -> bytes:
        """For a socket without ZeroMQ on it."""
        return self._random.choice(
            [self._random.randbytes(size), b"\xff" + b"\0" * 8 + b"\x01\x7f\x03", b"GET / HTTP/1.1\r\n\r\n"]
        )

    def _good(self) -> Frames:
        """A whole message that a frontend or a worker could send, but not a hello."""
        number = self._random.randrange(_MANY)
        lengths = [self._random.randint(1, 9) for _ in range(self._random.randint(1, 9))]
        header, payload = self._random.choice(
            [
                (m.Submit([m.SubmittedRequest(number, lengths, 1000)]), b"\x0b\0\0\0" * sum(lengths)),
                (m.Done(number, number, lengths, [], 1.0), b"\0\0\x80\x3f" * sum(lengths)),
                (m.BatchFailed(number, number, m.ErrorCode.FORWARD_FAILED, "no", False), b""),
                (m.Beat(number, 1.0, 1), b""),
                (m.Cancel([number]), b""),
                (m.Draining([number]), b""),
            ]
        )
        return [bytes(frame) for frame in encode(header, payload)]

    def _noise(self) -> Frames:
        return [self._random.randbytes(self._random.randrange(60)) for _ in range(self._random.randrange(1, 5))]

    def _truncated(self) -> Frames:
        frames = self._good()
        frames[1] = frames[1][: self._random.randrange(len(frames[1]))]
        return frames

    def _changed(self) -> Frames:
        frames = self._good()
        header = bytearray(frames[1])
        header[self._random.randrange(len(header))] ^= 1 << self._random.randrange(8)
        return [frames[0], bytes(header), frames[2]]

    def _pickled(self) -> Frames:
        kind = self._good()[0]
        return self._random.choice([[self._pickle], [kind, self._pickle, b""], [kind, b"\x90", self._pickle]])

    def _too_large(self) -> Frames:
        frames = self._good()
        size = self._random.choice([MAX_HEADER_BYTES + 1, 1 << 18])
        return [frames[0], b"\x90" * size, b""] if self._random.random() < 0.8 else [*frames[:2], b"\0" * size]

    def _too_many_frames(self) -> Frames:
        return self._good() + [b"x"] * self._random.randint(1, 50)

    def _wrong_payload(self) -> Frames:
        frames = self._good()
        return [frames[0], frames[1], frames[2] + b"\0" * self._random.randint(1, 3)]


def is_malformed(decoder: Decoder, frames: Frames) -> bool:
    """Whether a socket with this decoder must count it as malformed."""
    try:
        decoder.decode(frames)
    except OtherVersionError:
        return False
    except MalformedMessageError:
        return True
    return False


def pack(kind: type[Any], *fields: Any) -> Frames:
    """A message as its sender means it, its fields unchecked."""
    return [bytes(encode(kind(*fields))[0]), msgspec.msgpack.encode(list(fields)), b""]
