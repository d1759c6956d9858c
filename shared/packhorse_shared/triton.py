"""The three batching knobs from a Triton ``config.pbtxt``, a file in protobuf's text format.

Source: protobuf.dev, "Text Format Language Specification", and Triton's model_config.proto (ModelDynamicBatching,
ModelQueuePolicy). The reader knows the format, not the schema: what else the file holds is skipped.
"""

from __future__ import annotations

import re
from pathlib import Path

from packhorse_shared.errors import SettingsError
from packhorse_shared.load import Given

MAX_TRITON_BYTES = 1 << 20
_MAX_DEPTH = 64
_MICROSECONDS = 1_000_000
_TOKEN = re.compile(
    r"""(?P<space>[\s]+|\#[^\n]*)
      | (?P<string>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')
      | (?P<word>[-+.\w]+)
      | (?P<mark>[{}\[\]<>:;,/])""",
    re.VERBOSE | re.ASCII,
)
_CLOSING = {"{": "}", "<": ">"}

Message = list[tuple[str, int, "str | Message"]]
"""Fields in order: name, line, and a scalar's text or the fields of a nested message."""


def from_triton(path: Path) -> dict[str, Given]:
    """``max_batch_size``, ``max_queue_delay`` and ``max_queue_size``, those that the file sets.

    They are ``max_batch_size``, ``dynamic_batching.max_queue_delay_microseconds`` and
    ``dynamic_batching.default_queue_policy.max_queue_size`` of the file. Triton's 0 for the last one means no limit: it counts
    as not set. Raises SettingsError with the line of a mistake.
    """
    try:
        content = path.read_bytes()
    except OSError as problem:
        raise SettingsError(f"{path}", f"cannot be read: {problem.strerror}") from None
    if len(content) > MAX_TRITON_BYTES:
        raise SettingsError(f"{path}", f"has {len(content)} bytes, limit {MAX_TRITON_BYTES}")
    fields = parse_text_format(content.decode("utf-8", "replace"), f"{path}")
    found: dict[str, Given] = {}
    if (batch := _find(fields, f"{path}", "max_batch_size")) is not None:
        found["max_batch_size"] = Given(batch[0], (str(batch[1]),))
    if (delay := _find(fields, f"{path}", "dynamic_batching", "max_queue_delay_microseconds")) is not None:
        found["max_queue_delay"] = Given(delay[0], (repr(delay[1] / _MICROSECONDS),))
    size = _find(fields, f"{path}", "dynamic_batching", "default_queue_policy", "max_queue_size")
    if size is not None and size[1] != 0:
        found["max_queue_size"] = Given(size[0], (str(size[1]),))
    return found


def parse_text_format(text: str, name: str) -> Message:
    """The fields of a message in protobuf's text format. Raises SettingsError with the line of the first mistake."""
    return _Reader(text, name).message(closing="", depth=0)


def _find(fields: Message, name: str, *path: str) -> tuple[str, int] | None:
    """Where a number stands, as a label, and the number. Of a field that is set more than once the last one counts."""
    found: tuple[str, int] | None = None
    for field, line, value in fields:
        if field != path[0]:
            continue
        label = f"{name}:{line}: {field}"
        if len(path) > 1:
            if isinstance(value, str):
                raise SettingsError(label, "must be a block in { }")
            found = _find(value, name, *path[1:]) or found
        elif not isinstance(value, str) or not re.fullmatch(r"\d{1,18}", value, re.ASCII):
            raise SettingsError(label, "must be a whole number of 0 or more")
        else:
            found = (label, int(value))
    return found


class _Reader:
    """A recursive-descent reader over the tokens of one file."""

    def __init__(self, text: str, name: str) -> None:
        self._name = name
        self._tokens = list(self._split(text))
        self._at = 0

    def _split(self, text: str) -> list[tuple[str, str, int]]:
        tokens = []
        position, line = 0, 1
        while position < len(text):
            found = _TOKEN.match(text, position)
            if found is None:
                raise SettingsError(f"{self._name}:{line}", f"unexpected character {text[position]!r}")
            kind = found.lastgroup
            assert kind is not None
            if kind != "space":
                tokens.append((kind, found[0], line))
            line += found[0].count("\n")
            position = found.end()
        tokens.append(("end", "", line))
        return tokens

    def message(self, closing: str, depth: int) -> Message:
        """Fields up to the closing mark."""
        if depth > _MAX_DEPTH:
            raise self._wrong(f"blocks nested deeper than {_MAX_DEPTH}")
        fields: Message = []
        while self._peek() != closing:
            kind, text, line = self._next()
            if kind == "mark" and text == "[":
                text = self._extension_name()
            elif kind != "word":
                raise self._wrong(f"expected the name of a field, found {text or 'the end of the file'}", line)
            fields += [(text, line, value) for value in self._values(depth)]
            if self._peek() in {";", ","}:
                self._next()
        self._next()
        return fields

    def _values(self, depth: int) -> list[str | Message]:
        """What follows a field's name: a scalar, a block, or a list of either."""
        has_colon = self._peek() == ":"
        if has_colon:
            self._next()
        if self._peek() in _CLOSING:
            return [self.message(_CLOSING[self._next()[1]], depth + 1)]
        if self._peek() == "[":
            return self._list(depth)
        if not has_colon:
            raise self._wrong("expected : or { after the name of a field")
        return [self._scalar()]

    def _list(self, depth: int) -> list[str | Message]:
        self._next()
        values: list[str | Message] = []
        while self._peek() != "]":
            if values:
                self._expect(",")
            opening = self._peek()
            values.append(self.message(_CLOSING[self._next()[1]], depth + 1) if opening in _CLOSING else self._scalar())
        self._next()
        return values

    def _scalar(self) -> str:
        kind, text, line = self._next()
        if kind not in {"word", "string"}:
            raise self._wrong(f"expected a value, found {text or 'the end of the file'}", line)
        while kind == "string" and self._tokens[self._at][0] == "string":
            text += self._next()[1]
        return text

    def _extension_name(self) -> str:
        """``[package.name]`` or ``[type.googleapis.com/name]``, already past the opening bracket."""
        name = ""
        while self._peek() != "]":
            kind, text, line = self._next()
            if kind != "word" and text != "/":
                raise self._wrong("expected the name of an extension in [ ]", line)
            name += text
        self._next()
        return f"[{name}]"

    def _peek(self) -> str:
        """The next mark; a placeholder for what is no mark, empty at the end."""
        kind, text, _ = self._tokens[self._at]
        return text if kind in {"mark", "end"} else "a value"

    def _next(self) -> tuple[str, str, int]:
        token = self._tokens[self._at]
        if token[0] != "end":
            self._at += 1
        return token

    def _expect(self, mark: str) -> None:
        _, text, line = self._next()
        if text != mark:
            raise self._wrong(f"expected {mark}, found {text or 'the end of the file'}", line)

    def _wrong(self, problem: str, line: int | None = None) -> SettingsError:
        return SettingsError(f"{self._name}:{self._tokens[self._at][2] if line is None else line}", problem)
