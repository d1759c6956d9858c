"""The two ways in which a pair of texts becomes tokens; see ``pairs.py``. One maker for each piece of work."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from tokenizers import Encoding, Tokenizer

from packhorse_frontend.bodies.inputs import Ids
from packhorse_frontend.tokens.long_texts import encode_long, is_long
from packhorse_frontend.tokens.pair_work import Made, PairWork, Size, count_of, find_room, may_cut, read_query, refuse_query
from packhorse_shared.messages import SEGMENT_SHIFT, PairSlot, PairText
from packhorse_shared.pair_layout import PairLayout
from packhorse_shared.pair_text import join_pair

_MOST_REPEATED_CHARS = 1 << 24
"""Of a query and its prompt, times the documents: half a minute's work for one core."""


class Maker(Protocol):
    """Makes words of the pairs of one piece of work."""

    def make(self, step: slice) -> Iterator[Made]:
        """The pairs of one step, in order."""


@dataclass(frozen=True)
class Part:
    """A part of a pair template: words of special tokens, or a text to whose ids a segment is added."""

    slot: PairSlot | None
    words: Ids
    segment: int


@dataclass
class TemplateMaker:
    """Puts pairs together as a tokenizer's pair template does."""

    work: PairWork
    reader: Tokenizer
    parts: list[Part]
    query: str | None = None
    """The latest one, with its ids."""
    query_ids: Ids = field(default_factory=lambda: np.empty(0, dtype=np.int32))

    def make(self, step: slice) -> Iterator[Made]:
        """See ``Maker``."""
        index = self.work.first_index + step.start
        texts = self.work.texts[step]
        found: list[tuple[Encoding, bool]]
        if len(texts) == 1 and is_long(texts[0][1], self.work.rule):
            cuts = may_cut(self.work)
            found = [encode_long(self._encode, texts[0][1], self.work.rule, self.work.naming, index, may_cut=cuts)]
        else:
            documents = [document for _, document in texts]
            found = [(each, True) for each in self.reader.encode_batch_fast(documents, add_special_tokens=False)]
        for (query, _), (encoding, is_whole) in zip(texts, found, strict=True):
            query_ids = self._read_query(query, index)
            around = sum(len(query_ids) if part.slot is PairSlot.QUERY else len(part.words) for part in self.parts)
            shown = sum(part.slot is PairSlot.DOCUMENT for part in self.parts)
            kept = find_room(self.work, index, Size(len(query_ids), around, shown, len(encoding), is_whole))
            ids = np.array(encoding.ids[:kept], dtype=np.int32)
            yield Made([self._fill(part, query_ids, ids) for part in self.parts], kept < len(encoding) or not is_whole)
            index += 1

    def _encode(self, text: str) -> Encoding:
        encoding: Encoding = self.reader.encode_batch_fast([text], add_special_tokens=False)[0]
        return encoding

    def _read_query(self, query: str, index: int) -> Ids:
        if query != self.query:
            encoding = read_query(self.work, query, index, self._encode)
            self.query, self.query_ids = query, np.array(encoding.ids, dtype=np.int32)
        return self.query_ids

    def _fill(self, part: Part, query: Ids, document: Ids) -> Ids:
        if part.slot is None:
            return part.words
        ids = query if part.slot is PairSlot.QUERY else document
        return ids + np.int32(part.segment) if part.segment else ids


