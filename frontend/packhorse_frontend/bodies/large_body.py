"""Bodies that are too large to be parsed in one go.

A parser in C holds the interpreter until it is done: for 32 MiB of ids that is seconds, in which /health would wait. So a large
body is cut into steps of about a millisecond. What is large in a body that can be served are the fields that hold inputs: they
are read element by element (``large_field.py``), and the rest of the body, with null in their place, by the parser of small
bodies. The rules and the types are those of ``inputs.py``; only what no client sends is refused here and not there: more than
``MAX_REST_BYTES`` besides the inputs, a field whose key is spelled with escapes, 128 KiB of ids without a comma, and an object
of more than ``MAX_DOCUMENT_BYTES``.

To be run in a thread. Reading stops at the first fault: an input too many ends it, however large the body is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from packhorse_frontend.bodies.cursor import Cursor
from packhorse_frontend.bodies.large_field import FieldKind, FieldReader, InputLimits, Inputs
from packhorse_frontend.bodies.parsing import BYTE_ORDER_MARK, BodyParser
from packhorse_frontend.problems import invalid

MAX_REST_BYTES = 1 << 20
_BROKEN_BYTES = 64

Fields = Mapping[str, FieldKind]
"""The fields of a body that hold inputs."""


def read_large_body(
    body: bytes, parser: BodyParser, fields: Fields, limits: InputLimits, is_abandoned: Callable[[], bool]
) -> tuple[Any, dict[str, Inputs]]:
    """The body without its inputs as the parser's type, and the inputs by field; a field that is absent, null or no input at
    all is not among them.

    Raises Problem (400), and AbandonedError once nobody waits.
    """
    return _Reader(Cursor(body, is_abandoned), fields, limits).read(parser)


class _Reader:
    """Goes through a body once, and keeps what is for the parser."""

    def __init__(self, cursor: Cursor, fields: Fields, limits: InputLimits) -> None:
        self._cursor = cursor
        self._fields = {b'"%b"' % name.encode(): (name, kind) for name, kind in fields.items()}
        self._limits = limits
        self._rest: list[bytes] = []
        self._rest_bytes = 0
        self._rest_from = 0

    def read(self, parser: BodyParser) -> tuple[Any, dict[str, Inputs]]:
        """The whole body."""
        cursor = self._cursor
        found: dict[str, Inputs] = {}
        if cursor.body.startswith(BYTE_ORDER_MARK):
            cursor.at = self._rest_from = len(BYTE_ORDER_MARK)
        self._skip_space()
        if cursor.take(b"{"):
            self._skip_space()
            while cursor.peek() == b'"':
                key_at = cursor.at
                cursor.skip_text(self._bound_rest)
                field = self._fields.get(cursor.body[key_at : cursor.at])
                self._skip_space()
                if not cursor.take(b":"):
                    break
                self._skip_space()
                self._read_value(field, found)
                self._skip_space()
                if not cursor.take(b","):
                    break
                self._skip_space()
        if cursor.take(b"}"):
            self._skip_space()
        cursor.at += _BROKEN_BYTES  # what is no object of fields, and what follows one, is for the parser to refuse
        self._keep_rest()
        return parser.parse(b"".join(self._rest)), found

    def _read_value(self, field: tuple[str, FieldKind] | None, found: dict[str, Inputs]) -> None:
        """Of a field named twice the last value counts, as for every parser."""
        cursor = self._cursor
        if field is not None:
            name, kind = field
            found.pop(name, None)
            reader = FieldReader(cursor, name, kind, self._limits)
            if reader.can_read():
                self._keep_rest()
                found[name] = reader.read()
                self._rest.append(b"null")
                self._rest_from = cursor.at
                return
        cursor.skip_value(self._bound_rest)

    def _skip_space(self) -> None:
        self._cursor.skip_space(self._bound_rest)

    def _bound_rest(self) -> None:
        if self._rest_bytes + self._cursor.at - self._rest_from > MAX_REST_BYTES:
            raise invalid(f"the body has more than {MAX_REST_BYTES} bytes besides its inputs", None, "body_too_large")

    def _keep_rest(self) -> None:
        part = self._cursor.body[self._rest_from : self._cursor.at]
        self._rest.append(part)
        self._rest_bytes += len(part)
