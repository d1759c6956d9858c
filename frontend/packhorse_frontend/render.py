"""Answers written straight from float32 rows.

Floats are the shortest text that reads back as the same float32 (orjson, about 33 ns a value); base64 packs the rows as they
are. Big answers are written in a thread, in pieces: one call holds the interpreter for about a millisecond, so that the event
loop keeps turning.
"""

from __future__ import annotations

from binascii import b2a_base64
from typing import Literal

import msgspec
import numpy as np
import orjson

from packhorse_frontend.dimensions import Rows, shorten
from packhorse_frontend.schema import Usage

_VALUES_PER_PIECE = 32_768
LARGEST_INLINE_VALUES = 16_384
"""Answers up to this size are written on the event loop: half a millisecond, less than two thread switches under load."""


def render_embeddings(
    rows: Rows, dimension: int, encoding_format: Literal["float", "base64"], model: str, usage: Usage
) -> bytes:
    """The body of an answer to POST /v1/embeddings. ``rows`` is finite ``[inputs, values]``, float32, in input order."""
    rows = np.ascontiguousarray(shorten(rows, dimension), dtype="<f4")
    write = _write_base64 if encoding_format == "base64" else _write_floats
    step = max(1, _VALUES_PER_PIECE // dimension)
    pieces = [write(rows[start : start + step], start) for start in range(0, len(rows), step)]
    tail = b'],"model":%b,"usage":%b}' % (msgspec.json.encode(model), msgspec.json.encode(usage))
    return b"".join((b'{"object":"list","data":[', b",".join(pieces), tail))


def _write_floats(rows: Rows, first_index: int) -> bytes:
    data = [{"object": "embedding", "index": index, "embedding": row} for index, row in enumerate(rows, first_index)]
    return orjson.dumps(data, option=orjson.OPT_SERIALIZE_NUMPY)[1:-1]


def _write_base64(rows: Rows, first_index: int) -> bytes:
    return b",".join(
        b'{"object":"embedding","index":%d,"embedding":"%b"}' % (index, b2a_base64(row.data, newline=False))
        for index, row in enumerate(rows, first_index)
    )