@dataclass
class ChatMaker:
    """Has each pair's text tokenized as a whole, as a chat template makes it."""

    work: PairWork
    reader: Tokenizer
    form: PairText
    query: str | None = None
    """The latest one: it was looked at already."""

    def make(self, step: slice) -> Iterator[Made]:
        """See ``Maker``."""
        index = self.work.first_index + step.start
        texts = self.work.texts[step]
        for place, (query, _) in enumerate(texts, index):
            self._check_query(query, place)
        found: list[tuple[_Joined, bool]]
        if len(texts) == 1 and is_long(texts[0][1], self.work.rule):
            query, document = texts[0]

            def encode(text: str) -> _Joined:
                return self._encode([(query, text)])[0]

            cuts = may_cut(self.work)
            found = [encode_long(encode, document, self.work.rule, self.work.naming, index, may_cut=cuts)]
        else:
            found = [(each, True) for each in self._encode(texts)]
        for place, (joined, is_whole) in enumerate(found, index):
            yield self._cut(joined, place, is_whole=is_whole)

    def _encode(self, pairs: Sequence[tuple[str, str]]) -> list[_Joined]:
        joined = [join_pair(self.form, *pair, self.work.prompt) for pair in pairs]
        encodings = self.reader.encode_batch([each.text for each in joined], add_special_tokens=False)
        return [_Joined(encoding, each.documents) for encoding, each in zip(encodings, joined, strict=True)]

    def _check_query(self, query: str, index: int) -> None:
        """Raise Problem (400) for a query that is too long to come again with every document, or by itself."""
        if query == self.query:
            return
        work = self.work
        chars, documents = len(work.prompt) + len(query), count_of(work.naming) if count_of(work.query_naming) == 1 else 1
        if chars * documents > _MOST_REPEATED_CHARS:
            raise refuse_query(
                work,
                index,
                f"has {chars} characters, and comes again with each of {documents} documents; this model reads at most "
                f"{_MOST_REPEATED_CHARS} such characters in one request. Send fewer documents at a time",
            )
        if is_long(work.prompt + query, work.rule):
            read_query(work, query, index, lambda text: self.reader.encode_batch_fast([text], add_special_tokens=False)[0])
        self.query = query

    def _cut(self, joined: _Joined, index: int, *, is_whole: bool) -> Made:
        encoding, work = joined.encoding, self.work
        if is_whole and work.most_document_tokens is None and len(encoding) <= work.limit:
            return Made([np.array(encoding.ids, dtype=np.int32)], is_cut=False)
        runs = _runs(encoding, joined.documents)
        most = max(end - start for start, end in runs)
        around = len(encoding) - sum(end - start for start, end in runs)
        query, _ = work.texts[index - work.first_index]
        is_full = around + len(runs) > work.limit
        own = len(self.reader.encode(work.prompt + query, add_special_tokens=False)) if is_full else 0
        kept = find_room(work, index, Size(own, around, len(runs), most, is_whole))
        ids = np.array(encoding.ids, dtype=np.int32)
        parts, done = [], 0
        for start, end in runs:
            parts.append(ids[done : min(end, start + kept)])
            done = end
        return Made([*parts, ids[done:]], kept < most or not is_whole)


@dataclass(frozen=True)
class _Joined:
    """The encoding of a pair that is one text, and where in the text the document stands."""

    encoding: Encoding
    documents: tuple[tuple[int, int], ...]

    def __len__(self) -> int:
        """Tokens of the pair."""
        return len(self.encoding)


def parts_of(layout: PairLayout, *, has_segments: bool) -> list[Part]:
    """The parts of a pair template. ``has_segments``: whether words carry the token types."""
    parts = []
    for part in layout.parts:
        segments = np.array(part.types if has_segments else [0] * len(part.types), dtype=np.int32) << SEGMENT_SHIFT
        words = np.array(part.ids, dtype=np.int32) | segments if part.slot is None else np.empty(0, dtype=np.int32)
        parts.append(Part(part.slot, words, 0 if part.slot is None else int(segments[0])))
    return parts


def _runs(encoding: Encoding, places: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """First token and the one behind the last of each place (in characters). Tokens that reach over its ends are not in it.

    Looked up token by token: a list of all offsets holds the interpreter for a quarter of a second where a document is long.
    """
    tokens = range(len(encoding))

    def span(token: int) -> tuple[int, int]:
        return encoding.token_to_chars(token) or (0, 0)

    def is_empty(token: int) -> bool:
        start, end = span(token)
        return start >= end

    runs, done = [], 0
    for first, last in places:
        start = bisect_left(tokens, first, key=lambda token: span(token)[0])
        end = bisect_right(tokens, last, key=lambda token: span(token)[1])
        while start < end and is_empty(start):
            start += 1
        while start < end and is_empty(end - 1):
            end -= 1
        start, done = (start, end) if start < end else (done, done)
        runs.append((start, done))
    return runs
