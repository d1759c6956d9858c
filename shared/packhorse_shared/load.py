"""From texts to typed settings: every source (flag, environment, YAML, Triton file) hands over what was written, and here it
becomes the value that the settings tree declares, or one clear line that names the setting and says what is allowed."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from msgspec import inspect

from packhorse_shared.errors import SettingsError
from packhorse_shared.settings import SECTIONS, Flag, Settings, flags

MAX_VALUE_CHARACTERS = 65_536
"""Longest text of one setting: it must also fit into one environment variable."""

_LONGEST_QUOTE = 64
_SIZE_UNITS = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)", re.ASCII | re.IGNORECASE)
_TRUE_FALSE = {"yes": "true", "on": "true", "no": "false", "off": "false"}


class Given(msgspec.Struct, frozen=True):
    """One setting as somebody wrote it: where (a flag, a variable, a file and line), and the texts.

    ``texts`` has one entry but for repeatable settings. ``value`` holds what is not a text: the one setting that has
    no flag.
    """

    label: str
    texts: tuple[str, ...] = ()
    value: dict[str, Any] | None = None


def build(given: Mapping[str, Given]) -> Settings:
    """The whole tree from what was given, defaults for the rest. Raises SettingsError."""
    known = flags()
    sections: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    for name, source in given.items():
        flag = known[name]
        sections[flag.section][name] = source.value if flag.yaml_only else to_value(flag, source)
    return Settings(**{section: type(getattr(Settings(), section))(**values) for section, values in sections.items()})


def to_value(flag: Flag, given: Given) -> Any:
    """The typed value of one setting. Raises SettingsError that names it as it was written."""
    for text in given.texts:
        if len(text) > MAX_VALUE_CHARACTERS:
            raise SettingsError(given.label, f"has {len(text)} characters, limit {MAX_VALUE_CHARACTERS}")
        if any(ord(character) < 32 or ord(character) == 127 for character in text):
            raise SettingsError(given.label, "contains a control character")
    if flag.repeatable:
        return _to_list(flag, given)
    text = given.texts[-1].strip()
    if not text and flag.default != "":
        raise SettingsError(given.label, f"is empty; leave it out for the default, or give {allowed(flag)}")
    value = _size(text) if flag.name.endswith("_bytes") else _word(flag, text)
    try:
        return msgspec.convert(value, flag.type, strict=False)
    except msgspec.ValidationError:
        raise SettingsError(given.label, f"{_quote(flag, text)} is not allowed; give {allowed(flag)}") from None


def allowed(flag: Flag) -> str:
    """What a setting takes, in words: ``a whole number from 1 to 4096, or auto``."""
    words = [_allowed(kind, flag) for kind in _kinds(flag.type) if not isinstance(kind, inspect.NoneType)]
    return ", or ".join(words)


def to_text(flag: Flag, value: Any) -> str:
    """A value as the environment carries it; ``to_value`` of it gives the value back. Not for None or YAML-only settings."""
    if flag.repeatable:
        return ",".join(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    return repr(value) if isinstance(value, float) else str(value)


def did_you_mean(word: str, known: Iterable[str], prefix: str = "") -> str:
    """``; did you mean X?``, or nothing when no known word is near.

    ``prefix`` is what all of them begin with, and is left out of ``word`` and ``known``: it would make all of them near.
    """
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.7)
    return f"; did you mean {prefix}{near[0]}?" if near else ""


def _to_list(flag: Flag, given: Given) -> Any:
    entries = tuple(entry.strip() for text in given.texts for entry in text.split(","))
    if flag.name != "devices" or not any(entries):  # there an empty one is a mistake (devices.py): CUDA would stop at it
        entries = tuple(filter(None, entries))
    if not entries:
        raise SettingsError(given.label, "is empty; leave it out for the default, or give a comma-separated list")
    for entry in entries:
        try:
            msgspec.convert((entry,), flag.type, strict=False)
        except msgspec.ValidationError:
            raise SettingsError(given.label, f"{_quote(flag, entry)} is not allowed; give {allowed(flag)}") from None
    return entries


def _word(flag: Flag, text: str) -> str:
    """Words in any case, and yes/no/on/off for true/false; other texts as they are."""
    lowered = text.lower()
    if lowered in flag.choices:
        return lowered
    if any(isinstance(kind, inspect.BoolType) for kind in _kinds(flag.type)):
        return _TRUE_FALSE.get(lowered, lowered)
    return text


def _size(text: str) -> str | int:
    """Bytes of ``32MiB``; the text itself when it is no size."""
    found = _SIZE.fullmatch(text)
    unit = _SIZE_UNITS.get(found[2].lower()) if found else None
    if found is None or unit is None:
        return text
    size = float(found[1]) * unit
    return int(size) if size.is_integer() else text


def _quote(flag: Flag, text: str) -> str:
    if flag.secret:
        return "a value (not shown)"
    return repr(text if len(text) <= _LONGEST_QUOTE else f"{text[:_LONGEST_QUOTE]}...")


def _kinds(annotation: Any) -> tuple[inspect.Type, ...]:
    kind = inspect.type_info(annotation)
    while isinstance(kind, inspect.Metadata):
        kind = kind.type
    return kind.types if isinstance(kind, inspect.UnionType) else (kind,)


def _allowed(kind: inspect.Type, flag: Flag) -> str:
    match kind:
        case inspect.LiteralType():
            return " or ".join([", ".join(flag.choices[:-1]), flag.choices[-1]] if len(flag.choices) > 1 else flag.choices)
        case inspect.BoolType():
            return "true or false"
        case inspect.IntType():
            size = ", with KiB, MiB or GiB behind it if you like" if flag.name.endswith("_bytes") else ""
            return f"a whole number {_range(kind)}{size}"
        case inspect.FloatType():
            return f"a number {_range(kind)}"
        case inspect.VarTupleType():
            return "a comma-separated list"
        case _:
            return "a text"


def _range(kind: inspect.IntType | inspect.FloatType) -> str:
    low = f"above {kind.gt:g}" if kind.gt is not None else f"from {kind.ge}"
    high = f" to {kind.le:g}" if isinstance(kind, inspect.FloatType) else f" to {kind.le}"
    return low + (high if kind.le is not None else "")
