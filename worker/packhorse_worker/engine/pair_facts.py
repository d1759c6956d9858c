"""What the frontends must know of a model to make its pairs of texts, found out once, when the model is loaded."""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass
from typing import Any

import msgspec
from tokenizers import Tokenizer

from packhorse_shared.messages import SEGMENT_SHIFT, ModelFacts, PairText
from packhorse_shared.pair_layout import find_pair_layout
from packhorse_worker.engine.pair_text import PairTextError, find_pair_text
from packhorse_worker.engine.pairs import PairTokenizer, count_segments

log = logging.getLogger(__name__)

_MOST_PROBLEM_CHARS = 512
_MOST_ROWS = 1 << SEGMENT_SHIFT
"""Of an embedding table whose ids leave room for segments in a word."""


@dataclass(frozen=True)
class PairFacts:
    """See the fields of these names in ``ModelFacts``."""

    segments: int = 1
    pair_text: PairText | None = None
    pair_problem: str = ""

    def put_into(self, facts: ModelFacts, most_bytes: int) -> ModelFacts:
        """The facts of a model with these among them, in its fingerprint too. ``most_bytes``: of all of them, encoded."""
        whole = self._put_into(facts)
        if len(msgspec.msgpack.encode(whole)) <= most_bytes:
            return whole
        problem = "the chat template's own text is too long to be told beside the model's prompts and labels"
        return refuse_pairs(problem, self.segments)._put_into(facts)

    def _put_into(self, facts: ModelFacts) -> ModelFacts:
        own = (self.segments, self.pair_text)
        return msgspec.structs.replace(
            facts,
            segments=self.segments,
            pair_text=self.pair_text,
            pair_problem=self.pair_problem,
            fingerprint=hashlib.sha256(f"{facts.fingerprint}\0{own!r}".encode()).hexdigest(),
        )


def refuse_pairs(problem: str, segments: int = 1) -> PairFacts:
    """The facts of a reranker that cannot be given pairs, told in one warning."""
    told = " ".join(problem.split()).encode("utf-8", "replace").decode()[:_MOST_PROBLEM_CHARS]
    log.warning("this reranker cannot be given pairs, only texts that hold both", extra={"reason": told})
    return PairFacts(segments, None, told)


def find_segments(built: Any, token_types: int, rows: int) -> PairFacts:
    """Of a model that is given texts that hold both. For the arguments see ``find_pair_facts``."""
    segments = count_segments(token_types, built)
    return PairFacts(1 if rows > _MOST_ROWS else segments)


def find_pair_facts(pairs: PairTokenizer, served: Tokenizer, built: Any, token_types: int, rows: int) -> PairFacts:
    """Of a reranker. ``served``: its tokenizer.json; ``built``: what transformers makes of it; ``token_types``: rows of the
    table of token types that its forward reads, 0 for none; ``rows``: of its embedding table."""
    segments = count_segments(token_types, built)
    if segments > 1 and rows > _MOST_ROWS:
        return refuse_pairs(
            f"the model tells the texts of a pair apart and has {rows} embeddings; both are served up to {_MOST_ROWS} of them"
        )
    if pairs.uses_chat_template:
        return _find_chat(pairs, built, segments)
    layout = find_pair_layout(served)
    if layout is None:
        return refuse_pairs("what tokenizer.json puts around the texts of a pair cannot be told", segments)
    if segments > 1 and max(layout.types) >= segments:
        return refuse_pairs(
            f"tokenizer.json marks a text of a pair with type {max(layout.types)}, but the model has {segments} types", segments
        )
    return PairFacts(segments)


def _find_chat(pairs: PairTokenizer, built: Any, segments: int) -> PairFacts:
    if "strftime_now" in str(built.chat_template):
        return refuse_pairs("the chat template tells the time, so that it makes other text of the same pair each day", segments)
    try:
        found = find_pair_text(lambda query, document, prompt: str(pairs.join([(query, document)], prompt)[0]))
    except PairTextError as problem:
        return refuse_pairs(f"the chat template cannot be told in pieces: {problem}", segments)
    return PairFacts(segments, found)
