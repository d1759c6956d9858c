"""Where a tokenizer's own pair template puts two texts and its special tokens, so that a query is tokenized only once.

The library tokenizes the two texts of a pair apart, and only then puts special tokens around them. What it puts there does not
depend on the texts, so that one pair shows it; a few others prove it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from tokenizers import Encoding, Tokenizer

from packhorse_shared.messages import PairSlot

_SAMPLES = ("a", "the", "1", "0", ".")
_MOST_WORDS_TRIED = 512
"""Of the tokenizer's own, where it makes nothing of any sample."""


@dataclass(frozen=True)
class LayoutPart:
    """Special tokens, or the place of a text."""

    slot: PairSlot | None
    """Whose text stands here; None for special tokens."""
    ids: tuple[int, ...]
    """Of the special tokens; () for a text."""
    types: tuple[int, ...]
    """Of each special token; of a text the one type that all its tokens have."""


@dataclass(frozen=True)
class PairLayout:
    """A pair template: its parts, in order."""

    parts: tuple[LayoutPart, ...]

    @property
    def types(self) -> frozenset[int]:
        """All token types in it."""
        return frozenset(each for part in self.parts for each in part.types)

    def count(self, slot: PairSlot | None) -> int:
        """How often a text stands in it; for None, how many special tokens."""
        return sum(1 if part.slot is not None else len(part.ids) for part in self.parts if part.slot is slot)

    def fill(self, query: Sequence[int], document: Sequence[int]) -> tuple[list[int], list[int]]:
        """The ids and types of a pair of which both texts were tokenized without special tokens."""
        texts = {PairSlot.QUERY: query, PairSlot.DOCUMENT: document}
        ids: list[int] = []
        types: list[int] = []
        for part in self.parts:
            own = part.ids if part.slot is None else texts[part.slot]
            ids += own
            types += part.types if part.slot is None else part.types * len(own)
        return ids, types


def find_pair_layout(tokenizer: Tokenizer) -> PairLayout | None:
    """The pair template of a tokenizer; None where it is none that can be told."""
    for sample in _samples(tokenizer):
        own = tokenizer.encode(sample, add_special_tokens=False).ids
        if not own:
            continue
        layout = PairLayout(tuple(_parts(tokenizer.encode(sample, sample))))
        texts = ("", sample, f"{sample} {sample} {sample}")
        pairs = [(query, document) for query in texts for document in texts]
        return layout if all(_is_right(layout, tokenizer, *pair) for pair in pairs) else None
    return None


def _samples(tokenizer: Tokenizer) -> Iterator[str]:
    yield from _SAMPLES
    for token_id in range(min(tokenizer.get_vocab_size(), _MOST_WORDS_TRIED)):
        word = tokenizer.id_to_token(token_id)
        if word:
            yield word


def _parts(encoding: Encoding) -> Iterator[LayoutPart]:
    tokens = zip(encoding.sequence_ids, encoding.ids, encoding.type_ids, strict=True)
    for sequence, run in groupby(tokens, key=lambda token: token[0]):
        _, ids, types = zip(*run, strict=True)
        yield LayoutPart(None, ids, types) if sequence is None else LayoutPart(PairSlot(sequence), (), types[:1])


def _is_right(layout: PairLayout, tokenizer: Tokenizer, query: str, document: str) -> bool:
    apart = [tokenizer.encode(text, add_special_tokens=False).ids for text in (query, document)]
    whole = tokenizer.encode(query, document)
    slots = {part.slot for part in layout.parts}
    return layout.fill(*apart) == (whole.ids, whole.type_ids) and {PairSlot.QUERY, PairSlot.DOCUMENT} <= slots
