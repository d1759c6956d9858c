"""The user's own texts or requests, from a file of JSON lines.

A line is a text, as a string, as ``{"text": "..."}`` or as ``{"input": "..."}``; any other object is a whole request. All lines
of a file are of one kind.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from packhorse.bench import BenchError
from packhorse.bench.bodies import INPUT_FIELDS
from packhorse.bench.options import Endpoint

_MOST_BYTES = 64 << 20


class OwnFile(msgspec.Struct, frozen=True):
    """One of the lists is empty."""

    texts: list[str]
    requests: list[dict[str, Any]]
    is_cut: bool
    """Whether the file goes on: only its first 64 MiB are used."""


def read_own_file(name: str, endpoint: Endpoint) -> OwnFile:
    """Raises BenchError with one line that names the line of the file."""
    path = Path(name).expanduser()
    found = OwnFile([], [], is_cut=False)
    size = 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                size += len(line)
                if size > _MOST_BYTES and number > 1:
                    return msgspec.structs.replace(found, is_cut=True)
                if line.strip():
                    _take(line, f"--texts: line {number} of {name}", endpoint, found)
    except OSError as problem:
        raise BenchError(f"--texts: cannot read {name}: {problem.strerror}; give a file, or short, mixed, bulk, long") from None
    if not found.texts and not found.requests:
        raise BenchError(f"--texts: {name} has no texts; write a JSON string or object on each line")
    return found


def _take(line: bytes, where: str, endpoint: Endpoint, found: OwnFile) -> None:
    try:
        value = msgspec.json.decode(line)
    except msgspec.DecodeError as problem:
        raise BenchError(f"{where} is no JSON: {problem}") from None
    text = _text(value)
    if text is not None:
        found.texts.append(text)
    elif not isinstance(value, dict):
        raise BenchError(f"{where} is {type(value).__name__}, not a string or an object")
    elif missing := [field for field in INPUT_FIELDS[endpoint] if field not in value]:
        raise BenchError(f"{where} has no {missing[0]}, so it is no request to {endpoint}; nor has it a text of its own")
    else:
        found.requests.append(value)
    if found.texts and found.requests:
        raise BenchError(f"{where} is of another kind than the lines before it; write texts or whole requests")


def _text(value: Any) -> str | None:
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        if isinstance(value.get("text"), str):
            return str(value["text"])
        if value.keys() == {"input"} and isinstance(value["input"], str):
            return str(value["input"])
    return None
