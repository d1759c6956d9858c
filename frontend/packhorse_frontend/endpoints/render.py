"""Answers written straight from float32 rows.

Floats are the shortest text that reads back as the same float32 (orjson, about 33 ns a value); base64 packs the rows as they
are. Big answers are written in a thread, in pieces: one call holds the interpreter for about a millisecond, so that the event
loop keeps turning, and the text of one piece is all that there is at a time.
"""

from __future__ import annotations

from binascii import b2a_base64
from collections.abc import Iterator
from typing import Literal

import msgspec
import numpy as np
import orjson

from packhorse_frontend.endpoints.dimensions import shorten
from packhorse_frontend.exchange import Answer
from packhorse_frontend.rows import Rows
from packhorse_frontend.schema import Usage

_VALUES_PER_PIECE = 32_766
"""A multiple of 3: so many float32 values are base64 without a remainder."""
LARGEST_INLINE_VALUES = 16_384
"""Answers up to this size are written on the event loop: half a millisecond, less than two thread switches under load."""

EncodingFormat = Literal["float", "base64"]


def render_embeddings(rows: Answer, dimension: int, encoding_format: EncodingFormat, model: str, usage: Usage) -> bytes:
    """The body of an answer to POST /v1/embeddings. ``rows`` are finite, float32, in input order; those of one size are cut to
    ``dimension`` values."""
    return b"".join(pieces_of(rows, dimension, encoding_format, model, usage))


def pieces_of(rows: Answer, dimension: int, encoding_format: EncodingFormat, model: str, usage: Usage) -> Iterator[bytes]:
    """The same piece by piece, each of a bounded number of values."""
    if not isinstance(rows, list):
        rows = np.ascontiguousarray(shorten(rows, dimension), dtype="<f4")
    write, write_long = (_write_base64, _long_base64) if encoding_format == "base64" else (_write_floats, _long_floats)
    before = b'{"object":"list","data":['
    for start, end in _cuts(rows):
        if rows[start].size > _VALUES_PER_PIECE:
            yield b'%b{"object":"embedding","index":%d,"embedding":' % (before, start)
            yield from write_long(rows[start])
            yield b"}"
        else:
            yield before + write(rows[start:end], start)
        before = b","
    yield b'],"model":%b,"usage":%b}' % (msgspec.json.encode(model), msgspec.json.encode(usage))


def count_values(rows: Answer) -> int:
    """Values of all rows."""
    return sum(row.size for row in rows) if isinstance(rows, list) else rows.size


def _cuts(rows: Answer) -> Iterator[tuple[int, int]]:
    """First row of each piece, and the first one behind it: as many as have ``_VALUES_PER_PIECE`` values, at least one."""
    if not isinstance(rows, list):
        step = max(1, _VALUES_PER_PIECE // rows.shape[1])
        yield from ((start, start + step) for start in range(0, len(rows), step))
        return
    start, values = 0, 0
    for number, row in enumerate(rows):
        if number > start and values + row.size > _VALUES_PER_PIECE:
            yield start, number
            start, values = number, 0
        values += row.size
    yield start, len(rows)


def _write_floats(rows: Answer, first_index: int) -> bytes:
    data = [{"object": "embedding", "index": index, "embedding": row} for index, row in enumerate(rows, first_index)]
    return orjson.dumps(data, option=orjson.OPT_SERIALIZE_NUMPY)[1:-1]


def _long_floats(row: Rows) -> Iterator[bytes]:
    """A row by itself, in pieces."""
    before = b"["
    for start in range(0, row.size, _VALUES_PER_PIECE):
        yield before + orjson.dumps(row[start : start + _VALUES_PER_PIECE], option=orjson.OPT_SERIALIZE_NUMPY)[1:-1]
        before = b","
    yield b"]"


def _write_base64(rows: Answer, first_index: int) -> bytes:
    return b",".join(
        b'{"object":"embedding","index":%d,"embedding":"%b"}' % (index, b2a_base64(row.data, newline=False))
        for index, row in enumerate(rows, first_index)
    )


def _long_base64(row: Rows) -> Iterator[bytes]:
    yield b'"'
    for start in range(0, row.size, _VALUES_PER_PIECE):
        yield b2a_base64(row[start : start + _VALUES_PER_PIECE].data, newline=False)
    yield b'"'
