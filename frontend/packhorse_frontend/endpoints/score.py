"""POST /v1/score: a reranker's score of each pair, or the cosine of a text-embedding model's two vectors."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from packhorse_frontend.bodies.inputs import Texts, TokenizedInputs
from packhorse_frontend.bodies.naming import Naming
from packhorse_frontend.endpoints.answers import new_answer_id, write_list
from packhorse_frontend.endpoints.asking import Asked, Body, Endpoint, Question
from packhorse_frontend.endpoints.embeddings import usage_of
from packhorse_frontend.endpoints.tasks import require_pairs, wrong_task
from packhorse_frontend.exchange import Answer
from packhorse_frontend.problems import invalid
from packhorse_frontend.rows import Rows, RowShape, shape_of
from packhorse_frontend.schema import ScoreAnswer, ScoreRequest
from packhorse_frontend.tokens.pairs import PairWork
from packhorse_frontend.tokens.prompts import choose_pair_prompt, choose_prompt
from packhorse_frontend.tokens.texts import TextWork

_ITEM_SIZE = 4
"""Of a score, in values."""
_ROWS_PER_STEP = 256


def _read(asked: Asked) -> Question:
    first, second = asked.texts("text_1"), asked.texts("text_2")
    if len(first.texts) not in (1, len(second.texts)):
        raise invalid(
            f"text_1 has {len(first.texts)} texts and text_2 {len(second.texts)}; send one text_1 for all, or as many of both",
            "text_1",
        )
    if asked.serving.model.task == "embedding":
        return _cosines(asked, first, second)
    if asked.serving.model.task != "rerank":
        raise wrong_task(asked.serving, "score")
    return _pairs(asked, first, second)


def _pairs(asked: Asked, first: Texts, second: Texts) -> Question:
    require_pairs(asked.serving, "score")
    request: ScoreRequest = asked.request
    model, rule = asked.serving.model, asked.serving.length_rule(request.truncate_prompt_tokens)
    queries = first.texts if len(first.texts) > 1 else [first.texts[0]] * len(second.texts)
    work = PairWork(
        texts=list(zip(queries, second.texts, strict=True)),
        first_index=0,
        naming=Naming.of("text_2", len(second.texts), listed=second.listed),
        query_naming=Naming.of("text_1", len(first.texts), listed=first.listed),
        prompt=choose_pair_prompt(request.prompt, request.prompt_name, model),
        lowercase=model.lowercase,
        rule=rule,
        cuts=rule.truncate_to is not None,
        most_document_tokens=None,
    )

    def write(rows: Answer, tokens: TokenizedInputs) -> Body:
        assert isinstance(rows, np.ndarray)
        return _write(asked, rows[:, 0], tokens)

    return Question(work, work.naming, RowShape(1), write, request.priority or 0, scored=True)


def _cosines(asked: Asked, first: Texts, second: Texts) -> Question:
    request: ScoreRequest = asked.request
    serving, model = asked.serving, asked.serving.model
    if len(first.texts) + len(second.texts) > serving.max_inputs:
        count = len(first.texts) + len(second.texts)
        raise invalid(f"text_1 and text_2 have {count} inputs, the limit is {serving.max_inputs} (--max_inputs)", "text_2")
    naming = Naming(
        tuple((name, len(each.texts) if each.listed else None) for name, each in (("text_1", first), ("text_2", second)))
    )
    texts = [*first.texts, *second.texts]
    prompt = choose_prompt(request.prompt, request.prompt_name, None, model, is_text=True)
    work = TextWork(texts, 0, naming, prompt, model.lowercase, True, serving.length_rule(request.truncate_prompt_tokens))

    def write(rows: Answer, tokens: TokenizedInputs) -> Body:
        assert isinstance(rows, np.ndarray)
        return _write(asked, cosines(rows[: len(first.texts)], rows[len(first.texts) :]), tokens)

    return Question(work, naming, shape_of(model), write, request.priority or 0)


def _write(asked: Asked, scores: Rows, tokens: TokenizedInputs) -> Body:
    def items(start: int, end: int) -> list[dict[str, Any]]:
        return [{"index": index, "object": "score", "score": scores[index]} for index in range(start, end)]

    answer = ScoreAnswer(
        id=new_answer_id("score"),
        created=int(time.time()),
        model=asked.serving.name,
        data=[],
        usage=usage_of(tokens, is_cutting=asked.request.truncate_prompt_tokens is not None),
    )
    return write_list(answer, "data", [_ITEM_SIZE] * len(scores), items)


def cosines(first: Rows, second: Rows) -> Rows:
    """The cosine of each row of ``second`` ``[n, d]`` with its row of ``first`` ``[n or 1, d]``: float32 ``[n]`` in [-1, 1].

    0 where a row is zero. Worked out in float64: a float32's square may overflow or vanish.
    """
    found: Rows = np.empty(len(second), dtype=np.float32)
    for start in range(0, len(second), _ROWS_PER_STEP):
        right = second[start : start + _ROWS_PER_STEP].astype(np.float64)
        left = (first if len(first) == 1 else first[start : start + _ROWS_PER_STEP]).astype(np.float64)
        lengths = np.sqrt(np.einsum("ij,ij->i", left, left)) * np.sqrt(np.einsum("ij,ij->i", right, right))
        dots = np.einsum("ij,ij->i", np.broadcast_to(left, right.shape), right)
        found[start : start + _ROWS_PER_STEP] = np.clip(
            np.divide(dots, lengths, out=np.zeros_like(dots), where=lengths > 0), -1, 1
        )
    return found


SCORE = Endpoint(ScoreRequest, {"text_1": "texts", "text_2": "texts"}, _read)
