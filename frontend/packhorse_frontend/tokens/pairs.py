"""Pairs of texts, a query and a document each, to the words of a reranker's tokens. Runs in a thread, as ``tokens.py`` does.

Either the tokenizer's own pair template puts special tokens around the two texts: then each query is tokenized once. Or a chat
template makes one text of them, and each pair's text is tokenized as a whole, since its tokens may reach over the seams.

How much text is tokenized is bounded as in ``long_texts.py``, each document for itself. A chat template's query comes again
with every document: its characters (with the prompt's) times the documents are at most 2**24.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from packhorse_frontend.bodies.inputs import Ids, TokenizedInputs
from packhorse_frontend.problems import invalid
from packhorse_frontend.tokens.long_texts import AbandonedError, steps
from packhorse_frontend.tokens.pair_makers import ChatMaker, Maker, Part, TemplateMaker, parts_of
from packhorse_frontend.tokens.pair_work import PairWork
from packhorse_shared.errors import ModelFilesError
from packhorse_shared.messages import ModelFacts
from packhorse_shared.pair_layout import find_pair_layout
from packhorse_shared.tokenizing import ModelTokenizer

__all__ = ["PairTokenizer", "PairWork"]


class PairTokenizer:
    """Makes words of pairs, for one model. Safe to use from several threads at once."""

    def __init__(self, tokenizer: ModelTokenizer, facts: ModelFacts) -> None:
        """``facts``: of a model that can be given pairs. Raises ModelFilesError where its tokenizer is not the one that the
        worker has."""
        self._tokenizer = tokenizer
        self._form = facts.pair_text
        self._parts: list[Part] = []
        if self._form is None:
            layout = find_pair_layout(tokenizer.variant(lowercase=False))
            if layout is None:
                raise ModelFilesError("tokenizer.json: what it puts around the texts of a pair cannot be told")
            self._parts = parts_of(layout, has_segments=facts.segments > 1)

    def tokenize(self, work: PairWork, is_abandoned: Callable[[], bool]) -> TokenizedInputs:
        """The words of all pairs. Raises Problem (400) naming the first query or document that is too long."""
        reader = self._tokenizer.variant(lowercase=work.lowercase)
        maker: Maker = TemplateMaker(work, reader, self._parts) if self._form is None else ChatMaker(work, reader, self._form)
        words: list[Ids] = []
        lengths: list[int] = []
        cut: list[int] = []
        for step in steps(work.sizes(repeats=self._form is not None)):
            if is_abandoned():
                raise AbandonedError
            for made in maker.make(step):
                index = work.first_index + len(lengths)
                length = sum(map(len, made.words))
                if not length:
                    raise invalid(f"{work.naming.label(index)} and its query have no tokens", work.naming.param(index))
                words += made.words
                lengths.append(length)
                if made.is_cut:
                    cut.append(index)
        return TokenizedInputs(np.concatenate(words), lengths, len(cut), tuple(cut))
