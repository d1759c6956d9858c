"""Bodies that are too large to be parsed in one go.

A parser in C holds the interpreter until it is done: for 32 MiB of ids that is seconds, in which /health would wait. So a large
body is cut into steps of about a millisecond. What is large in a body that can be served is the value of ``input``: it is
read here element by element, and the rest of the body, with null in its place, by the parser of small bodies. The rules and
the types are those of ``inputs.py``; only what no client sends is refused here and not there: more than ``MAX_REST_BYTES``
besides the input, an input whose key is spelled with escapes, and 128 KiB of ids without a comma.

To be run in a thread. Reading stops at the first fault: an input too many ends it, however large the body is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np

from packhorse_frontend.inputs import IdLists, Ids, Texts, refuse_count, refuse_empty, refuse_mixture, to_array
from packhorse_frontend.parsing import BYTE_ORDER_MARK, BodyParser, explain_text, explain_type, not_json
from packhorse_frontend.problems import Problem, invalid

MAX_REST_BYTES = 1 << 20
_STEP_BYTES = 128 * 1024
_BROKEN_BYTES = 64
_SPACE = re.compile(rb"[ \t\r\n]*+")
_SCALAR = re.compile(rb'[^ \t\r\n,\[\]{}"]*+')
_PLAIN = re.compile(rb'[^"\[\]{}]*+')
# Whole characters and escapes only: half a surrogate pair is left for the next step.
_TEXT = re.compile(rb'(?:[^"\\]++|\\u(?![dD][89abAB])[0-9a-fA-F]{4}|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[0-9a-fA-F]{4}|\\[^u])*+')
_HALF_PAIR = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}")
_ids = msgspec.json.Decoder(list[int])
_text = msgspec.json.Decoder(str)
_any = msgspec.json.Decoder(str | int | list[int])

Inputs = Texts | IdLists


class AbandonedError(Exception):
    """Nobody waits for this body any more."""


def read_large_body(
    body: bytes, parser: BodyParser, max_inputs: int, vocabulary_rows: int, is_abandoned: Callable[[], bool]
) -> tuple[Any, Inputs | None]:
    """The body without its ``input`` as the parser's type, and the input; None where it is absent, null or no input at all.

    Raises Problem (400), and AbandonedError once nobody waits.
    """
    return _Reader(body, max_inputs, vocabulary_rows, is_abandoned).read(parser)


class _Reader:
    """Goes through a body once; ``_at`` is where it is."""

    def __init__(self, body: bytes, max_inputs: int, vocabulary_rows: int, is_abandoned: Callable[[], bool]) -> None:
        self._body = body
        self._at = 0
        self._max_inputs = max_inputs
        self._vocabulary_rows = vocabulary_rows
        self._is_abandoned = is_abandoned
        self._rest: list[bytes] = []
        self._rest_bytes = 0
        self._rest_from = 0

    def read(self, parser: BodyParser) -> tuple[Any, Inputs | None]:
        inputs: Inputs | None = None
        if self._body.startswith(BYTE_ORDER_MARK):
            self._at = self._rest_from = len(BYTE_ORDER_MARK)
        self._skip_space()
        if self._take(b"{"):
            self._skip_space()
            while self._peek() == b'"':
                key_at = self._at
                self._skip_text()
                is_input = self._body[key_at : self._at] == b'"input"'
                self._skip_space()
                if not self._take(b":"):
                    break
                self._skip_space()
                if is_input and self._peek() in (b'"', b"["):
                    self._keep_rest()
                    inputs = self._read_input()
                    self._rest.append(b"null")
                    self._rest_from = self._at
                else:
                    inputs = None if is_input else inputs
                    self._skip_value()
                self._skip_space()
                if not self._take(b","):
                    break
                self._skip_space()
        if self._take(b"}"):
            self._skip_space()
        self._at += _BROKEN_BYTES  # what is no object of fields, and what follows one, is for the parser to refuse
        self._keep_rest()
        return parser.parse(b"".join(self._rest)), inputs

    # ---- moving on ----

    def _peek(self) -> bytes:
        return self._body[self._at : self._at + 1]

    def _take(self, char: bytes) -> bool:
        if self._peek() != char:
            return False
        self._at += 1
        return True

    def _run(self, pattern: re.Pattern[bytes]) -> int:
        """Take what the pattern matches, one step of it at most; returns its size."""
        if self._is_abandoned():
            raise AbandonedError
        found = pattern.match(self._body, self._at, self._at + _STEP_BYTES)
        size = found.end() - self._at if found else 0
        self._at += size
        return size

    def _skip_space(self) -> None:
        while self._run(_SPACE) == _STEP_BYTES:
            self._bound_rest()

    def _skip_text(self) -> None:
        """Past a string of the rest; left where it is broken."""
        self._at += 1
        while self._run(_TEXT):
            self._bound_rest()
        self._take(b'"')

    def _skip_value(self) -> None:
        """Past a value of the rest."""
        depth = 0
        while True:
            char = self._peek()
            if char == b'"':
                self._skip_text()
            elif char in (b"[", b"{"):
                depth += 1
                self._at += 1
            elif char in (b"]", b"}"):
                depth -= 1
                self._at += 1
            elif not self._run(_PLAIN if depth else _SCALAR):
                return
            self._bound_rest()
            if depth <= 0:
                return

    def _bound_rest(self) -> None:
        if self._rest_bytes + self._at - self._rest_from > MAX_REST_BYTES:
            raise invalid(f"the body has more than {MAX_REST_BYTES} bytes besides its input", None, "body_too_large")

    def _keep_rest(self) -> None:
        part = self._body[self._rest_from : self._at]
        self._rest.append(part)
        self._rest_bytes += len(part)

    def _not_json(self, problem: str) -> Problem:
        return not_json(f"{problem} (byte {self._at})")

    # ---- the input ----

    def _read_input(self) -> Inputs:
        if self._peek() == b'"':
            return Texts([self._read_text("input")], listed=False)
        self._at += 1
        self._skip_space()
        first = self._peek()
        if first == b"]":
            raise refuse_empty("input")
        if first.isdigit() or first == b"-":
            ids = self._read_ids("input")
            return IdLists(ids, [len(ids)], listed=False)
        texts: list[str] = []
        lists: list[Ids] = []
        for index in self._elements():
            if self._peek() != first or first not in (b'"', b"["):
                raise self._refuse_element(index, first)
            if first == b'"':
                texts.append(self._read_text(f"input[{index}]"))
            else:
                self._at += 1
                lists.append(self._read_ids(f"input[{index}]"))
        if texts:
            return Texts(texts, listed=True)
        return IdLists(np.concatenate(lists), list(map(len, lists)), listed=True)

    def _elements(self) -> Iterator[int]:
        """Stands at the beginning of each element in turn; the caller takes it. Ends behind the list."""
        for index in range(self._max_inputs):
            yield index
            self._skip_space()
            if self._take(b"]"):
                return
            if not self._take(b","):
                raise self._not_json("expected ',' or ']'")
            self._skip_space()
        raise refuse_count(f"more than {self._max_inputs}", self._max_inputs)

    def _refuse_element(self, index: int, first: bytes) -> Problem:
        """The element here is none of those that an input may have, or another than the first one."""
        kinds = {b'"': str, b"[": list}
        kind = kinds.get(self._peek(), int)
        if kind is not int:
            return refuse_mixture(index, kind, kinds.get(first, int))
        found = _SCALAR.match(self._body, self._at, self._at + 64)
        scalar = found[0] if found else b""
        try:
            _any.decode(scalar or self._peek() + b"}")
        except msgspec.ValidationError as problem:
            return explain_type(str(problem), f"input[{index}]")
        except msgspec.DecodeError:
            return self._not_json("invalid value")
        return refuse_mixture(index, int, kinds.get(first, int))

    def _read_text(self, label: str) -> str:
        """The string that begins here."""
        self._at += 1
        pieces: list[str] = []
        while True:
            start = self._at
            size = self._run(_TEXT)
            if size:
                if size == _STEP_BYTES:
                    self._at -= _bytes_of_cut_character(self._body[self._at - 3 : self._at + 1])
                pieces.append(self._decode_text(self._body[start : self._at], label))
            elif self._take(b'"'):
                return "".join(pieces)
            elif _HALF_PAIR.match(self._body, self._at):
                raise explain_text(self._body[self._at : self._at + 6], label)
            else:
                raise self._not_json("a text without end, or an invalid escape in it")

    def _decode_text(self, content: bytes, label: str) -> str:
        try:
            return _text.decode(b'"%b"' % content)
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise explain_text(content, label) from None

    def _read_ids(self, label: str) -> Ids:
        """The ids up to the end of this list."""
        end = self._body.find(b"]", self._at)
        if end < 0:
            raise self._not_json("a list without end")
        arrays: list[Ids] = []
        count = 0
        while True:
            if self._is_abandoned():
                raise AbandonedError
            cut = self._end_of_step(end)
            ids = self._decode_ids(self._body[self._at : cut], label, count)
            if ids:
                arrays.append(to_array(ids, self._vocabulary_rows, label, count))
                count += len(ids)
            elif count or cut < end:
                raise self._not_json("a list with a gap")
            self._at = cut + 1
            if cut == end:
                break
        if not arrays:
            raise refuse_empty(label)
        return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)

    def _end_of_step(self, end: int) -> int:
        """The comma at which this step ends, or the end of the list."""
        if end - self._at <= _STEP_BYTES:
            return end
        comma = self._body.rfind(b",", self._at, self._at + _STEP_BYTES)
        if comma < 0:
            raise self._not_json(f"no comma in {_STEP_BYTES} bytes of ids")
        return comma

    def _decode_ids(self, content: bytes, label: str, first: int) -> list[int]:
        try:
            return _ids.decode(b"[%b]" % content)
        except msgspec.ValidationError as problem:
            raise explain_type(str(problem), label, first) from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as problem:
            raise not_json(str(problem)) from None


def _bytes_of_cut_character(around: bytes) -> int:
    """How many of the first three bytes belong to the character that the fourth one continues, in UTF-8."""
    if len(around) < 4 or around[3] & 0xC0 != 0x80:
        return 0
    return next((size for size in (1, 2, 3) if around[3 - size] & 0xC0 == 0xC0), 0)
