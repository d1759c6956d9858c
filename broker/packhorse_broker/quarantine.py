"""Inputs that were found to make workers die: asked for again, they are refused at once.

Clients retry what failed with 500. Without this, each retry of such an input would cost three workers more.
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict

from packhorse_shared.codec import Buffer
from packhorse_shared.messages import BYTES_PER_TOKEN

KEPT_S = 600.0
"""How long an input is refused: a fault of the machine or of an old release of a driver should not count for ever."""
MOST_INPUTS = 1024
_DIGEST_BYTES = 16


class Quarantine:
    """The guilty inputs of the last minutes, by the digest of their ids; the ids themselves are not kept."""

    def __init__(self) -> None:
        self._until: OrderedDict[tuple[int, bytes], float] = OrderedDict()
        self._lengths: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._until)

    def add(self, ids: Buffer, now: float) -> None:
        """An input is guilty."""
        key = _key(ids)
        if self._until.pop(key, None) is None:
            self._lengths[key[0]] += 1
        self._until[key] = now + KEPT_S
        if len(self._until) > MOST_INPUTS:
            self._drop_first()

    def find(self, lengths: list[int], ids: Buffer, now: float) -> int | None:
        """The first input of a request that is guilty. ``ids`` are those of all its inputs, joined.

        O(1) while nothing is in quarantine; else only inputs as long as a guilty one are looked at.
        """
        while self._until and next(iter(self._until.values())) <= now:
            self._drop_first()
        if not self._until:
            return None
        whole = memoryview(ids)
        start = 0
        for index, length in enumerate(lengths):
            end = start + BYTES_PER_TOKEN * length
            if length in self._lengths and _key(whole[start:end]) in self._until:
                return index
            start = end
        return None

    def _drop_first(self) -> None:
        (length, _), _ = self._until.popitem(last=False)
        self._lengths[length] -= 1
        if not self._lengths[length]:
            del self._lengths[length]


def _key(ids: Buffer) -> tuple[int, bytes]:
    return len(ids) // BYTES_PER_TOKEN, hashlib.blake2b(ids, digest_size=_DIGEST_BYTES).digest()
