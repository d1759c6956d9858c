"""What a reranker's chat template makes of a pair, found out by rendering: pieces of text and the places of the pair's texts.

So that frontends can join pairs without running anybody's template. Texts that stand for nothing else show where the query, the
document and the prompt go; texts of every awkward kind then prove that nothing else is done with them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import msgspec

from packhorse_shared.messages import PairPiece, PairSlot, PairText
from packhorse_shared.pair_text import join_pair

Render = Callable[[str, str, str], str]
"""Query, document and prompt (empty for none) to the text that the template makes of them. May raise anything."""

_MARKS = {PairSlot.QUERY: "zqxqueryxqz", PairSlot.DOCUMENT: "zqxdocumentxqz", PairSlot.PROMPT: "zqxpromptxqz"}
_SLOTS = {mark: slot for slot, mark in _MARKS.items()}
_MOST_BYTES = 16 * 1024
"""Of an encoded ``PairText``: it travels in the header of every state that the broker tells its frontends."""
_PROBES = (
    "",
    " ahead",
    "behind ",
    "\n\n\taround\r\n ",
    " \n",
    "\u00a0rare white space\u3000",
    "two\n\nlines  of\twords",
    'it\'s "quoted", {{ braced }} {% and %} {# so #} {on} \\n',
    "<b>bold</b> &amp; </s> <|im_end|>",
    "<think>a</think>b",
    "<tool_response>a</tool_response>",
    "Caf\u00e9 \u65e5\u672c\u8a9e \U0001f40e \u0130",
    "UPPER lower",
    "0",
    "none",
    "long words " * 1000,
    *_MARKS.values(),
    " ".join(_MARKS.values()),
)


class PairTextError(Exception):
    """Pieces cannot say what the template does; the message says why."""


def find_pair_text(render: Render) -> PairText:
    """How a chat template joins pairs. Raises PairTextError."""
    try:
        plain, prompted = (_pieces(render, prompt) for prompt in ("", _MARKS[PairSlot.PROMPT]))
        found = [PairText(plain=plain, prompted=prompted, strips=strips) for strips in (False, True)]
        size = len(msgspec.msgpack.encode(found[0]))
        if size > _MOST_BYTES:
            raise PairTextError(f"it adds {size} bytes of its own, limit {_MOST_BYTES}")
        msgspec.convert(msgspec.to_builtins(found[0]), PairText)
        strange = [_find_difference(form, render) for form in found]
    except msgspec.ValidationError as problem:
        raise PairTextError(f"it adds too much of its own: {problem}") from None
    except PairTextError:
        raise
    except Exception as problem:  # whatever a template of somebody else raises
        reason = str(problem).strip().partition("\n")[0][:200]
        raise PairTextError(f"it raises {type(problem).__name__} for some texts: {reason}") from None
    for form, difference in zip(found, strange, strict=True):
        if difference is None:
            return form
    raise PairTextError(f"it changes texts: {strange[0]}")


def _pieces(render: Render, prompt: str) -> tuple[PairPiece, ...]:
    text = render(_MARKS[PairSlot.QUERY], _MARKS[PairSlot.DOCUMENT], prompt)
    parts = [part for part in re.split(f"({'|'.join(_SLOTS)})", text) if part]
    for slot in (PairSlot.QUERY, PairSlot.DOCUMENT):
        if _MARKS[slot] not in parts:
            raise PairTextError(f"it does not show a {slot.name.lower()} as it is")
    return tuple(_SLOTS.get(part, part) for part in parts)


def _find_difference(form: PairText, render: Render) -> str | None:
    """A pair of which the form makes another text than the template."""
    for query, document, prompt in _pairs():
        if join_pair(form, query, document, prompt).text != render(query, document, prompt):
            shown = [ascii(text[:40]) for text in (query, document, prompt)]
            return f"the query {shown[0]}, the document {shown[1]} or the prompt {shown[2]}"
    return None


def _pairs() -> Iterator[tuple[str, str, str]]:
    for probe in _PROBES:
        for prompt in ("", "judge"):
            yield probe, "a document", prompt
            yield "a query", probe, prompt
            yield probe, probe, prompt
        yield "a query", "a document", probe
