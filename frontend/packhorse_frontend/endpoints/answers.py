"""Writing answers other than embeddings: the beginning, the elements of one list, the end; large ones piece by piece, however
large a single element is.

Numbers that are float32 are written as such: the shortest text that reads back as the same value.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import orjson

from packhorse_frontend.endpoints.asking import Body

_SIZE_PER_PIECE = 65_536
_LARGEST_INLINE_SIZE = 16_384

Items = Callable[[int, int], list[dict[str, Any]]]
"""Makes the elements from one index up to another."""


def new_answer_id(kind: str) -> str:
    """``rerank-`` and 32 hexadecimal digits, for example."""
    return f"{kind}-{secrets.token_hex(16)}"


def write_list(answer: msgspec.Struct, name: str, sizes: Sequence[int], items: Items) -> Body:
    """The body of an answer, whose list ``name`` is empty so far, with these items in it.

    ``sizes`` tells about how many values or characters each of them has. A large answer is made in pieces, when they are sent.
    """
    # A quote within a text is escaped, so that this is found only where it is meant.
    before, after = msgspec.json.encode(answer).split(b'"%b":[]' % name.encode("ascii"), 1)
    pieces = _pieces(before + b'"%b":[' % name.encode("ascii"), runs(sizes, _SIZE_PER_PIECE), items, b"]" + after)
    return pieces if sum(sizes) > _LARGEST_INLINE_SIZE else b"".join(pieces)


def _pieces(before: bytes, cuts: Iterator[tuple[int, int]], items: Items, after: bytes) -> Iterator[bytes]:
    for start, end in cuts:
        if end - start == 1:
            yield before
            yield from _written(*items(start, end))
        else:
            yield before + _dumps(items(start, end))[1:-1]
        before = b","
    yield after


def _written(value: Any) -> Iterator[bytes]:
    """One value, whatever its size, in pieces of a bounded one."""
    if isinstance(value, str) and len(value) > _SIZE_PER_PIECE:
        yield b'"'
        for start in range(0, len(value), _SIZE_PER_PIECE):
            yield _dumps(value[start : start + _SIZE_PER_PIECE])[1:-1]
        yield b'"'
    elif isinstance(value, np.ndarray) and len(value) > _SIZE_PER_PIECE:
        before = b"["
        for start in range(0, len(value), _SIZE_PER_PIECE):
            yield before + _dumps(value[start : start + _SIZE_PER_PIECE])[1:-1]
            before = b","
        yield b"]"
    elif isinstance(value, dict) and value:
        before = b"{"
        for name, each in value.items():
            yield before + _dumps(name) + b":"
            yield from _written(each)
            before = b","
        yield b"}"
    else:
        yield _dumps(value)


def _dumps(value: Any) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)


def runs(sizes: Sequence[int], most: int) -> Iterator[tuple[int, int]]:
    """Runs of items of these sizes, first and behind the last, up to ``most`` together; a larger item is a run of its own."""
    start, total = 0, 0
    for index, size in enumerate(sizes):
        if index > start and total + size > most:
            yield start, index
            start, total = index, 0
        total += size
    yield start, len(sizes)
