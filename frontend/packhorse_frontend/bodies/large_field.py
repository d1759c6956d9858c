"""The value of one field that holds a request's inputs, read element by element from a large body (``large_body.py``)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import msgspec
import numpy as np

from packhorse_frontend.bodies.cursor import SCALAR, TEXT, AbandonedError, Cursor
from packhorse_frontend.bodies.inputs import IdLists, Ids, Texts, refuse_count, refuse_empty, refuse_mixture, to_array
from packhorse_frontend.bodies.parsing import explain_syntax, explain_text, explain_type, not_json
from packhorse_frontend.problems import Problem, invalid
from packhorse_frontend.schema import Document

MAX_DOCUMENT_BYTES = 4 << 20
_HALF_PAIR = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}")
_ids = msgspec.json.Decoder(list[int])
_text = msgspec.json.Decoder(str)

Inputs = Texts | IdLists
FieldKind = Literal["input", "text", "texts", "ids", "documents"]
"""What a field holds: texts or ids, one text, texts only, ids only, or a list of documents (texts, or objects with one)."""

_DIGIT = b"0"
"""Stands for whatever a number begins with."""
_ALONE = {"input": (b'"', _DIGIT), "text": (b'"',), "texts": (b'"',), "ids": (_DIGIT,), "documents": ()}
"""What the field may be, or be a list of, for a single input."""
_LISTED: dict[FieldKind, tuple[bytes, ...]] = {
    "input": (b'"', b"["),
    "text": (),
    "texts": (b'"',),
    "ids": (b"[",),
    "documents": (b'"', b"{"),
}
_ELEMENTS = {
    "input": msgspec.json.Decoder(str | int | list[int]),
    "texts": msgspec.json.Decoder(str),
    "ids": msgspec.json.Decoder(int | list[int]),
    "documents": msgspec.json.Decoder(str | Document),
}
_KINDS = {b'"': str, b"[": list}


@dataclass(frozen=True)
class InputLimits:
    """What holds for the inputs of any body."""

    max_inputs: int
    vocabulary_rows: int


class FieldReader:
    """Reads the value that begins at a cursor, and leaves the cursor behind it."""

    def __init__(self, cursor: Cursor, field: str, kind: FieldKind, limits: InputLimits) -> None:
        self._cursor = cursor
        self._field = field
        self._kind: FieldKind = kind
        self._max_inputs = limits.max_inputs
        self._vocabulary_rows = limits.vocabulary_rows

    def can_read(self) -> bool:
        """Whether the value here is a list, or a text where one may stand alone; the rest is for the parser to refuse."""
        char = self._cursor.peek()
        return (char == b"[" and bool(_LISTED[self._kind])) or (char == b'"' and b'"' in _ALONE[self._kind])

    def read(self) -> Inputs:
        """The inputs. Raises Problem (400), and AbandonedError."""
        cursor, field = self._cursor, self._field
        if cursor.peek() == b'"':
            return Texts([self._read_text(field)], listed=False)
        cursor.at += 1
        cursor.skip_space(_unbounded)
        first = cursor.peek()
        if first == b"]":
            raise refuse_empty(field, field)
        if _DIGIT in _ALONE[self._kind] and (first.isdigit() or first == b"-"):
            ids = self._read_ids(field)
            return IdLists(ids, [len(ids)], listed=False)
        texts: list[str] = []
        lists: list[Ids] = []
        for index in self._elements():
            label = f"{field}[{index}]"
            char = cursor.peek()
            if char not in _LISTED[self._kind] or (char != first and self._kind != "documents"):
                raise self._refuse_element(index, first)
            if char == b'"':
                texts.append(self._read_text(label))
            elif char == b"{":
                texts.append(self._read_document(label))
            else:
                cursor.at += 1
                lists.append(self._read_ids(label))
        if texts:
            return Texts(texts, listed=True)
        return IdLists(np.concatenate(lists), list(map(len, lists)), listed=True)

    def _elements(self) -> Iterator[int]:
        """Stands at the beginning of each element in turn; the caller takes it. Ends behind the list."""
        cursor = self._cursor
        for index in range(self._max_inputs):
            yield index
            cursor.skip_space(_unbounded)
            if cursor.take(b"]"):
                return
            if not cursor.take(b","):
                raise cursor.not_json("expected ',' or ']'")
            cursor.skip_space(_unbounded)
        raise refuse_count(self._field, f"more than {self._max_inputs}", self._max_inputs)

    def _refuse_element(self, index: int, first: bytes) -> Problem:
        """The element here is none of those that the field may have, or another than the first one."""
        cursor, field = self._cursor, self._field
        kind = _KINDS.get(cursor.peek(), int)
        if self._kind == "input" and kind is not int:
            return refuse_mixture(field, index, kind, _KINDS.get(first, int))
        found = SCALAR.match(cursor.body, cursor.at, cursor.at + 64)
        scalar = (found[0] if found else b"") or {b'"': b'""', b"[": b"[]", b"{": b"{}"}.get(cursor.peek(), b"?")
        try:
            _ELEMENTS[self._kind].decode(scalar)
        except msgspec.ValidationError as problem:
            return explain_type(str(problem), f"{field}[{index}]")
        except msgspec.DecodeError:
            return cursor.not_json("invalid value")
        return refuse_mixture(field, index, kind, _KINDS.get(first, int))

    def _read_document(self, label: str) -> str:
        """The text of the object that begins here."""
        cursor, start = self._cursor, self._cursor.at

        def bound() -> None:
            if cursor.at - start > MAX_DOCUMENT_BYTES:
                raise invalid(f"{label} is an object of more than {MAX_DOCUMENT_BYTES} bytes; send its text alone", self._field)

        cursor.skip_value(bound)
        content = cursor.body[start : cursor.at]
        try:
            document: Document = _ELEMENTS["documents"].decode(content)
        except msgspec.ValidationError as problem:
            raise explain_type(str(problem), label) from None
        except RecursionError:
            raise invalid("the body is nested too deeply", None) from None
        except (msgspec.DecodeError, UnicodeDecodeError) as problem:
            raise explain_syntax(content, str(problem), label) from None
        return document.text

    def _read_text(self, label: str) -> str:
        """The string that begins here."""
        cursor = self._cursor
        cursor.at += 1
        pieces: list[str] = []
        while True:
            start = cursor.at
            size = cursor.run(TEXT)
            if size:
                if size == cursor.step_bytes:
                    cursor.at -= _bytes_of_cut_character(cursor.body[cursor.at - 3 : cursor.at + 1])
                pieces.append(self._decode_text(cursor.body[start : cursor.at], label))
            elif cursor.take(b'"'):
                return "".join(pieces)
            elif _HALF_PAIR.match(cursor.body, cursor.at):
                raise explain_text(cursor.body[cursor.at : cursor.at + 6], label, self._field)
            else:
                raise cursor.not_json("a text without end, or an invalid escape in it")

    def _decode_text(self, content: bytes, label: str) -> str:
        try:
            return _text.decode(b'"%b"' % content)
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise explain_text(content, label, self._field) from None

    def _read_ids(self, label: str) -> Ids:
        """The ids up to the end of this list."""
        cursor = self._cursor
        end = cursor.body.find(b"]", cursor.at)
        if end < 0:
            raise cursor.not_json("a list without end")
        arrays: list[Ids] = []
        count = 0
        while True:
            if cursor.is_abandoned():
                raise AbandonedError
            cut = self._end_of_step(end)
            ids = self._decode_ids(cursor.body[cursor.at : cut], label, count)
            if ids:
                arrays.append(to_array(ids, self._vocabulary_rows, self._field, label, count))
                count += len(ids)
            elif count or cut < end:
                raise cursor.not_json("a list with a gap")
            cursor.at = cut + 1
            if cut == end:
                break
        if not arrays:
            raise refuse_empty(self._field, label)
        return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)

    def _end_of_step(self, end: int) -> int:
        """The comma at which this step ends, or the end of the list."""
        cursor = self._cursor
        if end - cursor.at <= cursor.step_bytes:
            return end
        comma = cursor.body.rfind(b",", cursor.at, cursor.at + cursor.step_bytes)
        if comma < 0:
            raise cursor.not_json(f"no comma in {cursor.step_bytes} bytes of ids")
        return comma

    def _decode_ids(self, content: bytes, label: str, first: int) -> list[int]:
        try:
            return _ids.decode(b"[%b]" % content)
        except msgspec.ValidationError as problem:
            raise explain_type(str(problem), label, first) from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as problem:
            raise self._find_text(content, label, first) or not_json(str(problem)) from None

    def _find_text(self, content: bytes, label: str, first: int) -> Problem | None:
        """The refusal of a text among the ids, which may hold what looks like the end of the list."""
        before, quote, _ = content.partition(b'"')
        before = before.rstrip(b" \t\r\n")
        if not quote or (not before.endswith(b",") and before):
            return None
        ids = self._decode_ids(before[:-1], label, first)
        return explain_type("Expected `int`, got `str`", f"{label}[{first + len(ids)}]")


def _unbounded() -> None:
    """White space within the list: the body's own limit bounds it."""


def _bytes_of_cut_character(around: bytes) -> int:
    """How many of the first three bytes belong to the character that the fourth one continues, in UTF-8."""
    if len(around) < 4 or around[3] & 0xC0 != 0x80:
        return 0
    return next((size for size in (1, 2, 3) if around[3 - size] & 0xC0 == 0xC0), 0)
