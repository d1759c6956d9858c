"""Answers written straight from float32 rows.

Floats are the shortest text that reads back as the same float32 (orjson, about 33 ns a value); base64 packs the rows as they
are. Big answers are written in a thread, in pieces: one call holds the interpreter for about a millisecond, so that the event
loop keeps turning.
"""

from __future__ import annotations

from binascii import b2a_base64
from collections.abc import Iterator
from typing import Literal

import msgspec
import numpy as np
import orjson

from packhorse_frontend.dimensions import shorten
from packhorse_frontend.exchange import Answer
from packhorse_frontend.schema import Usage

_VALUES_PER_PIECE = 32_768
LARGEST_INLINE_VALUES = 16_384
"""Answers up to this size are written on the event loop: half a millisecond, less than two thread switches under load."""


def render_embeddings(
    rows: Answer, dimension: int, encoding_format: Literal["float", "base64"], model: str, usage: Usage
) -> bytes:
    """The body of an answer to POST /v1/embeddings. ``rows`` are finite, float32, in input order; those of one size are cut to
    ``dimension`` values."""
    if not isinstance(rows, list):
        rows = np.ascontiguousarray(shorten(rows, dimension), dtype="<f4")
    write = _write_base64 if encoding_format == "base64" else _write_floats
    pieces = [write(rows[start:end], start) for start, end in _cuts(rows)]
    tail = b'],"model":%b,"usage":%b}' % (msgspec.json.encode(model), msgspec.json.encode(usage))
    return b"".join((b'{"object":"list","data":[', b",".join(pieces), tail))


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


def _write_base64(rows: Answer, first_index: int) -> bytes:
    return b",".join(
        b'{"object":"embedding","index":%d,"embedding":"%b"}' % (index, b2a_base64(row.data, newline=False))
        for index, row in enumerate(rows, first_index)
    )
