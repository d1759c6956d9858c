"""Bodies to request types, and what is wrong with a body in words that name the field, and the element where it is known."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec

from packhorse_frontend.problems import Problem, invalid

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_AT = re.compile(r"^(?P<what>.*?)(?: - at `\$(?P<path>.*)`)?$", re.DOTALL)
_CHOICES = {"encoding_format": "float or base64"}
_MISSING = re.compile(r"required field `(\w+)`")
_NO_TEXT = "holds a lone surrogate or bytes that are not UTF-8, which is no valid text"


class BodyParser:
    """Parses bodies of one type. Raises Problem (400) naming the field, and the element where it is known."""

    def __init__(self, kind: type[Any]) -> None:
        self._decoder = msgspec.json.Decoder(kind)

    def parse(self, body: bytes) -> Any:
        """The body as ``kind``."""
        body = body.removeprefix(BYTE_ORDER_MARK)
        if not body.strip(b" \t\r\n"):
            raise invalid("the request has no body; send a JSON object", None)
        try:
            return self._decoder.decode(body)
        except msgspec.ValidationError as problem:
            raise explain_type(str(problem)) from None
        except RecursionError:
            raise invalid("the body is nested too deeply", None) from None
        except (msgspec.DecodeError, UnicodeDecodeError) as problem:
            raise explain_syntax(body, str(problem)) from None


def explain_type(problem: str, root: str = "", first: int = 0) -> Problem:
    """``Expected `int`, got `bool` - at `$.input[0][1]``` becomes ``input[0][1]: expected int, got bool``.

    For a part of a body, ``root`` is where it stands, and ``first`` the index of its first element.
    """
    found = _AT.match(problem)
    what, path = (found["what"], found["path"] or "") if found else (problem, "")
    if first:
        path = re.sub(r"^\[(\d+)\]", lambda index: f"[{int(index[1]) + first}]", path)
    path = (root + path).lstrip(".")
    what = what.replace("`", "").replace(" | null", "")
    what = what[:1].lower() + what[1:]
    field = re.split(r"[.\[]", path, maxsplit=1)[0] or None
    if field is None:
        missing = _MISSING.search(problem)
        field = missing[1] if missing else None
    if field is None:
        return invalid(f"the body is not what it should be: {what}", None)
    if what.startswith("invalid enum value") and field in _CHOICES:
        what += f", expected {_CHOICES[field]}"
    return invalid(f"{path or field}: {what}", field)


def explain_text(content: bytes, label: str, field: str) -> Problem:
    """Why the content of a JSON string (escapes and all, no quotes), which is or is in ``field``, is refused."""
    try:
        text = json.loads('"' + content.decode("utf-8", "surrogateescape") + '"')
    except ValueError as problem:
        return not_json(str(problem))
    return invalid(f"{label}: {_NO_TEXT}", field) if not _is_encodable(text) else not_json("a malformed text")


def not_json(problem: str) -> Problem:
    """400: the body is not JSON."""
    problem = problem.removeprefix("JSON is malformed: ")
    return invalid(f"the body is not valid JSON: {problem[:1].lower()}{problem[1:]}", None)


def explain_syntax(body: bytes, problem: str, root: str = "") -> Problem:
    """Why bytes are not JSON. A lone surrogate is looked for, since msgspec has no clear word for it. For a part of a body,
    ``root`` is where it stands."""
    if b"\\ud" in body or b"\\uD" in body or "UTF-8" in problem:
        try:
            content = json.loads(body.decode("utf-8", "surrogateescape"))
        except (ValueError, RecursionError):
            content = None
        place = _find_surrogate(content) if isinstance(content, dict) else None
        if place is not None:
            field, label = place
            if root:
                field, label = re.split(r"[.\[]", root, maxsplit=1)[0], f"{root}.{label}"
            return invalid(f"{label}: {_NO_TEXT}", field)
        if content is not None:  # so that a text somewhere deeper is the only thing that can be wrong
            return invalid(f"the body {_NO_TEXT}", None)
    return not_json(problem)


def _find_surrogate(content: dict[str, Any]) -> tuple[str | None, str] | None:
    """The first field of a body with a string that cannot be encoded: its name, and where within it that is: the index, and the
    field of an object."""
    for field, value in content.items():
        for index, each in enumerate(value) if isinstance(value, list) else ((None, value),):
            label = field if index is None else f"{field}[{index}]"
            if isinstance(each, str) and not _is_encodable(each):
                return field, label
            for name, text in each.items() if isinstance(each, dict) else ():
                if isinstance(text, str) and not _is_encodable(text):
                    return field, f"{label}.{name}"
    return None


def _is_encodable(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
