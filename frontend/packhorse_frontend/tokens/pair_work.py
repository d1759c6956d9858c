"""The pairs of a request, and how much of a document fits beside its query."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tokenizers import Encoding

from packhorse_frontend.bodies.inputs import Ids, LengthRule
from packhorse_frontend.bodies.naming import Naming
from packhorse_frontend.problems import Problem, invalid
from packhorse_frontend.tokens.long_texts import encode_long, is_long


@dataclass(frozen=True)
class PairWork:
    """Pairs of one request (or a run of them), and how to tokenize them."""

    texts: Sequence[tuple[str, str]]
    """Query and document."""
    first_index: int
    """Index of the first pair in its request, for messages."""
    naming: Naming
    """Of the request's documents."""
    query_naming: Naming
    """Of its queries: one for all documents, or one for each."""
    prompt: str
    """Goes before the query, or where a chat template has it; empty for none."""
    lowercase: bool
    rule: LengthRule
    """How long a pair may be, what stands around its texts included."""
    cuts: bool
    """Whether a document that is too long for its pair is cut at its end, and not refused."""
    most_document_tokens: int | None
    """Documents are cut to so many tokens, whatever ``cuts`` says; None cuts none so."""

    @property
    def chars(self) -> int:
        """Size of the work, a query counted once while it stays the same."""
        return sum(self.sizes(repeats=False))

    @property
    def limit(self) -> int:
        """Most tokens of a pair."""
        wanted = self.rule.truncate_to
        return self.rule.limit if wanted is None else min(wanted, self.rule.limit)

    def sizes(self, *, repeats: bool) -> list[int]:
        """Characters that each pair gives to do. ``repeats``: its query too where it is that of the pair before."""
        sizes, before = [], None
        for query, document in self.texts:
            sizes.append(len(document) + (len(self.prompt) + len(query) if repeats or query != before else 0))
            before = query
        return sizes


@dataclass(frozen=True)
class Made:
    """A pair's words, in parts."""

    words: list[Ids]
    is_cut: bool


@dataclass(frozen=True)
class Size:
    """What a pair's tokens are, counted."""

    query: int
    """Of the query and its prompt."""
    around: int
    """All that are not the document's."""
    shown: int
    """How often the document stands in the pair."""
    document: int
    """Of the document, where it stands once."""
    is_whole: bool
    """Whether these are all."""


def find_room(work: PairWork, index: int, size: Size) -> int:
    """How many tokens of a document stay. Raises Problem (400) where it must be cut and may not, or none would stay."""
    most, setting = work.limit, f"--{work.rule.setting}" if work.limit == work.rule.limit else "truncate_prompt_tokens"
    room = (most - size.around) // size.shown
    if room < 1 and size.around + size.shown <= work.rule.limit:
        raise invalid(
            f"truncate_prompt_tokens is {most}, but {_query_label(work, index)} and what stands around the texts are "
            f"{size.around} tokens; use at least {size.around + size.shown}",
            "truncate_prompt_tokens",
        )
    if room < 1:
        raise refuse_query(
            work,
            index,
            f"has {size.query} tokens; with the {max(0, size.around - size.query)} around the texts that leaves no room for a "
            f"document, as a pair may have {most} ({setting}). Shorten it",
        )
    wanted, is_whole = size.document, size.is_whole
    if work.most_document_tokens is not None and work.most_document_tokens < wanted:
        wanted, is_whole = work.most_document_tokens, True
    if not may_cut(work) and not (is_whole and wanted <= room):
        counted = f"{'' if is_whole else 'more than '}{size.around + wanted * size.shown}"
        raise invalid(
            f"{work.naming.label(index)} and its query have {counted} tokens, the limit is {most} ({setting}); shorten one of "
            "them, or set truncate_prompt_tokens to -1 to have the document cut",
            work.naming.param(index),
            "input_too_long",
        )
    return min(wanted, room)


def may_cut(work: PairWork) -> bool:
    """Whether a document that is too long is cut."""
    wanted = work.rule.truncate_to
    return work.cuts or (wanted is not None and wanted <= work.rule.limit)


def read_query(work: PairWork, query: str, index: int, encode: Callable[[str], Encoding]) -> Encoding:
    """The query's tokens, behind its prompt. Raises Problem (400) for one that is far too long."""
    text = work.prompt + query
    if not is_long(text, work.rule):
        return encode(text)
    place = _query_place(work, index)
    encoding, is_whole = encode_long(encode, text, work.rule, work.query_naming, place, may_cut=False)
    if not is_whole:
        raise refuse_query(
            work,
            index,
            f"has more than {len(encoding)} tokens; with a document it may have {work.limit} (--{work.rule.setting}). "
            "Shorten it",
        )
    return encoding


def refuse_query(work: PairWork, index: int, why: str) -> Problem:
    """The 400 for the query of a pair."""
    place = _query_place(work, index)
    return invalid(f"{_query_label(work, index)} {why}", work.query_naming.param(place), "input_too_long")


def _query_label(work: PairWork, index: int) -> str:
    return work.query_naming.label(_query_place(work, index))


def _query_place(work: PairWork, index: int) -> int:
    return 0 if count_of(work.query_naming) == 1 else index


def count_of(naming: Naming) -> int:
    """How many inputs are named."""
    return sum(1 if count is None else count for _, count in naming.fields)
