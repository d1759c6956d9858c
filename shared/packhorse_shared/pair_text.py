"""Joins the texts of a pair as a model's chat template would; see ``PairText`` of the messages."""

from __future__ import annotations

from typing import NamedTuple

from packhorse_shared.messages import PairSlot, PairText


class JoinedPair(NamedTuple):
    """The text of a pair."""

    text: str
    documents: tuple[tuple[int, int], ...]
    """Where in it the document stands: first character, and the one behind the last. A template may show it more than once."""


def join_pair(form: PairText, query: str, document: str, prompt: str) -> JoinedPair:
    """The text that a chat template makes of a pair. ``prompt``: empty for none."""
    texts = {PairSlot.QUERY: query, PairSlot.DOCUMENT: document, PairSlot.PROMPT: prompt}
    if form.strips:
        texts = {slot: text.strip() for slot, text in texts.items()}
    parts, documents, length = [], [], 0
    for piece in form.prompted if prompt else form.plain:
        part = piece if isinstance(piece, str) else texts[piece]
        if piece is PairSlot.DOCUMENT:
            documents.append((length, length + len(part)))
        parts.append(part)
        length += len(part)
    return JoinedPair("".join(parts), tuple(documents))
